"""Checkpoints on disk: whole or passed over, and no more of them than are needed.

A checkpoint is written in another folder and moved here when ``checkpoint.json``, which lists every file with its
size, lies in it. ``checkpoint-N`` is kept; ``latest-N`` only serves to go on from. The state of the optimizer is twice
the size of the model: only the newest two checkpoints have it.
"""

import contextlib
import json
import os
import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path

from ..errors import RunError
from ..files import parse_json
from ..records import write_atomically

KEPT, LATEST, PART = "checkpoint-", "latest-", ".part"
"""Beginnings of the names of checkpoints, and the folder beside them in which the Trainer writes one."""
_MANIFEST = "checkpoint.json"
_STATE = ("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model_fsdp*")


def seal_checkpoint(folder: Path, target: Path) -> None:
    """Force a checkpoint's files onto the disk, write their sizes beside them, and move ``folder`` to ``target``."""
    sizes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size}
    write_atomically(folder / _MANIFEST, json.dumps({"files": sizes}, indent=1).encode())
    if target.exists():
        shutil.rmtree(target)
    folder.replace(target)


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder of each checkpoint in ``folder``, newest first: ``checkpoint-N``, or else ``latest-N``."""
    by_step: dict[int, Path] = {}
    for prefix in (KEPT, LATEST):
        for path in folder.glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix)
            if path.is_dir() and number.isdecimal():
                by_step.setdefault(int(number), path)
    return dict(sorted(by_step.items(), reverse=True))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in ``folder`` that has its state, or None; warn of each damaged one."""
    for path in list_checkpoints(folder).values():
        try:
            if has_whole_state(path):
                return path
        except RunError as error:
            warnings.warn(f"{error}; the one before it is taken", stacklevel=3)
    return None


def has_whole_state(folder: Path) -> bool:
    """Return True if a checkpoint has the state of optimizer, schedule and random numbers, False if it has weights.

    Raises:
        RunError: a file of the weights is missing, or a file has not the size that it was written with.
    """
    try:
        listed = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        state = {name for name in listed if any(fnmatch(name.split("/")[0], one) for one in _STATE)}
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*")}
        for name, entry in listed.items():
            if (found := sizes.get(name)) != entry["bytes"] and not (found is None and name in state):
                raise ValueError(f"{name} has {found or 0:,} bytes, not {entry['bytes']:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"the checkpoint {folder} is damaged ({error})") from error
    return bool(state) and state <= sizes.keys()


def remove_superseded_checkpoints(folder: Path, *, finished: bool) -> None:
    """Remove old checkpoints from ``folder``: ``latest-N`` wholly, of ``checkpoint-N`` the optimizer's state alone.

    The two newest whole checkpoints stay as they are; once the run has ``finished``, only the newest one does.
    """
    state: dict[Path, bool] = {}
    for path in list_checkpoints(folder).values():
        with contextlib.suppress(RunError):
            state[path] = has_whole_state(path)
    kept = [path for path, whole in state.items() if whole][: 1 if finished else 2]
    for path in set(folder.glob(f"{LATEST}*")) - set(kept):
        if path.name.removeprefix(LATEST).isdecimal():
            shutil.rmtree(path)
    for path in (path for path in state if path.exists() and path not in kept):
        for part in (part for pattern in _STATE for part in path.glob(pattern)):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()
