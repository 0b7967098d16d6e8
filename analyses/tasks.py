"""Small tasks with right answers, without a network: what a tuned model is asked, and how its answers are counted.

``agreement``
    ``The keys near the cabinet behind the door`` -> `` are``. The nearest noun misleads in half of the prompts.
``questions``
    ``Anna has the ball. Peter has the key. Who has the ball? Answer:`` -> `` Anna``.
``genres``
    16 words of a document of yours and ``Genre:`` -> `` news``, or what else you call your kinds of text.

What is held out has words that no training prompt has: other nouns, other names and things, other documents. An answer
is right if it is more probable than the other choices of its prompt; its loss is that of its tokens among all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from sink_lens.data.token_ids import continuation_ids
from sink_lens.errors import InputError

_NOUNS = (
    "key keys|cabinet cabinets|dog dogs|house houses|teacher teachers|book books|road roads|window windows|car cars|"
    "river rivers|king kings|letter letters|ship ships|tree trees|picture pictures|door doors|farmer farmers|boy boys|"
    "bottle bottles|table tables|girl girls|horse horses|garden gardens|friend friends|doctor doctors|chair chairs|"
    "bird birds|school schools|soldier soldiers|tower towers|flower flowers|engine engines|student students|lamp lamps|"
    "wall walls|driver drivers"
)
_BETWEEN = "near|behind|beside|in front of|next to|opposite"
_NAMES = (
    "Anna|Peter|Mary|John|David|Sarah|Paul|Laura|James|Emma|Robert|Alice|Thomas|Lucy|George|Helen|Henry|Julia|Frank|"
    "Clara|Simon|Rose|Martin|Grace"
)
_THINGS = (
    "ball|key|book|lamp|cup|coin|map|ring|shoe|hat|knife|watch|letter|bell|brush|clock|drum|fork|glove|hammer|kite|pen|"
    "rope|spoon"
)
_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt, its right answer, and all answers that it could have."""

    prompt: str
    answer: str
    """Text after the prompt, with the space before it."""
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Examples to train on and others that are held out."""

    name: str
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]


def agreement(*, train: int, held_out: int, generator: torch.Generator) -> Task:
    """Make prompts that end before the verb; the head noun and the two after it are singular or plural, each as likely.

    Args:
        train: examples to train on.
        held_out: examples with other nouns.
        generator: draws nouns, numbers and words between.
    """

    def make(nouns: Sequence[str]) -> Example:
        head, *others = (nouns[at].split() for at in _draw(nouns, 3, generator))
        plural = _draw_one((0, 1), generator)
        between = (
            f"{_draw_one(_BETWEEN.split('|'), generator)} the {_draw_one(other, generator)}"
            for other in others
        )
        prompt = " ".join((f"The {head[plural]}", *between))
        return Example(prompt=prompt, answer=(" is", " are")[plural], choices=(" is", " are"))

    return _task("agreement", _parts(_NOUNS, generator), make, train=train, held_out=held_out)


def questions(*, train: int, held_out: int, generator: torch.Generator) -> Task:
    """Make two sentences of who has what and a question about one of them."""
    names, things = _parts(_NAMES, generator), _parts(_THINGS, generator)

    def make(words: tuple[list[str], list[str]]) -> Example:
        who, what = ([each[at] for at in _draw(each, 2, generator)] for each in words)
        asked = _draw_one((0, 1), generator)
        told = " ".join(f"{name} has the {thing}." for name, thing in zip(who, what, strict=True))
        choices = tuple(f" {name}" for name in who)
        return Example(
            prompt=f"{told} Who has the {what[asked]}? Answer:",
            answer=choices[asked],
            choices=choices,
        )

    words = tuple(zip(names, things, strict=True))
    return _task("questions", words, make, train=train, held_out=held_out)


def genres(
    *, texts: Mapping[str, Sequence[str]], train: int, held_out: int, generator: torch.Generator
) -> Task:
    """Cut prompts of 16 words from documents of several kinds, one kind as often as another.

    Args:
        texts: kind -> its documents, at least two of over 16 words.
        train: examples to train on.
        held_out: examples from other documents.
        generator: draws documents and places.

    Raises:
        InputError: a kind has fewer documents.
    """
    known, kept = {}, {}
    for genre, documents in texts.items():
        long = [words for words in map(str.split, documents) if len(words) > _WORDS]
        if len(long) < 2:
            raise InputError(
                f"{genre} has {len(long)} documents of more than {_WORDS} words; need at least 2"
            )
        known[genre], kept[genre] = _split_words(long, generator)
    choices = tuple(f" {genre}" for genre in texts)

    def make(cut: dict[str, list[list[str]]]) -> Example:
        genre = _draw_one(list(cut), generator)
        words = _draw_one(cut[genre], generator)
        start = int(torch.randint(len(words) - _WORDS, (1,), generator=generator))
        excerpt = " ".join(words[start : start + _WORDS])
        return Example(prompt=f"{excerpt}\nGenre:", answer=f" {genre}", choices=choices)

    return _task("genres", (known, kept), make, train=train, held_out=held_out)


def pad_prompts(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Make a batch of prompts with their answers, padded on the right; only the answers have labels.

    Args:
        pairs: prompt and answer.
        tokenizer: of the model. The prompt begins with BOS if that is what it does.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, as a Hugging Face model takes them.
    """
    rows = []
    for prompt, answer in pairs:
        before, after = tokenizer(prompt)["input_ids"], _behind(prompt, answer, tokenizer)
        rows.append((before + after, [-100] * len(before) + after))
    longest = max(len(ids) for ids, _ in rows)
    batch = torch.full((3, len(rows), longest), 0)
    batch[2] = -100
    for at, (ids, labels) in enumerate(rows):
        batch[:, at, : len(ids)] = torch.tensor([ids, [1] * len(ids), labels])
    return dict(zip(("input_ids", "attention_mask", "labels"), batch, strict=True))


