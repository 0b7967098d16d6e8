"""Rows that one process at a time appends to a run: ``log.jsonl``, from which its tables are made.

The first line names the tables and their columns. Every other line is one call of ``RunLog.append``. A line is on the
disk when ``append`` returns, and no line is ever written over, so that a process that is killed loses nothing; half a
line at the end was never a row.

A run that is continued appends as a new part. From the step on at which a part begins, rows of earlier parts no longer
count: they are from a branch of the training that was given up. They stay in the file.
"""

import contextlib
import errno
import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ..errors import RunError
from ..files import parse_json

LOG_FILE = "log.jsonl"
_CLAIM = ".log.lock"
_DTYPES = ("int64", "Int64", "float64", "str")

Columns = Mapping[str, Any]
"""Some rows of a table by column: a list, or one value for all of them."""


class Line(NamedTuple):
    """The rows that one call of ``RunLog.append`` wrote."""

    part: int
    at: int
    tables: Mapping[str, Sequence[Columns]]


class TakenError(RunError):
    """An error for a log that a later ``RunLog`` of this process continues."""


class RunLog:
    """The log of a run: tables to which rows are appended. While it is open, no other process can append."""

    def __init__(self, folder: Path, *, columns: Mapping[str, Mapping[str, str]]) -> None:
        """Begin the log of a run, or a new part of it.

        ``columns`` is table -> column -> dtype. Refuses a log to which another process appends, and one that is damaged
        or has other tables.
        """
        self.path = folder / LOG_FILE
        if (taken := _OPEN.get(self.path.resolve())) is None:
            self._claim = _lock_file(folder / _CLAIM)
        else:  # the lock goes over
            self._claim, taken.taken = taken._claim, True
        self.taken = False
        """A later log of this process goes on with the file; this one appends no more."""
        try:
            self._file = _open_file(self.path, os.O_APPEND)
            try:
                self.part = self._begin_part(columns)
            except BaseException:
                os.close(self._file)
                raise
        except BaseException:
            os.close(self._claim)
            raise
        self._waiting: list[bytes] = []
        _OPEN[self.path.resolve()] = self

    def append(self, at: int, tables: Mapping[str, Sequence[Columns]]) -> None:
        """Append the rows of ``tables`` for step ``at``, after any rows that could not be written before.

        Raises:
            OSError: the rows cannot be written now; the next call tries again.
            TakenError: a later log of this process goes on with the file.
        """
        if self.taken:
            raise TakenError(
                f"{self.path} is continued by another monitor of this process. Choose another folder."
            )
        line = {"part": self.part, "at": at, "tables": tables}
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        self._waiting.append(text.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the rows that an earlier ``append`` could not write."""
        if self._waiting and not self.taken:
            self._append_bytes(b"".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Close the file and give up the lock."""
        os.close(self._file)
        if self.taken:
            return
        _OPEN.pop(self.path.resolve(), None)
        (self.path.parent / _CLAIM).unlink(missing_ok=True)
        os.close(self._claim)

    def _begin_part(self, columns: Mapping[str, Mapping[str, str]]) -> int:
        """Cut off a broken last line, or write the line of columns; return the new part's number."""
        content = self.path.read_bytes()
        whole, first = content.rfind(b"\n") + 1, json.dumps({"columns": columns}).encode() + b"\n"
        if not whole and not first.startswith(content):
            raise RunError(
                f"{self.path} is no log of a run. Move it away, or choose another folder."
            )
        if not whole:
            os.ftruncate(self._file, 0)
            self._append_bytes(first)
            return 0
        try:
            known = read_log_columns(self.path)
            last = max((line.part for line in _read_all_log_lines(self.path)), default=-1)
        except ValueError as error:
            raise RunError(f"{self.path} is damaged ({error}). Choose another folder.") from error
        if known != columns:
            raise RunError(
                f"{self.path} has other tables than this run would add to. Choose another folder."
            )
        if whole < len(content):
            os.ftruncate(self._file, whole)
        return last + 1

    def _append_bytes(self, content: bytes) -> None:
        """Append bytes and force them onto the disk; after an error the file is as it was."""
        before = os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(content):
                done += os.write(self._file, content[done:])
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise


_OPEN: "weakref.WeakValueDictionary[Path, RunLog]" = weakref.WeakValueDictionary()


def refuse_used_log(folder: Path) -> None:
    """Refuse to begin a run in a folder whose log is open in this process or already has rows."""
    path = folder / LOG_FILE
    if path.resolve() in _OPEN:
        raise RunError(
            f"{folder} is in use by another monitor of this process. Choose another folder."
        )
    if path.is_file():
        with path.open("rb") as file:
            file.readline()
            if file.readline():
                raise RunError(
                    f"{folder} holds what another run has read. Choose another folder, or go on with that run."
                )


def read_log_columns(path: Path) -> dict[str, dict[str, str]]:
    """Read the first line of a log: table -> column -> dtype; ValueError if it has another form."""
    with path.open("rb") as file:
        first = parse_json(file.readline())
    columns = first.get("columns") if isinstance(first, dict) else None
    if not isinstance(columns, dict) or not all(
        isinstance(one, dict) and one and all(dtype in _DTYPES for dtype in one.values())
        for one in columns.values()
    ):
        raise ValueError("its first line names no tables")
    return columns


def _read_all_log_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        file.readline()
        for number, text in enumerate(file, start=2):
            if not text.endswith(b"\n"):
                return
            found = parse_json(text)
            line = (
                Line(**found)
                if isinstance(found, dict) and set(found) == set(Line._fields)
                else None
            )
            if (
                line is None
                or type(line.part) is not int
                or type(line.at) is not int
                or not isinstance(line.tables, dict)
                or not all(isinstance(blocks, list) for blocks in line.tables.values())
                or not all(
                    isinstance(one, dict) for blocks in line.tables.values() for one in blocks
                )
            ):
                raise ValueError(f"line {number} holds no rows")
            yield line


def read_log_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a log that count, in order: if a resumed run wrote a step again, only its later lines."""
    begins: dict[int, float] = {}
    for line in _read_all_log_lines(path):
        begins.setdefault(line.part, line.at)
    until, bound = {}, math.inf
    for part in sorted(begins, reverse=True):
        until[part] = bound
        bound = min(bound, begins[part])
    yield from (line for line in _read_all_log_lines(path) if line.at < until[line.part])


def read_log(path: Path) -> dict[str, pd.DataFrame]:
    """Read a log as tables by name; if a resumed run wrote a step again, only its later rows count."""
    dtypes = read_log_columns(path)
    found: dict[str, dict[str, list[Any]]] = {
        name: {one: [] for one in of} for name, of in dtypes.items()
    }
    for line in read_log_lines(path):
        for name, blocks in line.tables.items():
            for block in blocks:
                if name not in found or set(block) != set(found[name]):
                    raise ValueError(
                        f"its rows of {name!r:.40} have other columns than its first line says"
                    )
                lengths = {len(value) for value in block.values() if isinstance(value, list)} or {1}
                if len(lengths) > 1:
                    raise ValueError(f"columns of {name!r:.40} differ in length")
                for column, value in block.items():
                    rows = value if isinstance(value, list) else [value] * max(lengths)
                    found[name][column] += rows
    try:
        return {name: pd.DataFrame(table).astype(dtypes[name]) for name, table in found.items()}
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _open_file(path: Path, more: int = 0) -> int:
    """Open a file to read and write, with ``more`` flags; refuse a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | more, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RunError(
            f"{path} is a link; need a file of the run itself. Choose another folder."
        ) from error


def _lock_file(path: Path) -> int:
    import fcntl  # not there on Windows, where nothing but this needs it

    file = _open_file(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            raise in_use_error(path.parent) from error
    return file


def in_use_error(folder: Path) -> RunError:
    return RunError(
        f"{folder} is in use by another process; need a folder that no other run is writing. Wait for that one, or "
        "choose another folder."
    )
