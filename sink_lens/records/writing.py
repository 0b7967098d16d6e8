"""Write a run folder: under a lock, file by file, and continued from where an equal run stopped."""

import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pandas as pd
import safetensors.numpy
from filelock import FileLock, Timeout

from ..errors import InputError, RunError, SinkLensError, UndrawnError
from ..files import check_file_name, refuse_tilde
from .log import in_use_error
from .provenance import CIRCUMSTANCE, IDENTITY, plain_json
from .reading import (
    LOCK_FILE,
    PAGE_FILE,
    RUN_FILE,
    is_file_intact,
    is_regular_file,
    lock_of_folder,
    read_columns,
    read_raw_run_json,
    read_run_json,
)

PAGE_MARK = b'<meta name="generator" content="sink_lens">'
"""Text of a page that was drawn from a run: no other file of that name is ever replaced or deleted."""
_GOES_ON = "goes on from "
"""Begins a note that a run was continued with other versions."""
_TABLE_ENDINGS = ("", ".parquet", ".csv", ".safetensors")


def goes_on_note(folder: Path) -> str:
    return f"what is finished is in {folder}; the same call with out={str(folder)!r} goes on"


def default_run_folder(name: str) -> Path:
    """Return the folder of a run if the user names none: ``runs/NAME-DATE-TIME``, one that is not there.

    A second run within a second gets ``-2`` behind it: it must not go on with the first.
    """
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(name).name) or "model"
    first = Path("runs") / f"{stem[:60]}-{datetime.now():%Y%m%d-%H%M%S}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([first], others) if not one.exists())


