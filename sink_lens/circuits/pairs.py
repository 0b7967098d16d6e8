"""Tasks with a known answer: pairs of a clean and a corrupted prompt of as many tokens, with right and wrong answers.

- ``ioi``: indirect objects, in the templates of ``transformer_lens.evals.IOIDataset`` (MIT) and one more; the second
  mention of the subject becomes a third name.
- ``greater-than``: a war lasts from one year to a later one; the corrupted year begins its century.
- ``agreement``: "The keys to the cabinet" takes "are"; the corrupted subject is singular, or the other way round.
- ``capitals``: the capital of a country; the corrupted prompt names another country.
- ``induction``: random tokens twice; the last token is replaced by another of them.

Prompts whose tokens do not fit (an answer or a name of several tokens, other lengths) are left out.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..data.described import BosCondition
from ..errors import InputError
from ..patching.pair_file import Pair, read_pairs
from ..text import safe_line
from .config import CircuitConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
Item = TypeVar("Item")
_MOST_TOLD = 5
"""Pairs that are left out, each with its reason; of more, the reasons are counted."""
_NAMES = (  # noqa: SIM905 - a list would take a page
    "Mary John Tom James Dan Sarah Paul Anna Mark Lucy Peter Alice Bob David Emma Jack Kate Laura Michael Robert Susan "
    "Adam Simon Alex Kevin Jason Rachel Amy George Frank"
).split()
_TEMPLATES = (
    "[A] and [B] went to the [LOCATION] to buy [OBJECT]. [B] handed the [OBJECT] to [A]",
    "Then, [B] and [A] went to the [LOCATION]. [B] gave the [OBJECT] to [A]",
    "When [A] and [B] got some [OBJECT] at the [LOCATION], [B] decided to give the [OBJECT] to [A]",
)
_OF_TEMPLATES = {"LOCATION": ("store", "market"), "OBJECT": ("milk", "eggs", "bread")}
_NOUNS = {"war": 17, "siege": 16, "dispute": 18, "campaign": 15, "project": 19, "reign": 14}
_SUBJECTS = (
    "key keys|boy boys|girl girls|dog dogs|cat cats|book books|car cars|tree trees|house houses|friend friends|"
    "teacher teachers|picture pictures|doctor doctors|window windows|horse horses|letter letters"
)
_BEHIND = ("near the table", "on the wall", "from the city", "with the red hat", "behind the door")
_CAPITALS = (
    "France Paris|Germany Berlin|Italy Rome|Spain Madrid|Russia Moscow|Japan Tokyo|China Beijing|England London|"
    "Greece Athens|Egypt Cairo|Austria Vienna|Cuba Havana|Portugal Lisbon|Iran Tehran|Turkey Ankara|Ireland Dublin|"
    "Canada Ottawa|Poland Warsaw"
)
_CAPITAL_TEMPLATES = (
    "The capital of {} is",
    "The capital city of {} is called",
    "Q: What is the capital of {}? A:",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    """A pair of prompts as token ids."""

    clean: list[int]
    corrupted: list[int]
    correct: tuple[int, ...]
    incorrect: tuple[int, ...]
    template: str
    spans: Mapping[str, tuple[int, ...]]
    number: int = 0
    """Its place among the pairs of its source, from 1."""


def make_token_pairs(
    config: CircuitConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    d_vocab: int,
    generator: np.random.Generator,
) -> list[TokenPair]:
    """Return different pairs of the configuration's task whose tokens fit, at most twice ``config.pairs``.

    Raises:
        InputError: no file of pairs, or one that cannot be read; a span outside its prompt.
    """
    from ..data.token_ids import warn_of_forgotten_space

    name, pairs, bos = config.task, config.pairs, config.bos
    if name == "file":
        if config.pairs_file is None:
            raise InputError("the task 'file' needs a file of pairs; give pairs_file=...")
        read = read_pairs(
            config.pairs_file,
            spans=config.column_by_span,
            answers_as=config.answers_as,
            tokenizer=tokenizer,
        )
        every = (
            (one, pair.clean)
            for pair in read
            for side in (pair.correct, pair.incorrect)
            for one in _as_tuple(side)
        )
        warn_of_forgotten_space(every, tokenizer)
        source: Iterable[Pair] = read
    elif name == "induction":
        source = _draw_induction(tokenizer, d_vocab, generator, bos=bos)
    else:
        makers = {
            "ioi": _draw_ioi,
            "greater-than": _draw_greater_than,
            "agreement": _draw_agreement,
            "capitals": _draw_capitals,
        }
        source = makers[name](generator)
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], TokenPair] = {}
    tried, out = 0, list[tuple[str, str, str]]()
    for tried, pair in enumerate(source, 1):
        found = _tokenise_pair(pair, tokenizer, bos=bos)
        if isinstance(found, TokenPair):
            key = tuple(found.clean), tuple(found.corrupted)
            if kept.setdefault(key, one := replace(found, number=tried)) is not one:
                found = "the prompts were there before", f"pair {kept[key].number}"
        if not isinstance(found, TokenPair):
            which = f"pair {tried} ({safe_line(repr(pair.clean), limit=60)})"
            out.append((which, found[0], found[1]))
        if len(kept) >= 2 * pairs or tried > 40 * pairs + 400:
            break
    if name == "file" and out:
        told = [f"{which}: {why} ({detail})" for which, why, detail in out[:_MOST_TOLD]]
        if more := out[_MOST_TOLD:]:
            counts = Counter(why for _, why, _ in more).items()
            told.append(f"{len(more)} more: {', '.join(f'{why} ({n})' for why, n in counts)}")
        _LOG.warning(
            "%d of the first %d pairs of %s are left out. %s",
            len(out),
            tried,
            config.pairs_file,
            "; ".join(told),
        )
    return list(kept.values())


def _tokenise_pair(
    pair: Pair, tokenizer: "PreTrainedTokenizerBase", *, bos: BosCondition
) -> TokenPair | tuple[str, str]:
    """Return a pair as tokens, or why these do not fit, with a detail; InputError if a span is outside the prompt."""
    from ..data.token_ids import prompt_ids

    prompts = []
    for prompt in (pair.clean, pair.corrupted):
        prompts += (
            prompt_ids([prompt], tokenizer, bos=bos) if isinstance(prompt, str) else [list(prompt)]
        )
    sides = []
    for side in (pair.correct, pair.incorrect):
        ids = list[int]()
        for one in _as_tuple(side):
            if (token := _answer_token(one, pair, tokenizer)) is None:
                return "an answer is not one token behind both prompts", safe_line(repr(one))
            ids.append(token)
        sides.append(tuple(dict.fromkeys(ids)))
    clean, corrupted = prompts
    if len(clean) != len(corrupted):
        return "the prompts differ in length", f"{len(clean)} and {len(corrupted)} tokens"
    if clean == corrupted:
        return "the prompts are equal", f"{len(clean)} tokens"
    if both := set(sides[0]) & set(sides[1]):
        said = safe_line(repr(str(tokenizer.decode([min(both)]))))
        return "an answer is both right and wrong", said
    for name, positions in pair.spans.items():
        for position in positions:
            if not -len(clean) <= position < len(clean):
                raise InputError(
                    f"the span {name} has position {position} in a prompt of {len(clean)} tokens, "
                    f"{safe_line(repr(pair.clean), limit=80)}; need 0 to {len(clean) - 1}, or from -1 for the last "
                    "token"
                )
    return TokenPair(
        clean=clean,
        corrupted=corrupted,
        correct=sides[0],
        incorrect=sides[1],
        template=pair.template,
        spans=pair.spans,
    )


def _as_tuple(side: Any) -> tuple[Any, ...]:
    return side if isinstance(side, tuple) else (side,)


def _answer_token(
    answer: str | int, pair: Pair, tokenizer: "PreTrainedTokenizerBase"
) -> int | None:
    """Return the answer's id behind both prompts; None if it is several tokens or not the same."""
    from ..data.token_ids import answer_id, continuation_ids

    if pair.goes_on:
        ids = continuation_ids(str(pair.clean), str(answer), tokenizer)
        return ids[0] if ids else None
    try:
        first, second = (
            answer_id(answer, prompt, tokenizer) for prompt in (pair.clean, pair.corrupted)
        )
    except InputError:  # not one token behind these prompts
        return None
    return first if first == second else None


