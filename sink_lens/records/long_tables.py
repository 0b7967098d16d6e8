"""Some rows of a table that is too long for a page, read piece by piece so that the whole is never in memory.

Where a table has a column ``step`` of many steps, whole steps are kept: evenly spaced ones, the first, and the last
ones. From any other table, evenly spaced rows are kept, and those with the largest and the smallest numbers of each
column.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sink_lens.records.log import log_lines, read_log

__all__ = ["Shortened", "read_some"]

_LAST = 25
"""The last steps are all kept, as many as a page's table shows."""
_EXTREMES = 500
_PIECE = 131_072
_CHUNK = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """The rows that were kept of a table."""

    rows: int
    """All of its rows."""
    kept: int
    steps: int | None
    """All of its steps; None where single rows were kept."""


def read_some(path: Path, *, name: str, most: int) -> tuple[pd.DataFrame | None, Shortened | None]:
    """(rows for a page, what was left out) of a table with more than ``most`` rows; (None, None) for a shorter one.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    if path.suffix == ".parquet":
        return _some(_parquet_pieces(path), n_rows=_parquet_rows(path), most=most)
    if path.suffix == ".csv":
        return _some(_csv_pieces(path), n_rows=_lines_in(path) - 1, most=most)
    counts: dict[int, int] = {}
    for line in log_lines(path):
        rows = sum(
            max((len(one) for one in block.values() if isinstance(one, list)), default=1)
            for block in line.tables.get(name, ())
        )
        counts[line.at] = counts.get(line.at, 0) + rows
    if (total := sum(counts.values())) <= most:
        return None, None
    kept = _kept_steps(counts, most=most)
    frame = read_log(path, only=kept)[name]
    return frame, Shortened(rows=total, kept=len(frame), steps=len(counts))


def _some(
    pieces: Callable[[], Iterable[pd.DataFrame]], *, n_rows: int, most: int
) -> tuple[pd.DataFrame | None, Shortened | None]:
    """Shorten a table that is read in pieces: whole steps, else every n-th row and each column's extremes."""
    if n_rows <= most:
        return None, None
    counts = _steps(pieces())
    if counts is not None:
        kept = _kept_steps(counts, most=most)
        frame = pd.concat([one.loc[one["step"].isin(sorted(kept))] for one in pieces()], ignore_index=True)
        return frame, Shortened(rows=n_rows, kept=len(frame), steps=len(counts))
    stride, parts, start = -(-2 * n_rows // most), [], 0
    for one in pieces():
        chosen = (np.arange(start, start + len(one)) % stride) == 0
        for column in one.select_dtypes("float"):
            values = one[column].to_numpy(dtype=float, na_value=np.nan)
            known = np.argsort(values, kind="stable")[: int(np.isfinite(values).sum())]
            chosen[known[:_EXTREMES]] = chosen[known[-_EXTREMES:]] = True
        parts.append(one.loc[chosen])
        start += len(one)
    frame = pd.concat(parts, ignore_index=True)
    return frame, Shortened(rows=n_rows, kept=len(frame), steps=None)


def _steps(pieces: Iterable[pd.DataFrame]) -> dict[int, int] | None:
    """Step -> number of rows; None without a column ``step`` of whole numbers, or with too few steps to shorten."""
    counts: dict[int, int] = {}
    for one in pieces:
        if "step" not in one or not pd.api.types.is_integer_dtype(one["step"]) or one["step"].hasnans:
            return None
        steps, rows = np.unique(one["step"].to_numpy(dtype="int64"), return_counts=True)
        for step, n in zip(steps.tolist(), rows.tolist(), strict=True):
            counts[step] = counts.get(step, 0) + n
    return counts if len(counts) > 4 * _LAST else None


def _kept_steps(counts: Mapping[int, int], *, most: int) -> frozenset[int]:
    """Steps to keep so that about ``most`` rows are left: the first, evenly spaced ones, and the last ones."""
    steps = sorted(counts)
    room = max(2, most * len(steps) // max(sum(counts.values()), 1) - _LAST)
    return frozenset(steps[:: -(-len(steps) // room)]) | frozenset(steps[-_LAST:])


def _parquet_rows(path: Path) -> int:
    """Number of rows of a parquet file, from its metadata."""
    import pyarrow.parquet  # slow to import, and needed for long tables alone

    return pyarrow.parquet.read_metadata(path).num_rows


def _parquet_pieces(path: Path) -> Callable[[], Iterator[pd.DataFrame]]:
    """Return a function that reads a parquet file piece by piece, with the dtypes that ``pd.read_parquet`` gives."""

    def pieces() -> Iterator[pd.DataFrame]:
        import pyarrow as pa
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PIECE):
                piece = io.BytesIO()
                pyarrow.parquet.write_table(pa.Table.from_batches([batch]), piece, compression="none")
                yield pd.read_parquet(piece)

    return pieces


def _csv_pieces(path: Path) -> Callable[[], Iterator[pd.DataFrame]]:
    """Return a function that reads a CSV file piece by piece."""

    def pieces() -> Iterator[pd.DataFrame]:
        with pd.read_csv(path, chunksize=_CHUNK) as reader:
            yield from reader

    return pieces


def _lines_in(path: Path) -> int:
    """Number of lines of a file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)
