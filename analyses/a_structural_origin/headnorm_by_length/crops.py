"""Trainings on random crops of prose of any length, with BOS in front or without, and S2 by layer and position."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.prose_and_trigger import READ, adamw, machine, rate_at, step_on_cpu, step_on_gpu
from sink_lens import capture
from sink_lens.measures.variance import s2
from sink_lens.models.load import wrap
from sink_lens.training import SinkMonitor, TrainConfig
from sink_lens.training.batches import TrainingRows, load_training_rows
from sink_lens.training.model import model_of

HELD_OUT = {"loss": 32_768, "monitor": 16_384, "s2": 32_768}
"""Held-out tokens that a loss and the monitor read, and that S2 reads at once (it reads all)."""
OTHERS = 8
"""The first of the positions whose S2 the first token's is compared with."""
CURVE, READINGS = 8, 2
"""Losses along a training after its first, and readings of the monitor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and the tokens of a step."""

    n_layers: int
    d_model: int
    d_mlp: int
    n_heads: int
    vocab_size: int
    data: str
    step_tokens: int
    block: int
    """Tokens of the pieces that are held out; a multiple of every length."""
    half: bool = True
    """Compute in bfloat16 (autocast), with weights in float32, as the authors do; S2 is read in float32."""

    def config(
        self, *, length: int, steps: int, rate: float, seed: int, fields: Mapping[str, Any]
    ) -> TrainConfig:
        """The training of one arm."""
        names = ("n_layers", "d_model", "d_mlp", "n_heads", "vocab_size", "data")
        return TrainConfig(
            length=length,
            batch=self.step_tokens // length,
            accumulation=1,
            steps=steps,
            warmup=max(1, steps // 10),
            lr=rate,
            min_lr=rate / 10,
            seed=seed,
            bos="without",
            device="cpu",
            **{name: getattr(self, name) for name in names},
            **fields,
        )


@dataclass(slots=True, kw_only=True)
class Ended:
    """The readings of a training, by step, and S2 at its end by layer and position."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    positions: pd.DataFrame = field(default_factory=pd.DataFrame)


def train_on_crops(
    shape: Shape,
    *,
    length: int,
    bos: bool,
    steps: int,
    rate: float,
    seed: int,
    fields: Mapping[str, Any],
    losses_only: bool = False,
    device: str = "cpu",
) -> Ended:
    """Train one model on random crops, and read it along the training; one that diverges ends there.

    Args:
        shape: the model and the tokens of a step.
        length: tokens of a crop.
        bos: put BOS in the place of each crop's first token.
        steps: of the optimizer.
        rate: the largest learning rate.
        seed: of the weights and of the crops.
        fields: fields of ``TrainConfig`` that the arm changes.
        losses_only: read the losses at begin and end alone.
        device: where it is trained; a GPU runs the whole step as one graph.
    """
    rows, stream, apart = corpus_of(shape)
    config = shape.config(length=length, steps=steps, rate=rate, seed=seed, fields=fields)
    assert rows.tokenizer is not None  # it made the rows
    first = rows.tokenizer.bos_token_id if bos else None
    held_out = begun(apart.view(-1, length), first).to(device)
    read = spread(held_out, HELD_OUT["loss"] // length)
    model: Any = model_of(config, tokenizer=rows.tokenizer).train()
    model.to(device)
    optimizer = adamw(model, config)
    offsets = torch.Generator().manual_seed(seed)

    def loss_on(tokens: Tensor) -> Tensor:
        with torch.autocast(
            torch.device(device).type, torch.bfloat16, enabled=shape.half, cache_enabled=False
        ):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    make_step = step_on_cpu if device == "cpu" else step_on_gpu
    advance = make_step(
        model, optimizer, backward=lambda tokens: loss_on(tokens).backward(), clip=config.clip
    )
    ended = Ended()
    on_curve, with_monitor = (
        {round(steps * at / n) for at in range(n + 1)}
        for n in ((1, 1) if losses_only else (CURVE, READINGS))
    )
    for step in range(steps + 1):
        if step in on_curve | with_monitor:
            with torch.no_grad():
                parts = read.split(max(1, HELD_OUT["monitor"] // length))
                loss = sum(loss_on(part).item() * len(part) for part in parts) / len(read)
            row = {"step": step, "tokens": step * config.step_tokens, "prose": loss}
            ended.rows.append(row)
            if not np.isfinite(loss):
                break
            if step in with_monitor and not losses_only:
                row |= monitored(model, spread(read, HELD_OUT["monitor"] // length))
                by_position = s2_by_position(model, held_out if step == steps else read)
                row |= {f"s2_ratio_{layer}": of_first(one) for layer, one in enumerate(by_position)}
                row["s2_ratio"] = float(np.mean([of_first(one) for one in by_position]))
                if step == steps:
                    ended.positions = in_bins(by_position)
        if step < steps:
            starts = torch.randint(len(stream) - length + 1, (config.batch, 1), generator=offsets)
            advance(rate_at(step, config), begun(stream[starts + torch.arange(length)], first))
    ended.rows[-1]["machine"] = machine(device)
    return ended


@functools.cache
def corpus_of(shape: Shape) -> tuple[TrainingRows, Tensor, Tensor]:
    """The rows of a data set, its training tokens as one stream, and its held-out tokens; read once a process."""
    names = {"data": shape.data, "vocab_size": shape.vocab_size}
    rows = load_training_rows(
        TrainConfig(length=shape.block, bos="without", eval_sequences=10**6, **names),
        progress=False,
    )
    train, apart = (
        torch.cat([split[at]["input_ids"] for at in range(len(split))])
        for split in (rows.train, rows.evaluation)
    )
    return rows, train, apart


def begun(tokens: Tensor, first: int | None) -> Tensor:
    """Sequences with ``first`` in the place of their first token; None leaves them."""
    if first is not None:
        tokens = tokens.clone()
        tokens[:, 0] = first
    return tokens


def spread(rows: Tensor, n: int) -> Tensor:
    """At most ``n`` rows, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(n, len(rows))).round()]


