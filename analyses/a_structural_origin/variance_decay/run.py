"""Spread of the aggregated values by position, on text and on random tokens, beside the toy law; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.measures.variance import decay_exponent, s1, token_std, variance_ratio
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

BLOCK = 25


def measure(work: Work) -> Measured:
    """S1 and S2 by position, their ratios and exponents, and the toy law's."""
    early = frozenset(range(work.steps()[0].last_layer + 1))

    def over_samples(view):
        return s1(view["z"], valid=view.valid).expand(len(view.valid), -1)

    def within(view):
        return token_std(view["z"])

    random = work.random(sequences=work.size(500, 50), length=64, bos="without")
    text = work.text(sequences=work.size(100, 8), length=64)
    reading = Reading(name="s1", sites=("z",), function=over_samples, layers=early)
    found = stream(
        work.lens, random, [reading], batch_size=BLOCK, progress=work.progress, label="S1"
    )
    blocks = (
        found.stacked("s1").mean(0)[::BLOCK].numpy()
    )  # block, position: the mean over the layers
    reading = Reading(name="s2", sites=("z",), function=within, layers=early)
    sequences = (
        stream(work.lens, text, [reading], progress=work.progress, label="S2")
        .stacked("s2")
        .mean(0)
        .numpy()
    )
    values = torch.randn(work.size(2000, 500), 64, 16, generator=work.generator())
    averages = values.cumsum(1) / torch.arange(1, 65)[None, :, None]
    toy = token_std(averages).numpy()

    numbers = {}
    for name, rows in (("s1", blocks), ("s2", sequences)):
        numbers[f"{name}_ratio"] = work.interval(rows, statistic=_ratio)
        numbers[f"{name}_exponent"] = work.interval(rows, statistic=_exponent)
    numbers["toy_exponent"] = work.interval(toy, statistic=_exponent, n_resamples=200)

    figure = new_figure(width=5.4, height=3.3)
    axes = panel(figure, xlabel="position + 1", ylabel="spread ÷ that of position 0")
    t = np.arange(1, 65)
    for rows, colour, marker, label in (
        (blocks, BLUE, "o", "S1, random tokens"),
        (sequences, ORANGE, "s", "S2, text"),
    ):
        mean = rows.mean(0)
        axes.plot(t, mean / mean[0], color=colour, marker=marker, markersize=3, label=label)
    axes.plot(t, t**-0.5, color=INK, linestyle="--", label="1/√t")
    log_scale(axes, axis="x")
    log_scale(axes, axis="y")
    legend(axes, columns=3)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def _ratio(rows: np.ndarray) -> float:
    return float(variance_ratio(torch.from_numpy(rows.mean(0))))


def _exponent(rows: np.ndarray) -> float:
    return float(decay_exponent(torch.from_numpy(rows.mean(0))))


if __name__ == "__main__":
    main(measure)
