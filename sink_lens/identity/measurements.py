"""The kinds of survey: what each reads of a model, and what it computes from all of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.corpora import bundled_text
from ..data.tokens import TokenBatch, from_tensor, from_text
from ..models.lens import LensModel
from .contrasts import variant_table
from .measured_models import Draws
from .state_contraction import agreement, contraction
from .survey import Measure, MeasuredModel, Partial, variants_of
from .token_preference import preference
from .variance_calibration import calibration

TABLES = {
    "preference": ("summary", "coverage", "tokens"),
    "contraction": ("summary", "layers", "positions", "alignment"),
    "calibration": ("summary",),
}
"""Kind -> the tables that each model adds to."""


def preferences(draws: Draws, *, progress: bool = False) -> Measure:
    """Token preference of a model; its sums are kept while it runs."""

    def measure(lens: LensModel, partial: Partial) -> MeasuredModel:
        found = preference(lens, **_of(draws), progress=progress, resume=partial.load(), keep=partial.keep)
        top = found.top()
        text = [_text(lens, token) for token in top["token"].tolist()]
        frames = {"summary": found.summary, "coverage": found.coverage, "tokens": top.assign(text=text)}
        return MeasuredModel(frames=frames, tensors={})

    return measure


def contractions(draws: Draws, *, sinks: bool = True, progress: bool = False) -> Measure:
    """Contraction of a model, and its directions."""

    def measure(lens: LensModel, partial: Partial) -> MeasuredModel:
        found = contraction(lens, **_of(draws), sinks=sinks, progress=progress)
        frames = {name: getattr(found, name) for name in TABLES["contraction"]}
        kept = {name: one.astype(np.float32) for name, one in found.directions.items() if ".attention" not in name}
        return MeasuredModel(frames=frames, tensors=kept)

    return measure


def calibrations(draws: Draws, *, progress: bool = False) -> Measure:
    """Calibrations of a model: on random tokens, or on the bundled prose where it has a tokenizer."""

    def measure(lens: LensModel, partial: Partial) -> MeasuredModel:
        draws.check(lens)
        tokens = _sequences(lens, draws)
        frame = calibration(lens, tokens, seed=draws.seed, progress=progress)
        return MeasuredModel(frames={"summary": frame.assign(tokens=tokens.source)}, tensors={})

    return measure


def directions_compared(
    tables: Mapping[str, pd.DataFrame], tensors: Mapping[str, np.ndarray]
) -> dict[str, pd.DataFrame]:
    """The variants, and how far the contraction directions of the models agree."""
    by_model: dict[str, dict[str, np.ndarray]] = {model: {} for model in tables["models"]["model"].tolist()}
    for name, tensor in tensors.items():
        model, _, place = name.rpartition("|")
        by_model[model][place] = tensor
    found = {model: _ordered(places) for model, places in by_model.items() if places}
    return variants_of(tables, tensors) | {"agreement": agreement(found)}


def calibrations_compared(
    tables: Mapping[str, pd.DataFrame], tensors: Mapping[str, np.ndarray]
) -> dict[str, pd.DataFrame]:
    """The calibrations of each variant over its seeds, against none, paired by seed."""
    frames = []
    for variant, of_variant in tables["summary"].groupby("variant", sort=False):
        found = variant_table(of_variant.assign(variant=of_variant["calibration"]))
        frames.append(found.rename(columns={"variant": "calibration"}).assign(variant=variant))
    return {"arms": pd.concat(frames, ignore_index=True)}


def _of(draws: Draws) -> dict[str, Any]:
    return {"sequences": draws.sequences, "length": draws.length, "seed": draws.seed, "bos": draws.bos}


def _ordered(places: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The directions by layer: a file of tensors is ordered by name."""
    return dict(sorted(places.items(), key=lambda one: int(one[0].partition(".")[0])))


def _text(lens: LensModel, token: int) -> str:
    known = lens.tokenizer is not None and token < len(lens.tokenizer)
    return str(lens.tokenizer.decode([token])) if known and lens.tokenizer is not None else f"<{token}>"


def _sequences(lens: LensModel, draws: Draws) -> TokenBatch:
    if lens.tokenizer is None:
        return from_tensor(torch.cat([chunk.tokens for chunk in draws.chunks(lens)]))
    size = {"sequences": draws.sequences, "length": draws.length, "bos": draws.bos}
    return from_text(bundled_text(), lens.tokenizer, name="moby_dick", **size)
