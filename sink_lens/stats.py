"""Bootstrap intervals over sequences or seeds. The first axis holds the units; the caller passes the generator.

An interval is the percentile bootstrap (Efron and Tibshirani 1993, chapter 13): the units are drawn with
replacement, the statistic is computed on each draw, and the interval runs from the (1 - level) / 2 quantile to the
(1 + level) / 2 quantile of these values. The method assumes independent units. With fewer than about 20 units the
interval is somewhat too narrow; with fewer than two units it is undefined.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sink_lens.errors import InputError

_DRAWS_AT_ONCE = 4_000_000
"""Largest number of drawn values (resamples x units) kept in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with the bounds of its bootstrap interval; an undefined bound is nan."""

    estimate: float
    """The statistic over all units that have a value; nan if no unit has one."""
    low: float
    """The lower bound; nan with fewer than two units."""
    high: float
    """The upper bound; nan with fewer than two units."""
    n: int
    """Number of units in the estimate; units with a nan are dropped and not counted."""


def interval(
    values: Any,
    *,
    generator: np.random.Generator,
    statistic: Callable[..., Any] = np.mean,
    n_resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Compute a statistic over units, with its percentile bootstrap interval.

    Args:
        values: Numbers with one unit (sequence or seed) per entry of the first axis. A unit may hold several
            numbers, which are always drawn together. Units with a nan are dropped.
        generator: Source of the random draws.
        statistic: Function from the drawn units (the shape of `values`, with another first axis) to one number. A
            statistic that accepts `axis`, as numpy's do, runs once for all draws if the values are one-dimensional.
        n_resamples: Number of draws.
        level: Share of draws between the bounds, in (0, 1).

    Returns:
        The interval. If all units are equal, low = high = estimate. If the statistic is undefined (nan) on any
        draw, the bounds are nan.

    Raises:
        InputError: `values` is a single number, `level` is outside (0, 1) or `n_resamples` is not positive.
    """
    from scipy.stats import bootstrap  # scipy.stats takes a second to import, and only this function needs it

    _check_draws(n_resamples, level=level)
    units = _defined(np.asarray(values, dtype=np.float64))
    n = len(units)
    if n == 0:
        return Interval(estimate=np.nan, low=np.nan, high=np.nan, n=0)
    if statistic is np.mean and units.ndim > 1:
        units = units.reshape(n, -1).mean(axis=1)  # the mean of units of one size is the mean of their means
    estimate = float(statistic(units))
    if n < 2:
        return Interval(estimate=estimate, low=np.nan, high=np.nan, n=n)
    if np.all(units == units[0]):
        return Interval(estimate=estimate, low=estimate, high=estimate, n=n)
    if units.ndim == 1:
        sample, of_draw, vectorized = units, statistic, None
    else:
        sample, of_draw, vectorized = np.arange(n), lambda drawn: statistic(units[drawn]), False
    with np.errstate(invalid="ignore"):  # between two infinite draws a quantile is nan, which is the answer
        found = bootstrap(
            (sample,),
            of_draw,
            n_resamples=n_resamples,
            batch=max(1, min(n_resamples, _DRAWS_AT_ONCE // n)),
            vectorized=vectorized,
            confidence_level=level,
            method="percentile",
            rng=generator,
        ).confidence_interval
    return Interval(estimate=estimate, low=float(found.low), high=float(found.high), n=n)


def paired_difference(
    a: Any,
    b: Any,
    *,
    generator: np.random.Generator,
    statistic: Callable[..., Any] = np.mean,
    n_resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Interval of the paired difference a - b. Pairing removes the variation that the two conditions share.

    A unit that is nan in `a` or `b` is dropped from both.

    Raises:
        InputError: `a` and `b` differ in shape, so their units are not pairs. The errors of `interval` also apply.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise InputError(
            f"a paired difference of shapes {first.shape} and {second.shape}; need the same units in the "
            "same order in both. Compare two intervals where the units are not the same."
        )
    with np.errstate(invalid="ignore"):  # inf - inf is undefined, and such a unit is dropped
        difference = first - second
    return interval(difference, generator=generator, statistic=statistic, n_resamples=n_resamples, level=level)


def paired_differences(
    a: Any, b: Any, *, generator: np.random.Generator, n_resamples: int = 2000, level: float = 0.95
) -> list[Interval]:
    """Interval of the mean paired difference a - b for each row: ``paired_difference`` for many rows at once.

    All rows share the same draws, so thousands of rows cost about as much as one. Rows with a nan are drawn one by one.

    Args:
        a: numbers, shape (rows, units).
        b: the numbers to subtract, in the same shape; a single row is compared with every row of `a`.
        generator: Source of the random draws.
        n_resamples: Number of draws.
        level: Share of draws between the bounds.

    Raises:
        InputError: the shapes do not fit. The errors of `interval` also apply.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.ndim != 2 or second.ndim != 2 or second.shape not in (first.shape, (1, first.shape[1])):
        raise InputError(
            f"paired differences of shapes {first.shape} and {second.shape}; need (rows, units) twice, with the same "
            "units in the same order."
        )
    _check_draws(n_resamples, level=level)
    with np.errstate(invalid="ignore"):
        difference = first - second
    n = difference.shape[1]
    plain = [not bool(np.isnan(row).any()) for row in difference]
    options: dict[str, Any] = {"generator": generator, "n_resamples": n_resamples, "level": level}
    if n < 2:
        return [interval(row, **options) for row in difference]
    weights = generator.multinomial(n, np.full(n, 1 / n), size=n_resamples) / n
    found: list[Interval] = []
    tails = [(1 - level) / 2, (1 + level) / 2]
    for row, defined in zip(difference, plain, strict=True):
        if not defined or not np.isfinite(row).all() or np.all(row == row[0]):
            found.append(interval(row, **options))
            continue
        low, high = np.quantile(weights @ row, tails)
        found.append(Interval(estimate=float(row.mean()), low=float(low), high=float(high), n=n))
    return found


def _check_draws(n_resamples: int, *, level: float) -> None:
    if not 0 < level < 1:
        raise InputError(f"the level of an interval is {level}; need a share between 0 and 1, as 0.95.")
    if n_resamples < 1:
        raise InputError(f"n_resamples is {n_resamples}; need at least 1, and 1,000 or more for stable bounds.")


def _defined(units: np.ndarray) -> np.ndarray:
    if units.ndim == 0:
        raise InputError(f"an interval of the single number {units}; need one number per unit, as a list or array.")
    return units[~np.isnan(units).any(axis=tuple(range(1, units.ndim)))]


def strongest(frame: pd.DataFrame, column: str, *, n: int) -> pd.DataFrame:
    """The rows with the largest magnitudes in a column; undefined values come last."""
    order = np.argsort(-frame[column].abs().fillna(-1).to_numpy(), kind="stable")
    return frame.iloc[order[:n]].reset_index(drop=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean of paired differences with its intervals and tests; an undefined number is nan."""

    mean: float
    low: float
    """Lower end of the 95% t interval, which assumes normal differences. With few seeds it is wide, as it should be."""
    high: float
    boot_low: float
    """Lower end of the 95% bootstrap interval, which always lies between the smallest and the largest difference."""
    boot_high: float
    t_p: float
    """Two-sided p-value of the paired t test."""
    flip_p: float
    """Two-sided p-value of the sign-flip permutation test, exact up to 12 seeds."""
    flip_smallest: float
    """The smallest p-value that the sign-flip test can give with n seeds: 2 / 2^n."""
    n: int

    @property
    def told(self) -> bool:
        """Whether the t interval excludes 0."""
        return self.low > 0 or self.high < 0


def difference(values: ArrayLike, *, generator: np.random.Generator) -> Difference:
    """Summarise paired differences, one per seed; nan values are left out.

    If all differences are equal, their standard deviation is 0: the interval is that value and the t test is undefined.
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
