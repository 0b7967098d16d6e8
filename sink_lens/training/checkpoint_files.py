"""Checkpoints on disk: whole or passed over, and no more of them than are needed.

A checkpoint is written in another folder and moved here when ``checkpoint.json``, which lists every file with its size
and hash, lies in it. ``checkpoint-N`` is kept; ``latest-N`` only serves to go on from. Only the newest two have the
optimizer's state. A file that ``checkpoint.json`` does not list is somebody else's: it is never removed or replaced,
and no link is followed.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..data.cache import sha256_of
from ..errors import RunError
from ..files import parse_json
from ..records import write_atomically
from ..records.writing import refuse_foreign_files

KEPT, LATEST, PART = "checkpoint-", "latest-", ".part"
"""Prefixes of checkpoints' names, and the folder beside them in which the Trainer writes one."""
_MANIFEST = "checkpoint.json"
_STATE = ("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model_fsdp*")
_WRITTEN = (
    *_STATE,
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "trainer_state.json",
    "training_args.bin",
    f"*{_MANIFEST}*",
)
"""What is in a checkpoint before its ``checkpoint.json`` is."""


def seal_checkpoint(folder: Path, target: Path) -> None:
    """Force a checkpoint's files onto the disk, write ``checkpoint.json``, and move ``folder`` to ``target``."""
    listed = {}
    for path in sorted(_files(folder)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        listed[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
    write_atomically(folder / _MANIFEST, json.dumps({"files": listed}, indent=1).encode())
    remove_checkpoint(target)
    names = (*listed, _MANIFEST)
    refuse_foreign_files(target, ["", *names] if target.is_symlink() else names, written=())
    if not target.exists():
        folder.replace(target)
        return
    for name in names:  # beside files of somebody else's; the last one makes it a checkpoint
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).replace(target / name)


def remove_checkpoint(folder: Path) -> None:
    """Remove the files that a checkpoint's ``checkpoint.json`` lists, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if not folder.is_symlink():
            listed = _read_manifest(folder)
            own = [path for path in _files(folder) if path.relative_to(folder).as_posix() in listed]
            _remove(folder, [*own, folder / _MANIFEST])  # in this order, should it be killed


def remove_unsealed(folder: Path) -> None:
    """Remove what a training that was stopped had written of a checkpoint.

    Raises:
        RunError: something else is in it.
    """
    for one in (path for path in folder.glob(f"{KEPT}*") if not path.is_symlink()):
        _remove(one, _files(one, _WRITTEN))
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()
    refuse_foreign_files(folder, [path.name for path in folder.glob("*")], written=())


def refuse_foreign_folders(folder: Path) -> None:
    """Refuse links where a training writes its checkpoints, and checkpoints that it did not write.

    Raises:
        RunError: ``folder``, or a folder in it, is one.
    """
    inside = (path for prefix in (KEPT, LATEST, PART) for path in folder.glob(f"{prefix}*"))
    for path in (folder, *inside):
        number = path.name.removeprefix(KEPT).removeprefix(LATEST)
        foreign = (
            number.isdecimal()
            and (path / "config.json").is_file()
            and not (path / _MANIFEST).is_file()
        )
        if path.is_symlink() or foreign:
            raise RunError(
                f"{path} is {f'no checkpoint of a training, which has a {_MANIFEST}' if foreign else 'a link'}, where "
                "the training writes a folder of its own. Move it away, or train into another folder."
            )


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder of each checkpoint, newest first: ``checkpoint-N``, or else ``latest-N``."""
    by_step: dict[int, Path] = {}
    for prefix in (KEPT, LATEST):
        for path in folder.glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix)
            if number.isdecimal() and (path / _MANIFEST).is_file() and not path.is_symlink():
                by_step.setdefault(int(number), path)
    return dict(sorted(by_step.items(), reverse=True))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint that has its state; warn of each damaged one."""
    newest = None
    for path in list_checkpoints(folder).values():
        try:
            if has_whole_state(path, content=True) and newest is None:
                newest = path
        except RunError as error:
            what = "; the one before it is taken" if newest is None else ""
            warnings.warn(f"{error}{what}", stacklevel=3)
    return newest


def has_whole_state(folder: Path, *, content: bool = False) -> bool:
    """Return True if a checkpoint has the state of optimizer, schedule and random numbers, False if it has weights.

    Raises:
        RunError: a file of the weights is missing, or the size or (with ``content``) the hash of a file is another.
    """
    try:
        listed = _read_manifest(folder)
        state = {name for name in listed if any(fnmatch(name.split("/")[0], one) for one in _STATE)}
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*")
        }
        for name, entry in listed.items():
            found = sizes.get(name)
            if found != entry["bytes"] and not (found is None and name in state):
                raise ValueError(f"{name} has {found or 0:,} bytes, not {entry['bytes']:,}")
            if content and found is not None and sha256_of(folder / name) != entry["sha256"]:
                raise ValueError(f"{name} is not the file that was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"the checkpoint {folder} is damaged ({error})") from error
    return bool(state) and state <= sizes.keys()


def remove_superseded_checkpoints(folder: Path, *, finished: bool) -> None:
    """Remove old checkpoints: ``latest-N`` wholly, of ``checkpoint-N`` the optimizer's state alone.

    The two newest whole ones stay as they are; once the run has ``finished``, only the newest one does.
    """
    kept: list[Path] = []
    for path in list_checkpoints(folder).values():
        with contextlib.suppress(RunError):  # a damaged one
            if has_whole_state(path) and len(kept) < (1 if finished else 2):
                kept.append(path)
            else:
                _remove(path, _files(path, _STATE))
    for path in set(folder.glob(f"{LATEST}*")) - set(kept):
        remove_checkpoint(path)


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    return parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]


def _files(folder: Path, patterns: Iterable[str] = ("*",)) -> list[Path]:
    """Return the files in a folder and its subfolders whose first names match, no links and nothing behind one."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and any(fnmatch(path.relative_to(folder).parts[0], one) for one in patterns)
    ]


def _remove(folder: Path, files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()
    for path in sorted([folder, *folder.rglob("*")], reverse=True):
        with contextlib.suppress(OSError):  # a file, or not empty
            path.rmdir()
