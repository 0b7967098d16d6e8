"""Bootstrap intervals over sequences or seeds: the unit is the first axis, the generator is passed in.

An interval is the percentile bootstrap (Efron and Tibshirani 1993, chapter 13): the units are drawn with
replacement, the statistic is computed on each draw, and the interval runs between the (1 - level) / 2 and
(1 + level) / 2 quantiles of what comes out. It assumes that the units are independent. With fewer than about
20 units it is somewhat too narrow; with fewer than two it is undefined.
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
"""Upper bound of resamples x units held in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with the bounds of its bootstrap interval; a bound that is undefined is nan."""

    estimate: float
    """The statistic of all units that are defined; nan where there is none."""
    low: float
    """The lower bound; nan with fewer than two units."""
    high: float
    """The upper bound; nan with fewer than two units."""
    n: int
    """How many units the estimate stands on, after those that hold a nan were dropped."""


def interval(
    values: Any,
    *,
    generator: np.random.Generator,
    statistic: Callable[..., Any] = np.mean,
    n_resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """The statistic of the units and its percentile bootstrap interval over them.

    Args:
        values: Numbers, one unit (sequence, seed) an entry of the first axis; a unit may hold several
            numbers, which are drawn together. Units that hold a nan are dropped.
        generator: Where the draws come from.
        statistic: Takes the drawn units, shaped as `values` but for how many, and returns one number. On
            one-dimensional values a statistic that knows `axis`, as numpy's do, runs once for all draws.
        n_resamples: Draws.
        level: Share of draws between the bounds, in (0, 1).

    Returns:
        The interval. All units alike: low = high = estimate. A statistic that is undefined (nan) on some draw
        has nan bounds.

    Raises:
        InputError: `values` is a single number, `level` is outside (0, 1) or `n_resamples` is not positive.
    """
    from scipy.stats import bootstrap  # takes a second to import, and only this function needs it

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
    """The interval of a - b, unit by unit: what the units share cancels before anything is drawn.

    A unit that is nan in either is dropped from both.

    Raises:
        InputError: `a` and `b` differ in shape, so their units are not pairs; and what `interval` raises.
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
    """The interval of the mean of a - b of each row, unit by unit: ``paired_difference`` of many rows at once.

    All rows are drawn alike, so that thousands of them cost what one does. Rows that hold a nan are drawn one by one.

    Args:
        a: numbers, shape (rows, units).
        b: the same of what is compared with; one row serves for all.
        generator: Where the draws come from.
        n_resamples: Draws.
        level: Share of draws between the bounds.

    Raises:
        InputError: the shapes do not fit; and what `interval` raises.
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
        raise InputError(f"an interval of the single number {units}; need one number a unit, as a list or array.")
    return units[~np.isnan(units).any(axis=tuple(range(1, units.ndim)))]


def strongest(frame: pd.DataFrame, column: str, *, n: int) -> pd.DataFrame:
    """The rows with the largest magnitudes in a column, undefined last."""
    order = np.argsort(-frame[column].abs().fillna(-1).to_numpy(), kind="stable")
    return frame.iloc[order[:n]].reset_index(drop=True)


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
