"""A sweep of edits over a grid of cells: its figures and its page."""

import textwrap
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..edits.effect_table import lacks_controls, rows_beyond_chance
from ..errors import RunError
from ..records import Run
from ..report.diagram import Style
from ..report.page import INTERVALS, Drawn, Listed, Page, PageTable, ci_texts, page_table
from ..report.style import (
    BLUE,
    FONT,
    INK,
    ORANGE,
    QUIET,
    Picture,
    add_colour_scale,
    draw_map,
    legend,
    new_figure,
    panel,
    style_axes,
    with_serifs,
    without_formulas,
)
from ..schema import FEW
from ..stats import sort_by_magnitude
from ..text import as_text, safe_line, site_label
from . import words
from .words import (
    MARK,
    cell_name,
    few_sequences_note,
    metric_names,
    n_failed_cells,
)

_MOST_NAMED = 40
"""More cells than these are not all named in the forest plot."""
_LABEL = 52
"""Characters of a cell's name in the forest plot."""
_LABELLED = 5
_MOST_PANELS = 8
_COLOURED = 0.98
"""The share of a map's values that its colours span, if the largest is more than twice as large."""
_PURE = ("effect_in_sds", "corrected_p", "n", "n_controls")
"""Columns without the metric's unit."""


def swept_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns with numbers, no blanks and more than one value."""
    found = []
    for name in ("layer", "position", "head", "unit", "key", "factor", "seed"):
        if name in frame.columns:
            values = frame[name].to_numpy(float)
            if not np.isnan(values).any() and len(set(values.tolist())) > 1:
                found.append(name)
    return found


def effect_figure(
    frame: pd.DataFrame,
    *,
    value: str = "effect",
    title: str = "",
    style: Style = "page",
    width: float | None = None,
) -> Picture:
    """Draw a panel for each kind of edit and site: points with intervals over one swept axis, a heat map over two.

    With three axes or more, a pixel shows the value of largest magnitude along the axes that are not drawn. If a few
    values are more than twice as large as all others, colours end at the others' and these are marked.

    Raises:
        RunError: nothing was swept over numbers, or the frame has no such column.
    """
    every = swept_panels(frame, value=value)
    drawn, n_left = every[:_MOST_PANELS], len(every[_MOST_PANELS:])
    maps = [np.abs(rows[value].to_numpy(float)) for _, rows, axes in drawn if len(axes) > 1]
    sizes = np.concatenate([one[np.isfinite(one)] for one in (*maps, np.zeros(0))])
    largest = limit = float(sizes.max(initial=0.0)) or 1.0  # one scale for all maps
    most = float(np.quantile(sizes, _COLOURED, method="lower")) if len(sizes) > 9 else largest
    if 0 < 2 * most < largest:
        limit = most
    heights = [  # a line's is fixed, a map's grows with its rows
        2.6 if len(axes) == 1 else min(max(1.9, 0.8 + 0.15 * len(set(rows[axes[0]]))), 5.5)
        for _, rows, axes in drawn
    ]
    width = width or (3.25 if style == "paper" else 8.0)
    label = _value_label(frame, value)
    figure = new_figure(width=width, height=0.4 + sum(heights))
    images = []
    for index, (name, rows, axes) in enumerate(drawn):
        place = (len(drawn), 1, index + 1)
        if len(axes) > 1:
            across = max(axes[1:], key=lambda axis: rows[axis].nunique())
            on, image = draw_map(
                figure, rows, (axes[0], across), place=place, value=value, limit=limit
            )
            images.append((on, image))
            shown: Any = image.get_array()
            beyond = np.argwhere(np.abs(np.ma.filled(shown, 0)) > limit * (1 + 1e-9))
            on.scatter(beyond[:, 1], beyond[:, 0], marker="x", s=14, color="white", linewidths=1)
        else:
            on = _draw_points(figure, rows, axes[0], place=place, value=value, label=label)
        above = ": ".join(part for part in (title if index == 0 else "", name) if part)
        lines = textwrap.wrap(above, int(width * 72 / (0.52 * FONT)))
        on.set_title("\n".join(lines), fontsize=FONT, color=INK, loc="left")
    if images:
        clipped = f"\n×: beyond ±{as_text(limit)}, at most {as_text(largest)}" * (limit < largest)
        add_colour_scale(figure, images[0][1], [on for on, _ in images], label=label + clipped)
    if n_left:
        left = f"{n_left} of {len(every)} panels are left out; the table of cells has all"
        figure.supxlabel(left, fontsize=FONT, color=INK)
    return without_formulas(figure if style == "page" else with_serifs(figure))


def _value_label(frame: pd.DataFrame, value: str) -> str:
    label = value.replace("_", " ")
    if "metric" in frame.columns and len(frame):
        label += f"{' on' if value == 'effect' else ','} {safe_line(frame['metric'].iloc[0])}"
    return label + _unit_text(frame) * (value not in _PURE)


def _unit_text(frame: pd.DataFrame) -> str:
    units = frame["metric_unit"].tolist()[:1] if "metric_unit" in frame.columns else []
    return f" ({safe_line(units[0])})" if units and units[0] else ""


def swept_panels(frame: pd.DataFrame, *, value: str) -> list[tuple[str, pd.DataFrame, list[str]]]:
    if value not in frame.columns:
        raise RunError(
            f"there is no column {value!r}; need one of {', '.join(map(str, frame.columns))}"
        )
    parts = [(name, rows, swept_columns(rows)) for name, rows in _rows_by_edit(frame)]
    drawn = [part for part in parts if part[2]]
    if not drawn:
        raise RunError(
            "a figure needs an axis of numbers with two values or more; nothing of the kind was swept"
        )
    return drawn


def _rows_by_edit(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    keys = [name for name in ("kind", "site", "centre") if name in frame.columns]
    if not keys:
        return [("", frame)]
    names = [
        " ".join(site_label(part) for part in row if isinstance(part, str))
        for row in frame[keys].to_numpy().tolist()
    ]
    return [(name, frame.loc[[one == name for one in names]]) for name in dict.fromkeys(names)]


def _draw_points(
    figure: Figure,
    frame: pd.DataFrame,
    axis: str,
    *,
    place: tuple[int, int, int],
    value: str,
    label: str,
) -> Axes:
    rows = frame.sort_values(axis)
    x, y = rows[axis].to_numpy(float), rows[value].to_numpy(float)
    axes = panel(figure, place=place, xlabel=axis, ylabel=label)
    if value == "effect" and {"ci_low", "ci_high"} <= set(rows.columns):
        low, high = (rows[name].to_numpy(float) for name in ("ci_low", "ci_high"))
        axes.vlines(x, low, high, color=QUIET, linewidth=1, alpha=0.6)
    axes.plot(x, y, ".", color=INK, markersize=3 if len(x) > 100 else 6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=bool((x == x.round()).all())))
    axes.axhline(0, color=QUIET, linewidth=0.8)
    order = np.argsort(-np.abs(y), kind="stable")  # nan, of cells that failed, comes last
    for index in order[: min(_LABELLED, int(np.isfinite(y).sum()))]:
        axes.annotate(
            f"{x[index]:g}",
            (x[index], y[index]),
            fontsize=FONT - 2,
            xytext=(4, 2),
            textcoords="offset points",
        )
    return axes


_CELLS = ["cell", "kind", "site", "where", "metric", "effect", "ci_low", "ci_high", "error"]
_CELLS += ["n", "n_controls", "control_effect", "over_low", "over_high", "corrected_p", "changed"]
_EACH = 15


def _cell_rows(run: Run) -> pd.DataFrame:
    return run.need("cells", columns=_CELLS)


def _title(run: Run) -> str:
    table = run.optional("cells", columns=_CELLS)
    if table is None:
        return "A sweep of edits"
    return words.sweep_title(table, least=_least_effect(run))


def _least_effect(run: Run) -> float:
    return float(run.provenance.get("least_effect") or 0.0)


def forest_plot(rows: pd.DataFrame, *, metric: str) -> Figure:
    """Draw every cell's effect on a metric with its interval, sorted by magnitude; one that may be chance is grey."""
    known = np.isfinite(rows["effect"].to_numpy(float))
    rows = sort_by_magnitude(rows.loc[known], "effect")
    told_apart = rows_beyond_chance(rows)
    shown = rows.head(_MOST_NAMED)
    parts = [(shown, told_apart[: len(shown)], True)]
    if len(rows) > _MOST_NAMED:
        parts.append((rows, told_apart, False))
    common, names = _split_names(shown)
    figure = new_figure(width=8.0, height=1.1 + 0.19 * len(shown) + 3.0 * (len(parts) > 1))
    figure.suptitle(common, fontsize=FONT, color=INK, x=0.01, ha="left")
    grid = figure.add_gridspec(
        len(parts), 1, height_ratios=[0.6 + 0.19 * len(shown), 3.0][: len(parts)]
    )
    below = f"effect on {metric}{_unit_text(rows)}: edited − baseline"
    for place, (part, apart, with_names) in enumerate(parts):
        axes = style_axes(figure.add_subplot(grid[place]), xlabel=below * (place == len(parts) - 1))
        y = np.arange(len(part))
        effect, low, high = (part[name].to_numpy(float) for name in ("effect", "ci_low", "ci_high"))
        hollow = lacks_controls(part)
        for which, colour, label, order in (
            (~apart & ~hollow, QUIET, "no more than chance and controls", 1),
            (apart & (effect > 0), ORANGE, "raises it", 2),
            (apart & (effect <= 0), BLUE, "lowers it", 3),
            (~apart & hollow, QUIET, "no controls", 1),
        ):
            if which.any():
                lines = axes.hlines(y[which], low[which], high[which], color=colour, zorder=order)
                lines.set(linewidth=1.2, alpha=0.8)
                inside = ["white" if one else colour for one in hollow[which]]
                axes.scatter(
                    effect[which],
                    y[which],
                    edgecolors=colour,
                    facecolors=inside,
                    s=22 if with_names else 8,
                    marker={2: "^", 3: "v"}.get(order, "o"),
                    label=label,
                    zorder=order + 1,
                )
        control = part["control_effect"].to_numpy(float)
        if with_names and np.isfinite(control).any():
            axes.scatter(
                control, y, marker="|", s=70, color=INK, label="mean of its controls", zorder=5
            )
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_ylim(len(part) - 0.5, -0.5)
        if with_names:
            half = _LABEL // 2
            # a long name keeps its end, which tells cells apart
            axes.set_yticks(
                y, [one if len(one) <= _LABEL else f"{one[:half]} … {one[-half:]}" for one in names]
            )
            axes.tick_params(axis="y", labelsize=FONT - 2)
            legend(axes, columns=2)
        else:
            axes.set_yticks([])
            axes.set_ylabel(f"all {len(part)} cells", fontsize=FONT, color=INK)
    return without_formulas(figure)


