"""Which paths between the parts of the chain carry the sink, by path patching; see claim.md."""

import numpy as np
import pandas as pd

from analyses.claims import Measured, Work, certain, main
from sink_lens.errors import InputError
from sink_lens.report.style import BLUE, GREEN, INK, legend, new_figure, panel, without_formulas
from sink_lens.stats import Interval

PATHS = {
    "everything_to_neurons": ("everything", "super neurons", ""),
    "attention_to_neurons": ("attention", "super neurons", ""),
    "mlps_to_neurons": ("MLPs", "super neurons", ""),
    "neurons_to_key": ("super neurons", "key", ""),
    "neurons_through_dimension": ("super neurons", "key", "outlier dimensions"),
    "everything_to_key": ("everything", "key", ""),
    "key_to_sink": ("key", "sink", ""),
}
"""Number -> source, target and what the path goes through, of one growth step."""
STEP_TO_STEP = "step_to_step"


def measure(work: Work) -> Measured:
    """The share of a step's sink that each path carries, and the largest that a control does."""
    tokens = work.text(work.size("brown", "moby-dick"), sequences=work.size(32, 8), length=64)
    table = work.trace(tokens, interventions=True, **work.size({}, {"controls": 2}))["paths"]
    rows = {f"{name} @ growth step {step + 1}": row for (name, step), row in chosen(table).items()}
    if not rows:
        raise InputError(f"no path of a growth step in {work.lens.name}; need super neurons")
    order = [*PATHS, STEP_TO_STEP]
    rows = dict(sorted(rows.items(), key=lambda one: order.index(one[0].partition(" @ ")[0])))
    numbers = {
        name: Interval(
            estimate=row["share"], low=row["ci_low"], high=row["ci_high"], n=int(row["n"])
        )
        for name, row in rows.items()
    }
    if not any(name.startswith(STEP_TO_STEP) for name in rows):  # one growth step
        numbers[STEP_TO_STEP] = Interval(estimate=np.nan, low=np.nan, high=np.nan, n=0)
    told = pd.DataFrame(rows).T
    numbers["control"] = certain(told["control_largest"].astype(float).max())

    figure = new_figure(width=6.8, height=0.8 + 0.24 * len(rows))
    axes = panel(figure, xlabel="share of the growth step's sink that goes with the path")
    for place, row in enumerate(reversed(rows.values())):
        axes.barh(place, row["share"], color=BLUE, height=0.6, label="" if place else "path")
        axes.plot([row["ci_low"], row["ci_high"]], [place, place], color=INK)
        axes.plot(
            row["control_largest"],
            place,
            "|",
            color=GREEN,
            label="" if place else "largest control",
        )
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(
        range(len(rows)), [name.replace("_", " ") for name in reversed(rows)], fontsize=7
    )
    legend(axes, columns=2)
    return Measured(numbers=numbers, figure=without_formulas(figure))


def chosen(table: pd.DataFrame) -> dict[tuple[str, int], pd.Series]:
    """Name and growth step -> the row whose attention is read after that step; with one, wherever there is a sink."""
    step = table["target_step"].where(table["target"] != "sink", table["source_step"])
    table = table[(table["read_step"] == step) | (table["read_step"].nunique() == 1)].assign(
        step=step
    )
    own = (table["source"] != "super neurons") | (table["source_step"] == table["step"])
    found = {}
    for name, ends in PATHS.items():
        rows = table[own & (table[["source", "target", "through"]] == list(ends)).all(axis=1)]
        found |= {(name, int(row["step"])): row for _, row in rows.iterrows()}
    before = table["source_step"] == table["step"] - 1
    rows = table[before & (table[["source", "target"]] == "super neurons").all(axis=1)]
    return found | {(STEP_TO_STEP, int(row["step"])): row for _, row in rows.iterrows()}


if __name__ == "__main__":
    main(measure)
