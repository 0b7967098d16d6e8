"""Files of pairs: a clean and a corrupted prompt of as many tokens, with right and wrong answers; without torch."""

import contextlib
import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import check_regular_file, parse_json
from ..text import parse_ranges, plural, safe_line

Prompt = str | tuple[int, ...]
Answer = str | int | tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A clean and a corrupted prompt with right and wrong answers; prompts are texts or token ids."""

    clean: Prompt
    corrupted: Prompt
    correct: Answer
    incorrect: Answer
    template: str = ""
    goes_on: bool = False
    """True if the answers go on the clean text's last word: of each, the first token behind the prompt's counts."""
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Span -> its positions in this pair."""


def read_pairs(file: str | Path, *, spans: Mapping[str, str] | None = None) -> list[Pair]:
    """Read pairs from ``file``, JSON lines or a .csv with the same names as columns.

    Args:
        file: its path.
        spans: span -> the field, or column, that has its positions in each pair, such as 4 or 4-6.

    Raises:
        InputError: the file cannot be read, a line lacks what a pair needs, or a span differs in length between pairs.
    """
    path = Path(file)
    check_regular_file(path, what="the file of pairs")
    try:
        text = path.read_text("utf-8-sig")
        lines: list[Any] = text.split("\n")  # splitlines breaks texts at U+2028 too
        if path.suffix.lower() == ".csv":
            lines = ["", *csv.DictReader(io.StringIO(text, newline=""))]  # after the line of names
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({error}); need a file of JSON lines, or a .csv") from None
    found: list[Pair] = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = parse_json(line) if isinstance(line, str) else line
            fields = {name: row[name] for name in ("clean", "corrupted", "correct", "incorrect")}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{where} is no pair ({error}); need an object with clean, corrupted, correct and "
                "incorrect: two prompts with the same number of tokens, and two answers of one token each"
            ) from None
        for name in ("clean", "corrupted"):
            value = fields[name]
            if isinstance(value, list) and value and all(_is_token_id(one) for one in value):
                fields[name] = tuple(value)
            elif not isinstance(value, str) or not value:
                raise InputError(f"{where}: {name} is {safe_line(repr(value))}; need a text or a list of token ids")
        for name in ("correct", "incorrect"):
            value = fields[name]
            if (
                isinstance(line, dict)
                and isinstance(value, str)
                and all(pieces := value.split("|"))
                and len(pieces) > 1
            ):
                value = pieces  # several answers in a cell of a table
            several = value if isinstance(value, list) else [value]
            if not several or not all(isinstance(one, str) or _is_token_id(one) for one in several):
                said = safe_line(repr(value), limit=200)
                raise InputError(f"{where}: {name} is {said}; need a text or a token id, or a list")
            fields[name] = tuple(value) if isinstance(value, list) else value
        own = {
            name: _read_span_positions(row.get(column), f"{where}: the span {name} ({column})")
            for name, column in (spans or {}).items()
        }
        for name, positions in own.items() if found else ():
            if len(positions) != (before := len(found[0].spans[name])):
                raise InputError(
                    f"{where}: the span {name} has {plural(len(positions), 'position')}, and {before} "
                    "in the first pair; need as many in every pair, so that it is the same part of each prompt"
                )
        found.append(Pair(**fields, template=str(row.get("template") or ""), spans=own))
    if not found:
        raise InputError(f"{path} has no pairs; need one JSON object per line, or a row of a .csv")
    return found


def _is_token_id(value: object) -> bool:
    """Check whether a value is a whole number from 0 to 2**31 - 1, and no bool."""
    return type(value) is int and 0 <= value < 2**31


def _read_span_positions(value: Any, said: str) -> tuple[int, ...]:
    """Read the positions of a span in one pair from ``value``, a field of the file, which errors call ``said``."""
    if value is None or value in ("", []):
        raise InputError(f"{said} has no positions; need them in every pair, such as 4 or 4-6")
    if isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(dict.fromkeys(value))
    if isinstance(value, str) or type(value) is int:
        with contextlib.suppress(InputError):
            return tuple(dict.fromkeys(parse_span_positions(str(value))))
    raise InputError(f"{said} is {safe_line(repr(value), limit=200)}; need positions, such as 4 or 4-6")


def parse_span_positions(text: str) -> tuple[int, ...]:
    """Parse the positions of a span: "0,4-6" gives (0, 4, 5, 6), and "-2,-1", the last two tokens, gives (-2, -1)."""
    if not text.strip().startswith("-"):
        return tuple(parse_ranges(text, name="span"))
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise InputError(
            f"span has the positions {text!r}; need numbers such as -2,-1, or ranges such as 4-6"
        ) from None