def _split_names(rows: pd.DataFrame) -> tuple[str, list[str]]:
    """Split the names of cells at commas into the parts that all begin with, and what is left of each."""
    parts = [cell_name(row).split(", ") for row in rows.to_dict("records")]
    same = 0
    while all(len(one) > same + 1 and one[same] == parts[0][same] for one in parts):
        same += 1
    return ", ".join(parts[0][:same]), [", ".join(one[same:]) for one in parts]


def _effect_figures(which: int) -> tuple[Drawn, Drawn]:
    def of(run: Run) -> pd.DataFrame:
        table = _cell_rows(run)
        return table.loc[table["metric"] == metric_names(table)[which]]

    def every(run: Run) -> tuple[str, Figure]:
        rows = of(run)
        metric = safe_line(rows["metric"].iloc[0])
        known = rows.loc[np.isfinite(rows["effect"].to_numpy(float))]
        if not len(known):
            raise RunError("no cell of this metric has an effect. Run the sweep again to see it.")
        several = f" The {_MOST_NAMED} strongest are named; all are drawn below."
        several *= len(known) > _MOST_NAMED
        see = (
            f"Effect of every cell on {metric} with its 95% interval over sequences, the strongest first. Grey: the "
            "interval of the effect, or of the effect above the cell's random controls, contains zero. Hollow: there "
            f"are no random controls.{several}"
        )
        return see, forest_plot(rows, metric=metric)

    def mapped(run: Run) -> tuple[str, Figure]:
        rows = of(run)
        blank = rows.assign(effect=rows["effect"].where(rows_beyond_chance(rows)))
        see = (
            f"The same effects on {safe_line(rows['metric'].iloc[0])} by where the edit was made. Red raises it, blue "
            "lowers it; cells that cannot be told from chance and their controls are left empty."
        )
        return see, effect_figure(blank)

    def there(run: Run) -> bool:
        return "cells" not in run.tables or len(metric_names(run.tables["cells"])) > which

    def has_map(run: Run) -> bool:
        if "cells" not in run.tables or not there(run):
            return False
        several = any(len(swept_columns(part)) > 1 for _, part in _rows_by_edit(of(run)))
        return several and bool(rows_beyond_chance(of(run)).any())

    number_of = ("", ", second metric", ", third metric", ", fourth metric")[which]
    return (
        Drawn(
            key=f"effects-{which}", title=f"Every cell{number_of}", make=every, data=of, when=there
        ),
        Drawn(key=f"map-{which}", title=f"Where{number_of}", make=mapped, data=of, when=has_map),
    )