def monitored(model: Any, tokens: Tensor) -> dict[str, float]:
    """Sinks and outliers, as the monitor of trainings reads them."""
    with SinkMonitor(model, every=1, tokens=tokens, sequences=len(tokens)) as monitor:
        reading = monitor.finish()
    assert reading is not None  # each step is read
    # short texts have no rate
    return {name: reading.get(f"sinks/{name}", np.nan) for name in READ}


def s2_by_position(model: Any, tokens: Tensor) -> np.ndarray:
    """S2 of the input of W_O, [layer, position]."""
    lens = wrap(model.eval())
    parts = tokens.split(max(1, HELD_OUT["s2"] // tokens.shape[1]))
    sums = np.zeros((lens.n_layers, tokens.shape[1]))
    for part in parts:
        z = capture(lens, part, sites=["z"], path="plain")
        valid = torch.ones_like(part, dtype=torch.bool)
        for layer in range(lens.n_layers):
            sums[layer] += len(part) * s2(z["z", layer], valid=valid).double().cpu().numpy()
    model.train()
    return sums / len(tokens)


def of_first(by_position: np.ndarray) -> float:
    """S2 of the first token over the mean of the others'."""
    return float(by_position[0] / by_position[OTHERS:].mean())


def in_bins(by_position: np.ndarray) -> pd.DataFrame:
    """S2 by layer, at the first token and in bins of positions that double in width."""
    length = by_position.shape[1]
    edges = [
        0,
        *itertools.takewhile(lambda edge: edge < length, (2**power for power in itertools.count())),
        length,
    ]
    return pd.DataFrame(
        {"layer": layer, "from": low, "to": high - 1, "s2": row[low:high].mean()}
        for layer, row in enumerate(by_position)
        for low, high in itertools.pairwise(edges)
    )
