"""The numbers that a figure draws, to be copied where a page names no table for it."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator


def plotted(figure: Figure) -> pd.DataFrame:
    """Lines, points, bars and cells of a figure: panel, series, x, y, value (of a cell).

    Places that have names have their names; lines that only mark a place are left out.
    """
    rows = [row for axes in figure.axes if axes.get_label() != "<colorbar>" for row in _of(axes)]
    frame = pd.DataFrame(rows, columns=["panel", "series", "x", "y", "value"])
    return frame.dropna(axis="columns", how="all")


def _of(axes: Axes) -> list[tuple[Any, ...]]:
    panel = axes.get_title(loc="left") or axes.get_title() or axes.get_ylabel() or axes.get_xlabel()
    series: list[tuple[str, np.ndarray]] = []
    for line in axes.get_lines():
        if line.get_transform() == axes.transData:
            series.append((_label(line), np.asarray(line.get_xydata(), dtype=float)))
    for points in axes.collections:
        if isinstance(points, PathCollection):
            series.append((_label(points), np.ma.getdata(points.get_offsets()).astype(float)))
    for bars in axes.containers:
        if isinstance(bars, BarContainer):
            series.append(
                (_label(bars), np.array([_bar(bar, bars.orientation) for bar in bars.patches]).reshape(-1, 2))
            )
    rows = [(panel, name, x, y, None) for name, places in series for x, y in places.tolist()]
    for image in axes.get_images():
        grid = np.ma.filled(np.ma.asarray(image.get_array()).astype(float), np.nan)
        if grid.ndim == 2:
            rows += [(panel, "", x, y, one) for (y, x), one in np.ndenumerate(grid) if np.isfinite(one)]
    xs = _named(axes.xaxis, [float(x) for _, _, x, _, _ in rows])
    ys = _named(axes.yaxis, [float(y) for _, _, _, y, _ in rows])
    return [(panel, name, x, y, value) for (panel, name, _, _, value), x, y in zip(rows, xs, ys, strict=True)]


def _label(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def _bar(bar: Any, orientation: str | None) -> tuple[float, float]:
    x, y, width, height = (float(one) for one in (bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()))
    return (x + width, y + height / 2) if orientation == "horizontal" else (x + width / 2, y + height)


def _named(axis: Axis, places: list[float]) -> list[Any]:
    """The names of places, where the axis names every one of them; else the places."""
    locator, formatter = axis.get_major_locator(), axis.get_major_formatter()
    if not isinstance(locator, FixedLocator):
        return places
    names = {float(place): formatter(place, at) for at, place in enumerate(axis.get_majorticklocs())}
    return [names[place] for place in places] if set(places) <= set(names) else places