def _draw(some: Sequence[Item], generator: np.random.Generator) -> Item:
    return some[int(generator.integers(len(some)))]


def _draw_ioi(generator: np.random.Generator) -> Iterator[Pair]:
    while True:
        number = int(generator.integers(len(_TEMPLATES)))
        text = _TEMPLATES[number]
        for noun, words in _OF_TEMPLATES.items():
            text = text.replace(f"[{noun}]", _draw(words, generator))
        a, b, c = (_NAMES[index] for index in generator.choice(len(_NAMES), 3, replace=False))
        text = text.removesuffix(" [A]").replace("[A]", a)
        before, _, behind = text.rpartition("[B]")
        yield Pair(
            clean=text.replace("[B]", b),
            corrupted=before.replace("[B]", b) + c + behind,
            correct=f" {a}",
            incorrect=f" {b}",
            template=f"ioi {number}",
        )


def _draw_greater_than(generator: np.random.Generator) -> Iterator[Pair]:
    while True:
        noun, century = _draw(list(_NOUNS.items()), generator)
        tens, last = int(generator.integers(3, 8)), int(generator.integers(2, 9))
        text = f"The {noun} lasted from the year {century}{{}}{last} to the year {century}"
        yield Pair(
            clean=text.format(tens),
            corrupted=text.format(0),
            correct=f"{tens + 1}{last}",
            incorrect=f"{tens - 2}{last}",
            template=noun,
            goes_on=True,  # a year is a token a digit, or one of two digits, as the tokenizer has it
        )


