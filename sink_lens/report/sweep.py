"""A sweep of edits over a grid of cells: its figures and its page."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report.page import Drawn, Listed, Page, PageTable, shown_table
from sink_lens.report.style import FONT, INK, QUIET, canvas, colour_scale, finished, map_panel, panel
from sink_lens.text import interval, number, plural, visible

_AXES = ("layer", "position", "head", "unit", "key", "factor", "seed")
_LABELLED = 5
_MOST_PANELS = 8


def swept_columns(frame: pd.DataFrame) -> list[str]:
    """The columns of numbers that take more than one value, and no blank: the axes of a figure."""
    found = []
    for name in _AXES:
        if name in frame.columns:
            values = frame[name].to_numpy(float)
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
    drawn = swept_panels(frame, value=value)
    mapped = [np.nanmax(np.abs(rows[value].to_numpy(float)), initial=0.0) for _, rows, axes in drawn if len(axes) > 1]
    limit = float(max(mapped, default=0.0)) or 1.0  # one scale for all maps
    figure = canvas(width=8.0, height=0.4 + sum(_height(rows, axes) for _, rows, axes in drawn))
    images = []
    for index, (name, rows, axes) in enumerate(drawn):
        place = (len(drawn), 1, index + 1)
        if len(axes) > 1:
            on, image = map_panel(figure, rows, mapped_pair(rows, axes), place=place, value=value, limit=limit)
            images.append((on, image))
        else:
            on = _line(figure, rows, axes[0], place=place, value=value)
        on.set_title(": ".join(part for part in (title if index == 0 else "", name) if part), fontsize=FONT, loc="left")
    if images:
        colour_scale(figure, images[0][1], [on for on, _ in images], label=value.replace("_", " "))
    return finished(figure)


def swept_panels(frame: pd.DataFrame, *, value: str) -> list[tuple[str, pd.DataFrame, list[str]]]:
    """The panels of a figure: the name of a kind of edit and site, its rows, and the axes that were swept in them.

    Raises:
        RunError: nothing was swept over numbers, or the frame has no such column.
    """
    if value not in frame.columns:
        raise RunError(f"there is no column {value!r}; need one of {', '.join(map(str, frame.columns))}")
    parts = [(name, rows, swept_columns(rows)) for name, rows in _blocks(frame)]
    drawn = [part for part in parts if part[2]][:_MOST_PANELS]
    if not drawn:
        raise RunError("a figure needs an axis of numbers with two values or more; nothing of the kind was swept")
    return drawn


def mapped_pair(rows: pd.DataFrame, axes: list[str]) -> tuple[str, str | None]:
    """The two axes of a map: the first, down, and the one of most values among the others, across."""
    return axes[0], max(axes[1:], key=lambda axis: rows[axis].nunique(), default=None)


def _blocks(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each kind of edit, site and centre."""
    keys = [name for name in ("kind", "site", "centre") if name in frame.columns]
    if not keys:
        return [("", frame)]
    names = [" ".join(str(part) for part in row if isinstance(part, str)) for row in frame[keys].to_numpy().tolist()]
    return [(name, frame.loc[[one == name for one in names]]) for name in dict.fromkeys(names)]


def _height(rows: pd.DataFrame, axes: list[str]) -> float:
    """Inches of a panel."""
    return 2.6 if len(axes) == 1 else min(max(1.9, 0.8 + 0.15 * len(set(rows[axes[0]].to_numpy(float).tolist()))), 5.5)


def _line(figure: Figure, frame: pd.DataFrame, axis: str, *, place: tuple[int, int, int], value: str) -> Axes:
    rows = frame.sort_values(axis)
    x, y = rows[axis].to_numpy(float), rows[value].to_numpy(float)
    axes = panel(figure, place=place, xlabel=axis, ylabel=value.replace("_", " "))
    if value == "effect" and {"ci_low", "ci_high"} <= set(rows.columns):
        axes.vlines(
            x, rows["ci_low"].to_numpy(float), rows["ci_high"].to_numpy(float), color=QUIET, linewidth=1, alpha=0.6
        )
    axes.plot(x, y, ".", color=INK, markersize=3 if len(x) > 100 else 6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=bool((x == x.round()).all())))
    axes.axhline(0, color=QUIET, linewidth=0.8)
    order = np.argsort(-np.abs(y), kind="stable")  # nan, of cells that failed, comes last
    for index in order[: min(_LABELLED, int(np.isfinite(y).sum()))]:
        axes.annotate(
            f"{x[index]:g}", (x[index], y[index]), fontsize=FONT - 2, xytext=(4, 2), textcoords="offset points"
        )
    return axes


