"""Estimate the cost of a sweep on a loaded model: cells, forward passes, time from a few timed packs, and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric
from ..engine.cells import Cell
from ..engine.cost import duration, now, peak_bytes, seconds_of, weight_bytes
from ..engine.engine import Block, Engine
from ..engine.needs import Needs
from ..engine.plan import Plan, bytes_a_token, plan_of
from ..models.lens import LensModel
from .cluster import cells_to_run
from .grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The estimated cost of a sweep."""

    cells: int
    """Number of cells in the table."""
    controls: int
    """Number of random controls that are not also cells of the table."""
    sequences: int
    metrics: int
    slow_forwards: int
    """Number of full forward passes if cells ran one at a time, including the baseline run."""
    forwards: int
    """Number of forward passes that are really run, with several cells in each."""
    layers_frac: float
    """Share of the layers that are run, on average, per cell and batch of prompts."""
    seconds: float
    """Estimated time in seconds: scaled from the timed packs, plus the time of the check before the sweep."""
    bytes_weights: int
    bytes_forward: int
    """Approximate memory of the forward passes that run side by side, in bytes."""
    bytes_peak: int
    """Peak memory of this process in bytes; GPU memory if the model is on a GPU."""


def cost_of(
    lens: LensModel,
    tokens: TokenBatch,
    what: Grid | Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    check: Callable[[Sequence[Cell], Plan], Plan] = lambda cells, plan: plan,
) -> Cost:
    """The cost of a sweep on a model; runs a few packs of it.

    Args:
        lens: the model.
        tokens: the sequences.
        what: the grid or the cells.
        metrics: what is read.
        check: what the sweep does before it begins, which may change the plan.
    """
    cells = cells_to_run(what, lens, tokens)
    n_asked = what.n_cells(lens, n_positions=tokens.n_positions) if isinstance(what, Grid) else len(what)
    needs = Needs.of(metrics, lens=lens)
    begun = now(lens.device)
    plan = check(cells, plan_of(lens, tokens, needs, n_cells=len(cells)))
    checking = now(lens.device) - begun
    engine = Engine(lens, tokens, cells, metrics, plan=plan)
    run = [block for block in engine.blocks if block.first <= lens.n_layers]
    layers = sum(max(1, engine.layers_of(block)) * len(block.cells) for block in run)
    batches = -(-tokens.n_sequences // plan.prompts)
    return Cost(
        cells=n_asked,
        controls=len(cells) - n_asked,
        sequences=tokens.n_sequences,
        metrics=len(metrics),
        slow_forwards=(len(cells) + 1) * batches,
        forwards=sum(engine.forwards_of(block) for block in run) + batches,
        layers_frac=layers / (len(cells) * batches * lens.n_layers),
        seconds=checking + _seconds(engine, run),
        bytes_weights=weight_bytes(lens),
        bytes_forward=bytes_a_token(lens, tokens.n_positions, needs)
        * plan.lanes
        * plan.pack
        * plan.prompts
        * tokens.n_positions,
        bytes_peak=peak_bytes(lens.device),
    )


def in_words(cost: Cost) -> RenderableType:
    """The cost of a sweep in words."""
    table = Table(title="Sweep", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "cells": f"{cost.cells:,}",
        "random controls beside them": f"{cost.controls:,}",
        "sequences": f"{cost.sequences:,}",
        "metrics": f"{cost.metrics:,}",
        "forwards, one cell at a time": f"{cost.slow_forwards:,}",
        "forwards after reuse": f"{cost.forwards:,}",
        "layers run for a cell": f"{cost.layers_frac:.0%} of all",
        "time": duration(cost.seconds),
        "memory": f"{cost.bytes_peak / 1e6:,.0f} MB",
        "of it the weights": f"{cost.bytes_weights / 1e6:,.0f} MB",
        "of it forwards, at most": f"{cost.bytes_forward / 1e6:,.0f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    note = (
        "Time is that of one device once the model is loaded, from a few packs that were timed; several devices share "
        "it. Memory is the most that this process took. Nothing was written."
    )
    return Group(table, Text(note))


def _seconds(engine: Engine, blocks: Sequence[Block]) -> float:
    """Estimated time of all blocks: a cost per cell plus a cost per layer, fitted to timed blocks."""
    if not blocks:
        return 0.0
    far, near = max(blocks, key=engine.layers_of), min(blocks, key=engine.layers_of)
    most, least = max(1, engine.layers_of(far)), max(1, engine.layers_of(near))
    longest = _seconds_a_cell(engine, far)
    slope = longest / most
    if least < most:
        slope = min(slope, max(0.0, longest - _seconds_a_cell(engine, near)) / (most - least))
    fixed = longest - slope * most
    baseline_cost = fixed + slope * min(engine.needs.last, engine.lens.n_layers)
    found = 2 * baseline_cost * len({block.prompts.start for block in blocks})  # what it reads, and where cells begin
    return found + sum((fixed + slope * max(1, engine.layers_of(block))) * len(block.cells) for block in blocks)


def _seconds_a_cell(engine: Engine, block: Block) -> float:
    """In a pack of a block."""
    few = replace(block, cells=block.cells[: engine.plan.pack * engine.plan.lanes])
    once = seconds_of(lambda: engine.run(few), device=engine.lens.device, warm_up=1)  # the baseline run is kept
    return once / len(few.cells)
