"""Variance calibration from the first step on, where softmax has a sink; see claim.md."""

import math

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, main
from analyses.trigger_training import BATCH, LENGTH, RATE, VOCAB, train_on_trigger
from sink_lens.report.style import (
    COLOURS,
    MARKS,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval, t_intervals
from sink_lens.training.config import TrainConfig
from sink_lens.training.model import model_of

ARMS = {
    "softmax": {},
    "position": {"value_norm": "position"},
    "shared gain": {"value_norm": "shared", "value_norm_init": "first_token"},
    "a gain a head": {"value_norm": "per_head", "value_norm_init": "dummy_pass"},
}
SEEDS = tuple(range(20, 26))


def measure(work: Work) -> Measured:
    """The last readings beside those of softmax with the same seed."""
    names = {arm: arm.replace(" ", "-") for arm in ARMS}
    table = pd.concat(
        [work.once(name, lambda arm=arm: trained(work, arm)) for arm, name in names.items()]
    )
    ends = table[table["step"] == table["step"].max()].set_index(["arm", "seed"])
    base = ends.loc["softmax"]

    def over_seeds(values) -> Interval:
        return t_intervals(np.asarray(values)[None])[0]

    def ratio(values) -> Interval:
        found = over_seeds(np.log(values))
        low, estimate, high = (math.exp(one) for one in (found.low, found.estimate, found.high))
        return Interval(estimate=estimate, low=low, high=high, n=found.n)

    others = list(ARMS)[1:]
    numbers = {
        f"removed @ {arm}": over_seeds(ends.loc[arm]["rate_first"] - base["rate_first"])
        for arm in others
    }
    numbers |= {
        f"mass @ {arm}": over_seeds(ends.loc[arm]["mass_first"] - base["mass_first"])
        for arm in others
    }
    numbers |= {f"cost @ {arm}": ratio(ends.loc[arm]["loss"] / base["loss"]) for arm in others}
    return Measured(numbers=numbers | {"sink": over_seeds(base["rate_first"])}, figure=draw(table))


def trained(work: Work, arm: str) -> pd.DataFrame:
    """arm, seed, step, error and readings of the trainings of one arm."""
    steps, every = work.size(250, 6), work.size(50, 3)
    rows = []
    for seed in work.size(SEEDS, SEEDS[:3]):
        sizes = {
            "d_model": work.size(64, 16),
            "d_mlp": work.size(128, 32),
            "n_heads": work.size(4, 2),
            "vocab_size": VOCAB,
        }
        times = {"length": LENGTH, "batch": BATCH, "steps": steps, "warmup": 1}
        config = TrainConfig(
            n_layers=2, **sizes, **times, tied=False, lr=RATE, seed=seed, **ARMS[arm]
        )
        model = model_of(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        rows += train_on_trigger(model, optimizer=optimizer, seed=seed, steps=steps, every=every)
    return pd.DataFrame(rows).assign(arm=arm)


def draw(table: pd.DataFrame):
    """Sink rate, attention to position 0 and error by step, mean over seeds."""
    figure = new_figure(width=9.6, height=3.2)
    names = {
        "rate_first": "share of heads with a sink",
        "mass_first": "attention to position 0",
        "loss": "error",
    }
    for place, (name, ylabel) in enumerate(names.items()):
        axes = panel(figure, place=(1, 3, place + 1), xlabel="step", ylabel=ylabel)
        for index, arm in enumerate(ARMS):
            mean = table[table["arm"] == arm].groupby("step")[name].mean()
            axes.plot(
                mean,
                color=COLOURS[index],
                marker=MARKS[index],
                markersize=3,
                linewidth=1.3,
                label=arm,
            )
        if name == "loss":
            log_scale(axes, axis="y")
    legend(figure.axes[0], columns=4, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)
