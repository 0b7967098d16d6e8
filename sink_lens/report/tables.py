"""A table as a page shows it: text in every cell, from a data frame."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sink_lens.report.words import number

MOST_ROWS = 25
"""More rows than these are not shown, but counted."""
_MOST_COPIED = 2_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it is shown: text in every cell."""

    heads: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: list[tuple[str, ...]]
    frame: pd.DataFrame | None = None
    """All rows, as they are in the run; None where the text is all that there is."""

    @property
    def numbers(self) -> pd.DataFrame:
        """What a reader copies."""
        return pd.DataFrame(self.rows, columns=list(self.heads)) if self.frame is None else self.frame


def shown_table(frame: pd.DataFrame, heads: Mapping[str, str], *, most: int = MOST_ROWS) -> Table:
    """A data frame as text: the columns that it has, under other names, undefined texts empty."""
    columns = [name for name in heads if name in frame.columns]
    numeric = [
        pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name]) for name in columns
    ]
    rows = []
    for row in frame[columns].head(most).itertuples(index=False):
        cells = zip(row, numeric, strict=True)
        rows.append(tuple(_cell(value, is_number=is_number) for value, is_number in cells))
    return Table(
        heads=tuple(heads[name] for name in columns),
        numeric=tuple(numeric),
        rows=rows,
        frame=frame.filter(items=columns),
    )


def _cell(value: Any, *, is_number: bool) -> str:
    if pd.isna(value):
        return "undefined" if is_number else ""
    return number(value)


def more(total: int, name: str, *, most: int = MOST_ROWS) -> str:
    """What is said where a table has more rows than are shown; nothing where it has not."""
    return f" The first {most} of {total}; all are in {name}.parquet." if total > most else ""


def csv(frame: pd.DataFrame) -> str:
    """A data frame as CSV to be pasted: numbers to six digits, and no text that a spreadsheet takes for a formula.

    Of a longer frame than a page holds, evenly spaced rows, and a last line that says so.
    """
    step = -(-len(frame) // _MOST_COPIED)
    part = frame.iloc[:: max(step, 1)].map(lambda value: f"'{value}" if _is_formula(value) else value)
    text = part.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text if step <= 1 else f"{text}# every {step}th of {len(frame)} rows; all are in the run's folder\n"


def _is_formula(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_FORMULA)
