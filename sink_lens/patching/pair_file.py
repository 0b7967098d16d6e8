"""Files of pairs: a clean and a corrupted prompt of as many tokens, with right and wrong answers; without torch."""

import contextlib
import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError
from ..files import check_regular_file, parse_json
from ..text import parse_ranges, plural, safe_line

Prompt = str | tuple[int, ...]
Answer = str | int | tuple[str | int, ...]
AnswersAs = Literal["text", "ids"]
_ANSWERS = ("correct", "incorrect")


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


def read_pairs(
    file: str | Path,
    *,
    spans: Mapping[str, str] | None = None,
    answers_as: AnswersAs | None = None,
    tokenizer: Any = None,
) -> list[Pair]:
    """Read pairs from ``file``, JSON lines or a .csv with the same names as columns.

    ``spans``: span -> the field, or column, that has its positions in each pair, such as 4 or 4-6. ``answers_as`` says
    how answers are read that are digits in a .csv, or that the file has both as text and as ids; None refuses them.
    """
    path = Path(file)
    check_regular_file(path, what="the file of pairs")
    try:
        text = path.read_text("utf-8-sig")
        lines: list[Any] = text.split("\n")  # splitlines breaks texts at U+2028 too
        if path.suffix.lower() == ".csv":
            lines = ["", *csv.DictReader(io.StringIO(text, newline=""))]  # after the line of names
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path} cannot be read ({error}); need a file of JSON lines, or a .csv"
        ) from None
    found: list[Pair] = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = parse_json(line) if isinstance(line, str) else line
            fields = {name: row[name] for name in ("clean", "corrupted")}
            fields |= {name: _answer_of_row(row, name, answers_as=answers_as) for name in _ANSWERS}
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
                raise InputError(
                    f"{where}: {name} is {safe_line(repr(value))}; need a text or a list of token ids"
                )
        for name in _ANSWERS:
            value = fields[name]
            if isinstance(line, dict) and isinstance(value, str):
                pieces = value.split("|")  # several answers in a cell of a table
                value = pieces if len(pieces) > 1 and all(pieces) else value
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
    if path.suffix.lower() != ".csv":
        return found
    for name in _ANSWERS:
        answers = _read_digits([getattr(one, name) for one in found], name, answers_as, tokenizer)
        found = [replace(one, **{name: own}) for one, own in zip(found, answers, strict=True)]
    return found


def _answer_of_row(row: Mapping[str, Any], name: str, *, answers_as: AnswersAs | None) -> Any:
    ids = row.get(f"{name}_idx")
    if ids is None or (name in row and answers_as == "text"):
        return row[name]
    if name in row and answers_as is None:
        raise InputError(
            f"the pairs have {name} ({safe_line(repr(row[name]), limit=40)}) and {name}_idx "
            f"({safe_line(repr(ids), limit=40)}); need one of them. Choose with answers_as='text' or answers_as='ids', "
            "or leave one out"
        )
    if not isinstance(ids, str):
        return ids
    several = [int(one) for one in re.split(r"[|,]", ids.strip("[] "))]
    return several if len(several) > 1 else several[0]


def _read_digits(
    answers: list[Answer], name: str, answers_as: AnswersAs | None, tokenizer: Any
) -> list[Answer]:
    """Read a table's column ``name``: digits alone are text or token ids, as ``answers_as`` says."""
    cells = [one if isinstance(one, tuple) else (one,) for one in answers]
    texts = [one for cell in cells for one in cell if isinstance(one, str)]
    digits = [one for one in texts if one.isascii() and one.isdigit()]
    if answers_as == "ids" and len(digits) < len(texts):
        other = next(one for one in texts if one not in digits)
        raise InputError(
            f"answers_as is 'ids' and {name} has {safe_line(repr(other))}; need digits. Leave it out"
        )
    if not digits or len(digits) < len(texts) or answers_as == "text":
        return answers
    if answers_as is None:
        token = ""
        if tokenizer is not None:
            token = f", {safe_line(repr(str(tokenizer.decode([int(digits[0])]))))}"
        raise InputError(
            f"every entry of the column {name} is digits, such as {digits[0]}: the text {digits[0]!r}, or the token "
            f"with this id{token}; need to know which. Choose with answers_as='text' or answers_as='ids'"
        )
    return [int(cell[0]) if len(cell) == 1 else tuple(map(int, cell)) for cell in cells]


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _read_span_positions(value: Any, said: str) -> tuple[int, ...]:
    if value is None or value in ("", []):
        raise InputError(f"{said} has no positions; need them in every pair, such as 4 or 4-6")
    if isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(dict.fromkeys(value))
    if isinstance(value, str) or type(value) is int:
        with contextlib.suppress(InputError):
            return tuple(dict.fromkeys(parse_span_positions(str(value))))
    raise InputError(
        f"{said} is {safe_line(repr(value), limit=200)}; need positions, such as 4 or 4-6"
    )


def parse_span_positions(text: str) -> tuple[int, ...]:
    """Parse the positions of a span, such as 0,4-6, or -2,-1: the last two tokens."""
    if not text.strip().startswith("-"):
        return tuple(parse_ranges(text, name="span"))
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise InputError(
            f"span has the positions {text!r}; need numbers such as -2,-1, or ranges such as 4-6"
        ) from None