class RunWriter:
    """A run folder that is being written, under a lock; closing it records how the run ended."""

    def __init__(
        self,
        folder: Path,
        *,
        record: dict[str, Any],
        lock: FileLock,
        made: list[Path],
        adding: bool = False,
        recomputes: bool = False,
    ) -> None:
        self.folder = folder
        self._record = record | {"written": record.get("written", list(record["files"]))}
        self._lock = lock
        self._made = made
        self._adding = adding
        self._recomputes = recomputes
        self._earlier: dict[str, Any] | None = None
        self._wrote = False

    def has(self, name: str) -> bool:
        """Check whether the folder has this table, tensors or file, complete."""
        return any(name in (file, Path(file).stem) for file in self._record["files"])

    def add_provenance(self, **facts: Any) -> None:
        """Add facts to the run's provenance; the next file that is written takes them into run.json."""
        self._record["provenance"] |= facts

    def read_or_make(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """Return the table NAME.parquet; if no earlier start of the run wrote it, write what ``make`` returns."""
        if self.has(name):
            return self.read(name)
        frame = make()
        self.write_table(name, frame)
        return frame

    def read(self, name: str, *, columns: Sequence[str] = ()) -> pd.DataFrame:
        """Read the table NAME.parquet; RunError if it is damaged, or lacks one of the columns."""
        return read_columns(self.folder / f"{name}.parquet", columns, kind=self._record["kind"])

    def write_table(self, name: str, frame: pd.DataFrame) -> Path:
        """Write a data frame to NAME.parquet, without its index."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        return self.write_bytes(f"{name}.parquet", buffer.getvalue())

    def write_csv(self, name: str, frame: pd.DataFrame) -> Path:
        """Write a data frame to NAME.csv, without its index; nan is an empty cell.

        Texts are written as they are, so that they are read back equal. A spreadsheet takes one that begins with "="
        for a formula: open such a file as text, or copy the table from the page, which escapes them.
        """
        text = frame.to_csv(index=False, lineterminator="\n")
        return self.write_bytes(f"{name}.csv", text.encode())

    def write_tensors(self, name: str, tensors: Mapping[str, np.ndarray]) -> Path:
        contiguous = {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}
        return self.write_bytes(f"{name}.safetensors", safetensors.numpy.save(contiguous))

    def write_findings(self, sentences: Iterable[str], *, notes: Iterable[str]) -> Path:
        said = [*sentences, *(f"note: {note}" for note in notes)]
        return self.write_text("findings.txt", "\n".join(said) + "\n")

    def write_text(self, filename: str, text: str) -> Path:
        return self.write_bytes(filename, text.encode())

    def write_bytes(self, filename: str, payload: bytes) -> Path:
        """Write bytes to a file, list it in run.json with size and hash, and return its path.

        run.json lists the file before it gets its name, so that every file of the run is known to be the run's.

        Raises:
            RunError: the file cannot be written, or a file with this name is there that is not the run's.
        """
        refuse_foreign_files(self.folder, [filename], written=self._record["written"])
        self._begin_writing()
        path, files = self.folder / filename, self._record["files"]
        before = files.get(filename)
        part = self._write(path, payload)
        try:
            self._list_content(filename, payload)
            part.replace(path)
        except BaseException as error:
            files.pop(filename)
            if before is not None:
                files[filename] = before
            part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._unwritten_error(path, error, size=len(payload)) from error
            raise
        return path

    def list_file(self, name: str) -> None:
        """Add a file that the run has written into the folder to run.json, with its present size and hash."""
        self._begin_writing()
        self._list_content(name, (self.folder / name).read_bytes())

    def _list_content(self, name: str, content: bytes) -> None:
        self._record["files"][name] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        if name not in self._record["written"]:
            self._record["written"].append(name)
        self._write_run_json()

    def _begin_writing(self) -> None:
        self._wrote = True
        if (replaced := self._record.pop("replaces", None)) is not None:
            self._record["removes"] = replaced["files"]  # known should the process be killed here
            self._write_run_json()
            _remove_page(self.folder)
            _remove_intact_files(self.folder, self._record.pop("removes"))

    def plan_field(self) -> dict[str, str]:
        """Return the hash of ``plan.json``, which shards of one plan share; {} without a plan."""
        entry = self._record["files"].get("plan.json")
        return {} if entry is None else {"plan_sha256": entry["sha256"]}

    def refuse_other(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Refuse the shard in ``folder``, whose run.json is ``record``, if it is of another run."""
        _refuse_other_run(folder, earlier=record, record=self._record, compared=IDENTITY)

    def list_parts(self, names: Iterable[str]) -> None:
        """Name the parts that the run is computed in, so that run.json says how many are done."""
        self._record["parts"] = list(names)

    def leave_unfinished(self) -> None:
        """Let the run count as unfinished when the block ends: run.json stays as it is."""
        self._adding = True

    def clear(self, begins: str = "") -> None:
        """Remove the run's files whose names begin with a text."""
        files = self._record["files"]
        if not (held := [name for name in files if name.startswith(begins)]):
            return
        self._record["files"] = {name: entry for name, entry in files.items() if name not in held}
        self._write_run_json()
        for file in held:
            (self.folder / file).unlink(missing_ok=True)

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._write_final_status(error)
        finally:
            _release_and_remove_lock(self._lock)
            if error is not None:
                _remove_empty_folders(self._made)
            if isinstance(error, KeyboardInterrupt) and (self._wrote or self._record["files"]):
                error.add_note(goes_on_note(self.folder))

    def _begin_record(self, *, overwrite: bool, reopen: bool) -> None:
        """Begin run.json, or continue that of an earlier run in the folder; a finished one only to ``reopen`` it.

        To ``overwrite`` it, the new record keeps that of the earlier run, whose files stay where they are until the new
        run writes its first one.
        """
        for leftover in self.folder.glob(f".{PAGE_FILE}*{_PART}"):
            if is_regular_file(leftover):
                leftover.unlink()
        if os.path.lexists(self.folder / RUN_FILE):
            self._continue_record(overwrite=overwrite, reopen=reopen)
        expects = self._record["expects"]
        expected = [f"{name}{ending}" for name in expects for ending in _TABLE_ENDINGS]
        refuse_foreign_files(self.folder, expected, written=self._record["written"])
        self._write_run_json()

    def _continue_record(self, *, overwrite: bool, reopen: bool) -> None:
        """Take over what the folder's earlier run has written, or begin to replace it."""
        raw, earlier = read_raw_run_json(self.folder), read_run_json(self.folder)
        written = list(earlier.get("written", earlier["files"]))
        for name in dict.fromkeys([RUN_FILE, *written, *earlier["files"]]):
            path = self.folder / name
            if os.path.lexists(path) and not is_regular_file(path):
                found = "a folder" if path.is_dir() else "no file"
                found = "a link" if path.is_symlink() else found
                raise RunError(
                    f"{path} is {found}, where its run has a file; need the run as written. Move it away, or choose "
                    "another folder for the run."
                )
        if "replaces" in raw:  # the run that began to replace it was killed before its first file
            path = self.folder / RUN_FILE
            self._write(path, _json_bytes(earlier)).replace(path)
        if not overwrite:
            compared = IDENTITY if self._recomputes else IDENTITY + CIRCUMSTANCE
            _refuse_other_run(
                self.folder, earlier=earlier, record=self._record, compared=compared, reopen=reopen
            )
        self._record["written"] = written
        if overwrite:
            self._record["replaces"] = earlier
            return
        if earlier["status"] != "finished":
            _remove_page(self.folder)  # of what is not finished
        _name_listed_files(self.folder, earlier["files"])
        for name in written:
            part_path(self.folder / name).unlink(missing_ok=True)
        left = earlier.get("removes", {})
        left = {name: entry for name, entry in left.items() if name not in earlier["files"]}
        _remove_intact_files(self.folder, left)
        self._earlier = earlier
        self._keep_earlier_circumstances(earlier["provenance"])
        self._record["started"] = earlier["started"]
        self._record["files"] = {
            file: entry
            for file, entry in earlier["files"].items()
            if is_file_intact(self.folder / file, entry)
        }

    def _keep_earlier_circumstances(self, earlier: Mapping[str, Any]) -> None:
        """Note in the provenance, and warn, that the run goes on with other versions or elsewhere."""
        own = self._record["provenance"]
        kept = [one for one in earlier.get("notes", ()) if one.startswith(_GOES_ON)]
        own["notes"] = [*own.get("notes", ()), *kept]
        if changed := {
            name: earlier.get(name) for name in CIRCUMSTANCE if earlier.get(name) != own.get(name)
        }:
            now = {name: own.get(name) for name in changed}
            said = f"{_GOES_ON}{json.dumps(changed)} on {json.dumps(now)}"
            own["notes"].append(said)
            warnings.warn(f"{self.folder} {said}", stacklevel=6)

    def _write_final_status(self, error: BaseException | None) -> None:
        if self._adding:
            return
        before = self._record.get("replaces")
        if before is None and isinstance(error, SinkLensError) and not self._wrote:
            before = self._earlier  # refused: as it was found
        if error is not None and before is not None:
            self._record = before
            self._write_run_json()
            return
        if error is None:
            self._begin_writing()
        elif not self._record["written"]:  # nothing was measured: leave nothing behind
            (self.folder / RUN_FILE).unlink(missing_ok=True)
            return
        status = "finished" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt):
            status = "interrupted"
        self._record |= {"status": status, "ended": utc_now_text()}
        if error is None:
            self._record.pop("parts", None)
        elif status == "failed":
            self._record["error"] = f"{type(error).__name__}: {error}"
        try:
            self._write_run_json()
        except RunError as unwritten:
            if error is None:
                raise
            error.add_note(f"{RUN_FILE} still says 'running': {unwritten}")

    def _write_run_json(self) -> None:
        path, content = self.folder / RUN_FILE, _json_bytes(self._record)
        try:
            self._write(path, content).replace(path)
        except OSError as error:
            raise self._unwritten_error(path, error, size=len(content)) from error

    def _write(self, path: Path, payload: bytes) -> Path:
        try:
            return write_part(path, payload)
        except OSError as error:
            raise self._unwritten_error(path, error, size=len(payload)) from error

    def _unwritten_error(self, path: Path, error: OSError, *, size: int) -> RunError:
        complete = f"Complete in this run: {', '.join(self._record['files']) or 'none'}."
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return RunError(f"{path} cannot be written ({error.strerror}). {complete}")
        free = shutil.disk_usage(self.folder).free
        return RunError(
            f"the disk is full: {path} needs {size:,} bytes and {self.folder} has {free:,} free. {complete} Free some "
            "space and run the same again: it goes on from there."
        )


