"""The attention that a key receives, from its column of the pattern, and the shape of sampled rows.

A *column* is the attention of every query to one key; it is computed without building the pattern. *Rows* are explicit
rows of the pattern at sampled query positions. Padding is on the right, so a real query never sees it; `valid` and
`row_valid` say which queries are real.

Scores and masses are shares of a query's attention, averaged over the queries that can see the key:

- softmax over the earlier keys: rows sum to 1, and a weight is a share as it is;
- a learned sink logit (gpt-oss): rows sum to less than 1, and a weight is still a probability, taken as it is;
- sigmoid: rows sum to anything, so each weight is taken over the sum of its row (`row_shares`);
- a sliding window: only the queries whose window reaches the key are averaged over. `reach` is the number of positions
  that a query sees, itself included; None is all.
"""

import math

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from .reductions import check_position, later_queries, mean_where, queries_from, widen


def sink_score(
    column: Float[Tensor, "batch head query"],
    *,
    valid: Bool[Tensor, "batch query"],
    key: int,
    min_queries: int = 10,
    reach: int | None = None,
) -> Float[Tensor, "batch head"]:
    """Mean attention to `key` over the queries that can see it, including its own query: alpha_k.

    In [0, 1]. Under uniform attention key k of T scores (1/(T-k)) sum_{i=k}^{T-1} 1/(i+1) (0-based).

    Args:
        column: attention of each query to `key`; of sigmoid attention, its share of the row's sum (`row_shares`).
        valid: which queries are real tokens.
        key: the 0-based position whose column this is.
        min_queries: sequences with fewer real queries that see `key` are nan, since the mean over few queries would be
            a false sink: see ``fewest_queries``; a window shorter than this must be full.
        reach: positions that a query sees, itself included, under a sliding window; None is all.

    Raises:
        InputError: `key` is outside the sequence.

    Reference: Gu et al., arXiv 2410.10781, alpha_k (self included).
    """
    check_position(key, n_positions=column.shape[2])
    counted = queries_from(valid, start=key, end=None if reach is None else key + reach)
    fewest = min_queries if reach is None else min(min_queries, reach)
    score = mean_where(column, where=counted[:, None], dim=-1)
    return score.masked_fill((counted.sum(-1) < fewest)[:, None], math.nan)


def sink_rate(score: Float[Tensor, "batch head"], *, threshold: float) -> Float[Tensor, " head"]:
    """Share of sequences in which the head's sink score is strictly above the threshold.

    In [0, 1]. Sequences whose score is nan are left out; nan if no sequence is left. The paper's threshold is 0.3.

    Reference: Gu et al., arXiv 2410.10781, Sink_k^eps (the mean of this over layers and heads).
    """
    return mean_where((score > threshold).float(), where=~score.isnan(), dim=0)


def passes(score: Float[Tensor, "..."], *, threshold: float) -> Float[Tensor, "..."]:
    """Return 1 where a sink score is strictly above the threshold, else 0; nan where the score is nan."""
    return (score > threshold).float().masked_fill(score.isnan(), math.nan)


def sink_mass(
    column: Float[Tensor, "batch head query"],
    *,
    valid: Bool[Tensor, "batch query"],
    key: int,
    reach: int | None = None,
) -> Float[Tensor, "batch head"]:
    """Mean attention to `key` over the real queries after it that can see it, without its own query.

    In [0, 1]; nan if no real query follows the key. After an intervention, report it at both the sink position and the
    target position: removing a sink and moving it are different results. Arguments and errors are those of
    `sink_score`.

    Reference: arXiv 2605.06611 (the induced sink score, before its mean over sequences and heads).
    """
    later = later_queries(valid, key=key, reach=reach)
    return mean_where(column, where=later[:, None], dim=-1)


def uniform_mass(
    valid: Bool[Tensor, "batch query"],
    *,
    key: int,
    reach: int | None = None,
    row_sum: Float[Tensor, "batch query"] | None = None,
) -> Float[Tensor, " batch"]:
    """Sink mass that `key` would have under uniform attention: the mean of 1 / (number of keys seen).

    The mean is over the later queries that see `key`. In [0, 1]; nan if no real query follows the key.

    Args:
        valid: which queries are real tokens.
        key: the 0-based position.
        reach: positions that a query sees, itself included, under a sliding window; None is all.
        row_sum: what the rows sum to, where a learned sink logit takes a part of them; None is 1.

    Raises:
        InputError: `key` is outside the sequence.
    """
    later = later_queries(valid, key=key, reach=reach)
    seen = torch.arange(1, valid.shape[1] + 1, device=valid.device).clamp(min=1, max=reach).double()
    shared = (1.0 if row_sum is None else row_sum) / seen
    return mean_where(shared.expand(valid.shape), where=later, dim=-1)


def fewest_tokens(*, threshold: float) -> int:
    """Return how many tokens a sequence, and a window, must have before a score above ``threshold`` means a sink.

    In shorter ones uniform attention passes: the first of n keys scores the mean of 1, 1/2, ..., 1/n. The number is 10
    at 0.3, 18 at 0.2, 44 at 0.1 and 105 at 0.05.
    """
    n, total = 1, 1.0
    while total / n >= threshold:
        n += 1
        total += 1 / n
    return n


def fewest_queries(*, threshold: float, reach: int | None = None) -> float:
    """Return how many queries must see a key before its sink score can be compared with the threshold.

    The number is 10, or 2 / threshold if that is more: at a late key with fewer queries a head that looks only at its
    own token and the one before would pass. In a shorter window it is ``reach``. The sequence needs ``fewest_tokens``.
    """
    fewest = max(10, 2 / threshold)
    return fewest if reach is None else min(fewest, reach)


def row_shares(rows: Float[Tensor, "batch head row key"]) -> Float[Tensor, "batch head row key"]:
    """Divide each weight of sigmoid attention by the sum of its row: in [0, 1]; a row of zeros stays zeros."""
    rows = widen(rows)
    return rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)


def entropy(rows: Float[Tensor, "batch head row key"]) -> Float[Tensor, "batch head row"]:
    """Entropy of each row in nats, with 0 log 0 = 0.

    From 0 (one key has everything) to the log of the number of visible keys (uniform). With a learned sink logit a row
    sums to less than 1; the entropy is then the sum over the keys alone, without renormalising.
    """
    rows = widen(rows)
    return -torch.xlogy(rows, rows).sum(-1)


def null_mass(rows: Float[Tensor, "batch head row key"]) -> Float[Tensor, "batch head row"]:
    """Attention that goes to no key: 1 - the sum of the row.

    In [0, 1]: 0 for an ordinary softmax, positive with a learned sink logit (gpt-oss). A sum that exceeds 1 by at most
    0.01 counts as rounding (bfloat16 rows are off by up to 2^-8) and gives 0. A larger one is no softmax's: nan.
    """
    missing = 1 - widen(rows).sum(-1)
    return missing.clamp(min=0).masked_fill(missing < -0.01, math.nan)


def mean_over_rows(
    per_row: Num[Tensor, "batch head row"], *, row_valid: Bool[Tensor, "batch row"]
) -> Float[Tensor, "batch head"]:
    """Mean of a per-row measure over the real rows (``row_valid``) where it is not nan; nan if there are none."""
    return mean_where(per_row, where=row_valid[:, None] & ~per_row.isnan(), dim=-1)