def _draw_agreement(generator: np.random.Generator) -> Iterator[Pair]:
    subjects = [one.split() for one in _SUBJECTS.split("|")]
    while True:
        one, many = _draw(subjects, generator)
        behind = _draw(_BEHIND, generator)
        sides = [(one, " is"), (many, " are")]
        plural = int(generator.integers(2))
        (clean, correct), (corrupted, incorrect) = sides[plural], sides[1 - plural]
        yield Pair(
            clean=f"The {clean} {behind}",
            corrupted=f"The {corrupted} {behind}",
            correct=correct,
            incorrect=incorrect,
            template=behind,
        )


def _draw_capitals(generator: np.random.Generator) -> Iterator[Pair]:
    capitals = [one.split() for one in _CAPITALS.split("|")]
    while True:
        (country, capital), (other, its_capital) = (
            capitals[index] for index in generator.choice(len(capitals), 2, replace=False)
        )
        template = _draw(_CAPITAL_TEMPLATES, generator)
        yield Pair(
            clean=template.format(country),
            corrupted=template.format(other),
            correct=f" {capital}",
            incorrect=f" {its_capital}",
            template=template,
        )


def _draw_induction(
    tokenizer: "PreTrainedTokenizerBase",
    d_vocab: int,
    generator: np.random.Generator,
    *,
    bos: BosCondition,
) -> Iterator[Pair]:
    """Draw 10 random tokens, then the first few again; the answer is the next."""
    from ..data.token_ids import bos_ids, ordinary_ids

    ids = np.array(ordinary_ids(tokenizer, d_vocab))
    begin = bos_ids(
        tokenizer, "with" if bos == "auto" and tokenizer.bos_token_id is not None else bos
    )
    length = 10
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