_PART = ".sink_lens"
"""Ending of the temporary name of a file that is being written."""


def part_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PART}")


def write_part(path: Path, payload: bytes) -> Path:
    """Write bytes under the temporary name of ``path``, force them onto the disk, and return the name.

    A link with that name is replaced, never followed. An OSError leaves nothing.
    """
    part = part_path(path)
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def write_atomically(path: Path, payload: bytes) -> None:
    """Write bytes to a file whole or not at all; after an OSError an earlier file is still there."""
    part = write_part(path, payload)
    try:
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def refuse_foreign_files(folder: Path, names: Iterable[str], *, written: Collection[str]) -> None:
    """Refuse to write a file if there is one with its name that the run, which has ``written`` some, did not write."""
    for name in names:
        if name not in written and os.path.lexists(folder / name):
            raise RunError(
                f"{folder / name} is no file of the run in its folder, which would write one with this name. Move it "
                "away and run the same again: what is finished is kept."
            )


def _remove_page(folder: Path) -> None:
    page = folder / PAGE_FILE
    if is_own_page(page):
        page.unlink()


def is_own_page(path: Path) -> bool:
    if not is_regular_file(path):
        return False
    with path.open("rb") as file:
        return PAGE_MARK in file.read(4096)


def remove_run(folder: Path) -> None:
    """Remove a run from its folder, and the folder if nothing else is in it; files that are not the run's stay."""
    if folder.is_symlink():
        return
    record, lock = read_run_json(folder), folder / LOCK_FILE
    _remove_page(folder)
    if is_regular_file(lock) and lock.stat().st_size == 0:
        lock.unlink()
    _remove_intact_files(folder, record["files"])
    for name in (*record.get("written", ()), RUN_FILE):
        part_path(folder / name).unlink(missing_ok=True)
    (folder / RUN_FILE).unlink()
    _remove_empty_folders([folder])


