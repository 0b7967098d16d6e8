"""Checkpoints on disk: whole or not there, verified before they are trusted, and no more of them than are needed.

A checkpoint is written into another folder and renamed when ``checkpoint.json``, which lists every file with its
size and hash, lies in it. ``checkpoint-N`` is kept; ``latest-N`` only serves to go on from. The state of the
optimizer is three times the size of the model: only the newest two checkpoints have it.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..files import parse_json
from ..records import write_atomically

KEPT, LATEST = "checkpoint-", "latest-"
LOG = "log.parquet"
"""The log up to the checkpoint, in its folder."""
_MANIFEST = "checkpoint.json"
_STATE = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model_fsdp*")
_NEEDED = "scheduler.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder whose files are all there, byte for byte."""

    folder: Path
    step: int
    facts: Mapping[str, Any]
    """Facts that were passed to ``seal_checkpoint``."""
    resumable: bool
    """True if it holds the optimizer's state."""


def seal_checkpoint(folder: Path, *, step: int, facts: Mapping[str, Any]) -> None:
    """Complete the checkpoint in ``folder``: force its files onto the disk; write a manifest with sizes and hashes.

    The manifest also holds the step, and ``facts``, anything else that a resumed training must know.
    """
    (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, and nothing reads it
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = {"step": step, "facts": dict(facts), "files": files}
    write_atomically(folder / _MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder of each checkpoint in ``folder``, newest first: ``checkpoint-N``, or else ``latest-N``."""
    by_step: dict[int, Path] = {}
    for prefix in (KEPT, LATEST):
        for path in folder.glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix)
            if path.is_dir() and number.isdecimal():
                by_step.setdefault(int(number), path)
    return dict(sorted(by_step.items(), reverse=True))


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest intact and resumable checkpoint, or None; warn of each damaged one."""
    for path in list_checkpoints(folder).values():
        try:
            checkpoint = read_checkpoint(path)
        except RunError as error:
            warnings.warn(f"{error}; the one before it is taken", stacklevel=3)
            continue
        if checkpoint.resumable:
            return checkpoint
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in ``folder``, and compare the size and hash of each of its files with the manifest.

    Raises:
        RunError: a file is missing or changed.
    """
    try:
        listed = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))
        files, step, facts = listed["files"], listed["step"], listed["facts"]
        if type(step) is not int or not all(math.isfinite(float(facts[name])) for name in ("since_row", "seconds")):
            raise ValueError("its step or its facts are no numbers")
        for name, entry in files.items():
            path = folder / name
            if not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):  # resolve() raises at a loop of links
                raise ValueError(f"{name} is no file of this folder")
            if path.stat().st_size != entry["bytes"]:
                raise ValueError(f"{name} has {path.stat().st_size:,} bytes, not {entry['bytes']:,}")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise ValueError(f"{name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"the checkpoint {folder} is damaged ({error})") from error
    return Checkpoint(folder=folder, step=step, facts=facts, resumable=_NEEDED in files)


def remove_checkpoints_after(folder: Path, step: int) -> None:
    """Remove from ``folder`` all checkpoints of steps after ``step`` and all that were only half written."""
    for leftover in folder.glob(".part-*"):
        shutil.rmtree(leftover)
    for later, path in list_checkpoints(folder).items():
        if later > step:
            shutil.rmtree(path)


def remove_superseded_checkpoints(folder: Path, *, finished: bool) -> None:
    """Remove old checkpoints from ``folder``: ``latest-N`` wholly, of ``checkpoint-N`` the optimizer's state alone.

    The two newest whole checkpoints stay as they are; once the run has ``finished``, only the newest one does.
    """
    whole = [path for path in list_checkpoints(folder).values() if _looks_resumable(path)]
    for path in folder.iterdir():
        name, _, number = path.name.rpartition("-")
        if not number.isdecimal() or path in whole[: 1 if finished else 2]:
            continue
        if f"{name}-" == LATEST:
            shutil.rmtree(path)
        elif f"{name}-" == KEPT:
            state = [part for pattern in _STATE for part in path.glob(pattern)]
            if not state or not _looks_resumable(path):
                continue
            listed = parse_json((path / _MANIFEST).read_text(encoding="utf-8"))
            gone = {part.name for part in state}
            listed["files"] = {name: one for name, one in listed["files"].items() if name.split("/")[0] not in gone}
            write_atomically(path / _MANIFEST, json.dumps(listed, indent=1, allow_nan=False).encode())
            for part in state:
                if part.is_dir():
                    shutil.rmtree(part)
                else:
                    part.unlink()


def _looks_resumable(folder: Path) -> bool:
    """Check that the checkpoint has the optimizer's state and that its files have the sizes in its manifest."""
    try:
        files = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return _NEEDED in files and all((folder / name).stat().st_size == files[name]["bytes"] for name in files)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
