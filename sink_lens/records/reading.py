"""Read a run folder: its provenance at once, its tables and tensors on demand."""

import contextlib
import copy
import hashlib
import html
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors
import safetensors.numpy
from filelock import FileLock, Timeout
from pandas.api import types

from ..errors import RunError
from ..files import check_file_name, is_plain_file_name
from ..schema import table_of
from .log import LOG_FILE, read_log, read_log_columns
from .long_tables import Shortened, shorten_table

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
PAGE_FILE = "report.html"
"""It is drawn from the run's other files, and run.json never lists it."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "kind": (str,),
    "status": (str,),
    "started": (str,),
    "ended": (str, type(None)),
    "error": (str, type(None)),
    "config": (dict,),
    "provenance": (dict,),
    "expects": (list,),
    "files": (dict,),
}
_PIECE = 1 << 20
_NUMBERS = ("integer", "floating", "mixed-integer-float", "boolean", "empty")
_TEXTS = ("string", "empty")


class Tables(Mapping[str, pd.DataFrame]):
    """The tables of a run by name; each access reads the file again, unless the tables are kept in memory."""

    def __init__(self, folder: Path, *, files: Mapping[str, Mapping[str, Any]], kind: str) -> None:
        self._kind = kind
        self._files = files
        self._kept: dict[str, pd.DataFrame] | None = None
        self._most: int | None = None
        self.shortened: dict[str, Shortened] = {}
        """Tables of which some rows were read."""
        self._paths = {
            Path(file).stem: folder / file
            for file in files
            if Path(file).suffix in (".parquet", ".csv") and (folder / file).exists()
        }
        log = folder / LOG_FILE
        if log.name not in files or not log.is_file():
            return
        # since the tables were written: all are read from it
        grown = log.stat().st_size > files[log.name]["bytes"]
        with contextlib.suppress(OSError, ValueError):
            names = [name for name in read_log_columns(log) if grown or name not in self._paths]
            self._paths |= dict.fromkeys(names, log)

    def cached_copy(self, *, most: int | None = None) -> "Tables":
        """Return a copy that reads each table only once, for code that never changes the tables.

        Tables of more than ``most`` rows are shortened, and stand in ``shortened``.
        """
        same = copy.copy(self)
        same._kept, same._most, same.shortened = {}, most, {}
        return same

    def __getitem__(self, name: str) -> pd.DataFrame:
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        path = self._paths[name]
        try:
            if not is_file_intact(path, self._files[path.name]):
                raise ValueError(f"it is not what {RUN_FILE} says was written")
            if path.name == LOG_FILE:
                table = _check_table(read_log(path)[name], kind=self._kind, name=name)
            else:
                table = read_table(path, kind=self._kind)
            if self._most is not None and len(table) > self._most:
                table, self.shortened[name] = shorten_table(table, most=self._most)
        except (OSError, ValueError) as error:
            raise damaged_file_error(path, error) from error
        if self._kept is not None:
            self._kept[name] = table
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, name: object) -> bool:
        return name in self._paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read from its folder; its tables are read on demand."""

    folder: Path
    kind: str
    """Such as "trace"."""
    status: str
    """How the run ended: finished, interrupted or failed; running also if the process was killed."""
    error: str | None
    """What made the run fail."""
    started: str
    """In UTC, like ``ended``."""
    ended: str | None
    """None if it has not ended."""
    config: dict[str, Any]
    """The whole configuration."""
    provenance: dict[str, Any]
    """What the run was made from: model, hashes, tokens, device and versions."""
    tables: Tables
    """Name of a table (.parquet or .csv) -> data frame."""
    missing: list[str]
    """Files that a finished run of this kind has and this run lacks or has lost."""
    place: Any = None
    """Holds the folder if it is temporary."""

    def _repr_html_(self) -> str:
        return "".join(
            f"<div><b>{name}</b> {html.escape(text)}</div>" for name, text in self._facts().items()
        )

    def __repr__(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in self._facts().items())

    def _facts(self) -> dict[str, str]:
        facts = {
            "run": f"{self.kind} ({self.status})",
            "of": str(self.provenance.get("model") or "no model"),
            "in": str(self.folder),
            "tables": ", ".join(self.tables),
            "missing": ", ".join(self.missing),
        }
        return {name: text[:400] for name, text in facts.items() if text}

    def need(self, name: str, *, columns: Sequence[str]) -> pd.DataFrame:
        """Read a table; RunError if it is not in the run, is damaged, or lacks one of the columns."""
        if name not in self.tables:
            raise RunError(
                f"this run has no table {name!r}. Finish the run, or run it again, to see it."
            )
        table = self.tables[name]
        if absent := [column for column in columns if column not in table.columns]:
            raise RunError(
                f"the table {name!r} lacks {', '.join(absent)}; need {', '.join(columns)}. Run again to see it."
            )
        return table

    def optional(self, name: str, *, columns: Sequence[str]) -> pd.DataFrame | None:
        """Read a table; None if it is absent, damaged or lacks a column."""
        try:
            return self.need(name, columns=columns)
        except RunError:
            return None

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """Read the run's file NAME.safetensors: name of a tensor -> array."""
        path = self.folder / f"{name}.safetensors"
        try:
            return safetensors.numpy.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise damaged_file_error(path, error) from error


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read the run in a folder, whether it finished or not.

    Raises:
        RunError: There is no run in the folder, or its run.json is damaged. A damaged table raises when it is read.
    """
    folder = Path(folder)
    record = read_run_json(folder)
    written = {Path(file).stem for file in record["files"]}
    gone = [Path(file).stem for file in record["files"] if not (folder / file).exists()]
    tables = Tables(folder, files=record["files"], kind=record["kind"])
    own = ("kind", "status", "error", "started", "ended", "config", "provenance")
    expected = [name for name in record["expects"] if name not in written and name not in tables]
    return Run(
        folder=folder,
        **{name: record[name] for name in own},
        tables=tables,
        missing=expected + gone,
    )


def is_regular_file(path: Path) -> bool:
    """Check whether there is a file itself, no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def lock_of_folder(folder: Path, *, patience: float = 0) -> FileLock:
    """Return the lock of a run folder, not yet taken; refuse one that is no empty file: it is not a run's."""
    path = folder / LOCK_FILE
    if os.path.lexists(path) and not (is_regular_file(path) and path.stat().st_size == 0):
        raise RunError(
            f"{path} is no lock of a run, which is an empty file. Move it away, or choose another folder."
        )
    return FileLock(path, timeout=patience, thread_local=False)


