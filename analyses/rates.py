"""Rates over combinations of mechanism and architecture, and how well a ranking finds what is needed."""

import numpy as np
from scipy.stats import binomtest

from sink_lens.stats import Interval


def share(holds: int, n: int) -> Interval:
    """A share of combinations, whose seeds are not independent, with its exact 95% interval; nan for none."""
    if not n:
        return Interval(estimate=np.nan, low=np.nan, high=np.nan, n=0)
    test = binomtest(holds, n)
    bounds = test.proportion_ci()
    return Interval(estimate=test.statistic, low=bounds.low, high=bounds.high, n=n)


def auroc_of(size: np.ndarray, needed: np.ndarray, others: np.ndarray) -> float:
    """Return how often a needed edge is larger than another; a tie counts half."""
    one, other = size[needed][:, None], size[others]
    return float(((one > other).mean() + (one >= other).mean()) / 2)
