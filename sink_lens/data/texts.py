"""Documents to train on, from wherever they are: bundled, fetched, a file, a folder, or a saved data set."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sink_lens.data.corpora import bundled_text, read_text
from sink_lens.errors import InputError

_COLUMN = "text"
_ENDINGS = (".txt", ".jsonl", ".parquet")


class Texts:
    """Documents in a fixed order, read again at every pass; never all in memory."""

    def __init__(self, source: str, read: Callable[[], Iterator[str]]) -> None:
        self.source = source
        self._read = read

    def __iter__(self) -> Iterator[str]:
        return self._read()


def texts_of(source: str) -> Texts:
    """The documents of a source.

    Args:
        source: ``bundled`` (the beginning of Moby-Dick), ``fetched`` (every public-domain part in the cache),
            ``fetched:all`` or ``fetched:brown,moby-dick`` (these parts), a file (.txt is one document; .jsonl and
            .parquet have one a row, in the column ``text``), a folder of such files, or a folder that
            ``datasets`` saved.

    Raises:
        InputError: there is no such source, it has no documents, or it is damaged; some of it only when read.
    """
    if source == "bundled":
        return Texts(source, lambda: iter([bundled_text()]))
    if source == "fetched" or source.startswith("fetched:"):
        folders = _fetched(source)
        return Texts(source, lambda: (text for folder in folders for text in _part(folder)))
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(
            f"there is no file or folder {source}; need one, or bundled, or fetched (sink-lens data fetch). "
            "Check the path."
        )
    if path.is_dir():
        files = _files_of(path)
    elif path.suffix in (".jsonl", ".parquet", ".arrow"):
        files = [path]
    else:
        return Texts(source, lambda: iter([read_text(path)]))
    return Texts(source, lambda: (text for file in files for text in _read(file)))


def _fetched(source: str) -> list[Path]:
    """Folders of the fetched parts that a source names."""
    from sink_lens.data.fetch import fetched
    from sink_lens.data.recipes import PARTS, choose

    manifest = fetched()
    asked = source.partition(":")[2]
    if asked and asked != "all":
        names = [part.name for part in choose(asked.split(","))]
        if missing := [name for name in names if name not in manifest.parts and name not in manifest.failed]:
            raise InputError(f"{', '.join(missing)} is not fetched. Run: sink-lens data fetch {' '.join(missing)}")
    else:
        names = [name for name in manifest.parts if asked == "all" or PARTS[name].public_domain]
        damaged = [name for name in manifest.failed if asked == "all" or PARTS[name].public_domain]
        names += damaged
    if damaged := [manifest.failed[name] for name in names if name in manifest.failed]:
        raise InputError(damaged[0])
    if not names:
        what = "" if asked == "all" else " in the public domain"
        raise InputError(f"no text{what} is fetched. Run: sink-lens data fetch{' --public-domain' if what else ''}")
    return [manifest.folder / name for name in names]


def _part(folder: Path) -> Iterator[str]:
    from sink_lens.data.fetch import read_part

    return read_part(folder)


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder that hold documents, by name; of a saved data set, in its own order."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _listed(splits, "splits", lambda content: [str(name) for name in content])
        if "train" not in names:
            raise InputError(f"{folder} has the splits {', '.join(names)}; need train. Give the folder of one of them.")
        return _files_of(folder / "train")
    state = folder / "state.json"
    if state.is_file() and (folder / "dataset_info.json").is_file():
        files = _listed(state, "_data_files", lambda content: [str(entry["filename"]) for entry in content])
        return [folder / Path(name).name for name in files]
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in _ENDINGS and path.is_file()]
    if not files:
        raise InputError(f"{folder} has no {', '.join(_ENDINGS)} file; need some. Give a folder of texts.")
    return files


def _listed(path: Path, key: str, names: Callable[[Sequence[dict[str, str]]], list[str]]) -> list[str]:
    try:
        return names(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}); need a data set that datasets saved. Save it again.") from error


def _read(path: Path) -> Iterator[str]:
    """The documents of one file."""
    if path.suffix == ".jsonl":
        return _rows(path)
    if path.suffix == ".txt":
        return iter([read_text(path)])
    return _columns(path)


def _rows(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[_COLUMN]
                if not isinstance(text, str):
                    raise TypeError(f"{_COLUMN} is a {type(text).__name__}")
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f'{path}, line {number}: {error}; need a JSON object with "{_COLUMN}". Put it right.'
                ) from error
            yield text


def _columns(path: Path) -> Iterator[str]:
    """The column ``text`` of a parquet file, or of an Arrow file of a saved data set."""
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                _check_column(file.schema_arrow.names, path=path)
                for batch in file.iter_batches(batch_size=64, columns=[_COLUMN]):
                    yield from _strings(batch.column(_COLUMN).to_pylist(), path=path)
            return
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            _check_column(stream.schema.names, path=path)
            for batch in stream:
                yield from _strings(batch.column(_COLUMN).to_pylist(), path=path)
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read ({first}); need a whole file. Write it again.") from error


def _check_column(names: Sequence[str], *, path: Path) -> None:
    if _COLUMN not in names:
        raise InputError(f"{path} has the columns {', '.join(names)}; need '{_COLUMN}'. Rename the one with the text.")


def _strings(values: Sequence[object], *, path: Path) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise InputError(f"{path}: the column '{_COLUMN}' holds a {type(value).__name__}; need text in every row.")
        yield value