_CELLS = ["cell", "kind", "site", "where", "metric", "effect", "ci_low", "ci_high", "error"]
_EACH = 15


def _cells(run: Run) -> pd.DataFrame:
    return run.need("cells", columns=_CELLS)


def _metrics(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(one for one in table["metric"].tolist() if isinstance(one, str) and one))


def _failed(table: pd.DataFrame) -> int:
    return len(set(table["cell"].loc[table["error"].notna()]))


def _title(run: Run) -> str:
    table = run.optional("cells", columns=_CELLS)
    return "A sweep of edits" if table is None else f"A sweep of {plural(len(set(table['cell'])), 'cell')}"


def _headline(run: Run) -> list[str]:
    table = _cells(run)
    said = []
    for metric in _metrics(table):
        rows = table.loc[table["metric"] == metric].sort_values("effect", key=abs, ascending=False, kind="stable")
        best = rows.iloc[0].to_dict()
        if np.isfinite(float(best["effect"])):
            control = float(best.get("control_effect", np.nan))
            beside = f", its controls {number(control)}" if np.isfinite(control) else ""
            bounds = interval(best["ci_low"], best["ci_high"])
            said.append(
                f"{visible(metric)}: most by {visible(best['kind'])} of {visible(best['site'])} at "
                f"{visible(best['where'])}, {number(float(best['effect']))} {bounds}{beside}."
            )
    if failed := _failed(table):
        said.append(f"{plural(failed, 'cell')} failed; the table says why.")
    return said


def _effects(which: int) -> Drawn:
    """The figure of the metric of that number."""

    def of(run: Run) -> pd.DataFrame:
        table = _cells(run)
        return table.loc[table["metric"] == _metrics(table)[which]]

    def make(run: Run) -> tuple[str, Figure]:
        rows = of(run)
        see = (
            f"Effect of each cell on {visible(rows['metric'].iloc[0])}: edited − unedited. Red and points above the "
            "line raise it, blue lowers it. An effect counts where it is larger than that of its controls (below)."
        )
        return see, effect_figure(rows)

    return Drawn(
        key=f"effects-{which}",
        title="Effects" if which == 0 else f"Effects on the metric of number {which + 1}",
        make=make,
        data=of,
        when=lambda run: "cells" not in run.tables or len(_metrics(run.tables["cells"])) > which,
    )


def _cell_table(run: Run) -> tuple[str, PageTable]:
    table = _cells(run)
    rows = pd.concat(
        [
            table.loc[table["metric"] == metric]
            .sort_values("effect", key=abs, ascending=False, kind="stable")
            .head(_EACH)
            for metric in _metrics(table)
        ]
        or [table]
    )
    for name, low, high in (("interval", "ci_low", "ci_high"), ("over", "over_low", "over_high")):
        if {low, high} <= set(rows.columns):
            bounds = zip(rows[low].to_numpy(float), rows[high].to_numpy(float), strict=True)
            rows = rows.assign(**{name: [interval(one, other) for one, other in bounds]})
    heads = {"metric": "metric", "kind": "edit", "site": "site", "where": "where", "factor": "factor"}
    heads |= {"centre": "centre", "effect": "effect", "interval": "95%", "control_effect": "controls"}
    heads |= {"over": "effect over controls, 95%"}
    heads = {name: head for name, head in heads.items() if name in rows.columns and bool(rows[name].notna().any())}
    see = f"The {_EACH} strongest cells of each metric; all {len(table)} rows are in cells.parquet."
    return see, shown_table(rows, heads, most=_EACH * 6)


def _failed_table(run: Run) -> tuple[str, PageTable]:
    table = _cells(run)
    rows = table.loc[table["error"].notna()]
    return "Cells that could not be computed, and why.", shown_table(
        rows, {"kind": "edit", "site": "site", "where": "where", "error": "why"}
    )


SWEEP = Page(
    title=_title,
    headline=_headline,
    figures=tuple(_effects(which) for which in range(4)),
    tables=(
        Listed(key="cell-table", title="Strongest cells", make=_cell_table),
        Listed(
            key="failed-table",
            title="Failed cells",
            make=_failed_table,
            when=lambda run: "cells" in run.tables and _failed(run.tables["cells"]) > 0,
        ),
    ),
)
