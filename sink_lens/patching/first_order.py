"""First-order effect of every patch of a sweep, (x' - x) . dm/dx, from the gradient of the metric m."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..edits.part import Part
from ..engine.forward import run_with
from ..engine.gradients import metric_gradients
from ..models.sites import site_key
from .parts import select_part
from .run_pair import RunPair


def first_order_effects(
    runs: RunPair, grid: Sequence[Part], *, steps: int = 1
) -> tuple[Float[Tensor, " sample"], Int[Tensor, " sample"]]:
    """Approximate the effect of each patch: its part's change times the metric's mean gradient at ``steps`` points.

    Returns (each part's mean effect over the sequences that have it and a metric, or a sum if the metric is one number
    for all sequences; the number of these sequences).
    """
    gradients = _mean_gradients(runs, steps=steps)
    products = {}
    for key, gradient in gradients.items():
        run, source = runs.held[key].float(), runs.given[key].float()
        # masked scores may be infinite in both runs
        difference = torch.where(run == source, 0.0, source - run)
        products[key] = difference * gradient.float()
    lengths = runs.run.lengths.tolist()
    effects = torch.zeros(len(grid), runs.run.n_sequences, dtype=torch.float32)
    for number, part in enumerate(grid):
        for key in {site_key(runs.site, layer) for layer in part.layers or ()}:
            effects[number] += select_part(part, products[key], lengths).flatten(1).sum(1)
        effects[number] = runs.nan_where_short(part, effects[number])
    effects, undefined = effects.double(), runs.baseline.isnan()
    if runs.metric.whole_batch:
        return effects.sum(1), torch.full((len(grid),), 1 - int(undefined.sum()))
    effects = effects[:, ~undefined]
    return effects.nanmean(1), (~effects.isnan()).sum(1)


def _mean_gradients(runs: RunPair, *, steps: int) -> dict[tuple[str, int], Tensor]:
    run = {"lens": runs.lens, "batch": runs.run, "metric": runs.metric, "at": runs.held}
    if steps == 1:
        return metric_gradients(**run)
    first = {"layers": (0,), "sites": ("resid_pre",), "loss": False, "progress": False}
    one, other = (
        run_with(runs.lens, tokens, **first).tensors["resid_pre", 0]
        for tokens in (runs.run, runs.other)
    )
    # in half precision small steps are lost
    total = {key: torch.zeros_like(one, dtype=torch.float32) for key, one in runs.held.items()}
    for step in range(steps):
        between = one + (step + 0.5) / steps * (other - one)
        for key, gradient in metric_gradients(**run, embedding=between).items():
            total[key] += gradient.float() / steps
    return total
