"""Token batches from text, prompts, a data set, uniform random tokens or one repeated token.

A text with too few tokens is refused: nothing is silently substituted or shortened. These functions add BOS
according to the requested condition ("auto", "with", "without"). BOS counts as one of a sequence's tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator
from transformers import PreTrainedTokenizerBase

from sink_lens.arguments import checked
from sink_lens.data.batch import TokenBatch, decode_tokens, from_tensor
from sink_lens.data.bos import (
    bos_id,
    first_ids,
    ordinary_ids,
    prompt_ids,
    refuse_own_bos,
    text_ids,
    tokenizer_adds_bos,
)
from sink_lens.data.described import BosCondition
from sink_lens.errors import InputError

__all__ = [
    "BosCondition",
    "TokenBatch",
    "bos_id",
    "decode_tokens",
    "from_dataset",
    "from_prompts",
    "from_tensor",
    "from_text",
    "random_tokens",
    "repeated_tokens",
    "tokenizer_adds_bos",
]


@checked
def from_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int,
    length: int,
    bos: BosCondition = "auto",
    name: str = "text",
) -> TokenBatch:
    """Cut pieces of equal length from one text, spread evenly over it.

    The text is tokenised once, without special tokens. If it has N tokens, sequence i of S takes consecutive tokens
    from floor(i N / S) on. The sequences therefore never overlap, keep the order of the text and cover all of it,
    not only its beginning. Most begin in the middle of a sentence. BOS, if added, counts as one of the `length`
    tokens.

    Args:
        text: the text to cut.
        tokenizer: the model's own.
        sequences: number of pieces, at least 1.
        length: tokens of each piece, at least 2.
        bos: "auto", "with" or "without".
        name: name of the text, recorded as `text:<name>`.

    Raises:
        InputError: the text is too short (sequences are never shortened or left out), the text begins with BOS, or
            an argument is out of range.
    """
    _check_size(sequences, length)
    first = first_ids(tokenizer, bos)
    ids = text_ids(text, tokenizer)
    tokens = _cut_ids(ids, tokenizer, sequences=sequences, length=length, first=first, what=f"the text '{name}'")
    return _full(tokens, source=f"text:{name}", first=first, bos_condition=bos)


@checked
def from_prompts(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, bos: BosCondition = "auto"
) -> TokenBatch:
    """Make one sequence per prompt, padded on the right with the pad token, else EOS, else 0.

    Raises:
        InputError: there is no prompt, or a prompt is empty, is a single token (no later token could attend to it),
            or begins with BOS itself.
    """
    rows = prompt_ids(prompts, tokenizer, bos=bos)
    pad_ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(pad for pad in pad_ids if pad is not None)
    width = max(len(row) for row in rows)
    return TokenBatch(
        tokens=torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        source="prompts",
        bos=bool(first_ids(tokenizer, bos)),
        bos_condition=bos,
        seed=None,
    )


@checked
def random_tokens(
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequences: int,
    length: int,
    generator: Generator,
    bos: BosCondition = "auto",
    vocab_size: int | None = None,
) -> TokenBatch:
    """Draw tokens uniformly and independently from the ordinary ids (no special tokens), after BOS if it is added.

    Args:
        tokenizer: the model's own; None if the model has no tokenizer ("auto" then adds no BOS).
        sequences: number of sequences, at least 1.
        length: tokens per sequence, BOS included, at least 2.
        generator: a CPU generator; its seed is recorded.
        bos: "auto", "with" or "without".
        vocab_size: draw only ids below this, the size of the model's vocabulary; required without a tokenizer.

    Raises:
        InputError: an argument is out of range, the generator is not on the CPU, or no id can be drawn.
    """
    return _draw_ids(tokenizer, sequences, length, generator, bos, vocab_size, source="random")


@checked
def repeated_tokens(
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequences: int,
    length: int,
    generator: Generator,
    bos: BosCondition = "auto",
    vocab_size: int | None = None,
) -> TokenBatch:
    """Draw one ordinary id per sequence uniformly and repeat it, after BOS if it is added.

    Arguments and errors are those of `random_tokens`.
    """
    return _draw_ids(tokenizer, sequences, length, generator, bos, vocab_size, source="repeated")


@checked
def from_dataset(
    dataset: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    column: str = "text",
    sequences: int,
    length: int,
    bos: BosCondition = "auto",
    name: str | None = None,
) -> TokenBatch:
    """Join the documents of a data set by empty lines and cut the result as `from_text` does.

    Documents are read in order until there are enough tokens; empty documents are skipped.

    Args:
        dataset: a Hugging Face `Dataset` (one split) or any iterable of mappings.
        tokenizer: the model's own.
        column: the column that holds the text.
        sequences: number of pieces, at least 1.
        length: tokens of each, BOS included, at least 2.
        bos: "auto", "with" or "without".
        name: recorded as `dataset:<name>`; by default the data set's own name, else "iterable".

    Raises:
        InputError: the column is missing or holds no text, the documents have too few tokens, or an argument
            is out of range.
    """
    _check_size(sequences, length)
    first = first_ids(tokenizer, bos)
    needed = sequences * (length - len(first))
    documents: list[str] = []
    ids: list[int] = []
    count = 0
    for index, row in enumerate(dataset):
        document = _document(row, index, column)
        if not document:
            continue
        documents.append(document)
        count += len(text_ids(document, tokenizer))
        if count >= needed:
            ids = text_ids("\n\n".join(documents), tokenizer)
            if len(ids) >= needed:
                break
    else:
        ids = text_ids("\n\n".join(documents), tokenizer)
    name = name or getattr(getattr(dataset, "info", None), "dataset_name", None) or "iterable"
    tokens = _cut_ids(ids, tokenizer, sequences=sequences, length=length, first=first, what=f"the data set '{name}'")
    return _full(tokens, source=f"dataset:{name}", first=first, bos_condition=bos)


def _cut_ids(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int,
    length: int,
    first: Sequence[int],
    what: str,
) -> list[list[int]]:
    """Cut S sequences of `length` tokens; sequence i begins at floor(i N / S) of the N ids."""
    body = length - len(first)
    if len(ids) < sequences * body:
        fit = len(ids) // body
        raise InputError(
            f"{what} has {len(ids)} tokens; need {sequences} x {body} = {sequences * body} for sequences of "
            f"{length}{' with BOS' if first else ''} ({fit} would fit). Give more text, fewer sequences or a "
            f"shorter length."
        )
    rows = []
    for index in range(sequences):
        start = index * len(ids) // sequences
        row = list(ids[start : start + body])
        refuse_own_bos(row, tokenizer, what=f"sequence {index} of {what}")
        rows.append([*first, *row])
    return rows


def _full(tokens: list[list[int]], *, source: str, first: Sequence[int], bos_condition: BosCondition) -> TokenBatch:
    """A batch without padding and without a seed."""
    return TokenBatch(
        tokens=torch.tensor(tokens),
        lengths=torch.full((len(tokens),), len(tokens[0])),
        source=source,
        bos=bool(first),
        bos_condition=bos_condition,
        seed=None,
    )


def _draw_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int,
    length: int,
    generator: Generator,
    bos: BosCondition,
    vocab_size: int | None,
    *,
    source: str,
) -> TokenBatch:
    """Draw ordinary ids uniformly: one per position for "random", one per sequence for "repeated"."""
    _check_size(sequences, length)
    first = first_ids(tokenizer, bos)
    if generator.device.type != "cpu":
        raise InputError(
            f"the generator is on {generator.device}; need one on the CPU, so that every device draws the "
            f"same tokens. Make it with torch.Generator()."
        )
    ids = torch.tensor(ordinary_ids(tokenizer, vocab_size))
    body = length - len(first)
    draws = 1 if source == "repeated" else body
    drawn = ids[torch.randint(len(ids), (sequences, draws), generator=generator)].expand(sequences, body)
    return TokenBatch(
        tokens=torch.cat([torch.tensor([first] * sequences, dtype=torch.int64), drawn], dim=1),
        lengths=torch.full((sequences,), length),
        source=source,
        bos=bool(first),
        bos_condition=bos,
        seed=generator.initial_seed(),
    )


def _document(row: object, index: int, column: str) -> str:
    """The text of one row of a data set."""
    if not isinstance(row, Mapping):
        raise InputError(
            f"row {index} of the data set is a {type(row).__name__}; need a mapping with the column "
            f"'{column}'. Give one split of a data set, or dictionaries."
        )
    if column not in row:
        raise InputError(
            f"the data set has the columns {', '.join(map(str, row))}, not '{column}'; need the one with the "
            f"text. Name it with column=..."
        )
    document = row[column]
    if not isinstance(document, str):
        raise InputError(
            f"column '{column}' of row {index} holds a {type(document).__name__}; need text. Name another column."
        )
    return document


def _check_size(sequences: int, length: int) -> None:
    """Refuse fewer than one sequence or fewer than two tokens."""
    if sequences < 1:
        raise InputError(f"{sequences} sequences asked for; need at least 1. Ask for more.")
    if length < 2:
        raise InputError(
            f"the length is {length}; need at least 2 tokens, as no later token could attend to the first."
        )
