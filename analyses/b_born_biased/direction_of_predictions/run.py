"""How much of an untrained model's predictions one direction of its states makes; see claim.md."""

import itertools

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analyses.claims import Measured, Work, main
from sink_lens.data.tokens import random_tokens
from sink_lens.identity import UntrainedConfig, untrained
from sink_lens.report.style import (
    BLUE,
    INK,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval, summarise_differences

ARMS = {"GPT-2, ReLU": {"style": "gpt2", "activation": "relu"}, "Llama": {"style": "llama"}}
SHAPE = {"n_layers": 6, "d_model": 384, "n_heads": 6}
SEEDS = (20, 21, 22)
BATCH = 100
COSINES = ("same", "prose", "other", "contraction", "agree")
FACTORS = ("factor", "factor_along", "factor_without")
HIGH = 0.01
"""Share of the vocabulary, by its logits along the direction, in which a prediction is looked for."""


def measure(work: Work) -> Measured:
    """Each number with its 95% t interval over seeds, by arm."""
    tables = {
        arm: work.once(arm.replace(", ", "-"), lambda arm=arm: of_arm(work, arm)) for arm in ARMS
    }
    numbers = {}
    for name in (*COSINES, *FACTORS):
        for arm, table in tables.items():
            values = table.loc[table["number"] == name, "value"].to_numpy()
            numbers[f"{name} @ {arm}"] = over_seeds(work, values, factor=name in FACTORS)
    return Measured(numbers=numbers, figure=draw(numbers))


def over_seeds(work: Work, values: np.ndarray, *, factor: bool) -> Interval:
    """The mean over seeds, or over pairs of them, with its t interval; a geometric one of factors."""
    found = summarise_differences(np.log(values) if factor else values, generator=work.rng())
    low, mid, high = (np.exp(one) if factor else one for one in (found.low, found.mean, found.high))
    return Interval(estimate=float(mid), low=float(low), high=float(high), n=found.n)


def of_arm(work: Work, arm: str) -> pd.DataFrame:
    """The numbers of each untrained model of an arm: number, seed, value."""
    shape = work.size(SHAPE, {"n_layers": 2, "d_model": 48, "n_heads": 4, "vocab_size": 300})
    n = work.size(2000, 200)
    rows, directions = [], []
    for seed in SEEDS[: work.size(3, 2)]:
        lens = untrained(UntrainedConfig(**ARMS[arm], **shape), seed=seed)
        one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        sizes = {"sequences": n, "length": 8, "bos": "without", "vocab_size": lens.d_vocab}
        chosen, judged = (
            last_states(lens, random_tokens(None, generator=each, **sizes).tokens)
            for each in (one, two)
        )
        along = direction(chosen)
        unembedding = lens.bridge.W_U
        high = (along @ unembedding).topk(int(HIGH * unembedding.shape[1])).indices
        predicted = (judged @ unembedding).argmax(dim=1)
        part = (judged @ along)[:, None] * along
        found = {
            "same": along @ direction(judged),
            "prose": along @ direction(last_states(lens, prose(work, n, vocabulary=lens.d_vocab))),
            "contraction": contraction(judged),
            "agree": torch.isin(predicted, high).float().mean(),
            "factor": factor(predicted, size=unembedding.shape[1]),
            "factor_along": factor((part @ unembedding).argmax(dim=1), size=unembedding.shape[1]),
            "factor_without": factor(
                ((judged - part) @ unembedding).argmax(dim=1), size=unembedding.shape[1]
            ),
        }
        rows += [
            {"number": name, "seed": seed, "value": float(value)} for name, value in found.items()
        ]
        directions.append(along)
    rows += [
        {"number": "other", "seed": -1, "value": float((a @ b).abs())}
        for a, b in itertools.combinations(directions, 2)
    ]
    return pd.DataFrame(rows)


def prose(work: Work, n: int, *, vocabulary: int) -> Tensor:
    """As many sequences of the bundled text, in a trained model's ids, which mean nothing to an untrained one."""
    tokens = work.text(sequences=n, length=8, bos="without").tokens
    return tokens % vocabulary


@torch.no_grad()
def last_states(lens, tokens: Tensor) -> Tensor:
    """Return what the unembedding reads at the last position of each sequence: sequence, dimension."""
    name, states = "ln_final.hook_out", []
    for batch in tokens.split(BATCH):
        _, cache = lens.bridge.run_with_cache(batch, names_filter=lambda at: at == name)
        states.append(cache[name][:, -1])
    return torch.cat(states)


def direction(states: Tensor) -> Tensor:
    """The unit mean vector."""
    mean = states.mean(dim=0)
    return mean / mean.norm()


def contraction(states: Tensor) -> Tensor:
    """The mean cosine between states of two sequences."""
    units, n = states / states.norm(dim=1, keepdim=True), len(states)
    return (units.sum(dim=0).square().sum() - n) / (n * (n - 1))


def factor(predicted: Tensor, *, size: int) -> float:
    """The share of the most frequent prediction over its mean where tokens are drawn uniformly."""
    rng, n = np.random.default_rng(0), len(predicted)
    null = np.mean([np.bincount(rng.integers(size, size=n)).max() for _ in range(200)])
    return float(predicted.bincount().max() / null)


def draw(numbers):
    """Cosines and shares at the left, factors at the right."""
    figure = new_figure(width=8.4, height=3.2)
    left = panel(figure, place=(1, 2, 1), ylabel="cosine, or share")
    right = panel(figure, place=(1, 2, 2), ylabel="most frequent prediction, times chance")
    shown = {
        left: ("same", "prose", "other", "contraction", "agree"),
        right: ("factor", "factor_along", "factor_without"),
    }
    for axes, names in shown.items():
        for shift, (arm, colour) in zip(
            (-0.12, 0.12), zip(ARMS, (ORANGE, BLUE), strict=True), strict=True
        ):
            found = [numbers[f"{name} @ {arm}"] for name in names]
            at = [place + shift for place in range(len(names))]
            axes.vlines(
                at, [one.low for one in found], [one.high for one in found], color=colour, alpha=0.5
            )
            axes.plot(at, [one.estimate for one in found], "o", color=colour, label=arm)
    left.set_xticks(
        range(5),
        ["other\ninputs", "prose", "other\nseeds", "between\nsequences", "predictions\nalong it"],
    )
    right.set_xticks(range(3), ["whole\nstates", "along it\nalone", "without it"])
    left.axhline(0, color=INK, linewidth=1)
    right.axhline(1, color=INK, linewidth=1)
    log_scale(right, axis="y")
    legend(left, columns=2, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)
