"""Shared by the studies that end in a decision: two halves of the text, and shares of a loss gap."""

from typing import Any

import numpy as np
import torch

from ..data.tokens import TokenBatch
from ..errors import InputError
from ..schema import WORTH_KEEPING_NATS
from ..stats import Interval, interval, paired_difference

FEWEST = 4
"""The fewest sequences that two parts are made from."""


def parts(batch: TokenBatch) -> dict[str, TokenBatch]:
    """The first half of the sequences, to choose on, and the second, to judge on.

    Raises:
        InputError: there are too few sequences for two parts.
    """
    if batch.n_sequences < FEWEST:
        raise InputError(
            f"{batch.n_sequences} sequences were given; need at least {FEWEST}, half to choose on and half to judge on"
        )
    half = batch.n_sequences // 2
    return {"choose": batch[:half], "judge": batch[half:]}


def share_gained(gained: np.ndarray, whole: np.ndarray, *, seed: int) -> Interval:
    """Mean of what was gained over the mean of the whole, with its 95% interval over sequences."""

    def ratio(rows: np.ndarray) -> float:
        """Mean gain over mean cost."""
        below = rows[:, 1].mean()
        return float(rows[:, 0].mean() / below) if below else float("nan")

    pairs = np.stack([gained, whole], axis=1)
    return interval(pairs, generator=np.random.default_rng(seed), statistic=ratio, n_resamples=1000)


def loss_row(
    losses: torch.Tensor, *, baseline: torch.Tensor, worst: torch.Tensor, best: torch.Tensor, seed: int
) -> dict[str, Any]:
    """One condition: its loss, what it costs over the baseline run, and the share of the gap that it closes.

    Args:
        losses: loss of each sequence under the condition.
        baseline: the same of the baseline run.
        worst: the same at the start of the gap, where nothing is kept.
        best: the same at its end. The share is nan where the gap is no cost, as there is nothing to close.
        seed: seed of the bootstrap.
    """
    here, none, full, low = (one.double().numpy() for one in (losses, baseline, worst, best))
    change = paired_difference(here, none, generator=np.random.default_rng(seed))
    closed = share_gained(full - here, full - low, seed=seed) if is_cost(worst, best, seed=seed) else _UNDEFINED
    mean = float(here.mean())
    return {
        "loss_nats": mean,
        "perplexity": float(np.exp(mean)),
        "change_nats": change.estimate,
        "change_low": change.low,
        "change_high": change.high,
        "closed_share": closed.estimate,
        "closed_low": closed.low,
        "closed_high": closed.high,
        "n": len(here),
    }


_UNDEFINED = Interval(estimate=float("nan"), low=float("nan"), high=float("nan"), n=0)


def is_cost(more: torch.Tensor, less: torch.Tensor, *, seed: int) -> bool:
    """Check if one loss is above another by at least ``WORTH_KEEPING_NATS``, and by more than 0 with its interval."""
    found = paired_difference(more.double().numpy(), less.double().numpy(), generator=np.random.default_rng(seed))
    return found.estimate >= WORTH_KEEPING_NATS and not found.low <= 0
