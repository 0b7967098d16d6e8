"""Tasks with a known answer: pairs of a clean and a corrupted prompt of as many tokens, and two answers.

- ``ioi``: indirect objects, in the templates of ``transformer_lens.evals.IOIDataset`` (MIT) and one more; the second
  mention of the subject becomes a third name.
- ``greater-than``: a war lasts from one year to a later one; the corrupted year begins its century.
- ``agreement``: "The keys to the cabinet" takes "are"; the corrupted subject is singular, or the other way round.
- ``capitals``: the capital of a country; the corrupted prompt names another country.
- ``induction``: random tokens twice; the last token is replaced by another of them.

Prompts whose tokens do not fit (an answer or a name of several tokens, other lengths) are left out.
"""

import csv
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..data.described import BosCondition
from ..errors import InputError, check_regular
from ..text import json_value, visible
from .config import ReadyTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
_NAMES = (  # noqa: SIM905 - a list would take a page
    "Mary John Tom James Dan Sarah Paul Anna Mark Lucy Peter Alice Bob David Emma Jack Kate Laura Michael Robert Susan "
    "Adam Simon Alex Kevin Jason Rachel Amy George Frank"
).split()
_TEMPLATES = (
    "[A] and [B] went to the [LOCATION] to buy [OBJECT]. [B] handed the [OBJECT] to [A]",
    "Then, [B] and [A] went to the [LOCATION]. [B] gave the [OBJECT] to [A]",
    "When [A] and [B] got a [OBJECT] at the [LOCATION], [B] decided to give it to [A]",
)
_OF_TEMPLATES = {"LOCATION": ("store", "market"), "OBJECT": ("milk", "eggs", "bread")}
_NOUNS = {"war": 17, "siege": 16, "dispute": 18, "campaign": 15, "project": 19, "reign": 14}
_SUBJECTS = (
    "key keys|boy boys|girl girls|dog dogs|cat cats|book books|car cars|tree trees|house houses|friend friends|"
    "teacher teachers|picture pictures|doctor doctors|window windows|horse horses|letter letters"
)
_BEHIND = ("near the table", "on the wall", "from the city", "with the red hat", "behind the door")
_CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Russia": "Moscow",
    "Japan": "Tokyo",
    "China": "Beijing",
    "England": "London",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Portugal": "Lisbon",
    "Iran": "Tehran",
    "Turkey": "Ankara",
    "Ireland": "Dublin",
    "Canada": "Ottawa",
    "Poland": "Warsaw",
}
_CAPITAL_TEMPLATES = ("The capital of {} is", "The capital city of {} is called", "Q: What is the capital of {}? A:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A clean and a corrupted prompt with two answers; prompts are texts or token ids."""

    clean: str | tuple[int, ...]
    corrupted: str | tuple[int, ...]
    correct: str | int
    incorrect: str | int
    template: str = ""
    goes_on: bool = False
    """True if the answers go on the clean text's last word: of each, the first token behind the prompt's counts."""


def pairs_that_fit(
    name: Literal[ReadyTask, "file"],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    d_vocab: int,
    pairs: int,
    generator: np.random.Generator,
    file: str | Path | None,
    bos: BosCondition,
) -> list[tuple[list[int], list[int], int, int, str]]:
    """Different pairs of a task whose tokens fit, at most twice as many as are asked for: ids, answers and template.

    Raises:
        InputError: no file of pairs, or one that cannot be read.
    """
    if name == "file":
        if file is None:
            raise InputError("the task 'file' needs a file of pairs; give pairs_file (--pairs-file FILE)")
        source: Iterator[Pair] = iter(read_pairs(file))
    elif name == "induction":
        source = _induction(tokenizer, d_vocab, generator, bos=bos)
    else:
        makers = {"ioi": _ioi, "greater-than": _greater_than, "agreement": _agreement, "capitals": _capitals}
        source = makers[name](generator)
    kept: list[tuple[list[int], list[int], int, int, str]] = []
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    tried = 0
    for tried, pair in enumerate(source, 1):
        found = _tokens(pair, tokenizer, bos=bos)
        key = (tuple(found[0]), tuple(found[1])) if found else None
        if found is not None and key not in seen:
            seen.add((tuple(found[0]), tuple(found[1])))
            kept.append((*found, pair.template))
        if len(kept) >= 2 * pairs or tried > 40 * pairs + 400:
            break
    if name == "file" and (left := tried - len(kept)):
        _LOG.warning(
            "%d of the first %d pairs of %s are left out: their prompts differ in length, are equal or were there "
            "before, an answer is not one token, or both answers are the same",
            left,
            tried,
            file,
        )
    return kept


def read_pairs(file: str | Path) -> list[Pair]:
    """Pairs of a file of JSON lines, or of a .csv with the same names as columns, whose prompts and answers are texts.

    Raises:
        InputError: the file cannot be read, or a line lacks what a pair needs.
    """
    path = Path(file)
    check_regular(path, what="the file of pairs")
    try:
        text = path.read_text("utf-8-sig")
        lines: list[Any] = text.split("\n")  # splitlines breaks texts at U+2028 too
        if path.suffix.lower() == ".csv":
            lines = ["", *csv.DictReader(io.StringIO(text, newline=""))]  # after the line of names
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({error}); need a file of JSON lines, or a .csv") from None
    found = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        try:
            row = json_value(line) if isinstance(line, str) else line
            fields = {name: row[name] for name in ("clean", "corrupted", "correct", "incorrect")}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"line {number} of {path} is no pair ({error}); need an object with clean, corrupted, correct and "
                "incorrect: two prompts with the same number of tokens, and two answers of one token each"
            ) from None
        for name in ("clean", "corrupted"):
            value = fields[name]
            if isinstance(value, list) and value and all(_is_id(one) for one in value):
                fields[name] = tuple(value)
            elif not isinstance(value, str) or not value:
                said = visible(repr(value))
                raise InputError(f"line {number} of {path}: {name} is {said}; need a text or a list of token ids")
        for name in ("correct", "incorrect"):
            if not (isinstance(fields[name], str) or _is_id(fields[name])):
                said = visible(repr(fields[name]))
                raise InputError(f"line {number} of {path}: {name} is {said}; need a text or a token id")
        found.append(Pair(**fields, template=str(row.get("template") or "")))
    if not found:
        raise InputError(f"{path} has no pairs; need one JSON object per line, or a row of a .csv")
    return found


