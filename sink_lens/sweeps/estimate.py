"""What a sweep would cost: cells, forwards after reuse, time from a few timed packs, memory. Nothing is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric
from ..engine.cost import duration, now, peak_bytes, seconds_of, weight_bytes
from ..models.lens import LensModel
from .cluster import cells_to_run
from .engine import Block, Engine
from .grid import Cell, Grid
from .needs import Needs
from .plan import Mode, Plan, bytes_a_token, plan_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a sweep would take."""

    cells: int
    """Of the table."""
    controls: int
    """Random controls that are no cells of the table."""
    sequences: int
    metrics: int
    slow_forwards: int
    """Whole forwards of one cell at a time, and of the unedited run."""
    forwards: int
    """Forwards that are run, several cells in each."""
    layers_frac: float
    """Layers that are run for a cell and batch of prompts, on average, over all layers."""
    seconds: float
    """Scaled from the packs that were timed, and what the check before the sweep took."""
    bytes_weights: int
    bytes_forward: int
    """Of the forwards that run side by side, roughly."""
    bytes_peak: int
    """The most that this process has held, on the GPU where the model is there."""


def cost_of(
    lens: LensModel,
    tokens: TokenBatch,
    what: Grid | Sequence[Cell],
    metrics: Sequence[Metric],
    *,
    mode: Mode,
    check: Callable[[Sequence[Cell], Plan], Plan] = lambda cells, plan: plan,
) -> Cost:
    """The cost of a sweep on a model; runs a few packs of it.

    Args:
        lens: the model.
        tokens: the sequences.
        what: the grid or the cells.
        metrics: what is read.
        mode: exact or fast.
        check: what the runner does before it begins, which may change the plan.
    """
    cells = cells_to_run(what, lens, n_positions=tokens.n_positions)
    n_asked = what.n_cells(lens, n_positions=tokens.n_positions) if isinstance(what, Grid) else len(what)
    needs = Needs.of(metrics, lens=lens)
    begun = now(lens.device)
    plan = check(cells, plan_of(lens, tokens, needs, mode=mode, n_cells=len(cells)))
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
        forwards=sum(-(-len(block.cells) // plan.pack) for block in run) + batches,
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


def estimate(cost: Cost) -> RenderableType:
    """The same, as a person reads it."""
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
    """Of all blocks: a cell takes so much, and so much a layer, as the longest and the shortest of each path say."""
    found = 0.0
    for path in sorted({engine.path_of(block) for block in blocks}):
        some = [block for block in blocks if engine.path_of(block) == path]
        far, near = max(some, key=engine.layers_of), min(some, key=engine.layers_of)
        most, least = max(1, engine.layers_of(far)), max(1, engine.layers_of(near))
        longest = _seconds_a_cell(engine, far)
        slope = longest / most
        if least < most:
            slope = min(slope, max(0.0, longest - _seconds_a_cell(engine, near)) / (most - least))
        fixed = longest - slope * most
        found += sum((fixed + slope * max(1, engine.layers_of(block))) * len(block.cells) for block in some)
        unedited = fixed + slope * min(engine.needs.last, engine.lens.n_layers)
        found += 2 * unedited * len({block.prompts.start for block in some})  # what it reads, and where cells begin
    return found


def _seconds_a_cell(engine: Engine, block: Block) -> float:
    """In a pack of a block."""
    few = replace(block, cells=block.cells[: engine.plan.pack * engine.plan.lanes])
    once = seconds_of(lambda: engine.run(few), device=engine.lens.device, warm_up=1)  # the unedited run is kept
    return once / len(few.cells)
