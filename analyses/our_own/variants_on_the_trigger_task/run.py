"""Which variants of a training make sinks and outliers on a task that calls for a sink; see claim.md."""

from collections.abc import Iterator

import pandas as pd
import torch

from analyses.claims import Measured, Work, main
from analyses.trigger_training import BATCH, LENGTH, RATE, VOCAB, train_on_trigger
from sink_lens.models.headnorm import undecayed
from sink_lens.report.style import (
    COLOURS,
    MARKS,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval, summarise_differences
from sink_lens.training.config import TrainConfig
from sink_lens.training.model import model_of
from sink_lens.training.muon import MuonWithAdamW

VARIANTS = {
    "softmax": {},
    "sigmoid": {"attention": "sigmoid"},
    "off by one": {"attention": "off_by_one"},
    "sink logit": {"attention": "sink_logit"},
    "key bias": {"attention": "key_bias"},
    "gate": {"attention": "gate_headwise"},
    "value norm": {"value_norm": "shared", "value_norm_init": "first_token"},
    "single scale": {"norm": "single_scale"},
    "Muon": {"optimizer": "muon"},
}
"""Each differs from softmax in one part of the model or in the optimiser; trainings of one seed see the same
sequences."""
FREE = ("sigmoid", "off by one", "sink logit", "key bias", "gate")
"""Variants in which a head can give nothing without a sink."""
SEEDS = tuple(range(10))


def measure(work: Work) -> Measured:
    """The last readings, and their differences to softmax of the same seed with 95% t intervals over seeds."""
    names = {one: f"variant-{one.replace(' ', '-')}" for one in VARIANTS}
    table = pd.concat(
        [work.once(name, lambda one=one: trained(work, one)) for one, name in names.items()]
    )
    last = table[table["step"] == table["step"].max()].set_index(["variant", "seed"])

    def over_seeds(values) -> Interval:
        found = summarise_differences(values, generator=work.rng())
        return Interval(estimate=found.mean, low=found.low, high=found.high, n=found.n)

    def gap(name, variant):
        return over_seeds(last.loc[variant, name].to_numpy() - last.loc["softmax", name].to_numpy())

    others = [one for one in VARIANTS if one != "softmax"]
    numbers = {"rate": over_seeds(last.loc["softmax", "rate_first"].to_numpy())}
    numbers |= {f"rate_freed @ {one}": gap("rate_first", one) for one in FREE}
    numbers |= {f"rate_kept @ {one}": gap("rate_first", one) for one in others if one not in FREE}
    numbers["kurtosis"] = over_seeds(last.loc["softmax", "kurtosis"].to_numpy())
    numbers |= {f"kurtosis_less @ {one}": gap("kurtosis", one) for one in others}
    numbers |= {f"activation_less @ {one}": gap("max_activation", one) for one in others}
    solved = last["loss"] / table[table["step"] == 0].set_index(["variant", "seed"])["loss"]
    numbers |= {f"solved @ {one}": over_seeds(solved[one].to_numpy()) for one in VARIANTS}
    return Measured(numbers=numbers, figure=draw(table))


def trained(work: Work, variant: str) -> pd.DataFrame:
    """variant, seed, step, loss and what the monitor reads of 64 sequences that are kept apart."""
    seeds = SEEDS[: work.size(10, 2)]
    rows = [row for seed in seeds for row in training(work, variant, seed)]
    return pd.DataFrame(rows).assign(variant=variant)


def training(work: Work, variant: str, seed: int) -> Iterator[dict[str, float]]:
    """One training: its readings at the start, at regular steps and at the end."""
    steps, every = work.size(250, 6), work.size(25, 3)
    config = TrainConfig(
        n_layers=2,
        d_model=work.size(64, 16),
        d_mlp=work.size(128, 32),
        n_heads=work.size(4, 2),
        vocab_size=VOCAB,
        length=LENGTH,
        batch=BATCH,
        steps=steps,
        warmup=1,
        tied=False,
        lr=RATE,
        seed=seed,
        **VARIANTS[variant],
    )
    model = model_of(config).train()
    kept = undecayed(model)
    if config.optimizer == "muon":
        optimizer = MuonWithAdamW(
            model, lr=config.lr, weight_decay=0.0, betas=(0.9, 0.999), undecayed=kept
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    yield from train_on_trigger(model, optimizer=optimizer, seed=seed, steps=steps, every=every)


def draw(table: pd.DataFrame):
    """Sink rate, kurtosis and loss by step, mean over seeds."""
    figure = new_figure(width=9.6, height=3.6)
    names = {
        "rate_first": "share of heads with a sink",
        "kurtosis": "excess kurtosis",
        "loss": "loss",
    }
    for place, (name, ylabel) in enumerate(names.items()):
        axes = panel(figure, place=(1, 3, place + 1), xlabel="step", ylabel=ylabel)
        for index, variant in enumerate(VARIANTS):
            mean = table[table["variant"] == variant].groupby("step")[name].mean()
            style = "-" if index < len(COLOURS) else "--"
            colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
            axes.plot(
                mean,
                color=colour,
                marker=mark,
                markersize=3,
                linestyle=style,
                linewidth=1.3,
                label=variant,
            )
        if name == "loss":
            log_scale(axes, axis="y")
    legend(figure.axes[0], columns=4, over=figure)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)
