"""Three seeds of a softmax model and of one with head-wise RMSNorm, and their comparison; see claim.md."""

import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens.report.style import BLUE, INK, ORANGE, canvas, finished, panel
from sink_lens.stats import Interval
from sink_lens.training import compare

ARMS = {"softmax": "none", "headnorm": "shared"}
SEEDS = (0, 1, 2)
TABLES = ("differences", "measures", "finals")


def measure(work: Work) -> Measured:
    """The committed comparison, or one of models that are trained now."""
    tables = (
        trained(work)
        if work.tiny or work.retrain
        else {name: pd.read_csv(work.folder / f"{name}.csv") for name in TABLES}
    )
    losses, measures, finals = (tables[name] for name in TABLES)
    loss = losses.query("variant == 'shared' and curve == 'evaluation'").iloc[0]

    def of(measure, variant, *columns):
        where = "measure == @measure and variant == @variant and (threshold.isna() or threshold == 0.3)"
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

    finals = finals.query("curve == 'evaluation'")
    figure = canvas(width=7.4, height=2.8)
    axes = panel(figure, place=(1, 2, 1), ylabel="evaluation loss, nats")
    for pair in finals.pivot(index="seed", columns="variant", values="loss")[list(ARMS.values())].to_numpy():
        axes.plot(list(ARMS), pair, color=BLUE, marker="o")
    axes = panel(figure, place=(1, 2, 2), ylabel="with the norm ÷ without")
    names = {"dominance_ratio": "dominance", "effective_rank": "rank", "s2_ratio": "S2 ratio", "top_mass": "top mass"}
    pairs = [[of(name, arm, "mean", "low", "high").estimate for arm in ARMS.values()] for name in names]
    axes.bar(list(names.values()), [norm / none for none, norm in pairs], color=ORANGE)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    return Measured(numbers=numbers, figure=finished(figure))


def trained(work):
    """The tables of a comparison of models that are trained beside the run folder where they are not yet."""
    runs = [work.trained(arm, seed=seed, value_norm=norm) for seed in SEEDS for arm, norm in ARMS.items()]
    return compare(runs, generator=work.rng()).tables


if __name__ == "__main__":
    main(measure)
