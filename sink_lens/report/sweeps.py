"""Figures of a sweep: its table in, a matplotlib figure out."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import RunError
from .columns import floats, select
from .drawing import FONT, INK, QUIET, canvas, colour_scale, finished, panel
from .heatmap import map_panel

_AXES = ("layer", "position", "head", "unit", "key", "factor", "seed")
_LABELLED = 5
_MOST_PANELS = 8


def swept_columns(frame: pd.DataFrame) -> list[str]:
    """The columns of numbers that take more than one value, and no blank: the axes of a figure."""
    found = []
    for name in _AXES:
        if name in frame.columns:
            values = floats(frame, name)
            if not np.isnan(values).any() and len(set(values.tolist())) > 1:
                found.append(name)
    return found


def effect_figure(frame: pd.DataFrame, *, value: str = "effect", title: str = "") -> Figure:
    """One panel for each kind of edit and site: a heat map over two swept axes, a line with its interval over one.

    Over three axes and more, a pixel is the strongest (largest in magnitude, with its sign) along the others.

    Args:
        frame: one metric's rows of a sweep.
        value: which column is drawn.
        title: above the figure.

    Raises:
        RunError: nothing was swept over numbers, or the frame has no such column.
    """
    if value not in frame.columns:
        raise RunError(f"there is no column {value!r}; need one of {', '.join(map(str, frame.columns))}")
    parts = [(name, rows, swept_columns(rows)) for name, rows in _blocks(frame)]
    drawn = [part for part in parts if part[2]][:_MOST_PANELS]
    if not drawn:
        raise RunError("a figure needs an axis of numbers with two values or more; nothing of the kind was swept")
    mapped = [np.nanmax(np.abs(floats(rows, value)), initial=0.0) for _, rows, axes in drawn if len(axes) > 1]
    limit = float(max(mapped, default=0.0)) or 1.0  # one scale for all maps
    figure = canvas(width=8.0, height=0.4 + sum(_height(rows, axes) for _, rows, axes in drawn))
    images = []
    for index, (name, rows, axes) in enumerate(drawn):
        place = (len(drawn), 1, index + 1)
        if len(axes) > 1:
            across = max(axes[1:], key=lambda axis: len(set(floats(rows, axis).tolist())))
            pair = (axes[0], across)
            on, image = map_panel(figure, rows, pair, place=place, value=value, limit=limit)
            images.append((on, image))
        else:
            on = _line(figure, rows, axes[0], place=place, value=value)
        on.set_title(": ".join(part for part in (title if index == 0 else "", name) if part), fontsize=FONT, loc="left")
    if images:
        colour_scale(figure, images[0][1], [on for on, _ in images], label=value.replace("_", " "))
    return finished(figure)


def _blocks(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each kind of edit, site and centre."""
    keys = [name for name in ("kind", "site", "centre") if name in frame.columns]
    if not keys:
        return [("", frame)]
    names = [" ".join(str(part) for part in row if isinstance(part, str)) for row in frame[keys].to_numpy().tolist()]
    return [(name, select(frame, np.array([one == name for one in names]))) for name in dict.fromkeys(names)]


def _height(rows: pd.DataFrame, axes: list[str]) -> float:
    """Inches of a panel."""
    return 2.6 if len(axes) == 1 else min(max(1.9, 0.8 + 0.15 * len(set(floats(rows, axes[0]).tolist()))), 5.5)


def _line(figure: Figure, frame: pd.DataFrame, axis: str, *, place: tuple[int, int, int], value: str) -> Axes:
    rows = frame.sort_values(axis)
    x, y = floats(rows, axis), floats(rows, value)
    axes = panel(figure, place=place, xlabel=axis, ylabel=value.replace("_", " "))
    if value == "effect" and {"ci_low", "ci_high"} <= set(rows.columns):
        axes.vlines(x, floats(rows, "ci_low"), floats(rows, "ci_high"), color=QUIET, linewidth=1, alpha=0.6)
    axes.plot(x, y, ".", color=INK, markersize=3 if len(x) > 100 else 6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=bool((x == x.round()).all())))
    axes.axhline(0, color=QUIET, linewidth=0.8)
    order = np.argsort(-np.abs(y), kind="stable")  # nan, of cells that failed, comes last
    for index in order[: min(_LABELLED, int(np.isfinite(y).sum()))]:
        axes.annotate(
            f"{x[index]:g}", (x[index], y[index]), fontsize=FONT - 2, xytext=(4, 2), textcoords="offset points"
        )
    return axes
