"""Some rows of a table that is too long for a page: evenly spaced ones, the extremes, and the ends."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

_LAST = 25
"""As many as a page's table shows."""
_EXTREMES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """How many rows a table has that was shortened, and how many were kept."""

    rows: int
    kept: int
    steps: int | None
    """None where single rows were kept."""


def shorten_table(frame: pd.DataFrame, *, most: int) -> tuple[pd.DataFrame, Shortened]:
    """Shorten a table to about ``most`` rows; return the rows that were kept, and how many of how many they are.

    Of a table with many steps some steps are kept, with all their rows; else every n-th row, and the rows with the
    extremes of each column.
    """
    total = len(frame)
    step = frame.get("step")
    if step is not None and pd.api.types.is_integer_dtype(step) and not step.hasnans:
        steps, rows = np.unique(step.to_numpy(dtype="int64"), return_counts=True)
        if len(steps) > 4 * _LAST:
            room = max(2, most * len(steps) // int(rows.sum()) - _LAST)
            kept = {*steps[:: -(-len(steps) // room)].tolist(), *steps[-_LAST:].tolist()}
            frame = frame.loc[step.isin(sorted(kept))].reset_index(drop=True)
            return frame, Shortened(rows=total, kept=len(frame), steps=len(steps))
    chosen = np.arange(total) % -(-2 * total // most) == 0
    for column in frame.select_dtypes("float"):
        values = frame[column].to_numpy(dtype=float, na_value=np.nan)
        known = np.argsort(values, kind="stable")[: int(np.isfinite(values).sum())]
        chosen[known[:_EXTREMES]] = chosen[known[-_EXTREMES:]] = True
    frame = frame.loc[chosen].reset_index(drop=True)
    return frame, Shortened(rows=total, kept=len(frame), steps=None)
