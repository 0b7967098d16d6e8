"""Attribution patching: approximate every patch of a sweep at once, to first order, and measure the error.

Replacing x by x' at a site changes the metric m by about (x' - x) . dm/dx, with the gradient in the baseline run. One
forward and one backward pass give this approximation for every cell, whereas real patching takes a pass per cell. Use
it to screen cells: if the metric is not linear between x and x', as with attention, the approximation can be far off,
even in sign. ``sample`` measures the error against real patches.

With ``steps``, the gradient is averaged over runs whose embeddings lie between those of the baseline run and of the
source run, in the middle of that many equal steps (integrated gradients): where the metric saturates at the baseline
run, its gradient there says nothing.

Reference: Nanda 2023, "Attribution patching"; Syed et al., arXiv 2310.10348; Hanna et al., arXiv 2403.17806 (steps).
"""

from functools import partial
from typing import Any

from ..errors import InputError
from ..models.load import ModelLike, as_lens
from ..signatures import takes
from .config import OF_REAL_PATCHES, PatchConfig
from .first_order import first_order_effects
from .pairs import Sequences
from .results import AttributionResult, fields_of_patches, mark_unlike, part_table
from .run_folder import open_run
from .run_pair import merge_patch_config, prepare_runs


@takes(PatchConfig, leave_out=("approximate", "check", "put", "edits", *OF_REAL_PATCHES))
def attribution_patch(
    model: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    config: PatchConfig | None = None,
    **fields: Any,
) -> AttributionResult:
    """Approximate the effect of each patch by the metric's gradient, without patching. For arguments see ``patch``.

    Cost: four passes, plus one pass with gradients on all sequences at once for each step, which needs the memory of a
    training step.

    Raises:
        InputError: as in ``patch``; or the metric has no gradient (one of ranks, counts or detached tensors).
        SiteError: as in ``patch``.
    """
    lens = as_lens(model)
    settings = merge_patch_config(
        config, lens=lens, fields={"approximate": True} | fields, texts=(clean, corrupted)
    )
    settings.check_together()
    if settings.edits:
        raise InputError(
            "attribution_patch approximates patches of the unedited model; leave out edits"
        )
    if settings.put != "source":
        raise InputError(
            f"approximate and put {settings.put!r} were given; a gradient approximates values of the other run alone: "
            "leave out one of the two"
        )
    values_then = lens.state.unchanged.record_values()
    runs, grid, pair = prepare_runs(lens, clean, corrupted, config=settings)
    effects, n = first_order_effects(runs, grid, steps=settings.steps)
    frame = part_table(grid, settings.by)
    frame["effect"] = effects.numpy()
    frame["method"] = "gradient" if settings.steps == 1 else "integrated gradients"
    frame["changed"] = [runs.can_change(part) for part in grid]
    frame["n"] = n.numpy()
    return AttributionResult(
        rows=mark_unlike(frame, grid, runs, pair),
        runs=runs,
        grid=tuple(grid),
        values_then=values_then,
        opens=partial(open_run, lens=lens, metric=runs.metric, pair=pair, config=settings),
        **fields_of_patches(runs, pair, settings),
    )
