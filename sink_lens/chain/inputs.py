"""The other BOS condition of a trace's sequences, and its run's record."""

import dataclasses
import logging

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..activations.sink_mask import sink_mask
from ..data.token_ids import bos_id as bos_id_of
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.inputs import describe_provenance, make_tokens
from ..models.lens import LensModel
from .config import Thresholds, TraceConfig

log = logging.getLogger(__name__)
_BEFORE, _AFTER, _FEWEST = 8, 16, 4
"""Tokens that are left before an aligned sink, tokens that must follow it, and the fewest sequences."""
_FEWEST_HEADS = 3
"""Heads that have the sink, below which a sequence without it may be one by chance."""


def other_bos_condition(lens: LensModel, batch: TokenBatch, *, config: TraceConfig) -> TokenBatch | None:
    """The same sequences without BOS where they have it, with it where they do not; None if no BOS exists."""
    if lens.tokenizer is None or bos_id_of(lens.tokenizer) is None:
        return None
    try:
        return make_tokens(lens, config=config, bos="without" if batch.bos else "with")
    except InputError as error:
        log.warning("the other BOS condition is left out: %s", error)
        return None


def align_sinks(
    batch: TokenBatch, rate: Float[Tensor, "layer batch key"], *, position: int, min_sink_rate: float
) -> TokenBatch | None:
    """Cut each sequence so that its own sink stands at one common position; None where that is not needed.

    It is needed where sequences have sinks and the studied position is not one in most of them, as where a delimiter
    draws attention wherever it stands. Sequences without a sink that has tokens before and after it are left out.
    """
    of_sequence = rate.nanmean(0).nan_to_num(0.0)
    strongest = of_sequence.max(1).values
    typical = float(strongest.mean())
    if batch.bos or typical < min_sink_rate or float(of_sequence[:, position].mean()) >= typical / 2:
        return None
    cuts: list[tuple[int, int]] = []  # sequence, first token
    for number, row in enumerate(of_sequence):
        sinks = (row >= typical / 2).nonzero().flatten().tolist()
        fits = [key for key in sinks if key >= _BEFORE and int(batch.lengths[number]) - key >= _AFTER]
        cuts += [(number, key - _BEFORE) for key in fits[:1]]
    if len(cuts) < max(_FEWEST, batch.n_sequences // 2):
        return None
    length = min(int(batch.lengths[number]) - start for number, start in cuts)
    tokens = torch.stack([batch.tokens[number, start : start + length] for number, start in cuts])
    return dataclasses.replace(batch, tokens=tokens, lengths=torch.full((len(cuts),), length))


def sinks_elsewhere(rate: Float[Tensor, "layer batch key"], *, position: int) -> dict[int, int]:
    """Sequence -> position of its sink, for each sequence whose sink is not at the studied position.

    The studied position has less than half of the sink rate that it has on average, another one at least that half.
    None where it is so in half of the sequences or more.
    """
    of_sequence = rate.nanmean(0).nan_to_num(0.0)
    least = float(of_sequence[:, position].mean()) / 2
    found: dict[int, int] = {}
    for number, row in enumerate(of_sequence):
        others = row.clone()
        others[position] = 0.0
        if row[position] < least <= others.max() and least > 0:
            found[number] = int(others.argmax())
    return found if len(found) < len(of_sequence) / 2 else {}


def mask_having_sink(rates: Float[Tensor, " batch"], *, n_heads: int, min_sink_rate: float) -> Bool[Tensor, " batch"]:
    """Mark the sequences that have the sink: at least a quarter of the sink rate of those that pass the minimum.

    Sequences that are too short to tell count as having it. All do if those that pass have it in fewer than three of
    the ``n_heads`` heads of all layers: none or one of them is chance then.
    """
    passes = rates >= min_sink_rate
    typical = rates[passes].mean() if bool(passes.any()) else torch.tensor(0.0)
    return (rates >= typical / 4) | rates.isnan() | (typical * n_heads < _FEWEST_HEADS)


def marked_sink(lens: LensModel, batch: TokenBatch) -> tuple[int, Bool[Tensor, " batch"]]:
    """The position with most tokens that ``sink_mask`` marks, and a mask of the sequences that have it marked.

    The mask is empty if no token is marked, or less than half of them stand there.
    """
    marked = sink_mask(lens, batch)
    counts = marked.sum(0)
    position = int(counts.argmax())
    return position, marked[:, position] & bool(2 * counts[position] >= counts.sum())


def provenance(lens: LensModel, batch: TokenBatch, *, config: TraceConfig, kernel: str) -> dict[str, object]:
    """Provenance of a trace (model, tokens, kernel, thresholds), for its ``run.json``."""
    thresholds = [*(one.name for one in dataclasses.fields(Thresholds)), "super_share"]
    seeds = dict.fromkeys(("bootstrap", "controls", "random_init", "centring"), config.seed)
    return describe_provenance(lens, batch, kernel=kernel) | {
        "seeds": {"tokens": batch.seed} | seeds,
        "thresholds": {name: getattr(config, name) for name in thresholds},
    }
