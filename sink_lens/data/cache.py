"""The user's cache, and folders in it that are whole or not there: written as ``.part``, then renamed.

Every such folder has a lock beside it and a manifest with size, time stamp and hash of each of its files. The cache
has a folder for each kind of what it keeps: models, data, packed, vocabularies and what later rooms put beside them.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from sink_lens.errors import InputError, RunError

MANIFEST = "manifest.json"
"""Name of the file that says what a folder holds."""
_PART = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One folder of the cache."""

    kind: str
    """The folder of the cache that it lies in."""
    name: str
    """What its manifest calls it; the folder's own name where it does not say."""
    path: Path
    bytes: int
    complete: bool
    """Every file is there at its full size; False for what a killed process left, or a damaged folder."""


def cache_folder() -> Path:
    """Where what was converted, fetched and packed lies: ``SINK_LENS_CACHE``, else the user's cache directory."""
    chosen = os.environ.get("SINK_LENS_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("sink_lens")


@contextlib.contextmanager
def locked(folder: Path, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """One process at a time at this folder; a second one waits. The lock's file stays beside it.

    Args:
        folder: what is to be read or written.
        waiting: called once where another process has the lock.

    Raises:
        OSError: the place cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if waiting is not None:
            waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A ``.part`` folder to write into, which takes the place of ``folder`` where the block ends without an error.

    Use it inside `locked`. Whatever ends the block otherwise, Ctrl-C too, leaves nothing behind.

    Raises:
        OSError: the place cannot be written.
    """
    part = folder.with_name(f"{folder.name}{_PART}")
    if part.exists():  # of a process that was killed: the lock is ours
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        yield part
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, with every file that lies in it, its size, time stamp and hash.

    Raises:
        OSError: it cannot be written.
    """
    files = {path.name: {**stamp(path), "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({**content, "files": files}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none that lists files of this folder."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        names = manifest["files"]
        believed = all(Path(name).name == name and {"bytes", "sha256"} <= names[name].keys() for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if believed and names else None


def fault(folder: Path, manifest: Mapping[str, Any], *, sizes_only: bool = False) -> str | None:
    """What is wrong with a folder whose manifest was read: a file missing, of another size, or changed; else None.

    A file with the time stamp that was recorded is not hashed again.
    """
    for name, recorded in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        found = stamp(path)
        if found["bytes"] != recorded["bytes"]:
            return f"{name} has {found['bytes']:,} bytes and had {recorded['bytes']:,}"
        touched = found["mtime_ns"] != recorded.get("mtime_ns")
        if touched and not sizes_only and sha256_of(path) != recorded["sha256"]:
            return f"{name} has changed"
    return None


def stamp(path: Path) -> dict[str, int]:
    """Size and time of the last change, by which a file is known again without being read."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cache_entries() -> list[CacheEntry]:
    """What lies in the cache, by kind and name, with what killed processes left; never a link."""
    cache = cache_folder()
    found = [
        _entry(path, kind=kind.name)
        for kind in (cache.iterdir() if cache.is_dir() else ())
        if kind.is_dir()
        for path in kind.iterdir()
        if path.is_dir() and not path.is_symlink() and _lock_file(path).is_file()
    ]
    return sorted(found, key=lambda entry: (entry.kind, entry.name, entry.path))


def clear_cache(*, name: str | None = None) -> int:
    """Remove what was converted, fetched and packed; bytes freed.

    Only folders that sink_lens made (a lock lies beside them) are removed, only inside the cache, and links are not
    followed.

    Args:
        name: only entries of this name or kind, as ``cache_entries`` gives it; all of them if None.

    Raises:
        InputError: no entry of that name, or a folder of the cache is a link out of it.
        RunError: an entry is being made at this moment, or cannot be removed.
    """
    chosen = [entry for entry in cache_entries() if name in (None, entry.name, entry.kind)]
    if name is not None and not chosen:
        found = ", ".join(entry.name for entry in cache_entries()) or "nothing"
        raise InputError(f"the cache holds no {name!r}; it holds {found}")
    for entry in chosen:
        real = entry.path.parent.resolve()
        if not real.is_relative_to(cache_folder().resolve()):
            raise InputError(f"{entry.path.parent} is a link out of the cache; need a folder. Clear {real} by hand")
    freed = 0
    for entry in chosen:
        try:
            with _lock(entry.path).acquire(timeout=0):
                shutil.rmtree(entry.path)
        except Timeout as error:
            raise RunError(f"{entry.name} is being made by another process; wait until it is done") from error
        except OSError as error:
            raise RunError(f"{entry.path} cannot be removed ({error.strerror}); check its permissions") from error
        freed += entry.bytes
    return freed


def _entry(path: Path, *, kind: str) -> CacheEntry:
    manifest = read_manifest(path)
    return CacheEntry(
        kind=kind,
        name=str((manifest or {}).get("name", path.name)),
        path=path,
        bytes=sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or file.is_file()),
        complete=manifest is not None and fault(path, manifest, sizes_only=True) is None,
    )


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.removesuffix(_PART)}.lock")


def _lock(folder: Path) -> FileLock:
    return FileLock(_lock_file(folder))  # left behind: removing a lock that another waits for is a race