def run_state(folder: Path) -> str:
    """Return finished, failed, interrupted, running, or stopped (killed while running)."""
    status = str(read_run_json(folder)["status"])
    lock = lock_of_folder(folder)
    if status != "running" or not Path(lock.lock_file).exists():
        return "stopped" if status == "running" else status
    try:
        with lock:
            return "stopped"
    except Timeout:
        return status


def read_table(path: Path, *, kind: str) -> pd.DataFrame:
    """Read a table from a Parquet or CSV file of a run; ValueError if a column has another type than the schema's."""
    table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    return _check_table(table, kind=kind, name=path.stem, text_too=path.suffix == ".csv")


def read_columns(path: Path, columns: Sequence[str], *, kind: str) -> pd.DataFrame:
    """Read a run's table; RunError if it is damaged, or lacks one of the columns."""
    try:
        frame = read_table(path, kind=kind)
        if absent := [column for column in columns if column not in frame]:
            raise ValueError(f"it lacks {', '.join(absent)}")
    except (OSError, ValueError) as error:
        raise damaged_file_error(path, error) from error
    return frame


def _check_table(
    table: pd.DataFrame, *, kind: str, name: str, text_too: bool = False
) -> pd.DataFrame:
    if (described := table_of(kind, name)) is not None:
        for column in described.columns:
            if column.name in table and not (described.open and column.optional):
                _check_column(table, column.name, dtype=column.dtype, text_too=text_too)
    return table


