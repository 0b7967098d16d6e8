"""Compare some cells with the bridge on the user's machine before the others run, and say by how much they differ.

1. Take a plan: forwards side by side (lanes), cells that share a forward (pack), later first positions (cut).
2. Run the baseline and two cells, early and late in the layers, by it on the longest sequence (on all of the plan's, if
   something reads the whole batch), and all three in one forward of the bridge. If one fails, try cells alone,
   eight at most; if all fail, go to the end of 4. A trace, whose cells are not known before, first compares one
   isolation alone (``make_checked_run``).
3. If all metrics are within ``TOLERANCE`` of the largest metric or read logit (or 1), take the plan.
4. Else give up, in turn: lanes, later first positions, shared forwards, ``partial_pass``; after each, go to 2. What is
   left at last is one forward of the bridge per cell. In half precision every finite deviation is allowed. If even the
   last way is off, a warning says by how much.

The deviation that was found is kept in the plan, and stands in the run's record.
"""

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric
from ..models.lens import LensModel
from .baseline_run import BaselineRun
from .cells import Cell
from .engine import Engine
from .needs import Needs
from .plan import Plan, choose_even_plan, choose_plan
from .threads import choose_lanes

log = logging.getLogger(__name__)

TOLERANCE = 1e-5
"""Relative to a metric's largest magnitude, or to the largest logit if a metric reads logits: a small difference of
large logits is only as exact as they are.
"""
_CHECKED = 2
_TRIED = 8


def make_accurate_engine(
    lens: LensModel,
    batch: TokenBatch,
    cells: Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    plan: Plan,
) -> Engine:
    """Make the engine of ``plan``, or of a more careful one if metrics of some cells are not the bridge's."""
    plan = replace(plan, lanes=choose_lanes(lens, count=plan.lanes))
    together = any(one.whole_batch for one in (*metrics, *cells))
    make = partial(Engine, lens, batch, cells, metrics)
    alone, worst, first = replace(plan, lanes=1, cut=False), 0.0, math.nan
    ways = [
        plan,
        replace(plan, lanes=1),
        alone,
        replace(alone, pack=1),
        replace(alone, pack=1, path="bridge"),
    ]
    engine = make(plan=plan)
    for last in dict.fromkeys(ways):
        engine = make(plan=last)
        few = engine if together or last.prompts == 1 else make(plan=replace(last, prompts=1))
        worst, allowed, n_compared, error = _compare_with_bridge(few)
        engine.plan = replace(last, n_compared=n_compared, deviation=worst)
        if worst <= allowed and error is None:
            if (last.pack, last.cut, last.path) != (plan.pack, plan.cut, plan.path):
                log.warning(
                    "cells that share a forward or begin at a later layer would be off by %.1e here (allowed: %.1e): "
                    "this run does without, which takes longer",
                    first,
                    allowed,
                )
            return engine
        if worst <= allowed:
            log.warning(
                "no cell could be compared with the bridge, since all that were tried failed (%s: %s): this run takes "
                "one forward of the bridge for each cell, which takes longer",
                type(error).__name__,
                error,
            )
            return make(plan=replace(ways[-1], n_compared=0, deviation=worst))
        first = worst if math.isnan(first) else first
    log.warning(
        "one forward of the bridge for each cell is off by %.1e on %s, too",
        worst,
        lens.device,
    )
    return engine


def make_checked_run(
    lens: LensModel,
    batch: TokenBatch,
    cells: Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    needs: Needs,
) -> BaselineRun:
    """Make a baseline run for few cells, compared with the bridge."""
    plan = choose_even_plan(lens, batch, needs)
    plan = replace(plan, lanes=choose_lanes(lens, count=plan.lanes))
    baseline_run = BaselineRun(lens, batch, plan=plan, needs=needs)
    engine = Engine(
        lens,
        batch,
        cells,
        metrics,
        plan=plan if needs.together else replace(plan, prompts=1),
        needs=replace(needs, sites=()),
    )
    deviations, largest = engine.deviations(range(len(cells)))
    if max(deviations) <= _allowed_deviation(lens, largest):
        baseline_run.plan = replace(plan, n_compared=len(cells), deviation=max(deviations))
        return baseline_run
    plan = make_accurate_engine(lens, batch, cells, metrics, plan=plan).plan
    return BaselineRun(lens, batch, plan=plan, needs=needs)


def make_engine(
    lens: LensModel,
    batch: TokenBatch,
    cells: Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    batch_size: int | None = None,
) -> Engine:
    """Make the engine that runs some cells, by a plan that was compared with the bridge.

    A forward has ``batch_size`` sequences; None takes as many as length and memory allow. It has all of them if a
    metric or an edit reads all at once.
    """
    needs = Needs.of_metrics(metrics, lens=lens, cells=cells)
    plan = choose_plan(lens, batch, needs, n_cells=len(cells))
    if batch_size is not None and not needs.together:
        prompts = min(batch.n_sequences, batch_size)
        plan = replace(plan, prompts=prompts, pack=max(1, batch_size // prompts) if plan.cut else 1)
    return make_accurate_engine(lens, batch, cells, metrics, plan=plan)


def _compare_with_bridge(engine: Engine) -> tuple[float, float, int, Exception | None]:
    """Compare the baseline run, and up to two cells, early and late in the layers, with the bridge.

    Returns:
        The largest deviation, the one that is allowed, the number of cells that were compared, and the error if every
        tried cell failed.
    """
    changing = [
        number for number, first in enumerate(engine.first_layers) if first <= engine.lens.n_layers
    ]
    able = sorted(changing, key=engine.first_layers.__getitem__)
    chosen = dict.fromkeys(
        able[(2 * place + 1) * len(able) // (2 * _CHECKED)] for place in range(_CHECKED) if able
    )
    found, failed, largest = list[float](), None, 1.0
    others = list(dict.fromkeys([*chosen, *able]))[:_TRIED]
    for some in ([*chosen], [], *([number] for number in others)):
        try:
            deviations, largest = engine.deviations(some)
        except Exception as error:  # it is recorded when it is the cell's turn
            if not some:
                raise
            failed = failed or error
            continue
        found += deviations[1:] if found else deviations
        if len(found) > len(chosen):
            break
    failed = failed if len(found) == 1 else None
    return max(found), _allowed_deviation(engine.lens, largest), len(found) - 1, failed


def _allowed_deviation(lens: LensModel, largest: float) -> float:
    # Half precision has no order of sums to keep to, so that any number is allowed and reported; a number that is
    # undefined on one way alone is an infinite deviation, and is not.
    half = lens.dtype in (torch.float16, torch.bfloat16)
    return sys.float_info.max if half else TOLERANCE * max(1.0, largest)