def _remove_intact_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Remove those of a run's files that are as it wrote them; one changed since may be somebody's own."""
    for name, entry in files.items():
        path = folder / name
        if is_regular_file(path) and is_file_intact(path, entry):
            path.unlink()


def _name_listed_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Name the files that run.json lists and that a process which was killed had not named yet."""
    for name, entry in files.items():
        part = part_path(folder / name)
        if is_regular_file(part) and is_file_intact(part, entry):
            part.replace(folder / name)


def _json_bytes(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()


def create_run(
    folder: str | os.PathLike[str],
    *,
    kind: str,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    expects: Sequence[str] = (),
    overwrite: bool = False,
    reopen: bool = False,
    recomputes: bool = False,
    patience: float = 0,
    started: str | None = None,
) -> RunWriter:
    """Open a run folder for writing, new or continued, under a lock; use it in a `with` statement.

    If the block fails before anything was written, the folder is left as it was found, including the run that was to be
    replaced.

    Args:
        folder: it is created if it does not exist.
        kind: such as "trace".
        config: the whole configuration, as plain values.
        provenance: what the run is made from: model, hashes, BOS condition, dtype, device, kernel, versions, seeds and
            thresholds.
        expects: names of the files that a finished run of this kind has; `Run.missing` lists the absent ones.
        overwrite: replace the run that the folder holds, finished or not. Files that belong to no run stay.
        reopen: also continue an equal run that is already finished, for runs that can be added to.
        recomputes: the run compares finished numbers with new ones before it goes on: other versions, another device or
            kernel are a note then, and no reason to refuse.
        patience: seconds to wait for a folder that is in use, such as by a page that is drawn.
        started: when the run began (``utc_now_text``), if it has measured before it writes; None is now.

    Raises:
        UndrawnError: the folder holds this exact run, finished but without its page.
        RunError: the folder is in use; it holds a finished run, files that are no run, or an unfinished run of another
            kind, configuration, inputs or software; or it cannot be written.
    """
    folder = Path(folder)
    check_file_name(folder, what="the folder of the run")
    refuse_tilde(folder, what="the folder of the run")
    record = {
        "kind": kind,
        "status": "running",
        "started": started or utc_now_text(),
        "ended": None,
        "error": None,
        "config": plain_json(config),
        "provenance": plain_json(provenance),
        "expects": list(expects),
        "files": {},
        "written": [],
    }
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock: FileLock | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_other_files(folder)
        lock = lock_of_folder(folder, patience=patience)
        lock.acquire()
        writer = RunWriter(folder, record=record, lock=lock, made=made, recomputes=recomputes)
        writer._begin_record(overwrite=overwrite, reopen=reopen)
    except Timeout:
        raise in_use_error(folder) from None
    except BaseException as error:  # Ctrl-C too
        if lock is not None and lock.is_locked:
            _release_and_remove_lock(lock)
        _remove_empty_folders(made)
        if isinstance(error, OSError):
            raise RunError(
                f"{folder} cannot be written ({error.strerror}). Choose another folder."
            ) from error
        raise
    return writer


def check_folder_free(folder: str | os.PathLike[str] | None, *, overwrite: bool) -> None:
    """Refuse a folder that no run can be written to, before anything is computed.

    It is a file, holds files but no run, or, without ``overwrite``, a finished run with its page.
    """
    if folder is None:
        return
    folder = Path(folder)
    check_file_name(folder, what="the folder of the run")
    refuse_tilde(folder, what="the folder of the run")
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if there.is_file():
        raise RunError(f"{there} is a file; need a folder for the run.")
    if folder.is_dir():
        _refuse_other_files(folder)
    if overwrite or not (folder / RUN_FILE).is_file():
        return
    earlier = read_run_json(folder)
    if earlier["status"] == "finished" and (folder / PAGE_FILE).exists():
        raise RunError(_finished_run_message(folder, earlier))


def _finished_run_message(folder: Path, earlier: Mapping[str, Any]) -> str:
    return (
        f"{folder} holds a finished run ({earlier['kind']}, {earlier['ended']}); need another folder, or "
        "overwrite=True to replace it."
    )


def add_to_run(folder: str | os.PathLike[str]) -> RunWriter:
    """Open an existing run folder, under a lock, to add files that are made from it; use it in a `with` statement.

    The run's provenance and status stay as they are, whatever happens in the block.
    """
    folder = Path(folder)
    read_run_json(folder)
    lock = lock_of_folder(folder)
    try:
        lock.acquire()
    except Timeout:
        raise in_use_error(folder) from None
    except OSError as error:
        raise RunError(
            f"{folder} cannot be written ({error.strerror}). Make it writable, or copy it."
        ) from error
    try:
        record = read_run_json(folder)
        _name_listed_files(folder, record["files"])
    except BaseException:
        _release_and_remove_lock(lock)
        raise
    return RunWriter(folder, record=record, lock=lock, made=[], adding=True)


def refuse_file_of_run(path: Path, *, replaceable: Collection[str]) -> None:
    """Refuse to write over a file that belongs to a run: run.json, one that it lists, or one in its folder.

    Of the last, files with the suffixes ``replaceable`` may be replaced.
    """
    refuse_tilde(path, what="the name of the file")
    target = Path(os.path.realpath(path))  # resolve() raises at a loop of links
    for folder in target.parents:
        if not (folder / RUN_FILE).is_file():
            continue
        try:
            own = {RUN_FILE, *read_run_json(folder)["files"]}
        except RunError:  # run.json is damaged, so the files that it lists are unknown
            own = {RUN_FILE}
        if str(target.relative_to(folder)) in own or (
            target.is_file() and target.suffix.lower() not in replaceable
        ):
            raise InputError(f"{path} belongs to the run in {folder}; need a file of its own.")


def _remove_empty_folders(folders: Sequence[Path]) -> None:
    for path in folders:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _release_and_remove_lock(lock: FileLock) -> None:
    # under the lock: others that opened it see that it is gone
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def _refuse_other_files(folder: Path) -> None:
    held = sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)
    if RUN_FILE not in held and set(held) - {part_path(folder / RUN_FILE).name}:
        some = ", ".join(held[:3]) + (", ..." if held[3:] else "")
        raise RunError(
            f"{folder} holds files and no {RUN_FILE} ({some}); need an empty folder, a new one or an "
            "unfinished run."
        )


def _refuse_other_run(
    folder: Path,
    *,
    earlier: Mapping[str, Any],
    record: Mapping[str, Any],
    compared: Sequence[str] = IDENTITY + CIRCUMSTANCE,
    reopen: bool = True,
) -> None:
    """Refuse to continue the ``earlier`` run of a folder if configuration or ``compared`` provenance differ.

    A finished run is refused too, unless ``reopen`` is true.
    """
    undrawn = earlier["status"] == "finished" and not (folder / PAGE_FILE).exists()
    draw = f" Its page is missing; sink-lens report {folder} draws it." if undrawn else ""
    there, here = (
        {"kind": of["kind"]}
        | of["config"]
        | {name: of["provenance"].get(name) for name in compared}
        for of in (earlier, record)
    )
    others = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if earlier["status"] == "finished" and not reopen:
        text = _finished_run_message(folder, earlier) + draw
        raise UndrawnError(text, folder=folder) if undrawn and not others else RunError(text)
    if others:
        each = (f"{name}: {there.get(name)} there, {here.get(name)} here" for name in others)
        listed = "; ".join(each)
        raise RunError(
            f"{folder} holds a run that differs in {listed}. Repeat that one, choose another "
            "folder, or overwrite=True to replace it."
        )


def utc_now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
