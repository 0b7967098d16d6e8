"""Attention to the first token by length of the input; see claim.md."""

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.measures.attention import sink_score
from sink_lens.report.style import (
    BLUE,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval

LENGTHS = {16: 32, 64: 32, 256: 16, 1024: 8, 4096: 4}
TINY = {16: 4, 64: 4, 128: 2}


def measure(work: Work) -> Measured:
    """Mass and rate of every length, each kept as soon as it is measured."""
    lengths = work.size(LENGTHS, TINY)
    late = frozenset(range(work.steps()[0].last_layer + 1, work.lens.n_layers))

    def second_half(view):
        column = view["mass"][..., 0]
        return column[..., column.shape[-1] // 2 :].mean(dim=(1, 2))

    def over(view):
        return (sink_score(view["mass"][..., 0], valid=view.valid, key=0) > 0.3).float().mean(1)

    def read(length):
        tokens = work.text(sequences=lengths[length], length=length)
        readings = [
            Reading(name="mass", sites=("mass",), function=second_half, layers=late),
            Reading(name="rate", sites=("mass",), function=over),
        ]
        found = stream(
            work.lens, tokens, readings, progress=work.progress, label=f"{length} tokens"
        )
        return pd.DataFrame(
            {name: found.stacked(name).mean(0).numpy() for name in ("mass", "rate")}
        )

    tables = {
        length: work.once(f"length-{length}", lambda length=length: read(length))
        for length in lengths
    }
    short, long = tables[64]["mass"].to_numpy(), tables[work.size(1024, 128)]["mass"].to_numpy()
    draws = work.rng().integers
    ratios = [_draw(long, draws) / _draw(short, draws) for _ in range(2000)]
    low, high = np.quantile(
        ratios, [0.025, 0.975]
    )  # the two lengths have other sequences: each is drawn apart
    numbers = {
        "kept": Interval(
            estimate=float(long.mean() / short.mean()),
            low=float(low),
            high=float(high),
            n=len(long),
        )
    }
    for name in ("mass", "rate"):
        numbers |= {
            f"{name} @ {length} tokens": work.interval(table[name])
            for length, table in tables.items()
        }

    figure = new_figure(width=5.0, height=2.9)
    axes = panel(figure, xlabel="tokens")
    for name, colour, label in (
        ("mass", BLUE, "attention to the first token"),
        ("rate", ORANGE, "sink rate at 0.3"),
    ):
        found = [numbers[f"{name} @ {length} tokens"] for length in lengths]
        spread = [
            [one.estimate - one.low for one in found],
            [one.high - one.estimate for one in found],
        ]
        axes.errorbar(
            list(lengths),
            [one.estimate for one in found],
            spread,
            color=colour,
            marker="o",
            label=label,
        )
    log_scale(axes, axis="x")
    axes.set_ylim(0, 1)
    legend(axes, columns=2)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def _draw(values, draws):
    return values[draws(len(values), size=len(values))].mean()


if __name__ == "__main__":
    main(measure)
