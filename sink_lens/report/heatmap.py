"""Heat maps of a sweep of patches: its data frame in, a matplotlib figure out."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import RunError
from .columns import floats
from .drawing import FONT, INK, canvas, colour_scale, finished, panel
from .words import token

_WORDS = {"layer": "layer", "pos": "position", "head_index": "head", "src_pos": "key position"}
_MOST_LABELS = 40
"""More positions than these are numbered, not spelled out."""


def patch_map(
    frame: pd.DataFrame,
    *,
    by: Sequence[str],
    value: str = "effect",
    labels: Mapping[int, str] | None = None,
    title: str = "",
    unit: str = "",
) -> Figure:
    """A column of a sweep as heat maps over pairs of its swept columns; red is above 0, blue below.

    One panel for one or two swept columns. For more, one panel for each of the others against the first, in which a
    pixel is the strongest (largest in magnitude, with its sign) along what the panel leaves out.

    Args:
        frame: the columns of ``by``, and the value's.
        by: the swept columns, one at least.
        value: which column is drawn; nan is left empty.
        labels: position -> the text beside its number.
        title: above the figure.
        unit: of the value.

    Raises:
        RunError: the frame lacks a column, or nothing was swept.
    """
    absent = [name for name in (*by, value) if name not in frame.columns]
    if absent or not by:
        raise RunError(
            f"a heat map needs swept columns and a value; found by={list(by)} and no column {absent} in "
            f"{list(frame.columns)}. Sweep at least one thing, and draw one of the columns"
        )
    pairs = [(name, by[0]) for name in by[1:]] or [(by[0], None)]
    sizes = [len(set(frame[down].tolist())) for down, _ in pairs]
    height = sum(min(max(1.9, 0.6 + 0.17 * size), 6.5) for size in sizes)
    across = 1 if pairs[0][1] is None else len(set(frame[by[0]].tolist()))
    figure = canvas(width=min(max(5.0, 2.2 + 0.13 * across), 11.0), height=height + 0.5)
    limit = float(np.nanmax(np.abs(floats(frame, value)), initial=0.0)) or 1.0
    drawn = [
        map_panel(figure, frame, pair, place=(len(pairs), 1, 1 + index), value=value, limit=limit, labels=labels or {})
        for index, pair in enumerate(pairs)
    ]
    named = f"{value.replace('_', ' ')}" + f" ({unit})" * bool(unit and value != "normalised_effect")
    colour_scale(figure, drawn[0][1], [axes for axes, _ in drawn], label=named)
    if title:
        drawn[0][0].set_title(title, fontsize=FONT, color=INK, loc="left")
    return finished(figure)


def picture(figure: Figure) -> str:
    """The figure as an image in HTML, which holds it itself."""
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(png(figure)).decode()}">'


def png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def map_panel(
    figure: Figure,
    frame: pd.DataFrame,
    pair: tuple[str, str | None],
    *,
    place: tuple[int, int, int],
    value: str,
    limit: float,
    labels: Mapping[int, str] | None = None,
) -> tuple[Axes, ScalarMappable]:
    """One panel: a column over one or two swept columns, at a place of the figure; colours run from -limit to limit."""
    down, across = pair
    rows = sorted(frame[down].unique().tolist())
    columns = [0] if across is None else sorted(frame[across].unique().tolist())
    grid = np.full((len(rows), len(columns)), np.nan)
    at_row = [rows.index(one) for one in frame[down].tolist()]
    at_column = [0] * len(frame) if across is None else [columns.index(one) for one in frame[across].tolist()]
    crowded = len(frame) > grid.size
    for row, column, number in zip(at_row, at_column, floats(frame, value), strict=True):
        if not np.isnan(number) and not abs(grid[row, column]) >= abs(number):
            grid[row, column] = number
    ylabel = _WORDS.get(down, down) + (", strongest" if crowded else "")
    axes = panel(figure, place=place, xlabel="" if across is None else _WORDS.get(across, across), grid=False)
    axes.set_ylabel(ylabel, fontsize=FONT, color=INK)
    image = axes.imshow(grid, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none", aspect="auto")
    _ticks(axes, rows, name=down, labels=labels or {}, y=True)
    _ticks(axes, columns if across else [], name=across or "", labels={}, y=False)
    return axes, image


def _ticks(axes: Axes, values: Sequence[int | float], *, name: str, labels: Mapping[Any, str], y: bool) -> None:
    axis = axes.yaxis if y else axes.xaxis
    if name in ("pos", "src_pos") and any(labels.values()) and len(values) <= _MOST_LABELS:
        texts = [token(labels[one], limit=16, counted=False) if labels.get(one) else "" for one in values]
        axis.set_ticks(range(len(values)), labels=[f"{one} {text}" for one, text in zip(values, texts, strict=True)])
        axis.set_tick_params(labelsize=FONT - 3)
    elif values and list(values) == list(range(len(values))):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    else:
        step = max(1, -(-len(values) // 16))
        axis.set_ticks(range(0, len(values), step), labels=[str(one) for one in values[::step]])
