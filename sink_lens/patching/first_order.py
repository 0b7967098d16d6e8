"""First-order effect of every patch of a sweep, (x' - x) . dm/dx, from the gradient of the metric m."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ..engine.forward import run_with
from ..engine.gradients import metric_gradients
from .parts import Part, place

if TYPE_CHECKING:
    from .activation import Sweep


def first_order(sweep: "Sweep", grid: Sequence[Part], *, steps: int = 1) -> Float[Tensor, "sample batch"]:
    """Compute (x' - x) . dm/dx for each cell, by sequence; with several steps, the gradient's mean over them."""
    gradients = _gradients(sweep, steps=steps)
    products = {}
    for key, gradient in gradients.items():
        run, source = sweep.held[key].float(), sweep.given[key].float()
        difference = torch.where(run == source, 0.0, source - run)  # masked scores may be infinite in both runs
        products[key] = difference * gradient.float()
    found = torch.zeros(len(grid), sweep.run.n_sequences)
    for number, cell in enumerate(grid):
        for key in {place(sweep.site, layer) for layer in cell.layers}:
            found[number] += cell.of(products[key]).flatten(1).sum(1)
    return found


def _gradients(sweep: "Sweep", *, steps: int) -> dict[tuple[str, int], Tensor]:
    """Gradient of the metric, summed over sequences, at the site in every layer of the sweep, averaged over steps."""
    run = {"lens": sweep.lens, "batch": sweep.run, "metric": sweep.metric, "at": sweep.held}
    if steps == 1:
        return metric_gradients(**run)
    first = {"layers": (0,), "sites": ("resid_pre",), "loss": False}
    one, other = (run_with(sweep.lens, tokens, **first).tensors["resid_pre", 0] for tokens in (sweep.run, sweep.other))
    total = {key: torch.zeros_like(tensor) for key, tensor in sweep.held.items()}
    for step in range(steps):
        between = one + (step + 0.5) / steps * (other - one)
        for key, gradient in metric_gradients(**run, embedding=between).items():
            total[key] += gradient / steps
    return total
