"""Three seeds of a softmax model, of two with head-wise RMSNorm and of one with sigmoid attention; see claim.md."""

import pandas as pd

from analyses.claims import Measured, Work, main
from sink_lens.report.style import (
    BLUE,
    GREEN,
    INK,
    OCHRE,
    ORANGE,
    legend,
    new_figure,
    panel,
    without_formulas,
)
from sink_lens.stats import Interval
from sink_lens.training import compare

ARMS = {
    "softmax": {"value_norm": "none"},
    "headnorm": {"value_norm": "shared"},
    "headnorm-per-head": {"value_norm": "per_head"},
    "sigmoid": {"attention": "sigmoid"},
}
"""Each changes one field of ``TrainConfig``, whose value is the name of the variant in the tables."""
SAYS = {"shared": "shared gain", "per_head": "a gain a head", "sigmoid": "sigmoid"}
COLOURS = {"shared": ORANGE, "per_head": OCHRE, "sigmoid": GREEN}
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

    def loss(variant):
        row = losses.query("variant == @variant and curve == 'evaluation'").iloc[0]
        return Interval(estimate=row["mean"], low=row["low"], high=row["high"], n=len(SEEDS))

    def of(measure, variant, *columns):
        where = (
            "measure == @measure and variant == @variant and (threshold.isna() or threshold == 0.3)"
        )
        row = measures.query(where).iloc[0]
        return Interval(
            **dict(zip(("estimate", "low", "high"), row[list(columns)], strict=True)), n=len(SEEDS)
        )

    value, change = ("mean", "low", "high"), ("difference", "difference_low", "difference_high")
    added = [variant for variant in SAYS if variant != "shared"]
    numbers = {
        "loss": loss("shared"),
        "sink_rate": of("sink_rate", "none", *value),
        "dominance": of("dominance_ratio", "shared", *change),
        "rank": of("effective_rank", "shared", *change),
        "parity": of("s2_ratio", "shared", *value),
        **{f"loss_added @ {SAYS[one]}": loss(one) for one in added},
        **{f"sink_rate_added @ {SAYS[one]}": of("sink_rate", one, *change) for one in added},
        **{f"dominance_added @ {SAYS[one]}": of("dominance_ratio", one, *change) for one in added},
        **{f"parity_added @ {SAYS[one]}": of("s2_ratio", one, *value) for one in added},
    }

    figure = new_figure(width=9.6, height=3.2)
    axes = panel(figure, place=(1, 2, 1), ylabel="evaluation loss, nats")
    ends = finals.query("curve == 'evaluation'").pivot(
        index="seed", columns="variant", values="loss"
    )
    for row in ends[["none", *SAYS]].to_numpy():
        axes.plot(["softmax", *SAYS.values()], row, color=BLUE, marker="o")
    axes = panel(figure, place=(1, 2, 2), ylabel="variant ÷ softmax")
    names = {
        "dominance_ratio": "dominance",
        "effective_rank": "rank",
        "s2_ratio": "S2 ratio",
        "top_mass": "top mass",
    }
    for place, (variant, says) in enumerate(SAYS.items()):
        ratios = [
            of(name, variant, *value).estimate / of(name, "none", *value).estimate for name in names
        ]
        at = [0.27 * (place - 1) + one for one in range(len(names))]
        axes.bar(at, ratios, width=0.25, color=COLOURS[variant], label=says)
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    legend(axes, columns=3)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def trained(work: Work) -> dict[str, pd.DataFrame]:
    """The tables of models that are trained beside the run folder where they are not yet, and commits them to this one.

    The norm and the attention are compared apart, each with the softmax model without a norm.
    """
    runs = {
        arm: [work.trained(arm, seed=seed, **fields) for seed in SEEDS]
        for arm, fields in ARMS.items()
    }
    norms = [one for arm, folders in runs.items() if arm != "sigmoid" for one in folders]
    found = [
        compare(paths, generator=work.rng()).tables
        for paths in (norms, [*runs["softmax"], *runs["sigmoid"]])
    ]
    tables = {}
    for name in TABLES:
        norm, attention = (one[name] for one in found)
        tables[name] = pd.concat(
            [norm, attention[attention["variant"] == "sigmoid"]], ignore_index=True
        )
        if work.retrain and not work.tiny:
            tables[name].to_csv(
                work.folder / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n"
            )
    return tables


if __name__ == "__main__":
    main(measure)
