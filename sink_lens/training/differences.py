"""Differences paired by seed, with intervals and tests that say how little a few seeds can show."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..stats import interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean of paired differences; what is undefined is nan."""

    mean: float
    low: float
    """Of the 95% t interval: it assumes that differences are normal, and is wide with few seeds, as it should be."""
    high: float
    boot_low: float
    """Of the 95% bootstrap interval, which with so few seeds lies within the smallest and largest difference."""
    boot_high: float
    t_p: float
    """Of the paired t test, two-sided."""
    flip_p: float
    """Of the sign-flip permutation test, two-sided, exact up to 12 seeds."""
    flip_smallest: float
    """The smallest p that so many seeds can give in that test: 2 / 2^n."""
    n: int

    @property
    def told(self) -> bool:
        """Whether the t interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(values: ArrayLike, *, generator: np.random.Generator) -> Difference:
    """The mean of differences, one a seed; nan are left out.

    Where all are alike there is no spread to estimate: the interval is the value, and the t test undefined.
    """
    from scipy import stats

    found = np.asarray(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    n = len(found)
    boot = interval(found, generator=generator)
    low = high = t_p = flip_p = smallest = math.nan
    if n >= 2:
        smallest = 2 / 2**n
        if np.ptp(found) == 0:
            low = high = float(found[0])
        else:
            test: Any = stats.ttest_1samp(found, 0.0)
            bounds = test.confidence_interval(0.95)
            low, high, t_p = float(bounds.low), float(bounds.high), float(test.pvalue)
        flips = stats.permutation_test(
            (found,), np.mean, permutation_type="samples", n_resamples=4096, rng=generator, vectorized=True
        )
        flip_p = float(flips.pvalue)
    return Difference(
        mean=boot.estimate,
        low=low,
        high=high,
        boot_low=boot.low,
        boot_high=boot.high,
        t_p=t_p,
        flip_p=flip_p,
        flip_smallest=smallest,
        n=n,
    )
