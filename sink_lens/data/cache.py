"""The user's cache: folders that are either complete or absent, and the hashes by which their files are checked.

A cache folder is written as ``.part`` and then renamed. It has a lock beside it, and a manifest with the size, time
stamp and hash of each of its files. Models, data, packs and vocabularies have a folder each.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from sink_lens.files import is_plain_file_name, parse_json

MANIFEST = "manifest.json"
_PART = ".part"
_OLD = ".old"


def cache_folder() -> Path:
    """Return what ``SINK_LENS_CACHE`` says, else ``sink_lens`` in the user's cache folder."""
    chosen = os.environ.get("SINK_LENS_CACHE")
    return expand_home(chosen).absolute() if chosen else platformdirs.user_cache_path("sink_lens")


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Replace a leading ``~`` in a path by the user's home folder, if there is such a user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path.expanduser raises where there is no such user


@contextlib.contextmanager
def lock_folder(folder: Path, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Lock a cache folder for one process; a second one calls ``waiting`` and waits.

    The lock file, which ``FOLDER.part`` and ``FOLDER.old`` share, stays: removing it while another process waits is a
    race.

    Raises:
        OSError: the lock file cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = f"{folder.name.removesuffix(_PART).removesuffix(_OLD)}.lock"
    lock = FileLock(folder.with_name(name))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        if waiting is not None:
            waiting()
        held = lock.acquire()
    with held:
        yield


@contextlib.contextmanager
def write_new_folder(folder: Path) -> Iterator[Path]:
    """Open a ``.part`` folder to write into; it replaces ``folder`` if the block ends without an error.

    Use it inside `lock_folder`. After any error, including Ctrl-C, nothing is left behind.

    Raises:
        OSError: the folder cannot be written.
    """
    part = folder.with_name(f"{folder.name}{_PART}")
    if part.exists():  # of a process that was killed: the lock is ours
        shutil.rmtree(part)
    part.mkdir(parents=True)
    old = folder.with_name(f"{folder.name}{_OLD}")
    shutil.rmtree(old, ignore_errors=True)
    try:
        yield part
        if folder.exists():
            folder.replace(old)  # Ctrl-C before the new one is there brings it back
        part.replace(folder)
    except BaseException:  # Ctrl-C too
        if old.exists() and not folder.exists():
            old.replace(folder)
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    files = {
        path.name: {**_size_and_time(path), "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({**content, "files": files}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        names = manifest["files"]
        believed = all(
            is_plain_file_name(name) and type(one["bytes"]) is int and type(one["sha256"]) is str
            for name, one in names.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if believed and names else None


def describe_damage(
    folder: Path, manifest: Mapping[str, Any], *, sizes_only: bool = False
) -> str | None:
    """Describe the first file that is missing, of another size or changed; None if all files fit the manifest.

    A file is hashed only if its time stamp is not the recorded one, and never with ``sizes_only``.
    """
    for name, recorded in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        found = _size_and_time(path)
        if found["bytes"] != recorded["bytes"]:
            return f"{name} has {found['bytes']:,} bytes and had {recorded['bytes']:,}"
        touched = found["mtime_ns"] != recorded.get("mtime_ns")
        if touched and not sizes_only and sha256_of(path) != recorded["sha256"]:
            return f"{name} has changed"
    return None


def _size_and_time(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