def _is_id(value: object) -> bool:
    """Check that a value of JSON can be a token id."""
    return type(value) is int and 0 <= value < 2**31


def _tokens(
    pair: Pair, tokenizer: "PreTrainedTokenizerBase", *, bos: BosCondition
) -> tuple[list[int], list[int], int, int] | None:
    """Ids of a pair; None where lengths differ, both are equal, or an answer is not one token."""
    from ..data.bos import answer_id, ids_behind, prompt_ids

    prompts = []
    for prompt in (pair.clean, pair.corrupted):
        if isinstance(prompt, str):
            prompts += prompt_ids([prompt], tokenizer, bos=bos)
        else:
            prompts.append(list(prompt))
    answers = []
    for answer in (pair.correct, pair.incorrect):
        if pair.goes_on:
            ids = ids_behind(str(pair.clean), str(answer), tokenizer)
            if not ids:
                return None
            answers.append(ids[0])
            continue
        try:
            first, second = (answer_id(answer, prompt, tokenizer) for prompt in (pair.clean, pair.corrupted))
        except InputError:  # not one token behind these prompts
            return None
        if first != second:
            return None
        answers.append(first)
    if len(prompts[0]) != len(prompts[1]) or prompts[0] == prompts[1] or answers[0] == answers[1]:
        return None
    return prompts[0], prompts[1], answers[0], answers[1]


