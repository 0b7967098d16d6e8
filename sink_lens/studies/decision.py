"""Shared by the studies that end in a decision: two halves of the text, shares of a loss gap, the run folder."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch

from ..activations.forward import check_tokens
from ..chain.config import ReadConfig
from ..configuration import with_fields
from ..data.tokens import TokenBatch, decode_tokens
from ..errors import InputError
from ..models.inputs import default_folder, model_of, provenance_of, tokens_of
from ..models.lens import LensModel, check_every_layer
from ..models.load import ModelLike, as_lens
from ..records import create_run
from ..schema import WORTH_KEEPING_NATS
from ..stats import Interval, interval, paired_difference
from .study import Study

D = TypeVar("D", bound=ReadConfig)
FEWEST = 4
"""The fewest sequences that two parts are made from."""


def inputs(
    kind: type[D],
    model: ModelLike | ReadConfig,
    *,
    config: D | None,
    tokens: TokenBatch | str | None,
    fields: Mapping[str, Any],
    every_layer: bool = True,
) -> tuple[D, LensModel, TokenBatch]:
    """Resolve the arguments of a study into its configuration, its model and its sequences.

    Raises:
        InputError: two configurations, the one of another study, an unknown field, or a value that cannot be used.
        ModelError: the study needs attention in every layer, and the model is a hybrid.
    """
    where = kind.__name__.removesuffix("Config").lower()
    given = dict(fields) | ({"tokens": tokens} if isinstance(tokens, str) else {})
    if isinstance(model, ReadConfig):
        if config is not None or not isinstance(model, kind):
            found = "two configurations" if config is not None else f"a {type(model).__name__}"
            raise InputError(f"{where} was given {found}; need one {kind.__name__}, or a model before it")
        config = with_fields(kind, model, given, where=where)
        lens = model_of(config)
    else:
        name = str(model) if isinstance(model, str | Path) else as_lens(model).name
        config = with_fields(kind, config, given | {"model": name}, where=where)
        lens = model_of(config) if isinstance(model, str | Path) else as_lens(model)
    if every_layer:
        check_every_layer(lens)
    batch = tokens if isinstance(tokens, TokenBatch) else tokens_of(lens, config=config, bos=config.bos)
    check_tokens(lens, batch)
    return config, lens, batch


def parts(batch: TokenBatch) -> dict[str, TokenBatch]:
    """The first half of the sequences, to choose on, and the second, to judge on.

    Raises:
        InputError: there are too few sequences for two parts.
    """
    if batch.n_sequences < FEWEST:
        raise InputError(
            f"{batch.n_sequences} sequences were given; need at least {FEWEST}, half to choose on and half to judge on"
        )
    half = batch.n_sequences // 2
    return {"choose": batch[:half], "judge": batch[half:]}


def share_gained(gained: np.ndarray, whole: np.ndarray, *, seed: int) -> Interval:
    """Mean of what was gained over the mean of the whole, with its 95% interval over sequences."""

    def ratio(rows: np.ndarray) -> float:
        below = rows[:, 1].mean()
        return float(rows[:, 0].mean() / below) if below else float("nan")

    pairs = np.stack([gained, whole], axis=1)
    return interval(pairs, generator=np.random.default_rng(seed), statistic=ratio, n_resamples=1000)


def loss_row(
    losses: torch.Tensor, *, baseline: torch.Tensor, worst: torch.Tensor, best: torch.Tensor, seed: int
) -> dict[str, Any]:
    """One condition: its loss, what it costs over the baseline run, and the share of the gap that it closes.

    Args:
        losses: loss of each sequence under the condition.
        baseline: the same of the baseline run.
        worst: the same at the start of the gap, where nothing is kept.
        best: the same at its end. The share is nan where the gap is no cost, as there is nothing to close.
        seed: seed of the bootstrap.
    """
    here, none, full, low = (one.double().numpy() for one in (losses, baseline, worst, best))
    change = paired_difference(here, none, generator=np.random.default_rng(seed))
    closed = share_gained(full - here, full - low, seed=seed) if is_cost(worst, best, seed=seed) else _UNDEFINED
    mean = float(here.mean())
    return {
        "loss_nats": mean,
        "perplexity": float(np.exp(mean)),
        "change_nats": change.estimate,
        "change_low": change.low,
        "change_high": change.high,
        "closed_share": closed.estimate,
        "closed_low": closed.low,
        "closed_high": closed.high,
        "n": len(here),
    }


_UNDEFINED = Interval(estimate=float("nan"), low=float("nan"), high=float("nan"), n=0)


def is_cost(more: torch.Tensor, less: torch.Tensor, *, seed: int) -> bool:
    """Whether one loss is above another by at least ``WORTH_KEEPING_NATS``, and by more than 0 with its interval."""
    found = paired_difference(more.double().numpy(), less.double().numpy(), generator=np.random.default_rng(seed))
    return found.estimate >= WORTH_KEEPING_NATS and not found.low <= 0


def write_decision(
    kind: str,
    lens: LensModel,
    batch: TokenBatch,
    config: ReadConfig,
    frames: Mapping[str, pd.DataFrame],
    *,
    kernel: str,
    decision: Mapping[str, Any],
    headline: str,
    files: Mapping[str, Any],
    out: str | Path | None,
    overwrite: bool,
) -> Study:
    """The study, once its run folder is written; a file that is no text is written as JSON."""
    folder = Path(out) if out is not None else default_folder(lens.name)
    every: Sequence[str] = ("tokens", *frames, *dict.fromkeys(name.partition(".")[0] for name in files))
    with create_run(
        folder,
        kind=kind,
        config=dataclasses.asdict(config),
        provenance=provenance_of(lens, batch, kernel=kernel)
        | {"seeds": {"tokens": batch.seed, "bootstrap": config.seed, "controls": config.seed}},
        expects=tuple(every),
        overwrite=overwrite,
    ) as writer:
        writer.write_table("tokens", decode_tokens(batch, lens.tokenizer))
        for name, frame in frames.items():
            if name == "summary":
                writer.write_csv(name, frame)
            else:
                writer.write_table(name, frame)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            writer.write_text(name, text)
    return Study(folder=folder, kind=kind, tables=dict(frames), headline=headline, decision=decision)
