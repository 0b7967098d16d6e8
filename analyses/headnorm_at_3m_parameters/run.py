"""Three seeds of a softmax model and of one with head-wise RMSNorm, and their comparison; see claim.md."""

import subprocess

import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens.report.style import BLUE, INK, ORANGE, canvas, finished, panel
from sink_lens.stats import Interval

ARMS = {"softmax": "none", "headnorm": "shared"}
SEEDS = (0, 1, 2)


def measure(work: Work) -> Measured:
    """The committed comparison, or with --retrain one of models that are trained now."""
    folder = _trained(work) if work.retrain else work.folder
    losses, measures = (pd.read_csv(folder / f"{name}.csv") for name in ("differences", "measures"))
    loss = losses.query("arm == 'shared' and curve == 'evaluation'").iloc[0]

    def of(measure, arm, *columns):
        where = "measure == @measure and arm == @arm and (threshold.isna() or threshold == 0.3)"
        row = measures.query(where).iloc[0]
        return Interval(**dict(zip(("estimate", "low", "high"), row[list(columns)], strict=True)), n=len(SEEDS))

    difference = ("difference", "difference_low", "difference_high")
    numbers = {
        "loss": Interval(estimate=loss["mean"], low=loss["low"], high=loss["high"], n=len(SEEDS)),
        "sink_rate": of("sink_rate", "none", "mean", "low", "high"),
        "dominance": of("dominance_ratio", "shared", *difference),
        "rank": of("effective_rank", "shared", *difference),
        "parity": of("s2_ratio", "shared", "mean", "low", "high"),
    }

    finals = pd.read_csv(folder / "finals.csv").query("curve == 'evaluation'")
    figure = canvas(width=7.4, height=2.8)
    axes = panel(figure, place=(1, 2, 1), ylabel="evaluation loss, nats")
    for pair in finals.pivot(index="seed", columns="arm", values="loss")[list(ARMS.values())].to_numpy():
        axes.plot(list(ARMS), pair, color=BLUE, marker="o")
    axes = panel(figure, place=(1, 2, 2), ylabel="with the norm ÷ without")
    names = {"dominance_ratio": "dominance", "effective_rank": "rank", "s2_ratio": "S2 ratio", "top_mass": "top mass"}
    pairs = [[of(name, arm, "mean", "low", "high").estimate for arm in ARMS.values()] for name in names]
    axes.bar(list(names.values()), [norm / none for none, norm in pairs], color=ORANGE)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    return Measured(numbers=numbers, figure=finished(figure))


def _trained(work):
    """The comparison of models trained now; a stopped training goes on."""
    runs = []
    for seed in SEEDS:
        for arm, value_norm in ARMS.items():
            runs.append(str(work.shared / f"{arm}-{seed}"))
            asked = ["--seed", str(seed), "--set", f"value_norm={value_norm}", "--out", runs[-1]]
            subprocess.run(["sink-lens", "train", str(work.folder / "train.toml"), *asked], check=True)
    subprocess.run(["sink-lens", "compare", *runs, "--out", str(work.shared / "comparison"), "--overwrite"], check=True)
    return work.shared / "comparison"


if __name__ == "__main__":
    main(measure)
