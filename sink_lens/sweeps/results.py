"""Make the table of a sweep: compare each cell with the baseline run and with its controls."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..data.tokens import TokenBatch
from ..edits.effect_table import effect_table
from ..edits.metrics import Metric
from ..edits.part import AXES
from ..errors import InputError, RunError
from ..records import Result
from ..stats import sort_by_magnitude
from ..text import as_text, interval_text
from .cells import Cells
from .words import cell_name

if TYPE_CHECKING:
    from ..report.diagram import Style
    from ..report.page import PageTable
    from ..report.style import Picture

_SHOWN = 8
"""Cells of each metric that the command prints."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult(Result):
    """The result of a sweep: its tables, which its run folder has too, and methods that draw them.

    ``frame`` has one row per cell and metric, with the columns that the help of ``sweep`` lists.
    """

    main = "cells"

    @property
    def controls(self) -> pd.DataFrame:
        """The table of the random controls, with the columns of ``frame``."""
        return self.tables["controls"]

    @property
    def values(self) -> pd.DataFrame:
        """The table of each metric's value on each sequence in each cell (columns cell, sequence, metric, value)."""
        return self.tables["values"]

    @property
    def failed(self) -> pd.DataFrame:
        """The cells that could not be computed, a row of ``frame`` for each, whose ``error`` says why."""
        return self.frame.loc[self.frame["error"].notna()].drop_duplicates("cell")

    def top(self, n: int = 10, *, metric: str | None = None) -> pd.DataFrame:
        """Return the ``n`` rows of ``frame`` with the largest absolute effects on a metric (None: the first one)."""
        return (
            sort_by_magnitude(self._rows_of_metric(metric), "effect").head(n).reset_index(drop=True)
        )

    def figure(
        self,
        *,
        metric: str | None = None,
        value: str = "effect",
        style: "Style" = "page",
        width: float | None = None,
    ) -> "Picture":
        """Draw a metric's column ``value`` over the swept axes: points over one axis, a heat map over two or more.

        Args:
            metric: a name of the column ``metric``; None is the first.
            value: the column.
            style: ``page``, or ``paper`` with serifs.
            width: inches; None is 3.25, a single column, for ``paper``, and 8 for ``page``.

        Raises:
            RunError: nothing was swept over numbers, or the frame has no such column.
        """
        rows = self._rows_of_metric(metric)
        from .page import effect_figure

        title = str(rows["metric"].iloc[0])
        return effect_figure(rows, value=value, title=title, style=style, width=width)

    def _rows_of_metric(self, metric: str | None) -> pd.DataFrame:
        names = self.frame["metric"].unique().tolist()
        if metric is not None and metric not in names:
            raise InputError(f"the sweep has no metric {metric!r}; need one of {', '.join(names)}")
        return self.frame.loc[self.frame["metric"] == (names[0] if metric is None else metric)]

    def notebook_parts(self) -> tuple[object, ...]:
        """Return the parts that a notebook shows: a figure if there is one, and the cells with the largest effects."""
        drawn = []
        with contextlib.suppress(RunError):  # nothing was swept over numbers: there is no figure
            drawn = [self.figure()]
        top = self.top()
        cells = top.assign(edit=[cell_name(row) for row in top.to_dict("records")])
        columns = ("edit", "metric", "baseline", "effect", "ci_low", "ci_high")
        return *drawn, cells.filter(items=(*columns, "control_effect", "error"))


def values_by_cell(numbers: pd.DataFrame, *, n: int) -> pd.DataFrame:
    """Return the values of the first ``n`` cells, which are no controls; a failed cell has none."""
    read = numbers["metric"].notna() & numbers["metric"].ne("") & numbers["cell"].lt(n)
    found = pd.DataFrame(numbers.loc[read, ["cell", "sequence", "metric", "value"]])
    return found.sort_values(by=["metric", "cell", "sequence"]).reset_index(drop=True)


def mask_short_sequences(
    numbers: pd.DataFrame, cells: Cells, *, tokens: TokenBatch
) -> pd.DataFrame:
    """Set a cell's ``numbers`` to nan on each sequence too short to have all positions and keys that the cell edits.

    A metric with one number for all sequences is nan if one of them is too short.
    """
    lengths = tokens.lengths.cpu().numpy()
    needed = np.array([cell.tokens for cell in cells.every])
    if needed.max(initial=0) <= lengths.min():
        return numbers
    counts = numbers.groupby(["cell", "metric"])["sequence"].transform("size").to_numpy()
    of_sequence = lengths[numbers["sequence"].to_numpy()]
    found = np.where(counts == len(lengths), of_sequence, lengths.min())
    return numbers.assign(value=numbers["value"].mask(found < needed[numbers["cell"].to_numpy()]))