def _ioi(generator: np.random.Generator) -> Iterator[Pair]:
    """Draw indirect objects, with a third name in place of the repeated one."""
    while True:
        number = int(generator.integers(len(_TEMPLATES)))
        text = _TEMPLATES[number]
        for noun, words in _OF_TEMPLATES.items():
            text = text.replace(f"[{noun}]", words[int(generator.integers(len(words)))])
        a, b, c = (_NAMES[index] for index in generator.choice(len(_NAMES), 3, replace=False))
        text = text.removesuffix(" [A]")
        before, _, behind = text.rpartition("[B]")

        def filled(part: str, a: str = a, b: str = b) -> str:
            """The text with its names."""
            return part.replace("[A]", a).replace("[B]", b)

        yield Pair(
            clean=filled(before) + b + filled(behind),
            corrupted=filled(before) + c + filled(behind),
            correct=f" {a}",
            incorrect=f" {b}",
            template=f"ioi {number}",
        )


def _greater_than(generator: np.random.Generator) -> Iterator[Pair]:
    """Draw years, with 01 as the corrupted beginning."""
    while True:
        noun = list(_NOUNS)[int(generator.integers(len(_NOUNS)))]
        century, tens, last = _NOUNS[noun], int(generator.integers(3, 8)), int(generator.integers(2, 9))
        text = f"The {noun} lasted from the year {century}{{}}{last} to the year {century}"
        yield Pair(
            clean=text.format(tens),
            corrupted=text.format(0),
            correct=f"{tens + 1}{last}",
            incorrect=f"{tens - 2}{last}",
            template=noun,
            goes_on=True,  # a year is a token a digit, or one of two digits, as the tokenizer has it
        )


def _agreement(generator: np.random.Generator) -> Iterator[Pair]:
    """Draw subjects in singular and plural."""
    subjects = [one.split() for one in _SUBJECTS.split("|")]
    while True:
        one, many = subjects[int(generator.integers(len(subjects)))]
        behind = _BEHIND[int(generator.integers(len(_BEHIND)))]
        plural = bool(generator.integers(2))
        texts = f"The {many} {behind}", f"The {one} {behind}"
        yield Pair(
            clean=texts[0 if plural else 1],
            corrupted=texts[1 if plural else 0],
            correct=" are" if plural else " is",
            incorrect=" is" if plural else " are",
            template=behind,
        )


def _capitals(generator: np.random.Generator) -> Iterator[Pair]:
    """Draw capitals of two countries."""
    countries = list(_CAPITALS)
    while True:
        first, second = (countries[index] for index in generator.choice(len(countries), 2, replace=False))
        template = _CAPITAL_TEMPLATES[int(generator.integers(len(_CAPITAL_TEMPLATES)))]
        yield Pair(
            clean=template.format(first),
            corrupted=template.format(second),
            correct=f" {_CAPITALS[first]}",
            incorrect=f" {_CAPITALS[second]}",
            template=template,
        )


def _induction(
    tokenizer: "PreTrainedTokenizerBase",
    d_vocab: int,
    generator: np.random.Generator,
    *,
    bos: BosCondition,
    length: int = 10,
) -> Iterator[Pair]:
    """Draw random tokens whose second half repeats the first, after BOS; with ``auto`` wherever there is one."""
    from ..data.bos import first_ids, ordinary_ids

    ids = np.array(ordinary_ids(tokenizer, d_vocab))
    has_bos = tokenizer.bos_token_id is not None
    begin = first_ids(tokenizer, "with" if bos == "auto" and has_bos else bos)
    while True:
        drawn = generator.choice(ids, length, replace=False).tolist()
        at = int(generator.integers(length // 2, length - 1))
        other = int(generator.integers(0, at - 1))
        clean = [*begin, *drawn, *drawn[: at + 1]]
        yield Pair(
            clean=tuple(clean),
            corrupted=(*clean[:-1], drawn[other]),
            correct=drawn[at + 1],
            incorrect=drawn[other + 1],
            template="induction",
        )
