"""The sequences of a trace, and the record of them."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..activations.record import LayerView, Reading, stream_batch
from ..activations.sink_mask import Rule, mark_sinks
from ..data.token_ids import bos_id as bos_id_of
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..measures.reductions import mean_where
from ..measures.sink_tokens import sampled_queries
from ..models.inputs import describe_provenance, make_tokens
from ..models.lens import LensModel
from .at_token import token_label
from .config import CONTROL_LENGTH, CONTROL_MARGIN, THRESHOLDS, TraceConfig

log = logging.getLogger(__name__)
_BEFORE, _AFTER, _FEWEST = 8, 16, 4
"""Tokens that are left before an aligned sink, tokens that must follow it, and the fewest sequences."""
_FEWEST_HEADS = 3
"""With fewer, a sequence without the sink may be one by chance."""


def batch_in_other_bos_condition(
    lens: LensModel, batch: TokenBatch, *, config: TraceConfig
) -> TokenBatch | None:
    """The result is None if tokenizer or tokens do not allow it."""
    if lens.tokenizer is None or bos_id_of(lens.tokenizer) is None:
        return None
    try:
        return make_tokens(lens, config=config, bos="without" if batch.bos else "with")
    except InputError as error:
        log.warning("the other BOS condition is left out: %s", error)
        return None


def align_sinks(
    batch: TokenBatch,
    rate: Float[Tensor, "layer batch key"],
    *,
    position: int,
    min_sink_rate: float,
) -> TokenBatch | None:
    """Cut each sequence so that its own sink, such as a delimiter, stands at one common position.

    Sequences are left out if their sink has too few tokens before or after it. The result is None with BOS, if fewer
    than half of the sequences are left, or if no cut is needed: they have no sinks (a ``rate``, mean over layers, of
    ``min_sink_rate``), or have them at ``position``.
    """
    of_sequence = rate.nanmean(0).nan_to_num(0.0)
    typical = float(of_sequence.max(1).values.mean())
    if (
        batch.bos
        or typical < min_sink_rate
        or float(of_sequence[:, position].mean()) >= typical / 2
    ):
        return None
    cuts: list[tuple[int, int]] = []  # sequence, first token
    for number, row in enumerate(of_sequence):
        sinks = (row >= typical / 2).nonzero().flatten().tolist()
        fits = [
            key for key in sinks if key >= _BEFORE and int(batch.lengths[number]) - key >= _AFTER
        ]
        cuts += [(number, key - _BEFORE) for key in fits[:1]]
    if len(cuts) < max(_FEWEST, batch.n_sequences // 2):
        return None
    length = min(int(batch.lengths[number]) - start for number, start in cuts)
    tokens = torch.stack([batch.tokens[number, start : start + length] for number, start in cuts])
    lengths = torch.full((len(cuts),), length)
    return dataclasses.replace(batch, tokens=tokens, lengths=lengths, labelled=None)


def find_sinks_elsewhere(
    rate: Float[Tensor, "layer batch key"], *, position: int
) -> dict[int, int]:
    """Find the sequences whose sink is not at ``position``: index -> position of its sink.

    The ``rate`` at ``position`` is under half of its mean over sequences there, and another position reaches that half.
    If half of the sequences are like that, the result is empty.
    """
    of_sequence = rate.nanmean(0)
    least = float(of_sequence[:, position].nanmean()) / 2
    found: dict[int, int] = {}
    for number, row in enumerate(of_sequence.nan_to_num(0.0)):
        others = row.clone()
        others[position] = 0.0
        if row[position] < least <= others.max() and least > 0:
            found[number] = int(others.argmax())
    return found if len(found) < len(of_sequence) / 2 else {}


def mask_sequences_with_sink(
    rates: Float[Tensor, " batch"], *, n_heads: int, min_sink_rate: float
) -> Bool[Tensor, " batch"]:
    """Mark the sequences that have the sink, from their sink rates at the sink position.

    Those have it that are too short to tell (nan), or have a quarter of the mean of the rates above ``min_sink_rate``;
    all, if that mean is under three of the ``n_heads`` heads: a lower rate may be chance.
    """
    passes = rates >= min_sink_rate
    typical = rates[passes].mean() if bool(passes.any()) else torch.tensor(0.0)
    return (rates >= typical / 4) | rates.isnan() | (typical * n_heads < _FEWEST_HEADS)


def find_marked_sink(
    lens: LensModel, batch: TokenBatch, *, batch_size: int | None
) -> tuple[int, Bool[Tensor, " batch"]]:
    """Return the position that ``sink_mask`` marks most often, and the sequences with a sink there.

    There are none if less than half of all marked tokens stand there.
    """
    marked, _ = mark_sinks(lens, batch, batch_size=batch_size)
    counts = marked.sum(0)
    position = int(counts.argmax())
    return position, marked[:, position] & bool(2 * counts[position] >= counts.sum())


def trace_provenance(
    lens: LensModel, batch: TokenBatch, *, config: TraceConfig, kernel: str
) -> dict[str, object]:
    seeds = dict.fromkeys(("bootstrap", "controls", "random_init", "centring"), config.seed)
    return describe_provenance(lens, batch, kernel=kernel) | {
        "seeds": {"tokens": batch.seed} | seeds,
        "thresholds": {name: getattr(config, name) for name in THRESHOLDS},
        "controls": {"positions": CONTROL_LENGTH, "margin": CONTROL_MARGIN},
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTokens:
    """Tokens that ``sink_mask`` marks at other positions than the studied ones."""

    names: tuple[str, ...]
    """The most frequent of them, at most two."""
    n_sequences: int
    n_asked: int
    attention: float
    """Share of the attention behind the first of them that goes to them, mean over layers and heads."""
    to_studied: float
    """The same to the studied position."""


def find_marked_tokens(
    lens: LensModel,
    batch: TokenBatch,
    *,
    scores: Mapping[Rule, Tensor],
    studied: Sequence[int],
    batch_size: int | None,
) -> MarkedTokens | None:
    """Find the tokens that are sinks beside the ``studied`` positions, by their ``scores``.

    Cost: a pass without the unembedding if there are some.
    """
    marked, _ = mark_sinks(lens, batch, scores=scores)
    marked[:, list(studied)] = False
    having = marked.any(1)
    if not bool(having.any()):
        return None
    by_text = {
        _text_of(*pair): row
        for pair, row in zip(zip(batch.tokens, batch.valid, strict=True), marked, strict=True)
    }

    def behind(view: LayerView) -> Tensor:
        pairs = zip(view.tokens, view.valid, strict=True)
        at = torch.stack([by_text[_text_of(*pair)][: view.valid.shape[1]] for pair in pairs]).to(
            view.valid.device
        )
        assert view.rows is not None
        rows = view.rows.to(at.device)
        later = (
            (rows > at.int().argmax(1, keepdim=True))
            & at.any(1, keepdim=True)
            & view.valid[:, rows]
        )
        shares = view["rows"].float().mean(1)  # sample, query, key
        both = torch.stack([(shares * at[:, None]).sum(-1), shares[..., studied[0]]], dim=-1)
        return mean_where(both, where=later[..., None], dim=1)

    reading = Reading(name="behind", sites=("rows",), function=behind)
    rows = sampled_queries(batch.n_positions)
    streamed = stream_batch(lens, batch, [reading], rows=rows, batch_size=batch_size)
    found = streamed.stacked("behind").nanmean((0, 1))
    ids, counts = batch.tokens[marked].unique(return_counts=True)
    names = tuple(
        token_label((int(ids[at]),), lens.tokenizer) for at in counts.argsort(descending=True)[:2]
    )
    return MarkedTokens(
        names=names,
        attention=float(found[0]),
        to_studied=float(found[1]),
        n_sequences=int(having.sum()),
        n_asked=batch.n_sequences,
    )


def _text_of(tokens: Tensor, valid: Tensor) -> tuple[int, ...]:
    return tuple(tokens[valid].tolist())
