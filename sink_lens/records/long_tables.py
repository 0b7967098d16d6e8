"""Some rows of a table that is too long for a page: evenly spaced ones, the extremes, and the ends."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

_LAST = 25
"""The last steps are all kept, as many as a page's table shows."""
_EXTREMES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """The numbers of rows of a table that was shortened: all of them, and those that were kept."""

    rows: int
    """All of its rows."""
    kept: int
    steps: int | None
    """All of its steps; None where single rows were kept."""


def shorten_table(frame: pd.DataFrame, *, most: int) -> tuple[pd.DataFrame, Shortened]:
    """Shorten a table to about ``most`` rows; return (the rows that were kept, how many of how many they are).

    If the table has many steps, some steps are kept, with all their rows. If not, every n-th row is kept, and the rows
    with the extremes of each column.
    """
    total = len(frame)
    if (
        "step" in frame
        and pd.api.types.is_integer_dtype(frame["step"])
        and not frame["step"].hasnans
    ):
        steps, rows = np.unique(frame["step"].to_numpy(dtype="int64"), return_counts=True)
        if len(steps) > 4 * _LAST:
            room = max(2, most * len(steps) // int(rows.sum()) - _LAST)
            kept = {*steps[:: -(-len(steps) // room)].tolist(), *steps[-_LAST:].tolist()}
            frame = frame.loc[frame["step"].isin(sorted(kept))].reset_index(drop=True)
            return frame, Shortened(rows=total, kept=len(frame), steps=len(steps))
    chosen = np.arange(total) % -(-2 * total // most) == 0
    for column in frame.select_dtypes("float"):
        values = frame[column].to_numpy(dtype=float, na_value=np.nan)
        known = np.argsort(values, kind="stable")[: int(np.isfinite(values).sum())]
        chosen[known[:_EXTREMES]] = chosen[known[-_EXTREMES:]] = True
    frame = frame.loc[chosen].reset_index(drop=True)
    return frame, Shortened(rows=total, kept=len(frame), steps=None)