def _masses(run: Run) -> list[str]:
    asked = [one.get("name") for one in run.config.get("metrics") or ()]
    named = zip(metric_names(_cell_rows(run)), asked, strict=False)
    return [metric for metric, name in named if name == "sink_mass"]


def _mass_figure(run: Run) -> tuple[str, Figure]:
    table = _cell_rows(run)
    every = _masses(run)
    masses = every[:_MOST_PANELS]
    shown = [
        sort_by_magnitude(table.loc[table["metric"] == metric], "effect").head(_MOST_NAMED)
        for metric in masses
    ]
    heights = [1.1 + 0.19 * len(rows) for rows in shown]
    figure = new_figure(width=8.0, height=sum(heights))
    common, cells = _split_names(pd.concat(shown))
    figure.suptitle(common, fontsize=FONT, color=INK, x=0.01, ha="left")
    names = iter(cells)
    grid = figure.add_gridspec(len(shown), 1, height_ratios=heights)
    for place, (metric, rows) in enumerate(zip(masses, shown, strict=True)):
        axes = style_axes(figure.add_subplot(grid[place]), xlabel=metric)
        before, after = (rows[name].to_numpy(float) for name in ("baseline", "value"))
        y = np.arange(len(rows))
        axes.hlines(y, before, after, color=QUIET, linewidth=1.2)
        axes.scatter(before, y, facecolors="none", edgecolors=INK, s=22, label="before", zorder=2)
        axes.scatter(after, y, color=ORANGE, s=22, label="after", zorder=3)
        axes.set_yticks(y, [safe_line(name, limit=_LABEL) for name in islice(names, len(rows))])
        axes.tick_params(axis="y", labelsize=FONT - 2)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        legend(axes, columns=2)
    see = f"Attention before and after each edit, mean over sequences; the {_MOST_NAMED} strongest cells at most."
    left = f" The first {len(masses)} of {len(every)} metrics are drawn." * (every != masses)
    return see + left, without_formulas(figure)