def batches(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, *, size: int
) -> Iterator[dict[str, Tensor]]:
    """Make batches of right answers, in order; see ``pad_prompts``."""
    for start in range(0, len(examples), size):
        some = examples[start : start + size]
        yield pad_prompts([(one.prompt, one.answer) for one in some], tokenizer)


@torch.no_grad()
def answer_examples(
    model: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    size: int = 16,
) -> pd.DataFrame:
    """Ask a model: a row for each example, with ``loss`` (nats of the right answer) and ``right`` (1 or 0).

    Chance is one over the number of choices. Where all choices are one token, an example takes one sequence; else
    each of its choices does.

    Args:
        model: called with ``input_ids`` and ``attention_mask``, gives an output with ``logits``.
        tokenizer: of the model.
        examples: what is asked.
        size: examples of one batch.
    """
    found: dict[tuple[int, str], float] = {}
    for start in range(0, len(examples), size):
        some = list(enumerate(examples))[start : start + size]
        ids = [
            [_behind(one.prompt, choice, tokenizer) for choice in one.choices] for _, one in some
        ]
        if all(len(each) == 1 for choices in ids for each in choices):
            batch = pad_prompts([(one.prompt, one.answer) for _, one in some], tokenizer)
            last = batch["attention_mask"].sum(1) - 2  # the prompt's last token
            logits = _logits(model, batch)[torch.arange(len(some)), last].log_softmax(-1)
            for row, (at, one) in enumerate(some):
                of = zip(one.choices, ids[row], strict=True)
                found |= {(at, choice): -logits[row, token].item() for choice, (token,) in of}
            continue
        asked = [(at, one.prompt, choice) for at, one in some for choice in one.choices]
        batch = pad_prompts([row[1:] for row in asked], tokenizer)
        labels, logits = batch["labels"][:, 1:], _logits(model, batch)[:, :-1]
        each = cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
        )
        losses = each.view(labels.shape).sum(1).tolist()
        found |= {(at, choice): loss for (at, _, choice), loss in zip(asked, losses, strict=True)}
    rows = []
    for at, one in enumerate(examples):
        of = {choice: found[at, choice] for choice in one.choices}
        best = all(
            of[one.answer] < loss for choice, loss in of.items() if choice != one.answer
        )  # a tie is wrong
        rows.append({"example": at, "loss": of[one.answer], "right": int(best)})
    return pd.DataFrame(rows)


def _behind(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of an answer behind its prompt; refuses one that changes the prompt's own."""
    ids = continuation_ids(prompt, answer, tokenizer)
    if ids is None or (answer and not ids):
        raise InputError(
            f"the answer {answer!r} changes the tokens of {prompt[-40:]!r}; need one that leaves them"
        )
    return ids


def _logits(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits.float()


def _task(
    name: str, parts: Any, make: Callable[[Any], Example], *, train: int, held_out: int
) -> Task:
    """Draw the examples to train on, and others held out."""
    if min(train, held_out) < 1:
        raise InputError(
            f"{train} examples to train on and {held_out} held out; need at least 1 of each"
        )
    known, kept = parts
    first = tuple(make(known) for _ in range(train))
    return Task(name=name, train=first, held_out=tuple(make(kept) for _ in range(held_out)))


def _parts(words: str, generator: torch.Generator) -> tuple[list[str], list[str]]:
    return _split_words(words.split("|"), generator)


def _split_words(items: Sequence[Any], generator: torch.Generator) -> tuple[list[Any], list[Any]]:
    """Two thirds to train on, the rest held out, drawn."""
    order = torch.randperm(len(items), generator=generator).tolist()
    cut = len(items) * 2 // 3
    return [items[at] for at in order[:cut]], [items[at] for at in order[cut:]]


def _draw_one(items: Sequence[Any], generator: torch.Generator) -> Any:
    return items[int(torch.randint(len(items), (1,), generator=generator))]


def _draw(items: Sequence[Any], n: int, generator: torch.Generator) -> list[int]:
    """Draw indices without repeats."""
    return torch.randperm(len(items), generator=generator)[:n].tolist()
