"""Make the table of a sweep: compare each cell with the baseline run and with its controls."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..data.tokens import TokenBatch
from ..edits.effect_table import effect_table
from ..edits.metrics import Metric
from ..edits.part import AXES
from ..engine.cells import Cell
from ..errors import InputError, RunError
from ..records import Result
from ..stats import strongest
from ..text import strength

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class SweepResult(Result):
    """A sweep; everything in it also lies in its run folder.

    ``frame`` has one row per cell and metric: the edit and its location; ``baseline`` and ``value`` (means over the
    sequences that have all its positions), ``effect`` (value - baseline) with its paired 95% interval over sequences;
    ``control_effect`` and ``control_sd`` (mean and standard deviation over the cell's random controls),
    ``over_control`` (effect - control_effect) with its interval; ``changed`` (whether the edit changed anything that
    was run), ``n``, ``error``.
    """

    main = "cells"

    @property
    def controls(self) -> pd.DataFrame:
        """The random controls, with the same columns."""
        return self.tables["controls"]

    @property
    def values(self) -> pd.DataFrame:
        """Every single value, with the columns cell, sequence, metric and value."""
        return self.tables["values"]

    @property
    def failed(self) -> pd.DataFrame:
        """The cells that failed, with their errors."""
        return self.frame.loc[self.frame["error"].notna()].drop_duplicates("cell")

    def top(self, n: int = 10, *, metric: str | None = None) -> pd.DataFrame:
        """The cells with the largest effects of either sign on a metric; on the first metric if None."""
        return strongest(self._of(metric), "effect", n=n)

    def figure(self, *, metric: str | None = None, value: str = "effect") -> "Figure":
        """The effects as a heat map over two swept axes, or as a line over one."""
        rows = self._of(metric)
        from .page import effect_figure

        return effect_figure(rows, value=value, title=str(rows["metric"].iloc[0]))

    def _of(self, metric: str | None) -> pd.DataFrame:
        """The rows of a metric; of the first one if None."""
        names = list(dict.fromkeys(self.frame["metric"].tolist()))
        if metric is not None and metric not in names:
            raise InputError(f"the sweep has no metric {metric!r}; need one of {', '.join(names)}")
        return self.frame.loc[self.frame["metric"] == (names[0] if metric is None else metric)]

    def shown(self) -> tuple[object, ...]:
        """The figure, and the cells with the largest effects."""
        drawn = []
        with contextlib.suppress(RunError):  # nothing was swept over numbers: there is no figure
            drawn = [self.figure()]
        top = self.top()
        cells = top.assign(edit=[cell_name(row) for row in top.to_dict("records")])
        columns = ("edit", "metric", "baseline", "effect", "ci_low", "ci_high", "control_effect", "error")
        return *drawn, cells.filter(items=columns)


def failed_cells(frame: pd.DataFrame) -> list[Any]:
    """The cells that have an error, each once, in order."""
    pairs = zip(frame["cell"].tolist(), frame["error"].tolist(), strict=True)
    return list(dict.fromkeys(cell for cell, error in pairs if isinstance(error, str)))


def by_cell(numbers: pd.DataFrame, cells: Sequence[Cell]) -> pd.DataFrame:
    """The numbers of the table's cells: cell, sequence, metric, value, in order; those of failed cells are left out."""
    index = {cell.identity: number for number, cell in enumerate(cells)}
    keep = [
        isinstance(metric, str) and metric != "" and cell in index
        for cell, metric in zip(numbers["cell"].tolist(), numbers["metric"].tolist(), strict=True)
    ]
    found = numbers.loc[keep, ["cell", "sequence", "metric", "value"]]
    found = pd.DataFrame(found).assign(cell=[index[cell] for cell in found["cell"].tolist()])
    return found.sort_values(by=["metric", "cell", "sequence"]).reset_index(drop=True)


def leave_out_short(numbers: pd.DataFrame, cells: Sequence[Cell], *, tokens: TokenBatch) -> pd.DataFrame:
    """The numbers, undefined where a sequence has no token at a position or key of the cell.

    A metric with one number for all sequences is undefined if one of them has none.
    """
    lengths = tokens.lengths.numpy()
    needed = {cell.identity: cell.tokens for cell in cells}
    if max(needed.values(), default=0) <= int(lengths.min()):
        return numbers
    sequences = numbers["sequence"].to_numpy()
    each = numbers.groupby(["cell", "metric"])["sequence"].transform("size").to_numpy() == len(lengths)
    found = np.where(each, lengths[sequences], lengths.min())
    short = found < np.array([needed.get(cell, 0) for cell in numbers["cell"].tolist()])
    return numbers.assign(value=numbers["value"].mask(short))


def cell_name(row: Mapping[Any, Any]) -> str:
    """Name of the cell in a row."""
    if isinstance(row.get("name"), str):
        return row["name"]
    return f"{row['kind']} {row['site']}{strength(row)} {row['where']}".strip()


def tables(
    cells: Sequence[Cell],
    controls: Sequence[Cell],
    values: pd.DataFrame,
    baseline: pd.DataFrame,
    *,
    metrics: Sequence[Metric],
    most_controls: int,
    generator: np.random.Generator,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table of the cells and that of the controls.

    Args:
        cells: of the table.
        controls: of their groups; one that is also a cell was run once.
        values: what the blocks gave, its ``cell`` the identity of a cell.
        baseline: the baseline run.
        metrics: in the order of the table.
        most_controls: of each cell.
        generator: of the bootstrap.
    """
    codes, unique = pd.factorize(values["cell"])
    names = unique.tolist()
    failed = values["error"].notna().to_numpy(dtype=bool)
    errors: dict[str, str] = {}
    for code, error in zip(codes[failed].tolist(), values["error"][failed].tolist(), strict=True):
        errors.setdefault(names[code], error)
    differs = np.zeros(len(names), dtype=bool)
    differs[codes[values["changed"].to_numpy(dtype=bool)]] = True
    changed = dict(zip(names, differs.tolist(), strict=True))
    groups: dict[str, list[Cell]] = {}
    for one in controls:
        groups.setdefault(str(one.group), []).append(one)
    found: list[pd.DataFrame] = []
    found_controls: list[pd.DataFrame] = []
    for metric in metrics:
        of_metric = baseline.loc[baseline["metric"] == metric.name]
        column = {sequence: number for number, sequence in enumerate(of_metric["sequence"].tolist())}
        mine = (values["metric"] == metric.name).to_numpy(dtype=bool)
        sequences = [column[sequence] for sequence in values.loc[mine, "sequence"].tolist()]
        numbers = np.full((len(names), len(column)), np.nan)
        numbers[codes[mine], sequences] = values.loc[mine, "value"].to_numpy(dtype=float)
        matrix = {name: row for name, row in zip(names, numbers, strict=True) if name not in errors}
        common: dict[str, Any] = {
            "matrix": matrix,
            "before": of_metric["value"].to_numpy(dtype=float),
            "metric": metric,
            "errors": errors,
            "changed": changed,
            "generator": generator,
        }
        of_cell = [_controls_of(one, groups, most=most_controls) for one in cells]
        found.append(_metric_table(cells, of_cell, **common))
        found_controls.append(_metric_table(controls, [[] for _ in controls], **common))
    return pd.concat(found, ignore_index=True), pd.concat(found_controls, ignore_index=True)


def _metric_table(
    cells: Sequence[Cell],
    controls: Sequence[Sequence[str]],
    *,
    matrix: Mapping[str, np.ndarray],
    before: np.ndarray,
    metric: Metric,
    errors: Mapping[str, str],
    changed: Mapping[str, bool],
    generator: np.random.Generator,
) -> pd.DataFrame:
    """One metric's rows."""
    nothing = np.full(len(before), np.nan)
    values = np.stack([matrix.get(one.identity, nothing) for one in cells]) if cells else np.empty((0, len(before)))
    drawn = [np.array([matrix.get(name, nothing) for name in names]).reshape(-1, len(before)) for names in controls]
    effects = effect_table(values, before, controls=drawn, generator=generator)
    frame = pd.DataFrame([dict(one.columns) for one in cells])
    for axis in set(AXES) & set(frame):
        frame[axis] = pd.array(frame[axis].tolist(), dtype="Int64")
    frame["metric"], frame["metric_unit"] = metric.name, metric.unit
    frame = frame.join(effects.drop(columns="n"))
    frame["changed"] = [changed.get(one.identity, False) for one in cells]
    frame["n"] = effects["n"]
    frame["error"] = pd.array([errors.get(one.identity) for one in cells], dtype="string")
    frame.insert(0, "cell", range(len(cells)))
    return frame


def _controls_of(cell: Cell, groups: Mapping[str, list[Cell]], *, most: int) -> list[str]:
    """The identities of a cell's controls: of its group, with none of its own units."""
    own = set(cell.drawn)
    fit = [one.identity for one in groups.get(str(cell.group), ()) if not own & set(one.drawn)]
    return fit[:most]
