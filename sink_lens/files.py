"""Files that a user names: checks of their names and paths, and the JSON in them."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from .errors import InputError

_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""In bytes."""


def check_file_name(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse a path that is too long or has a character that no file name can have; the error calls it ``what``."""
    text = os.fspath(path)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is {text[:40]!r}, which is no text ({error.reason}); need a name in UTF-8"
        ) from error
    if "\0" in text:
        raise InputError(
            f"{what} is {text[:40]!r}, with a zero byte in it; need a name without one"
        )
    longest = max((len(part.encode()) for part in Path(text).parts), default=0)
    if longest > _LONGEST_NAME or size > _LONGEST_PATH:
        raise InputError(
            f"{what} is too long ({text[:40]}..., {len(text):,} characters); need at most {_LONGEST_NAME} bytes in a "
            "name. Give a shorter one"
        )


def check_regular_file(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse a path that is no regular file, since reading a pipe or a device might never end."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        found = "named pipe" if path.is_fifo() else "device or a socket"
        raise InputError(
            f"{what}, {path}, cannot be read: it is a {found}; need a regular file with its content"
        )


def refuse_pipes_in(folder: Path) -> None:
    """Refuse a folder that holds a named pipe, since reading one would wait for ever."""
    # a folder that cannot be read is refused with its reason later
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            check_regular_file(file, what=f"a file of the model {folder.name}")


def refuse_tilde(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse a path that begins with ``~``, which only a shell reads as the home folder."""
    text = os.fspath(path)
    if text.startswith("~"):
        raise InputError(
            f"{what} is {text[:200]}, which would be in a folder named {Path(text).parts[0]}; need the path of the "
            "home folder itself. Write Path(...).expanduser()"
        )


def is_plain_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and Path(name).name == name and name.isprintable()


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; ValueError if it is none, or is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