def _check_column(table: pd.DataFrame, name: str, *, dtype: str, text_too: bool) -> None:
    """Refuse a column of another type than ``dtype``, such as fractions for whole numbers.

    ``text_too`` allows numbers instead of texts: "12" is read from CSV as a number.
    """
    cells = table[name]
    if dtype == "int" and types.is_float_dtype(cells):
        broken = cells.to_numpy(dtype=float)
        broken = broken[np.isinf(broken) | (np.floor(broken) < broken)]
        if len(broken):
            raise ValueError(f"the column {name!r} holds {broken[0]}; need whole numbers")
    if (
        dtype == "any"
        or (dtype == "str" and text_too)
        or (dtype != "str" and types.is_numeric_dtype(cells))
    ):
        return
    found = types.infer_dtype(cells, skipna=True)
    if found not in (_TEXTS if dtype == "str" else _NUMBERS) and len(cells.dropna()):
        raise ValueError(f"the column {name!r} is {found}; need {dtype}")


def read_run_json(folder: Path) -> dict[str, Any]:
    """Read and check run.json of a folder.

    If a run began to replace an earlier one and has written no file yet, the record is the earlier one's.
    """
    record = read_raw_run_json(folder)
    return record.get("replaces") or record


def read_raw_run_json(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    check_file_name(path, what="the folder of a run")
    if not path.is_file():
        raise RunError(
            f"{folder} has no {RUN_FILE}, so it is no run. Give the folder that a run was written to."
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _check_run_json(record)
        if "replaces" in record:
            _check_run_json(record["replaces"])
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_file_error(path, error) from error
    return record


def _check_run_json(record: Any) -> None:
    if not isinstance(record, dict):
        raise ValueError("it holds no table")
    if absent := set(_KINDS) - set(record):
        raise ValueError(f"it lacks {', '.join(sorted(absent))}")
    for name, kinds in _KINDS.items():
        if not isinstance(record[name], kinds):
            raise ValueError(
                f"{name} is {record[name]!r:.60}; need {' or '.join(one.__name__ for one in kinds)}"
            )
    if not all(isinstance(name, str) for name in record["expects"]):
        raise ValueError("expects should be names")
    written, removes = record.get("written", []), record.get("removes", {})
    if not isinstance(written, list) or not isinstance(removes, dict):
        raise ValueError("written and removes should be names, and files")
    parts = record.get("parts", [])
    if not isinstance(parts, list) or not all(isinstance(one, str) for one in parts):
        raise ValueError("parts should be names")
    for file in (*record["files"], *written, *removes):
        if (
            not isinstance(file, str)
            or not is_plain_file_name(file)
            or file in (RUN_FILE, LOCK_FILE)
        ):
            raise ValueError(f"it lists {file!r:.60}, which is no file of this folder")
    for file, entry in (*record["files"].items(), *removes.items()):
        if (
            not isinstance(entry, dict)
            or type(entry.get("bytes")) is not int
            or type(entry.get("sha256")) is not str
        ):
            raise ValueError(f"{file} has no size and hash")


def is_file_intact(path: Path, entry: Mapping[str, Any]) -> bool:
    """Check whether a file has the size and hash of its entry; a log may have become longer."""
    if not path.is_file() or path.stat().st_size < entry["bytes"]:
        return False
    digest, left = hashlib.sha256(), entry["bytes"]
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
        longer = path.name != LOG_FILE and file.read(1)
    return left == 0 and not longer and digest.hexdigest() == entry["sha256"]


def damaged_file_error(path: Path, error: Exception) -> RunError:
    return RunError(
        f"{path} cannot be read: it is damaged ({error}). Run again into another folder."
    )
