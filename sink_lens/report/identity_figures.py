"""Figures of what untrained models are biased to: data frames of a survey in, a figure out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import RunError
from .columns import floats, named, select
from .drawing import GRID, INK, QUIET, canvas, finished, legend, logarithmic, panel
from .training import COLOURS, MARKS
from .words import number, visible

MOST_ARMS = 10
"""More arms than these are not drawn."""
_DASHES = ("-", "--", ":")
_WORDS = {"attention=False": "no attention", "mlp=False": "no MLP", "gated=False": "no gate"}
"""Field of an untrained model -> what a legend says."""


def arms_of(table: pd.DataFrame) -> list[str]:
    """The arms in their order, as many as a figure holds."""
    return [str(arm) for arm in dict.fromkeys(table["arm"].tolist())][:MOST_ARMS]


def name_of(arm: str, *, among: Sequence[str]) -> str:
    """An arm's name as a legend has it: what it does not share with all others, in words where there are some."""
    shared = set.intersection(*(set(other.split(",")) for other in among)) if len(among) > 1 else set()
    own = [
        _WORDS.get(part.strip(), part.strip().removeprefix("activation="))
        for part in arm.split(",")
        if part not in shared
    ]
    return visible(", ".join(part for part in own if part) or "as it is", limit=44, counted=False)


def styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Arm -> its colour, mark and dash."""
    return {
        arm: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKS[index % len(MARKS)],
            "linestyle": _DASHES[index // len(COLOURS) % len(_DASHES)],
        }
        for index, arm in enumerate(arms)
    }


def coverage(table: pd.DataFrame) -> Figure:
    """The share of the predictions that the most frequent tokens cover, and chance: argmax left, argmin right."""
    arms = arms_of(table)
    figure = canvas(width=9.0, height=3.6)
    for place, kind in enumerate(("argmax", "argmin"), start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="most frequent tokens", ylabel=f"share of the {kind}")
        rows = named(table, "kind", kind)
        chance: Any = rows.groupby("tokens")[["null", "null_low", "null_high"]].mean()
        chance = chance.reset_index()
        x = floats(chance, "tokens")
        axes.fill_between(
            x, floats(chance, "null_low"), floats(chance, "null_high"), color=QUIET, alpha=0.3, linewidth=0
        )
        axes.plot(x, floats(chance, "null"), color=QUIET, linewidth=1.4, label="chance")
        for arm, style in styles(arms).items():
            lines = list(named(rows, "arm", arm).groupby("model", sort=False))
            for index, (_, one) in enumerate(lines):
                label = name_of(arm, among=arms) if index == len(lines) - 1 else None
                fade = (index + 1) / len(lines) if bool(one["step"].notna().any()) else 1 / len(lines) ** 0.5
                axes.plot(floats(one, "tokens"), floats(one, "share"), label=label, alpha=fade, linewidth=1.4,
                          color=style["color"], linestyle=style["linestyle"])  # fmt: skip
        axes.axhline(0.8, color=GRID, linewidth=1)
        logarithmic(axes, axis="x")
        axes.set_ylim(0, 1.02)
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def dots(
    arms: pd.DataFrame, summary: pd.DataFrame, measures: Sequence[tuple[str, str, bool]], *, zero: bool = True
) -> Figure:
    """Each arm a line, a panel a measure: every seed a dot, the mean and its interval over seeds a bar.

    Args:
        arms: measure, arm, mean, low, high.
        summary: measure, arm, value and, where there is one, null_low and null_high.
        measures: of the panels: name, label, whether the scale is logarithmic.
        zero: draw a line at 0 where the scale is not logarithmic.

    Raises:
        RunError: there is nothing to draw.
    """
    names = arms_of(arms)
    if not names:
        raise RunError("this figure needs models that are no checkpoints; there is none.")
    figure = canvas(width=9.2, height=1.1 + 0.3 * len(names))
    for place, (measure, label, log) in enumerate(measures, start=1):
        axes = panel(figure, place=(1, len(measures), place), xlabel=label)
        of_models, of_arms = named(summary, "measure", measure), named(arms, "measure", measure)
        for line, (arm, style) in enumerate(styles(names).items()):
            values = floats(named(of_models, "arm", arm), "value")
            axes.scatter(values, np.full(len(values), line + 0.16), color=style["color"], s=12, alpha=0.6)
            for row in named(of_arms, "arm", arm).to_dict("records"):
                axes.plot([row["low"], row["high"]], [line, line], color=INK, linewidth=1.6)
                axes.plot([row["mean"]], [line], color=style["color"], marker=style["marker"], markersize=6)
        if "null_high" in of_models.columns and len(of_models):
            low, high = floats(of_models, "null_low").min(), floats(of_models, "null_high").max()
            axes.axvspan(low, high, color=QUIET, alpha=0.25, linewidth=0)
        if log:
            logarithmic(axes, axis="x")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=max(2, 9 // len(measures))))
        if zero and not log:
            axes.axvline(0, color=QUIET, linewidth=0.9)
        shown = [name_of(arm, among=names) for arm in names] if place == 1 else [""] * len(names)
        axes.set_yticks(range(len(names)), shown)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
    return finished(figure)


def along(summary: pd.DataFrame, measures: Sequence[tuple[str, str, bool]]) -> Figure:
    """Checkpoints: a panel a measure, a line a training, against its steps."""
    rows = select(summary, summary["step"].notna().to_numpy(dtype=bool))
    if not len(rows):
        raise RunError("this figure needs the checkpoints of a training; there is none.")
    figure = canvas(width=9.2, height=2.9 * -(-len(measures) // 3))
    arms = arms_of(rows)
    for place, (measure, label, log) in enumerate(measures, start=1):
        axes = panel(figure, place=(-(-len(measures) // 3), min(3, len(measures)), place), xlabel="step", ylabel=label)
        of_measure = named(rows, "measure", measure)
        for arm, style in styles(arms).items():
            one = named(of_measure, "arm", arm).sort_values("step")
            axes.plot(
                steps(one), floats(one, "value"), markersize=4, linewidth=1.4, label=name_of(arm, among=arms), **style
            )
        step_axis(axes)
        if log:
            logarithmic(axes, axis="y")
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def steps(rows: pd.DataFrame) -> np.ndarray:
    """Steps on a logarithmic axis, the first one at a half."""
    return np.maximum(floats(rows, "step"), 0.5)


def step_axis(axes: Axes) -> None:
    """Steps from 0 on a logarithmic scale."""
    logarithmic(axes, axis="x")
    high = axes.get_xlim()[1]
    ticks = [0.5, *(10**power for power in range(8) if 10**power <= high)]
    axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
    axes.set_xticks([], minor=True)


def by_layer(layers: pd.DataFrame) -> Figure:
    """The excess of both cosines after each sublayer: the mean over seeds, and from the smallest to the largest."""
    layers = _ends(layers)
    arms = arms_of(layers)
    figure = canvas(width=9.2, height=3.7)
    for place, (measure, label) in enumerate((("inter", "between sequences"), ("intra", "between positions")), start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="layer", ylabel=f"excess cosine {label}")
        rows = named(layers, "measure", measure)
        for arm, style in styles(arms).items():
            one = named(rows, "arm", arm)
            one = one.assign(depth=depth(one))
            found = one.groupby("depth")["excess"].agg(["mean", "min", "max"]).reset_index()
            x = floats(found, "depth")
            axes.fill_between(
                x, floats(found, "min"), floats(found, "max"), color=style["color"], alpha=0.2, linewidth=0
            )
            axes.plot(x, floats(found, "mean"), color=style["color"], linestyle=style["linestyle"], linewidth=1.5,
                      marker=".", markersize=4, label=name_of(arm, among=arms))  # fmt: skip
        axes.axhline(0, color=QUIET, linewidth=0.9)
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def _ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each training its first and its last checkpoint, as arms of their own; other models as they are."""
    step = floats(rows, "step")
    if np.isnan(step).all():
        return rows
    by_arm = rows.assign(step=step).groupby("arm")["step"]
    low, high = (by_arm.transform(name).to_numpy(dtype=float) for name in ("min", "max"))
    kept = np.isnan(step) | (step == low) | (step == high)
    names = [arm if np.isnan(one) else f"{arm} step {one:.0f}" for arm, one in zip(rows["arm"], step, strict=True)]
    return select(rows.assign(arm=names), kept)


def depth(rows: pd.DataFrame) -> np.ndarray:
    """Where a place stands: layer + 0.5 after its attention, + 1 after its MLP; 0 before the first layer."""
    after = {"embedding": 1.0, "attention": 0.5, "mlp": 1.0, "final": 0.5}
    return floats(rows, "layer") + np.array([after[str(place)] for place in rows["place"].tolist()])


