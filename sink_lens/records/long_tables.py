"""Some rows of a table that is too long for a page.

Where a table has a column ``step`` of many steps, whole steps are kept: evenly spaced ones, the first, and the last
ones. From any other table, evenly spaced rows are kept, and those with the largest and the smallest numbers of each
column. A log is read line by line, so that the whole is never in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sink_lens.records.log import log_lines, read_log

_LAST = 25
"""The last steps are all kept, as many as a page's table shows."""
_EXTREMES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """The rows that were kept of a table."""

    rows: int
    """All of its rows."""
    kept: int
    steps: int | None
    """All of its steps; None where single rows were kept."""


def shorten_log(path: Path, *, name: str, most: int) -> tuple[pd.DataFrame, Shortened | None]:
    """(about ``most`` rows of a table in a log, how many it has); (all rows, None) if it has no more than ``most``.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    counts: dict[int, int] = {}
    for line in log_lines(path):
        rows = sum(
            max((len(one) for one in block.values() if isinstance(one, list)), default=1)
            for block in line.tables.get(name, ())
        )
        counts[line.at] = counts.get(line.at, 0) + rows
    if (total := sum(counts.values())) <= most:
        return read_log(path)[name], None
    frame = read_log(path, only=_kept_steps(counts, most=most))[name]
    return frame, Shortened(rows=total, kept=len(frame), steps=len(counts))


def shorten(frame: pd.DataFrame, *, most: int) -> tuple[pd.DataFrame, Shortened | None]:
    """(about ``most`` rows of a table, how many it has); (the table, None) if it has no more than ``most``.

    Whole steps are kept, or else every n-th row and those with the extremes of each column.
    """
    total = len(frame)
    if total <= most:
        return frame, None
    if "step" in frame and pd.api.types.is_integer_dtype(frame["step"]) and not frame["step"].hasnans:
        steps, rows = np.unique(frame["step"].to_numpy(dtype="int64"), return_counts=True)
        if len(steps) > 4 * _LAST:
            kept = _kept_steps(dict(zip(steps.tolist(), rows.tolist(), strict=True)), most=most)
            frame = frame.loc[frame["step"].isin(sorted(kept))].reset_index(drop=True)
            return frame, Shortened(rows=total, kept=len(frame), steps=len(steps))
    chosen = np.arange(total) % -(-2 * total // most) == 0
    for column in frame.select_dtypes("float"):
        values = frame[column].to_numpy(dtype=float, na_value=np.nan)
        known = np.argsort(values, kind="stable")[: int(np.isfinite(values).sum())]
        chosen[known[:_EXTREMES]] = chosen[known[-_EXTREMES:]] = True
    frame = frame.loc[chosen].reset_index(drop=True)
    return frame, Shortened(rows=total, kept=len(frame), steps=None)


def _kept_steps(counts: Mapping[int, int], *, most: int) -> frozenset[int]:
    """Steps to keep so that about ``most`` rows are left: the first, evenly spaced ones, and the last ones."""
    steps = sorted(counts)
    room = max(2, most * len(steps) // max(sum(counts.values()), 1) - _LAST)
    return frozenset(steps[:: -(-len(steps) // room)]) | frozenset(steps[-_LAST:])
