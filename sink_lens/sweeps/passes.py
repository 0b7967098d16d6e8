"""Count the passes of a sweep: the share of layers and positions that each cell runs, without torch."""

from ..data.described import check_sequences_fit
from ..estimate import PassCount, PassCounts, Sizes, forward_activation_bytes
from ..models.sites import SITES
from .config import SweepConfig

_BESIDE = 8
"""Whole passes beside those of the cells: the baseline run twice, and some cells on both paths in the check."""


def count_sweep_passes(config: SweepConfig, sizes: Sizes) -> PassCounts | None:
    """Estimate a sweep's passes and memory; None if it has prompts, and the tokenizer's file is missing."""
    header = sizes.header
    check_sequences_fit(config, n_context=header.n_context, has_tokenizer=header.has_tokenizer)
    lengths = [config.length] * config.sequences
    if config.prompts:
        ids = sizes.prompt_ids(config.prompts, bos=config.bos)
        if ids is None:
            return None
        lengths = [len(one) for one in ids]
    n_positions = max(lengths)
    read = [metric.last_layer(header) for metric in config.metrics]
    unembeds = None in read
    last = header.n_layers - 1 if unembeds else max(layer for layer in read if layer is not None)
    specs, drawn = config.grid.specs(header, n_positions=n_positions)
    every = {spec.identity: spec for spec in (*specs, *drawn)}.values()
    begins = [  # the first layer that an edit changes; none of a site behind all layers
        min(spec.part.layers or (0,)) if SITES[spec.part.site].per_layer else header.n_layers
        for spec in every
    ]
    runs = [max(0, last + 1 - first) for first in begins]
    made = float(_BESIDE)
    for spec, run in zip(every, runs, strict=True):
        weights = run / header.n_layers * header.n_body + unembeds * header.n_vocab
        begin = min(spec.part.positions or (0,))
        made += (
            (run > 0 or unembeds)
            * weights
            / (header.n_body + header.n_vocab)
            * (1 - begin / n_positions)
        )
    return PassCounts(
        parts=(PassCount(forwards=made, tokens=len(lengths) * n_positions),),
        sequences=len(lengths),
        positions=n_positions,
        bytes=forward_activation_bytes(header, tokens=len(lengths) * n_positions),
        facts={
            "cells": f"{len(specs):,}",
            "random controls beside them": f"{len(every) - len(specs):,}",
            "metrics": f"{len(config.metrics):,}",
            "layers run for a cell": f"{sum(runs) / len(every) / header.n_layers:.0%} of all",
            "passes, one cell at a time": f"{len(every) + 1:,}",
        },
    )
