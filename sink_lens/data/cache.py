"""The user's cache, and folders in it that are whole or not there: written as ``.part``, then renamed.

Every such folder has a manifest with the size and the hash of each of its files.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

MANIFEST = "manifest.json"
"""Name of the file that says what a folder holds."""


def cache_folder() -> Path:
    """Where what was converted, fetched and packed lies: ``SINK_LENS_CACHE``, else the user's cache directory."""
    chosen = os.environ.get("SINK_LENS_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("sink_lens")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time at this folder; a second one waits. The lock's file stays beside it.

    Raises:
        OSError: the place cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A ``.part`` folder to write into, which takes the place of ``folder`` where the block ends without an error.

    Use it inside `locked`. Whatever ends the block otherwise, Ctrl-C too, leaves nothing behind.

    Raises:
        OSError: the place cannot be written.
    """
    part = folder.with_name(f"{folder.name}.part")
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
    """Write the manifest of a folder, with every file that lies in it, its size and its hash.

    Raises:
        OSError: it cannot be written.
    """
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
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


def fault(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with a folder whose manifest was read: a file missing, of another size, or changed; else None."""
    for name, recorded in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != recorded["bytes"]:
            return f"{name} has {size:,} bytes and had {recorded['bytes']:,}"
        if sha256_of(path) != recorded["sha256"]:
            return f"{name} has changed"
    return None


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
