"""Sinks and massive tokens: two scores of a token, and the gap that separates the high ones.

A *sink* receives attention; a *massive activation* is large. A model with a norm of queries and keys can have the first
without the second (arXiv 2603.05498), so each has its own score. Both scores are 1 at an ordinary token:

- the *fair share*: how many times its fair share of attention a token receives from later tokens;
- the *norm ratio*: the token's norm over the median norm of its sequence.

A gap decides whether a score is high: nearly no token has a score within it. A model without a gap has no such tokens.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import InputError
from .reductions import median_where, widen

SAMPLED_QUERIES = 64
"""The most query rows of a sequence that are computed."""
PRIOR_QUERIES = 2
"""Queries at exactly the fair share that are added to those of a token, so that one late query decides nothing."""
LEAST_SHARE = 2.5
"""The least median score of sinks, in fair shares; no token of an untrained model reaches 1.6."""
LEAST_NORM = 4.0
"""The least median norm ratio of massive activations; no token of an untrained model reaches 2.8."""
GAP = 1.5
"""The least ratio of the two edges of a gap."""
STRAY_FRAC = 0.05
"""The largest number of tokens within a gap, as a share of the tokens above it."""
_BISECTIONS = 16


class ScoreGap(NamedTuple):
    """The gap that divides the scores of tokens into low and high ones."""

    low: float
    """The largest score below the gap."""
    high: float
    """The smallest score above the gap."""
    threshold: float
    """Their geometric mean; tokens at or above it are marked."""
    above: int
    """Number of tokens above the gap."""
    within: int
    """Number of tokens whose score is closer to the threshold than the root of the asked ratio."""


def sampled_queries(length: int, *, first: int = 0) -> Int[Tensor, " row"]:
    """Return the query positions to sample from `first` to `length` - 1: all of them, or 64 evenly spaced if more."""
    if length - first <= SAMPLED_QUERIES:
        return torch.arange(first, length)
    return torch.linspace(first, length - 1, SAMPLED_QUERIES, dtype=torch.float32).round().long()


def earlier_keys(
    row_positions: Int[Tensor, " row"], *, n_keys: int, reach: int | None = None
) -> Bool[Tensor, "row key"]:
    """Mark for the query of each row (`row_positions`) which of `n_keys` keys come before it.

    With `reach`, only the keys less than `reach` positions back are marked.
    """
    distance = row_positions[:, None] - torch.arange(n_keys, device=row_positions.device)
    earlier = distance > 0
    return earlier if reach is None else earlier & (distance < reach)


def fair_shares(
    rows: Float[Tensor, "batch head row key"],
    *,
    row_positions: Int[Tensor, " row"],
    reach: int | None = None,
) -> Float[Tensor, "batch row key"]:
    """Mean attention over heads in fair shares; the fair share is 1 / (number of keys that the query sees).

    0 or more; 1 everywhere under uniform attention. 0 at the query itself and at keys that it does not see.

    Args:
        rows: sampled rows of the pattern; of sigmoid attention, its shares (`attention.row_shares`).
        row_positions: the query position of each row, 0-based.
        reach: positions that a query sees, itself included, under a sliding window; None is all.
    """
    row_positions = row_positions.to(rows.device)
    visible = (row_positions + 1).clamp(min=1, max=reach).to(torch.float32)
    seen = earlier_keys(row_positions, n_keys=rows.shape[3], reach=reach)
    return widen(rows).mean(1) * (seen * visible[:, None])


def share_score(
    shares: Float[Tensor, "batch row key"],
    *,
    seen: Bool[Tensor, "row key"],
    row_positions: Int[Tensor, " row"],
    row_valid: Bool[Tensor, "batch row"],
) -> Float[Tensor, "batch key"]:
    """Score of each token: the attention that it receives from the sampled later queries, in fair shares.

    A query's attention to a key counts as a multiple of the larger of two numbers: the fair share, and what the
    sequence's keys at a similar distance typically receive (the median over keys 1, 2, 3 to 4, 5 to 8, ... positions
    back), so that attention to neighbours makes no sink. The score is their mean over the later queries, and over
    ``PRIOR_QUERIES`` more that are taken to give 1: that of a token that no sampled query follows.

    ``shares`` are `fair_shares`, averaged over layers; ``seen`` says which keys each row sees and may count for
    (`earlier_keys`).
    """
    seen, row_positions = seen.to(shares.device), row_positions.to(shares.device)
    distance = row_positions[:, None] - torch.arange(shares.shape[2], device=shares.device)
    bins = distance.clamp(min=1).double().log2().ceil().long().masked_fill(~seen, -1)
    counted = torch.where(seen & row_valid[:, :, None], shares, 0.0)
    for one in range(int(bins.max()) + 1):
        at_row, at_key = (bins == one).nonzero(as_tuple=True)
        if len(at_row):
            part = counted[:, at_row, at_key]
            typical = median_where(part, where=row_valid[:, at_row])
            counted[:, at_row, at_key] = part / typical.nan_to_num(1.0).clamp(min=1.0)[:, None]
    queries = (row_valid.float() @ seen.float()).to(counted.dtype)
    return (counted.sum(1) + PRIOR_QUERIES) / (queries + PRIOR_QUERIES)


def ratios_to_median_norm(
    norms: Float[Tensor, "batch position"], *, valid: Bool[Tensor, "batch position"]
) -> Float[Tensor, "batch position"]:
    """Divide the norm of each token by the median norm of its sequence; padding is nan and does not count."""
    ratio = widen(norms) / median_where(norms, where=valid)[:, None]
    return ratio.masked_fill(~valid, torch.nan)


def score_gap(scores: Float[Tensor, "..."], *, least: float, gap: float = GAP) -> ScoreGap | None:
    """Find the gap between low and high scores: the lowest wide one with a median of at least `least` above it.

    A gap is a range from a score to at least `gap` times this score that is nearly empty: it holds at most `STRAY_FRAC`
    times as many tokens as lie above it. Of several gaps the function takes the lowest one that is, on a logarithmic
    scale, at least half as wide as the widest: so a lower kind of sink counts, and a chance hole among ordinary tokens
    does not. The threshold lies in the widest step between two scores of the gap. Scores of nan are left out; None if
    there is no gap.

    Raises:
        InputError: `gap` is not above 1.
    """
    if not gap > 1:
        raise InputError(f"found gap = {gap}; need a ratio above 1. {GAP} is the default.")
    ordered = scores[~scores.isnan()].double().sort().values
    ordered = ordered[ordered > 0]
    if len(ordered) < 2 or _lowest_gap_edges(ordered, gap, least=least) is None:
        return None
    known = math.log(gap)
    missed = max(math.log(gap), math.log(float(ordered[-1] / ordered[0]))) + 1.0
    # the widest gap, between what is known to be there and what is not
    for _ in range(_BISECTIONS):
        middle = (known + missed) / 2
        there = _lowest_gap_edges(ordered, math.exp(middle), least=least) is not None
        known, missed = (middle, missed) if there else (known, middle)
    # the median above half the width may be lower
    wide = max(gap, math.exp(known / 2)), math.exp(known)
    places = (_lowest_gap_edges(ordered, one, least=least) for one in wide)
    first, above = next(place for place in places if place is not None)
    around = ordered[first : above + 1]
    jump = int((around[1:] / around[:-1]).argmax())  # the widest step from one score to the next
    low, high = around[jump : jump + 2].tolist()
    threshold = (low * high) ** 0.5
    near = (ordered > threshold / gap**0.5) & (ordered < threshold * gap**0.5)
    return ScoreGap(
        low, high, threshold, above=len(ordered) - 1 - first - jump, within=int(near.sum())
    )


def _lowest_gap_edges(
    ordered: Float[Tensor, " sample"], gap: float, *, least: float
) -> tuple[int, int] | None:
    """Return the indices of the edges of the lowest gap in ascending scores (see `score_gap`); None without a gap."""
    last = len(ordered) - 1
    after = torch.searchsorted(ordered, ordered, right=True)
    # the first score that is at least gap times each
    first_above = torch.searchsorted(ordered, ordered * gap)
    above, within = len(ordered) - first_above, first_above - after
    middle = (first_above + (above - 1) // 2, first_above + above // 2)
    lower, upper = (ordered[one.clamp(max=last)] for one in middle)
    parts = (above > 0) & (within <= STRAY_FRAC * above) & ((lower + upper) / 2 >= least)
    place = int(parts.int().argmax())
    return (place, int(first_above[place])) if parts[place] else None
