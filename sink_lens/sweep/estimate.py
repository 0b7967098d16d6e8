"""What a sweep would cost: cells, forwards after reuse, time from one timed pack, memory. Nothing is written."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..data.tokens import TokenBatch
from ..interventions.metrics import Metric
from ..models.lens import LensModel
from .cluster import cells_to_run
from .engine import Block, Engine
from .grid import Cell, Grid
from .needs import Needs
from .plan import Mode, bytes_a_token, plan_of


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
    """Scaled from the pack that was timed."""
    bytes_weights: int
    bytes_forward: int
    """Of one forward, roughly."""


def cost_of(
    lens: LensModel, tokens: TokenBatch, what: Grid | Sequence[Cell], metrics: Sequence[Metric], *, mode: Mode
) -> Cost:
    """The cost of a sweep on a model; runs one pack of it, or three passes at most."""
    cells = cells_to_run(what, lens, n_positions=tokens.n_positions)
    asked = what.cells(lens, n_positions=tokens.n_positions)[0] if isinstance(what, Grid) else list(what)
    needs = Needs.of(metrics, lens=lens)
    plan = plan_of(lens, tokens, needs, mode=mode, n_cells=len(cells))
    engine = Engine(lens, tokens, cells, metrics, plan=plan)
    run = [block for block in engine.blocks if block.first <= lens.n_layers]
    per_layer = _seconds_a_layer(engine, run) if run else 0.0
    layers = sum(max(1, engine.layers_of(block)) * len(block.cells) for block in run)
    batches = -(-tokens.n_sequences // plan.prompts)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in lens.plain.parameters())
    return Cost(
        cells=len(asked),
        controls=len(cells) - len(asked),
        sequences=tokens.n_sequences,
        metrics=len(metrics),
        slow_forwards=(len(cells) + 1) * batches,
        forwards=sum(-(-len(block.cells) // plan.pack) for block in run) + batches,
        layers_frac=layers / (len(cells) * batches * lens.n_layers),
        seconds=layers * per_layer,
        bytes_weights=weights,
        bytes_forward=bytes_a_token(lens, tokens.n_positions, needs) * plan.pack * plan.prompts * tokens.n_positions,
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
        "time": _spoken(cost.seconds),
        "weights": f"{cost.bytes_weights / 1e6:,.0f} MB",
        "one forward": f"{cost.bytes_forward / 1e6:,.0f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    note = "Time is that of one device, from one pack that was timed; several devices share it. Nothing was written."
    return Group(table, Text(note))


def _seconds_a_layer(engine: Engine, blocks: Sequence[Block]) -> float:
    """Of one cell, from a pack of the first block that runs layers."""
    block = max(blocks, key=engine.layers_of)
    few = Block(number=block.number, prompts=block.prompts, first=block.first, cells=block.cells[: engine.plan.pack])
    engine.run(few)  # the unedited run, and warm caches
    _wait(engine.lens)
    before = time.perf_counter()
    engine.run(few)
    _wait(engine.lens)
    return (time.perf_counter() - before) / (len(few.cells) * max(1, engine.layers_of(block)))


def _wait(lens: LensModel) -> None:
    if lens.device.type == "cuda":
        torch.cuda.synchronize(lens.device)


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