def _strongest_cells_table(run: Run) -> tuple[str, PageTable]:
    table = _cell_rows(run)
    rows = table
    if metrics := metric_names(table):
        rows = sort_by_magnitude(table.loc[table["metric"].isin(metrics)], "effect")
        rows = rows.groupby("metric").head(_EACH)
        rows = rows.sort_values(
            "metric", key=lambda column: column.map(metrics.index), kind="stable"
        )
    marks = [MARK if 0 < n < FEW else "" for n in rows["n"]]
    for name, low, high in (("interval", "ci_low", "ci_high"), ("over", "over_low", "over_high")):
        told = zip(ci_texts(rows, low, high), marks, strict=True)
        rows = rows.assign(**{name: [text and f"{text}{mark}" for text, mark in told]})
    heads = {
        "metric": "metric",
        "kind": "edit",
        "site": "site",
        "where": "where",
        "factor": "factor",
        "centre": "centre",
        "effect": "effect",
        "interval": "95%",
        "control_effect": "controls",
        "over": "effect above controls, 95%",
    }
    heads = {
        name: head
        for name, head in heads.items()
        if name in rows.columns and bool(rows[name].notna().any())
    }
    see = f"The {_EACH} strongest cells of each metric; all {len(table)} rows are in cells.parquet."
    return f"{see} {few_sequences_note(table)}".rstrip(), page_table(rows, heads, most=_EACH * 6)


def _failed_cells_table(run: Run) -> tuple[str, PageTable]:
    table = _cell_rows(run)
    rows = table.loc[table["error"].notna()]
    heads = {"kind": "edit", "site": "site", "where": "where", "error": "why"}
    return "Cells that could not be computed, and why.", page_table(rows, heads)


SWEEP = Page(
    title=_title,
    headline=lambda run: words.sweep_sentences(
        _cell_rows(run), least=_least_effect(run), means=run.provenance.get("means", ())
    ),
    figures=(
        *(drawn for which in range(4) for drawn in _effect_figures(which)),
        Drawn(
            key="masses",
            title="Attention before and after",
            make=_mass_figure,
            data=lambda run: _cell_rows(run).loc[lambda table: table["metric"].isin(_masses(run))],
            when=lambda run: "cells" not in run.tables or bool(_masses(run)),
        ),
    ),
    tables=(
        Listed(
            key="cell-table",
            title="Strongest cells",
            make=_strongest_cells_table,
            meanings=INTERVALS
            | {
                "over": "Effect minus the mean effect of the cell's random controls, with its 95% interval."
            },
        ),
        Listed(
            key="failed-table",
            title="Failed cells",
            make=_failed_cells_table,
            when=lambda run: "cells" in run.tables and n_failed_cells(run.tables["cells"]) > 0,
        ),
    ),
)
