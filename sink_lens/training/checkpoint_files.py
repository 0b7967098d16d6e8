"""Checkpoints on disk: whole or passed over, and no more of them than are needed.

A checkpoint is written in another folder and moved here when ``checkpoint.json``, which lists every file with its
size, lies in it. ``checkpoint-N`` is kept; ``latest-N`` only serves to go on from. The state of the optimizer is twice
the size of the model: only the newest two checkpoints have it. A file that ``checkpoint.json`` does not list is
somebody else's: it is never removed or replaced, and no link is followed.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from ..errors import RunError
from ..files import parse_json
from ..records import write_atomically

KEPT, LATEST, PART = "checkpoint-", "latest-", ".part"
"""Beginnings of the names of checkpoints, and the folder beside them in which the Trainer writes one."""
_MANIFEST = "checkpoint.json"
_STATE = ("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model_fsdp*")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json")
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_WRITTEN = (*_STATE, *_WEIGHTS, *_TOKENIZER, "trainer_state.json", "training_args.bin", f"*{_MANIFEST}*")
"""Names of what is in a checkpoint before its ``checkpoint.json`` is."""


def seal_checkpoint(folder: Path, target: Path) -> None:
    """Force a checkpoint's files onto the disk, write their sizes beside them, and move ``folder`` to ``target``."""
    sizes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size}
    write_atomically(folder / _MANIFEST, json.dumps({"files": sizes}, indent=1).encode())
    remove_checkpoint(target)
    if not os.path.lexists(target):
        folder.replace(target)
        return
    there = [name for name in (*sizes, _MANIFEST) if os.path.lexists(target / name)]
    if there or target.is_symlink():
        raise RunError(
            f"{target / there[0] if there else target} is no file of the training, which would write one with this "
            "name. Move it away and run the same again: it goes on from the last checkpoint."
        )
    for name in (*sizes, _MANIFEST):  # beside files of somebody else's; the last one makes it a checkpoint
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).replace(target / name)


def remove_checkpoint(folder: Path) -> None:
    """Remove the files that a checkpoint's ``checkpoint.json`` lists, and its folder if nothing else is in it."""
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        own = [path for path in _files(folder) if _name(path, folder) in listed]
        _remove(folder, [*own, folder / _MANIFEST])  # in this order, should it be killed


def remove_unsealed(folder: Path) -> None:
    """Remove what a training that was stopped had written of a checkpoint into the ``folder`` of the Trainer.

    Raises:
        RunError: something else is in it.
    """
    for one in folder.glob(f"{KEPT}*"):
        _remove(one, _files(one, _WRITTEN))
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()
    if (left := next(folder.rglob("*"), None)) is not None:
        raise RunError(f"{left} is no file of the training, which writes its checkpoints there. Move it away.")


def refuse_foreign_folders(folder: Path, *others: Path) -> None:
    """Refuse links where a training writes, and a folder of a checkpoint that it did not write, before it begins.

    Raises:
        RunError: ``folder``, in which the checkpoints are, or a folder in it or of ``others`` is such a folder.
    """
    there = [path for prefix in (KEPT, LATEST, PART) for path in folder.glob(f"{prefix}*")]
    for path in (folder, *there, *others):
        number = path.name.removeprefix(KEPT).removeprefix(LATEST)
        foreign = number.isdecimal() and (path / "config.json").is_file() and not (path / _MANIFEST).is_file()
        if path.is_symlink() or foreign:
            raise RunError(
                f"{path} is {f'no checkpoint of a training, which has a {_MANIFEST}' if foreign else 'a link'}, where "
                "the training writes a folder of its own. Move it away, or train into another folder."
            )


def _files(folder: Path, patterns: Iterable[str] = ("*",)) -> list[Path]:
    """Return the files in a folder and its subfolders whose first names match, no links and nothing behind one."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if any(fnmatch(_name(path, folder).split("/")[0], one) for one in patterns)]


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _remove(folder: Path, files: Iterable[Path]) -> None:
    """Remove ``files`` of a folder, and those folders that are empty then."""
    held = {folder}
    for path in files:
        path.unlink()
        held |= {one for one in path.parents if one.is_relative_to(folder)}
    for path in sorted(held, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder of each checkpoint in ``folder``, newest first: ``checkpoint-N``, or else ``latest-N``."""
    by_step: dict[int, Path] = {}
    for prefix in (KEPT, LATEST):
        for path in folder.glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix)
            if number.isdecimal() and (path / _MANIFEST).is_file() and not path.is_symlink():
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
        remove_checkpoint(path)
    for path in (path for path in state if path.exists() and path not in kept):
        _remove(path, _files(path, _STATE))