def by_position(positions: pd.DataFrame) -> Figure:
    """The excess between sequences by position after the last layer, and the norm there over that of position 0."""
    positions = _ends(positions)
    arms = arms_of(positions)
    figure = canvas(width=9.2, height=3.5)
    quantities = (("excess", "excess cosine between sequences"), ("norm", "norm ÷ that of position 0"))
    for place, (quantity, label) in enumerate(quantities, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="position", ylabel=label)
        for arm, style in styles(arms).items():
            rows = named(named(positions, "arm", arm), "place", "mlp")
            rows = select(rows, floats(rows, "layer") == floats(rows, "layer").max())
            means: Any = rows.groupby("position")[quantity].mean()
            found = means.reset_index()
            values = floats(found, quantity) / (floats(found, quantity)[0] if quantity == "norm" else 1.0)
            axes.plot(floats(found, "position") + 1, values, markersize=4, linewidth=1.4,
                      label=name_of(arm, among=arms), **style)  # fmt: skip
        logarithmic(axes, axis="x")
        last = int(floats(positions, "position").max())
        ticks = [0, *(4**power for power in range(9) if 4**power < last / 1.5), last]
        axes.set_xticks([tick + 1 for tick in ticks], [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.axhline(1.0 if quantity == "norm" else 0.0, color=QUIET, linewidth=0.9)
    legend(figure.axes[0], columns=4, over=figure)
    return finished(figure)


def agreement(pairs: pd.DataFrame, models: pd.DataFrame) -> Figure:
    """The cosine of the directions of two models: the same seed in two arms, two seeds of one arm, neither."""
    facts = {row["model"]: row for row in models.to_dict("records")}
    groups: dict[str, list[float]] = {}
    for row in named(pairs, "place", "last").to_dict("records"):
        if not {row["a"], row["b"]} <= set(facts):
            continue
        groups.setdefault(relation(facts[row["a"]], facts[row["b"]]), []).append(float(row["cosine"]))
    if not groups:
        raise RunError("this figure needs two models of one width; there are none.")
    figure = canvas(width=7.6, height=1.2 + 0.45 * len(groups))
    axes = panel(figure, xlabel="cosine of the contraction directions after the last layer")
    chance = floats(pairs, "chance").max()
    axes.axvspan(-2 * chance, 2 * chance, color=QUIET, alpha=0.25, linewidth=0)
    for line, values in enumerate(groups.values()):
        spread = np.linspace(-0.22, 0.22, len(values)) if len(values) > 1 else np.zeros(1)
        axes.scatter(values, line + spread, color=COLOURS[line % len(COLOURS)], s=14, alpha=0.7)
        axes.plot([np.mean(values)], [line], color=INK, marker="|", markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(groups)), [f"{group} ({len(values)})" for group, values in groups.items()])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return finished(figure)


def direction_course(pairs: pd.DataFrame, models: pd.DataFrame) -> Figure:
    """The cosine of each checkpoint's direction with that of the training's first one, after the last layer."""
    steps_of = {row["model"]: (row["arm"], row["step"]) for row in models.to_dict("records")}
    first = {
        model for model, (arm, step) in steps_of.items() if step == min(s for a, s in steps_of.values() if a == arm)
    }
    rows = [
        {"arm": steps_of[row["b"]][0], "step": steps_of[row["b"]][1], "cosine": row["cosine"]}
        for row in named(pairs, "place", "last").to_dict("records")
        if row["a"] in first and steps_of[row["a"]][0] == steps_of[row["b"]][0]
    ]
    if not rows:
        raise RunError("this figure needs two checkpoints of one training; there are none.")
    frame = pd.DataFrame(rows)
    arms = arms_of(frame)
    figure = canvas(width=6.4, height=3.2)
    axes = panel(figure, xlabel="step", ylabel="cosine with the first checkpoint's")
    chance = floats(pairs, "chance").max()
    axes.axhspan(-2 * chance, 2 * chance, color=QUIET, alpha=0.25, linewidth=0)
    for arm, style in styles(arms).items():
        one = named(frame, "arm", arm).sort_values("step")
        label = name_of(arm, among=arms)
        axes.plot(steps(one), floats(one, "cosine"), markersize=4, linewidth=1.4, label=label, **style)
    step_axis(axes)
    axes.set_ylim(top=1.03)
    legend(axes, columns=3)
    return finished(figure)


def relation(a: dict[Any, Any], b: dict[Any, Any]) -> str:
    """What two models have in common."""
    same_seed = a["seed"] == b["seed"]
    if a["arm"] == b["arm"]:
        return "one training, two steps" if same_seed else "one arm, two seeds"
    if same_seed:
        return "two arms, one seed"
    return "two arms, two seeds"


def interval_text(mean: float, low: float, high: float) -> str:
    """A mean and its interval, as a table has it."""
    if np.isnan(low) or np.isnan(high):
        return number(mean)
    return f"{number(mean)} ({number(low)} to {number(high)})"
