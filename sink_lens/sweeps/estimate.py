"""Estimate what a sweep costs before it begins: its cells, their share of layers and positions, time and memory.

On the CPU all of it comes from the headers of the model's files, from the speed of one product of matrices and, for
prompts, from the tokenizer's file, so that no weights are loaded. On a GPU, or where the headers do not say it all,
``timed_estimate`` times some of the forwards.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..edits.named_edits import EditSpec
from ..engine.cost import about, conversion, peak_by_header, runs_on_gpu, seconds_a_token, size
from ..models.bundled import files_of
from ..models.header import Header, check_fits, read_header
from ..models.prompt_tokens import prompt_tokens
from ..models.sites import SITES
from .config import SweepConfig

_PASSES = 8
"""Whole passes beside those of the cells: the baseline run twice, and some cells on both paths in the check."""


def estimate(config: SweepConfig) -> RenderableType:
    """The cost of ``sweep`` with this configuration, in words. Nothing is written.

    Raises:
        InputError: what ``sweep`` would refuse, as far as it is known.
    """
    path = None if runs_on_gpu(config.device) else files_of(config.model)
    header = path and read_header(path)
    tokens = [[0] * config.length] * config.sequences
    if path is not None and header is not None:
        check_fits(header, config)
        tokens = prompt_tokens(path, config.prompts, bos=config.bos) if config.prompts else tokens
    if not header or tokens is None:
        from .sweep import dry_run

        return dry_run(config)
    before = "" if path is None else conversion(header, path=path)
    return _by_header(header, config, n_sequences=len(tokens), n_positions=max(map(len, tokens)), before=before)


def _by_header(
    header: Header, config: SweepConfig, *, n_sequences: int, n_positions: int, before: str
) -> RenderableType:
    """The estimate of a model whose headers were read."""
    read = [metric.last(header) for metric in config.metrics]
    unembeds = None in read
    last = header.n_layers - 1 if unembeds else max(layer for layer in read if layer is not None)
    specs, drawn = config.grid.specs(header, n_positions=n_positions)
    every = {spec.identity: spec for spec in (*specs, *drawn)}
    whole = header.n_body + header.n_vocab
    layers, passes = 0.0, 0.0
    for spec in every.values():
        run = max(0, last + 1 - _first(spec, n_layers=header.n_layers))
        weights = run / header.n_layers * header.n_body + unembeds * header.n_vocab
        begin = min(spec.part.positions or (0,))
        layers += run
        passes += (run > 0 or unembeds) * weights / whole * (1 - begin / n_positions)
    tokens = n_sequences * n_positions
    seconds = (passes + _PASSES) * tokens * seconds_a_token(header)
    table = Table(title="Sweep", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    held = header.bytes_as(config.dtype)
    for name, value in {
        "cells": f"{len(specs):,}",
        "random controls beside them": f"{len(every) - len(specs):,}",
        "sequences": f"{n_sequences:,}",
        "metrics": f"{len(config.metrics):,}",
        "tokens of a sequence": f"{'up to ' if config.prompts else ''}{n_positions:,}",
        "passes, one cell at a time": f"{len(every) + 1:,}",
        "whole passes after reuse": f"{passes + _PASSES:,.0f}",
        "layers run for a cell": f"{layers / len(every) / header.n_layers:.0%} of all",
        "time": about(seconds),
        "memory": f"about {size(peak_by_header(header, weights=held, tokens=tokens))}",
        "of it the weights": size(held),
    }.items():
        table.add_row(name, value)
    note = (
        "Cells and layers come from the headers of the model's files, the time from its size and the speed of a "
        "product of matrices here and now: expect a factor of 2. Loading, tables and the page are not counted. "
        "Nothing was written."
    )
    return Group(table, Text(f"{before}. {note}" if before else note))


def _first(spec: EditSpec, *, n_layers: int) -> int:
    """The layer that the pass of a cell begins with."""
    return min(spec.part.layers or (0,)) if SITES[spec.part.site].per_layer else n_layers
