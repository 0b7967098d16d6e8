"""Attention to the first token and its norm, layer by layer; see claim.md."""

import numpy as np
import torch

from analyses.claims import Measured, Work, main
from sink_lens import Reading, stream
from sink_lens.chain.locate import find_growth_steps, onset_layer
from sink_lens.measures.attention import sink_mass, sink_score
from sink_lens.measures.dimensions import growth_ratio
from sink_lens.report.style import (
    BLUE,
    GREEN,
    ORANGE,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)


def measure(work: Work) -> Measured:
    """Onset, growth and sink rate, with intervals over sequences."""

    def mass(view):
        return sink_mass(view["mass"][..., 0], valid=view.valid, key=0).mean(1)

    def over(view):
        return (sink_score(view["mass"][..., 0], valid=view.valid, key=0) > 0.3).float().mean(1)

    def ratio(site):
        return lambda view: growth_ratio(view[site].norm(dim=-1), valid=view.valid, key=0)

    readings = [
        Reading(name="mass", sites=("mass",), function=mass),
        Reading(name="over", sites=("mass",), function=over),
        Reading(
            name="before", sites=("resid_pre",), function=ratio("resid_pre"), layers=frozenset({0})
        ),
        Reading(name="ratio", sites=("resid_post",), function=ratio("resid_post")),
    ]
    tokens = work.text(sequences=work.size(100, 8), length=64)
    found = stream(work.lens, tokens, readings, progress=work.progress)
    masses = found.stacked("mass").T.numpy()  # sequence, layer
    ratios = torch.cat(
        [found.stacked("before"), found.stacked("ratio")]
    ).T.numpy()  # before layer 0, after each

    def first_step(rows):
        return next(
            iter(find_growth_steps(torch.from_numpy(rows.mean(0)), factor=2.0)), (np.nan, np.nan)
        )

    def gap(rows):
        half = rows.shape[1] // 2
        onset = onset_layer(torch.from_numpy(rows[:, :half].mean(0)), threshold=0.3)
        return np.nan if onset is None else float(onset - first_step(rows[:, half:])[1])

    def growth(rows):
        first, last = first_step(rows)
        mean = rows.mean(0)
        return np.nan if np.isnan(first) else mean[last + 1] / mean[first]

    both = np.concatenate([np.pad(masses, ((0, 0), (0, 1)), constant_values=0.0), ratios], axis=1)
    numbers = {
        "onset_gap": work.interval(both, statistic=gap),
        "growth": work.interval(ratios, statistic=growth),
        "largest_mass": work.interval(masses, statistic=lambda rows: rows.mean(0).max()),
        "sink_rate": work.interval(found.stacked("over").T.numpy()),
    }

    figure = new_figure(width=7.4, height=3.0)
    axes = panel(figure, place=(1, 2, 1), xlabel="layer", ylabel="attention to the first token")
    axes.plot(masses.mean(0), color=BLUE, marker="o", markersize=3, label="mean over heads")
    axes.axhline(0.3, color=ORANGE, linestyle="--", linewidth=1, label="0.3")
    axes.axhline(0.8, color=GREEN, linestyle=":", linewidth=1, label="0.8 (paper)")
    axes.set_ylim(0, 1)
    legend(axes, columns=3)
    axes = panel(figure, place=(1, 2, 2), xlabel="after layer", ylabel="norm ÷ others' median")
    axes.plot(range(-1, ratios.shape[1] - 1), ratios.mean(0), color=BLUE, marker="o", markersize=3)
    log_scale(axes, axis="y")
    return Measured(numbers=numbers, figure=without_formulas(figure))


if __name__ == "__main__":
    main(measure)