def effect_tables(
    cells: Cells,
    values: pd.DataFrame,
    baseline: pd.DataFrame,
    *,
    metrics: Sequence[Metric],
    generator: np.random.Generator,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare each cell with the baseline run: a table of cells and one of controls, a row per cell and metric."""
    number, n = values["cell"].to_numpy(dtype=int), len(cells.every)
    failed = values["error"].notna().to_numpy(dtype=bool)
    errors = values.loc[failed].drop_duplicates("cell").set_index("cell")["error"]
    changed = np.zeros(n, dtype=bool)
    changed[number[values["changed"].to_numpy(dtype=bool)]] = True
    found: list[pd.DataFrame] = []
    found_controls: list[pd.DataFrame] = []
    for metric in metrics:
        of_metric = baseline.loc[baseline["metric"] == metric.name]
        column = {sequence: place for place, sequence in enumerate(of_metric["sequence"].tolist())}
        mine = (values["metric"] == metric.name).to_numpy(dtype=bool)
        sequences = [column[sequence] for sequence in values.loc[mine, "sequence"].tolist()]
        matrix = np.full((n, len(column)), np.nan)
        matrix[number[mine], sequences] = values.loc[mine, "value"].to_numpy(dtype=float)
        matrix[number[failed]] = np.nan
        before = of_metric["value"].to_numpy(dtype=float)
        for rows, of_row, made in (
            (range(cells.n), cells.controls, found),
            (cells.drawn, [()] * len(cells.drawn), found_controls),
        ):
            at = np.array(rows, dtype=int)
            drawn = [matrix[np.array(some, dtype=int)] for some in of_row]
            effects = effect_table(matrix[at], before, controls=drawn, generator=generator)
            frame = pd.DataFrame([dict(cells.columns[one]) for one in rows])
            for axis in set(AXES) & set(frame):
                frame[axis] = pd.array(frame[axis].tolist(), dtype="Int64")
            frame["metric"], frame["metric_unit"] = metric.name, metric.unit
            kept = pd.DataFrame(np.where(np.isnan(matrix[at]), np.nan, before))
            spread = effects["control_sd"].fillna(kept.std(axis=1)).to_numpy(float)
            with np.errstate(divide="ignore", invalid="ignore"):  # nothing varies
                effects["effect_in_sds"] = effects["effect"].to_numpy(float) / spread
            frame = frame.join(effects.drop(columns="n"))
            frame["changed"] = changed[at].tolist()
            frame["n"] = effects["n"]
            frame["error"] = pd.array([errors.get(one) for one in rows], dtype="string")
            frame.insert(0, "cell", range(len(rows)))
            made.append(frame)
    return pd.concat(found, ignore_index=True), pd.concat(found_controls, ignore_index=True)


def show_sweep(found: SweepResult) -> "Iterator[str | PageTable]":
    from ..report.page import PageTable

    heads = ("edit", "effect", "95%", "controls", "above controls, 95%")
    yield found.headline
    for metric, rows in _strongest_by_metric(found).items():
        cells = [
            (
                cell_name(row),
                as_text(row["effect"]),
                interval_text(row["ci_low"], row["ci_high"]) or "none",
                as_text(row["control_effect"]) if pd.notna(row["control_effect"]) else "none",
                interval_text(row["over_low"], row["over_high"]) or "none",
            )
            for row in rows.to_dict("records")
        ]
        yield f"strongest effects on {metric}"
        yield PageTable(heads=heads, numeric=(False, True, True, True, True), rows=cells)


def answer_of_sweep(found: SweepResult) -> dict[str, Any]:
    strongest = _strongest_by_metric(found)
    return {
        "sentence": found.headline,
        "failed": len(found.failed),
        "cells": found.frame["cell"].nunique(),
        "strongest": {metric: rows.to_dict("records") for metric, rows in strongest.items()},
    }


def failed(found: SweepResult) -> bool:
    return len(found.failed) > 0


def _strongest_by_metric(found: SweepResult) -> dict[str, pd.DataFrame]:
    names = found.frame["metric"].unique().tolist()
    return {metric: found.top(_SHOWN, metric=metric) for metric in names}
