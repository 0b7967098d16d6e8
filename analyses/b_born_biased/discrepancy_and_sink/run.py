"""The discrepancy of untrained models and the sink of the trained ones, over activations and seeds; see claim.md."""

import math

import numpy as np
import pandas as pd
import torch

from analyses.claims import Measured, Work, main
from analyses.trigger_training import LENGTH, RATE, VOCAB, train_on_trigger
from sink_lens.identity import UntrainedConfig, contraction, untrained
from sink_lens.report.style import COLOURS, MARKS, legend, new_figure, panel, without_formulas
from sink_lens.stats import Interval, t_intervals

ACTIVATIONS = {"ReLU": "relu", "GELU": "gelu", "tanh": "tanh"}
SEEDS = tuple(range(40, 48))


def measure(work: Work) -> Measured:
    """Gaps between activations, paired by seed, and correlations over models."""
    table = pd.concat(
        [work.once(name, lambda name=name: trained(work, name)) for name in ACTIVATIONS]
    )
    first, last = (
        table[table["step"] == step].set_index(["activation", "seed"])
        for step in (0, table["step"].max())
    )
    start, end = first["discrepancy"].unstack("seed"), last["mass_first"].unstack("seed")
    rate, solved = (
        last["rate_first"].unstack("seed"),
        (last["loss"] / first["loss"]).unstack("seed"),
    )

    def over_seeds(values) -> Interval:
        return t_intervals(np.asarray(values)[None])[0]

    def correlation(names) -> Interval:
        """Correlation over the models of these activations, with the interval by Fisher's transformation."""
        pairs = start.loc[names].to_numpy().ravel(), end.loc[names].to_numpy().ravel()
        found, n = float(np.corrcoef(*pairs)[0, 1]), len(pairs[0])
        low, high = (
            math.tanh(math.atanh(found) + side * 1.96 / math.sqrt(n - 3)) for side in (-1, 1)
        )
        return Interval(estimate=found, low=low, high=high, n=n)

    numbers = {
        "sink_gap": over_seeds(end.loc["ReLU"] - end.loc["tanh"]),
        "rate_gap": over_seeds(rate.loc["ReLU"] - rate.loc["tanh"]),
        **{f"within @ {name}": correlation([name]) for name in ACTIVATIONS},
        "over_all": correlation(list(ACTIVATIONS)),
        "discrepancy_gap": over_seeds(start.loc["ReLU"] - start.loc["tanh"]),
        **{f"discrepancy @ {name}": over_seeds(start.loc[name]) for name in ACTIVATIONS},
        **{f"sink @ {name}": over_seeds(rate.loc[name]) for name in ACTIVATIONS},
        **{f"solved @ {name}": over_seeds(solved.loc[name]) for name in ACTIVATIONS},
    }
    return Measured(numbers=numbers, figure=draw(start, end))


def trained(work: Work, name: str) -> pd.DataFrame:
    """activation, seed, step, discrepancy at the start, error and readings of the trainings of one activation."""
    steps, every = work.size(250, 6), work.size(250, 3)
    sizes = {
        "n_layers": 2,
        "d_model": work.size(64, 16),
        "n_heads": work.size(4, 2),
        "vocab_size": VOCAB,
    }
    config = UntrainedConfig(
        style="gpt2",
        activation=ACTIVATIONS[name],
        **sizes,
        n_context=LENGTH,
        tied=False,
        init_std=0.1,
    )
    tables = []
    for seed in work.size(SEEDS, SEEDS[:4]):
        lens = untrained(config, seed=seed)
        options = {"sequences": work.size(500, 50), "length": LENGTH, "sinks": False}
        summary = contraction(lens, **options).frame.set_index("measure")["value"]
        model = lens.plain.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        rows = train_on_trigger(model, optimizer=optimizer, seed=seed, steps=steps, every=every)
        tables.append(pd.DataFrame(list(rows)).assign(discrepancy=float(summary["discrepancy"])))
    return pd.concat(tables, ignore_index=True).assign(activation=name)


def draw(start: pd.DataFrame, end: pd.DataFrame):
    """The attention to position 0 at the end by the discrepancy at the start, a mark a model."""
    figure = new_figure(width=4.8, height=3.4)
    axes = panel(
        figure,
        place=(1, 1, 1),
        xlabel="discrepancy at the start",
        ylabel="attention to position 0 at the end",
    )
    for index, name in enumerate(ACTIVATIONS):
        style = {
            "color": COLOURS[index],
            "marker": MARKS[index],
            "linestyle": "none",
            "markersize": 5,
        }
        axes.plot(start.loc[name], end.loc[name], label=name, **style)
    legend(axes, columns=3)
    return without_formulas(figure)


if __name__ == "__main__":
    main(measure)
