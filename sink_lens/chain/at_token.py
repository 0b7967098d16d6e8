"""``trace(at=TOKEN)``: sequences cut so that one occurrence of a token stands at one position in each.

So the chain's readings, interventions and freezes at that position are those at the occurrence.
"""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from ..activations.sink_mask import mark_sinks, sink_rates
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.lens import LensModel
from .config import TraceConfig

AUTO = "auto"
_BEFORE = 8
"""Fewest tokens before an occurrence, without BOS; as many as the first sink has where earlier ones are none."""
_AFTER = (48, 32, 24, 16, 12, 9)
"""Numbers of tokens after an occurrence that are tried: the first one that enough occurrences have is taken."""
_FEWEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrences:
    """Sequences that each hold one occurrence of a token, all at one position."""

    tokens: TokenBatch
    position: int
    ids: tuple[int, ...]
    text: str
    found: int
    """Occurrences in the given sequences, also those without enough room around them."""


def cut_at_token(lens: LensModel, batch: TokenBatch, *, config: TraceConfig) -> Occurrences:
    """Cut the sequences around each occurrence of the token that ``config.at`` names.

    Raises:
        InputError: no such token, or too few occurrences with tokens before and after them.
    """
    assert config.at is not None
    ids = (
        (_strongest_sink_token(lens, batch, config=config),)
        if config.at == AUTO
        else token_ids(config.at, lens=lens)
    )
    places = [
        (number, position)
        for number, row in enumerate(batch.tokens.tolist())
        for position in range(int(batch.bos), int(batch.lengths[number]))
        if row[position] in ids
    ]
    text = token_label(ids, lens.tokenizer)
    marked, _ = mark_sinks(lens, batch, batch_size=config.batch_size)
    sinks = [position for number, position in places if marked[number, position]]
    early = [
        one
        for number, one in places
        if not marked[number, one] and _BEFORE <= one < min(sinks, default=0)
    ]
    before = max(_BEFORE, min(sinks) - int(batch.bos)) if early else _BEFORE
    if early and has_learned_positions(lens):
        raise InputError(
            f"{text} is a sink from position {min(sinks)} on, and none up to position {max(early)}; need a model "
            f"without learned positions, in which its rows can be cut there. {lens.name} has them: trace it without at"
        )
    return _cut_at_places(batch, places, ids=ids, text=text, before=before)


def has_learned_positions(lens: LensModel) -> bool:
    """The model embeds positions, so that a text that is cut in front is another one to it."""
    return getattr(lens.config, "rope_parameters", None) is None and not lens.family.alibi


def token_ids(token: str, *, lens: LensModel) -> tuple[int, ...]:
    """Return the ids of all tokens that read like ``token``, or like it after a space; digits are an id."""
    if token.isdecimal():
        if int(token) >= lens.d_vocab:
            raise InputError(
                f"token id {token} is outside the vocabulary of {lens.d_vocab}; need an id of this model"
            )
        return (int(token),)
    if lens.tokenizer is None:
        raise InputError(
            f"{lens.name} has no tokenizer, so the token {token!r} has no id; need an id, such as 13"
        )
    wanted = token.replace("\\n", "\n").replace("\\t", "\t")
    known = sorted({i for i in lens.tokenizer.get_vocab().values() if i < lens.d_vocab})
    found = tuple(i for i in known if lens.tokenizer.decode([i]) in (wanted, f" {wanted}"))
    if not found:
        raise InputError(
            f"no token of {lens.name} reads {wanted!r}; need the text of exactly one token, an id, or auto"
        )
    return found


def token_label(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Name a token in a message: its text in quotes, or ``id 13`` without a tokenizer."""
    return f"id {ids[0]}" if tokenizer is None else repr(tokenizer.decode([ids[0]]))


def _cut_at_places(
    batch: TokenBatch,
    places: list[tuple[int, int]],
    *,
    ids: tuple[int, ...],
    text: str,
    before: int,
) -> Occurrences:
    by_sequence: dict[int, list[int]] = {}
    for number, position in places:
        by_sequence.setdefault(number, []).append(position)
    room: list[
        tuple[int, int, int, int]
    ] = []  # rank in its sequence, sequence, position, tokens after it
    for number, own in by_sequence.items():
        for rank, position in enumerate(own):
            start = own[rank - 1] + 1 if rank else int(batch.bos)
            end = own[rank + 1] if rank + 1 < len(own) else int(batch.lengths[number])
            if position - start >= before:
                room.append((rank, number, position, end - position - 1))
    fewest = max(_FEWEST, min(batch.n_sequences, len(room)) // 2)
    after = next((most for most in _AFTER if sum(one[3] >= most for one in room) >= fewest), None)
    if after is None:
        raise InputError(
            f"{text} stands {len(places)} times in {batch.n_sequences} sequences, and {len(room)} times with "
            f"{before} tokens before it; need {_FEWEST} occurrences with that many before and {_AFTER[-1]} tokens "
            "behind, none of which is another occurrence. Use longer sequences or more of them"
        )
    rows = []
    for _, number, position, _ in sorted(one for one in room if one[3] >= after)[
        : batch.n_sequences
    ]:
        row = batch.tokens[number, position - before : position + after + 1]
        rows.append(torch.cat([batch.tokens[number, :1], row]) if batch.bos else row)
    tokens = torch.stack(rows)
    lengths = torch.full((len(rows),), tokens.shape[1])
    cut = replace(batch, tokens=tokens, lengths=lengths, labelled=None)
    return Occurrences(
        tokens=cut, position=before + int(batch.bos), ids=ids, text=text, found=len(places)
    )


def _strongest_sink_token(lens: LensModel, batch: TokenBatch, *, config: TraceConfig) -> int:
    """Return the id of the token with the highest mean sink rate at position 8 or later.

    Raises:
        InputError: no token is a sink in at least ``min_sink_rate`` of (layer, head).
    """
    rate = sink_rates(
        lens,
        batch,
        threshold=config.threshold,
        kernel=config.kernel,
        batch_size=config.batch_size,
    ).nanmean(0)  # sequence, key
    of_token: dict[int, list[float]] = {}
    for number, row in enumerate(batch.tokens.tolist()):
        for position in range(_BEFORE, int(batch.lengths[number])):
            if not rate[number, position].isnan():  # else too few queries follow to tell
                of_token.setdefault(row[position], []).append(float(rate[number, position]))
    often = {token: sum(own) / len(own) for token, own in of_token.items() if len(own) >= _FEWEST}
    best = max(often, key=lambda token: often[token], default=None)
    if best is None or often[best] < config.min_sink_rate:
        text = "" if best is None else token_label((best,), lens.tokenizer)
        strongest = "" if best is None else f"; the strongest is {text} with {often[best]:.3f}"
        raise InputError(
            f"none of the tokens that stand at least {_FEWEST} times at position {_BEFORE} or later, with "
            f"enough queries behind them, is a sink there in {config.min_sink_rate:g} of layers and heads{strongest}. "
            "Name a token, or trace without at"
        )
    return best
