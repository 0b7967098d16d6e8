"""Columns of a run's tables as plain arrays, and what is said where a table or a column is not there."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sink_lens.errors import RunError
from sink_lens.records import Run


def floats(table: pd.DataFrame, name: str) -> np.ndarray:
    """A column as numbers; what is no number is nan."""
    return pd.Series(pd.to_numeric(table[name], errors="coerce")).to_numpy(dtype=float, na_value=np.nan)


def numbers(table: pd.DataFrame, names: Sequence[str]) -> list[tuple[float, ...]]:
    """Some columns as numbers, row by row."""
    return list(zip(*(floats(table, name).tolist() for name in names), strict=True))


def flags(table: pd.DataFrame, name: str) -> np.ndarray:
    """A column as booleans; what is missing is false."""
    return np.array([value is True or value == 1 for value in table[name].tolist()], dtype=bool)


def select(table: pd.DataFrame, keep: np.ndarray) -> pd.DataFrame:
    """The rows that are kept: a mask, or an order of row numbers."""
    return table.take(np.flatnonzero(keep) if keep.dtype == bool else keep)


def named(table: pd.DataFrame, column: str, name: str) -> pd.DataFrame:
    """The rows that have a text in a column."""
    return select(table, np.array([value == name for value in table[column].tolist()], dtype=bool))


def at(table: pd.DataFrame, position: int) -> pd.DataFrame:
    """The rows of one position."""
    return select(table, floats(table, "position") == position)


def by_size(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows, largest magnitude of a column first, undefined last."""
    return select(table, np.argsort(-np.abs(floats(table, name)), kind="stable"))


def need(run: Run, name: str, *, columns: Sequence[str]) -> pd.DataFrame:
    """A table that has some columns.

    Raises:
        RunError: It is not in the run, damaged, or lacks one of them.
    """
    if name not in run.tables:
        raise RunError(f"this run has no table {name!r}. Finish the run, or run it again, to see it.")
    table = run.tables[name]
    absent = [column for column in columns if column not in table.columns]
    if absent:
        raise RunError(f"the table {name!r} lacks {', '.join(absent)}; need {', '.join(columns)}. Run again to see it.")
    return table
