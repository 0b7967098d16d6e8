"""Compare some cells with the bridge on the user's machine before the others run, and say by how much they differ.

1. Take a plan: forwards side by side (lanes), cells that share a forward (pack), later beginnings (cut).
2. Run the baseline and two cells that begin at different layers by it, and by one forward of the bridge each. If a cell
   fails on its own, try others, eight at most.
3. If all metrics are within ``TOLERANCE``, take the plan.
4. Else give up, in turn: lanes, later beginnings, shared forwards, ``partial_pass``; after each, go to 2. What is left
   at last is one forward of the bridge per cell. In half precision every finite deviation is allowed.

The deviation that was found is kept in the plan, and stands in the run's record.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric
from ..models.lens import LensModel
from .baseline_run import BaselineRun
from .cells import Cell
from .engine import Engine
from .needs import Needs
from .plan import Plan, choose_even_plan, choose_plan
from .threads import can_copy_for_thread

log = logging.getLogger(__name__)

TOLERANCE = 1e-5
"""Largest allowed deviation from the bridge, relative to a metric's largest magnitude, or to the largest logit if a
metric reads logits: a small difference of large logits is only as exact as they are."""
_CHECKED = 2
"""Cells that are compared with passes of the bridge."""
_TRIED = 8
"""Cells that are tried where some cannot be compared, since they fail."""


def choose_accurate_plan(
    lens: LensModel, batch: TokenBatch, cells: Sequence[Cell], metrics: Sequence[Metric], *, plan: Plan
) -> Plan:
    """Return ``plan`` if its metrics of some cells are within ``TOLERANCE`` of the bridge's, else a more careful plan.

    If they are not, or if every cell that was tried failed, the plan's short cuts are given up in turn: forwards side
    by side, later beginnings, shared forwards, the bridge's blocks with eager attention. The last resort is one
    forward of the bridge per cell. No family promises a deviation of 0.
    """
    if plan.lanes > 1 and not can_copy_for_thread(lens):
        plan = replace(plan, lanes=1)
    alone, last, worst, first = replace(plan, lanes=1, cut=False), plan, 0.0, math.nan
    ways = [plan, replace(plan, lanes=1), alone, replace(alone, pack=1), replace(alone, pack=1, path="bridge")]
    for last in dict.fromkeys(ways):
        engine = Engine(lens, batch, cells, metrics, plan=last)
        (worst, n_compared, error), allowed = _compare_with_bridge(engine), _allowed_deviation(engine)
        last = replace(last, n_compared=n_compared, deviation=worst)
        if worst <= allowed and error is None:
            if (last.pack, last.cut, last.path) != (plan.pack, plan.cut, plan.path):
                log.warning(
                    "cells that share a forward or begin at a later layer would be off by %.1e here (allowed: %.1e): "
                    "this run does without, which takes longer",
                    first,
                    allowed,
                )
            return last
        if worst <= allowed:
            log.warning(
                "no cell could be compared with the bridge, since all that were tried failed (%s: %s): this run takes "
                "one forward of the bridge for each cell, which takes longer",
                type(error).__name__,
                error,
            )
            return replace(ways[-1], n_compared=0, deviation=worst)
        first = worst if math.isnan(first) else first
    log.warning("cells that share a forward, or begin at a later layer, are off by %.1e on %s", worst, lens.device)
    return last


def make_checked_run(
    lens: LensModel, batch: TokenBatch, cells: Sequence[Cell], metrics: Sequence[Metric], *, needs: Needs
) -> BaselineRun:
    """Make a baseline run for few cells at a time, compared with the bridge; its plan holds the largest deviation.

    The baseline run and the given cells are compared by ``metrics``; ``choose_accurate_plan`` tries other plans only if
    they differ more than is allowed. ``needs`` lists what the run keeps.
    """
    plan = choose_even_plan(lens, batch, needs)
    if plan.lanes > 1 and not can_copy_for_thread(lens):
        plan = replace(plan, lanes=1)
    baseline_run = BaselineRun(lens, batch, plan=plan, needs=needs)
    engine = Engine(lens, batch, cells, metrics, plan=plan, needs=replace(needs, sites=()), baseline_run=baseline_run)
    worst = max([engine.baseline_deviation(), *map(engine.cell_deviation, range(len(cells)))])
    if worst <= _allowed_deviation(engine):
        baseline_run.plan = replace(plan, n_compared=len(cells), deviation=worst)
        return baseline_run
    return BaselineRun(lens, batch, plan=choose_accurate_plan(lens, batch, cells, metrics, plan=plan), needs=needs)


def make_engine(
    lens: LensModel,
    batch: TokenBatch,
    cells: Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    batch_size: int | None = None,
    keep_plan: Callable[[Plan], object] = lambda plan: None,
) -> Engine:
    """Make the engine that runs some cells, by a plan that was compared with the bridge.

    A forward has ``batch_size`` sequences; None takes as many as length and memory allow. It has all of them if a
    metric or an edit reads all at once. ``keep_plan`` is called with the plan.
    """
    needs = Needs.of_metrics(metrics, lens=lens, cells=cells)
    plan = choose_plan(lens, batch, needs, n_cells=len(cells))
    if batch_size is not None and not needs.together:
        prompts = min(batch.n_sequences, batch_size)
        plan = replace(plan, prompts=prompts, pack=max(1, batch_size // prompts) if plan.cut else 1)
    plan = choose_accurate_plan(lens, batch, cells, metrics, plan=plan)
    keep_plan(plan)
    return Engine(lens, batch, cells, metrics, plan=plan)


def _compare_with_bridge(engine: Engine) -> tuple[float, int, Exception | None]:
    """Compare the baseline run, and up to two cells that begin at different layers, with the bridge.

    Returns:
        The largest deviation, the number of cells that were compared, and the error if every tried cell failed.
    """
    found = [engine.baseline_deviation()]
    able = [block for block in engine.blocks if block.first <= engine.lens.n_layers and block.prompts.start == 0]
    starts = {block.first: block for block in able}
    chosen = [
        block.cells[(len(block.cells) - 1) * (_CHECKED - place) // _CHECKED]
        for place, block in enumerate(list(starts.values())[:: max(1, len(starts) // _CHECKED)][:_CHECKED])
    ]
    others = (number for block in able for number in block.cells)
    failed: Exception | None = None
    for number in list(dict.fromkeys([*chosen, *others]))[:_TRIED]:
        try:
            found.append(engine.cell_deviation(number))
        except Exception as error:  # noqa: BLE001  # it is recorded when it is the cell's turn
            failed = failed or error
        if len(found) > len(chosen):
            break
    return max(found), len(found) - 1, failed if len(found) == 1 else None


def _allowed_deviation(engine: Engine) -> float:
    """Return the allowed deviation: ``TOLERANCE`` times the largest number, which is a metric, a logit or 1.

    In half precision there is no limit.
    """
    if engine.lens.dtype != torch.float32:
        # Half precision has no order of sums to keep to, so that any number is allowed and reported; a number that is
        # undefined on one way alone is an infinite deviation, and is not.
        return sys.float_info.max
    sizes = np.abs(engine.baseline_metrics()["value"].to_numpy(dtype=float))
    return TOLERANCE * max(1.0, float(np.nanmax(sizes, initial=0.0)), engine.largest_logit())
