"""Token batches: the sequences that a model is run on, and where they come from.

Sequences are padded on the right, which under causal attention does not affect the real positions. A text with too few
tokens is refused: nothing is substituted or shortened. BOS counts as one of a sequence's tokens.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from ..arguments import check_calls, value_in_words
from ..errors import InputError
from ..records import display
from ..text import as_ranges, join_and
from .collated import INTEGER_DTYPES, collated_texts, texts_of_rows, type_and_shape
from .described import BosCondition
from .given import Given, by_text
from .token_ids import bos_id, bos_ids, ordinary_ids, prompt_ids, refuse_own_bos, text_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Sequences of token ids, with their lengths and their source; compare two batches by `hash`."""

    tokens: Int[Tensor, "batch position"]
    """Token ids, int64, padded on the right; ids at padded positions have no meaning."""
    lengths: Int[Tensor, " batch"]
    """Number of real tokens of each sequence, BOS included, from 1 to the number of positions."""
    source: str
    """"text:<name>", "prompts", "random", "repeated", "dataset:<name>" or "tensor"."""
    bos: bool
    """True if the first token of every sequence is BOS."""
    bos_condition: BosCondition
    seed: int | None = None
    """Seed of the generator that drew the tokens, if they were drawn at random."""
    labelled: Bool[Tensor, "batch position"] | None = None
    """True at tokens whose loss counts, by the labels of a data set; None counts all."""
    given: Given | None = None
    """Where a tokenizer or a collator gave the tokens, in rows that begin or end with padding or hold several texts;
    None if they were given as they lie here."""

    @staticmethod
    @check_calls
    def from_text(
        text: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sequences: int,
        length: int,
        bos: BosCondition = "auto",
        name: str = "text",
    ) -> "TokenBatch":
        """Cut pieces of equal length from one text, spread evenly over it; ``name`` is recorded as `text:<name>`.

        The text is tokenised once, by the model's own tokenizer and without special tokens. If it has N tokens,
        sequence i of S takes consecutive tokens from floor(i N / S) on. The sequences therefore never overlap, keep the
        order of the text and cover all of it. Most begin in the middle of a sentence. `sequences` is at least 1,
        `length` at least 2, BOS included. `bos` says whether each begins with BOS: "with", "without", or as the
        tokenizer does with plain text ("auto").

        Raises:
            InputError: the text is too short (sequences are never shortened or left out), the text begins with BOS, or
                an argument is out of range.
        """
        _check_batch_size(sequences, length)
        tokenizer = _need_tokenizer(tokenizer)
        what, source = f"the text '{name}'", f"text:{name}"
        ids = text_ids(text, tokenizer)
        return _cut_batch(ids, tokenizer, sequences, length, bos, what=what, source=source)

    @staticmethod
    @check_calls
    def from_prompts(
        prompts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        bos: BosCondition = "auto",
    ) -> "TokenBatch":
        """Make one sequence per prompt, padded on the right with the pad token, else EOS, else 0.

        Raises:
            InputError: there is no prompt, or one is empty, is a single token (no later token could attend to it), or
                begins with BOS itself.
        """
        tokenizer = _need_tokenizer(tokenizer)
        rows = prompt_ids(prompts, tokenizer, bos=bos)
        pad = next(
            pad for pad in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if pad is not None
        )
        width = max(len(row) for row in rows)
        return TokenBatch(
            tokens=torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
            lengths=torch.tensor([len(row) for row in rows]),
            source="prompts",
            bos=bool(bos_ids(tokenizer, bos)),
            bos_condition=bos,
        )

    @staticmethod
    @check_calls
    def from_dataset(
        dataset: Iterable[Any],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        column: str = "text",
        sequences: int,
        length: int,
        bos: BosCondition = "auto",
        name: str | None = None,
    ) -> "TokenBatch":
        """Join the documents of a data set by empty lines and cut the result as `from_text` does.

        Documents are read in order until there are enough tokens; empty documents are skipped.

        The data set is one split of a Hugging Face `Dataset`, or any iterable of mappings, whose `column` holds the
        text. `sequences` is at least 1, `length` at least 2, BOS included. ``name`` is recorded as `dataset:<name>`; by
        default it is the data set's own name, else "iterable".

        Raises:
            InputError: the column is missing or holds no text, the documents have too few tokens, or an argument
                is out of range.
        """
        _check_batch_size(sequences, length)
        tokenizer = _need_tokenizer(tokenizer)
        needed = sequences * (length - len(bos_ids(tokenizer, bos)))
        documents: list[str] = []
        count = 0
        for index, row in enumerate(dataset):
            if document := _document_text(row, index, column):
                documents.append(document)
                count += len(text_ids(document, tokenizer))
                if count >= needed and len(text_ids("\n\n".join(documents), tokenizer)) >= needed:
                    break
        ids = text_ids("\n\n".join(documents), tokenizer)
        name = name or getattr(getattr(dataset, "info", None), "dataset_name", None) or "iterable"
        what, source = f"the data set '{name}'", f"dataset:{name}"
        return _cut_batch(ids, tokenizer, sequences, length, bos, what=what, source=source)

    @staticmethod
    @check_calls
    def from_tensor(
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "TokenBatch":
        """Make a batch from a copy of the caller's token ids. No BOS is added, and the BOS condition is "auto".

        Args:
            tokens: integers of shape (sequences, positions), padded on the right or as ``attention_mask`` says.
            lengths: number of real tokens of each sequence; by default all positions.
            attention_mask: 1 at real tokens, as Hugging Face tokenizers return it; replaces ``lengths``. Sequences
                padded on the left are moved to begin at position 0, where the model expects their first token.
            position_ids: of documents that are packed into rows, as trainers give them: where they begin again, a new
                document begins. Each document of two tokens or more becomes a sequence; none attends to another.
            tokenizer: used only to detect whether every sequence begins with BOS; without a tokenizer the answer is no.

        Raises:
            InputError: tokens, lengths or mask are not integers, have the wrong shape or are out of range; or the mask
                has a gap.
        """
        for name, other in (("an attention mask", attention_mask), ("position_ids", position_ids)):
            if other is not None and lengths is not None:
                raise InputError(f"lengths and {name} were given; need one of them.")
        if attention_mask is not None or position_ids is not None:
            tokens, lengths, _ = texts_of_rows(
                tokens, mask=attention_mask, places={"position_ids": position_ids}
            )
        if tokens.ndim != 2:
            raise InputError(
                f"tokens are {type_and_shape(tokens)}; need two axes, sequence and position. "
                f"For one sequence use tokens[None]."
            )
        if lengths is None:
            lengths = torch.full(tokens.shape[:1], tokens.shape[-1], device=tokens.device)
        for what, tensor in (("tokens", tokens), ("lengths", lengths)):
            if tensor.dtype not in INTEGER_DTYPES:
                raise InputError(
                    f"{what} are {type_and_shape(tensor)}; need integers. Convert them with .long()."
                )
        tokens, lengths = tokens.to(torch.int64, copy=True), lengths.to(torch.int64, copy=True)
        _check_tensors(tokens, lengths)
        batch = TokenBatch(
            tokens=tokens, lengths=lengths, source="tensor", bos=False, bos_condition="auto"
        )
        return replace(batch, bos=bool(begins_with_bos(batch, tokenizer).all()))

    @staticmethod
    @check_calls
    def random(
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sequences: int,
        length: int,
        generator: Generator,
        bos: BosCondition = "auto",
        vocab_size: int | None = None,
    ) -> "TokenBatch":
        """Draw tokens uniformly and independently from the ordinary ids (no special tokens), after BOS if it is added.

        BOS counts as one of the `length` tokens; without a tokenizer, "auto" adds none. Only ids below ``vocab_size``,
        the model's, are drawn; it is required without a tokenizer. The generator is one on the CPU, and its seed is
        recorded.

        Raises:
            InputError: an argument is out of range, the generator is not on the CPU, or no id can be drawn.
        """
        return _draw_batch(
            tokenizer, sequences, length, generator, bos, vocab_size, source="random"
        )

    @staticmethod
    @check_calls
    def repeated(
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sequences: int,
        length: int,
        generator: Generator,
        bos: BosCondition = "auto",
        vocab_size: int | None = None,
    ) -> "TokenBatch":
        """Draw one ordinary id per sequence uniformly and repeat it, after BOS if it is added; see `random`."""
        return _draw_batch(
            tokenizer, sequences, length, generator, bos, vocab_size, source="repeated"
        )

    def __post_init__(self) -> None:
        _check_tensors(self.tokens, self.lengths)

    def __repr__(self) -> str:
        bos = "with" if self.bos else "without"
        return f"TokenBatch of {self.n_sequences} x {self.n_positions} from {self.source}, {bos} BOS, {self.hash[:16]}"

    def _repr_html_(self) -> str:
        rows = {"source": self.source, "sequences": self.n_sequences, "positions": self.n_positions}
        return display.result_html(
            (), rows | {"first token is BOS": self.bos, "hash": self.hash[:16]}
        )

    @property
    def n_sequences(self) -> int:
        return self.tokens.shape[0]

    @property
    def n_positions(self) -> int:
        """Number of positions of each sequence, padding included."""
        return self.tokens.shape[1]

    @property
    def valid(self) -> Bool[Tensor, "batch position"]:
        """False at padding."""
        return torch.arange(self.n_positions, device=self.tokens.device) < self.lengths[:, None]

    @property
    def predicted(self) -> Bool[Tensor, "batch target"]:
        """True at the tokens whose loss counts: all but each sequence's first, and those that the labels leave out."""
        return self.valid[:, 1:] if self.labelled is None else (self.valid & self.labelled)[:, 1:]

    @property
    def hash(self) -> str:
        """SHA-256 (hex) over shape, tokens, lengths and labels: the same on any device or machine."""
        digest = sha256(f"{self.n_sequences}x{self.n_positions}".encode())
        labels = [] if self.labelled is None else [self.predicted]
        for tensor in (self.tokens, self.lengths, *labels):
            digest.update(tensor.cpu().contiguous().numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    @check_calls
    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> "TokenBatch":
        if not isinstance(rows, slice | Tensor):
            rows = torch.tensor(list(rows), dtype=torch.int64)
        rows = rows.to(self.tokens.device) if isinstance(rows, Tensor) else rows
        return replace(self, lengths=self.lengths[rows], **self._of_tokens(rows))

    @check_calls
    def cut(self, length: int) -> "TokenBatch":
        """Return a batch of the first ``length`` positions of every sequence, or all if there are fewer."""
        length = min(length, self.n_positions)  # a tensor takes no whole number above 64 bits
        first = self._of_tokens((slice(None), slice(length)))
        return replace(self, lengths=self.lengths.clamp(max=length), **first)

    def _of_tokens(self, chosen: Any) -> dict[str, Any]:
        return {
            name: None if (own := getattr(self, name)) is None else own[chosen]
            for name in ("tokens", "labelled", "given")
        }

    def with_bos(self, token: int) -> "TokenBatch":
        """Return the same sequences with a BOS token, whose id is ``token``, in front of each.

        Raises:
            InputError: they begin with BOS already.
        """
        if self.bos:
            raise InputError("the sequences begin with BOS already; need sequences without it")
        tokens = torch.cat([self.tokens.new_full((self.n_sequences, 1), token), self.tokens], dim=1)
        labelled = None if self.labelled is None else torch.nn.functional.pad(self.labelled, (1, 0))
        return replace(
            self,
            tokens=tokens,
            lengths=self.lengths + 1,
            labelled=labelled,
            given=None,
            bos=True,
            bos_condition="with",
        )

    def without_bos(self) -> "TokenBatch":
        """Return the same sequences without BOS; a sequence that is BOS alone becomes a single token of padding.

        Raises:
            InputError: they do not begin with BOS.
        """
        if not self.bos:
            raise InputError("the sequences do not begin with BOS; need sequences that do")
        return replace(
            self,
            lengths=(self.lengths - 1).clamp(min=1),
            bos=False,
            bos_condition="without",
            **self._of_tokens((slice(None), slice(1, None))),
        )

    def batches(self, size: int) -> "Iterator[TokenBatch]":
        """Yield the sequences in order, as batches of at most ``size``, each with the full width.

        Raises:
            InputError: size below 1.
        """
        if size < 1:
            raise InputError(f"the batch size is {size}; need at least 1.")
        return (self[start : start + size] for start in range(0, self.n_sequences, size))


from_text, from_prompts, from_dataset = (
    TokenBatch.from_text,
    TokenBatch.from_prompts,
    TokenBatch.from_dataset,
)
from_tensor, random_tokens, repeated_tokens = (
    TokenBatch.from_tensor,
    TokenBatch.random,
    TokenBatch.repeated,
)


def begins_with_bos(
    batch: TokenBatch, tokenizer: PreTrainedTokenizerBase | None
) -> Bool[Tensor, " batch"]:
    """Mark the sequences whose first token is the tokenizer's BOS, if it has one."""
    bos = None if tokenizer is None else bos_id(tokenizer)
    return batch.tokens[:, 0] == (-1 if bos is None else bos)


def decode_tokens(batch: TokenBatch, tokenizer: PreTrainedTokenizerBase | None) -> pd.DataFrame:
    """Table with one row per token that is not padding: sequence, position, token_id, text (as ``token_texts``)."""
    sequence, position = torch.nonzero(batch.valid.cpu(), as_tuple=True)
    token_id = batch.tokens.cpu()[sequence, position]
    text = token_texts(token_id.unique().tolist(), tokenizer)
    return pd.DataFrame(
        {
            "sequence": sequence.numpy(),
            "position": position.numpy(),
            "token_id": token_id.numpy(),
            "text": [text[token] for token in token_id.tolist()],
        }
    )


Tokens = TokenBatch | Int[Tensor, "batch position"] | Mapping[str, Any]
"""A token batch, a tensor of ids, or what a tokenizer, ``apply_chat_template`` or a collator returns
(``data.collated``)."""
Prompts = Tokens | str | Sequence[str]
"""Tokens, or texts that the model's own tokenizer reads."""


def as_batch(
    given: Prompts, tokenizer: PreTrainedTokenizerBase | None = None, *, bos: BosCondition = "auto"
) -> TokenBatch:
    """Return ``given`` as a token batch; a token batch is one of its own, whose tokens lie as they were given.

    Texts are tokenised, and get BOS in front as ``bos`` says; nothing was given behind the end of a shorter one. A
    mapping becomes a text a row (``data.collated``).

    Raises:
        InputError: there are texts and no tokenizer, or a mapping that ``collated_texts`` refuses; or ``bos`` was asked
            for, and there is no text.
    """
    refuse_bos_of_ids([given], bos)
    if isinstance(given, TokenBatch):
        return given if given.given is None else replace(given, given=None)
    if isinstance(given, Tensor):
        return from_tensor(given)
    if isinstance(given, Mapping):
        tokens, lengths, places, labels = collated_texts(given)
        batch = from_tensor(tokens, lengths=lengths)
        if places is None and labels is None:
            return batch
        labelled = None if labels is None else by_text(labels, places)
        if labelled is not None and bool((labelled | ~batch.valid)[:, 1:].all()):
            labelled = None
        return replace(batch, given=places, labelled=labelled)
    batch = from_prompts([given] if isinstance(given, str) else given, tokenizer, bos=bos)
    return replace(batch, given=texts_of_rows(batch.tokens, mask=batch.valid, places={})[2])


def unmasked_padding_text(batch: TokenBatch, tokenizer: PreTrainedTokenizerBase) -> str:
    """Say which sequences begin or end with padding that is read as text, and what to give instead; "" if none does.

    Padding is the tokenizer's pad token, or its EOS. A single EOS or BOS may belong to the text, and a sequence of
    nothing else is one.
    """
    eos: Any = tokenizer.eos_token_id
    pad: Any = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    least = 2 if pad in (eos, tokenizer.bos_token_id) else 1
    if pad is None or batch.n_positions <= least:
        return ""
    is_pad, lengths = (batch.tokens == pad).cpu(), batch.lengths.cpu()
    last = (lengths[:, None] - 1 - torch.arange(least)).clamp(min=0)
    text = (~is_pad & batch.valid.cpu()).any(1) & (lengths > least)
    ends = {"begin": is_pad[:, :least].all(1), "end": is_pad.gather(1, last).all(1)}
    found = []
    for side, padded in ends.items():
        if rows := (padded & text).nonzero().flatten().tolist():
            one = len(rows) == 1
            found.append(f"row{'' if one else 's'} {as_ranges(rows)} {side}{'s' * one}")
    if not found:
        return ""
    return (
        f"{join_and(found)} with the padding id {pad} ({tokenizer.decode([pad])!r}) and no attention_mask leaves it "
        "out: it is read as text, and counts in losses, means and sinks. Give what the tokenizer returned, input_ids "
        "with their attention_mask, or TokenBatch.from_tensor(ids, attention_mask=mask)"
    )


def count_copies(*batches: TokenBatch) -> int:
    rows = torch.cat([one.tokens.masked_fill(~one.valid, -1).cpu() for one in batches], dim=1)
    return len(rows) - len(rows.unique(dim=0))


def warn_of_copies(*batches: TokenBatch, what: str) -> None:
    if n := count_copies(*batches):
        log.warning(
            "%d of %d %s are copies of others, and intervals take each for one of its own, which makes them too narrow;"
            " give each once",
            n,
            batches[0].n_sequences,
            what,
        )


def refuse_bos_of_ids(given: Iterable[Any], bos: BosCondition) -> None:
    if bos != "auto" and all(isinstance(one, TokenBatch | Tensor | Mapping) for one in given):
        raise InputError(
            f"bos={bos!r} was given beside token ids, which are taken as they are; need texts for it. Leave bos out, "
            "or put the id of BOS in front yourself"
        )


def _need_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise InputError(
            "text was given and the model has no tokenizer; need token ids, or load(..., tokenizer=)"
        )
    return tokenizer


def check_positions(positions: Iterable[int], batch: TokenBatch) -> None:
    for position in positions:
        if not 0 <= position < batch.n_positions:
            raise InputError(
                f"position {position} is outside the sequences; need 0 to {batch.n_positions - 1}"
            )


def positions_in_texts(positions: Iterable[int], batch: TokenBatch) -> Int[Tensor, "batch sample"]:
    """Return positions as they are in each sequence, counted from 0; a negative one counts back from its own end.

    Raises:
        InputError: a position is outside the batch, or a negative one outside the shortest sequence.
    """
    asked, lengths = torch.tensor(list(positions), dtype=torch.int64), batch.lengths.cpu()
    for position in asked.tolist():
        if not -int(lengths.min()) <= position < batch.n_positions:
            raise InputError(
                f"position {position} is outside the sequences; need 0 to {batch.n_positions - 1}, or from "
                f"-1 for the last token to {-int(lengths.min())}"
            )
    return torch.where(asked < 0, lengths[:, None] + asked, asked)


def refuse_integer_positions(batch: TokenBatch, positions: Iterable[int], *, of: str) -> None:
    """Refuse positions from 0 on, which are ``of`` something, if a row as it was given begins with no first token.

    There the column of the row and the position in the text differ; below 0, both count back from the text's end.
    """
    named = [position for position in positions if position >= 0]
    if named and batch.given is not None and (late := batch.given.late) is not None:
        raise InputError(
            f"{of} names position {named[0]}, and text {late[0]} begins in column {late[1]} of its row; need rows that "
            "begin in column 0. TokenBatch.from_tensor(ids, attention_mask=...), or position_ids=..., makes them: "
            "positions then count from each text's first token, and results lie so"
        )


def positions_in_all(
    positions: Iterable[int], batch: TokenBatch, *, of: str, own_ends: bool = False
) -> tuple[int, ...]:
    """Return positions that are the same in all sequences, counted from 0; a negative one counts back from the end.

    With ``own_ends``, all stay as they are if sequences have several lengths.

    Raises:
        InputError: a negative position, and sequences of several lengths; or what ``refuse_integer_positions`` refuses.
    """
    asked, lengths = tuple(positions), batch.lengths.tolist()
    refuse_integer_positions(batch, asked, of=of)
    differ = len(set(lengths)) > 1
    if min(asked, default=0) >= 0 or (differ and own_ends):
        return asked
    if differ:
        raise InputError(
            f"{of} names position {min(asked)}, and the sequences have {min(lengths)} to {max(lengths)} tokens; need "
            "sequences of one length, or positions from 0 on"
        )
    found = tuple(positions_in_texts(asked, batch)[0].tolist())
    if len(set(found)) < len(found):
        raise InputError(
            f"{of} names a position twice: {list(asked)} in sequences of {lengths[0]}; need each once"
        )
    return found


def _cut_batch(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    sequences: int,
    length: int,
    bos: BosCondition,
    *,
    what: str,
    source: str,
) -> TokenBatch:
    """Cut N ids into S sequences of ``length`` tokens, the i-th from floor(i N / S). Errors call the ids ``what``."""
    first = bos_ids(tokenizer, bos)
    body = length - len(first)
    if len(ids) < sequences * body:
        fit = len(ids) // body
        raise InputError(
            f"{what} has {len(ids)} tokens; need {sequences} x {body} = {sequences * body} for sequences of {length}"
            f"{' with BOS' if first else ''} ({fit} would fit). Give more text, fewer sequences or a shorter length."
        )
    starts = [index * len(ids) // sequences for index in range(sequences)]
    rows = [list(ids[start : start + body]) for start in starts]
    for index, row in enumerate(rows):
        refuse_own_bos(row, tokenizer, what=f"sequence {index} of {what}")
    return TokenBatch(
        tokens=torch.tensor([[*first, *row] for row in rows]),
        lengths=torch.full((sequences,), length),
        source=source,
        bos=bool(first),
        bos_condition=bos,
    )


def _draw_batch(
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int,
    length: int,
    generator: Generator,
    bos: BosCondition,
    vocab_size: int | None,
    *,
    source: str,
) -> TokenBatch:
    _check_batch_size(sequences, length)
    first = bos_ids(tokenizer, bos)
    if generator.device.type != "cpu":
        raise InputError(
            f"the generator is on {generator.device}; need one on the CPU, so that every device draws the "
            f"same tokens. Make it with torch.Generator()."
        )
    ids = torch.tensor(ordinary_ids(tokenizer, vocab_size))
    body = length - len(first)
    draws = 1 if source == "repeated" else body
    drawn = ids[torch.randint(len(ids), (sequences, draws), generator=generator)]
    before = torch.tensor([first] * sequences, dtype=torch.int64)
    return TokenBatch(
        tokens=torch.cat([before, drawn.expand(-1, body)], dim=1),
        lengths=torch.full((sequences,), length),
        source=source,
        bos=bool(first),
        bos_condition=bos,
        seed=generator.initial_seed(),
    )


def _document_text(row: object, index: int, column: str) -> str:
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


def _check_batch_size(sequences: int, length: int) -> None:
    if sequences < 1:
        raise InputError(f"{sequences} sequences asked for; need at least 1. Ask for more.")
    if length < 2:
        raise InputError(
            f"the length is {length}; need at least 2 tokens, as no later token could attend to the first."
        )


def token_texts(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase | None) -> dict[int, str]:
    """Map each token id to its text; `<id>` if there is no tokenizer, or if it does not know the id."""
    if tokenizer is None:
        return {one: f"<{one}>" for one in ids}
    known = set(tokenizer.get_vocab().values())
    return {one: str(tokenizer.decode([one])) if one in known else f"<{one}>" for one in ids}


def _check_tensors(tokens: Tensor, lengths: Tensor) -> None:
    for name, given in (("tokens", tokens), ("lengths", lengths)):
        if not isinstance(given, Tensor) or given.is_meta:
            raise InputError(
                f"{name} of a TokenBatch are {value_in_words(given)}; need a tensor of int64. Use from_tensor"
            )
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or 0 in tokens.shape:
        raise InputError(
            f"tokens are {type_and_shape(tokens)}; need int64 of shape (sequences, positions), neither 0. "
            f"Use from_tensor, which converts other integers."
        )
    if lengths.shape != tokens.shape[:1] or lengths.dtype != torch.int64:
        raise InputError(
            f"lengths are {type_and_shape(lengths)}; need int64 of shape ({tokens.shape[0]},). "
            f"Give one length a sequence."
        )
    if lengths.device != tokens.device:
        raise InputError(
            f"tokens are on {tokens.device}, lengths on {lengths.device}; need one device. Move one of them."
        )
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 1 or longest > tokens.shape[1]:
        raise InputError(
            f"lengths go from {shortest} to {longest}; need 1 to {tokens.shape[1]}, the positions. "
            f"Drop empty sequences and count real tokens only."
        )
    if int(tokens.min()) < 0:
        raise InputError(
            f"token id {int(tokens.min())} is negative; need ids from 0. "
            f"Pad on the right with any id, and give lengths."
        )
