"""Whether a place in a ranking at the initialisation foretells what training chose: ranks, null, correction.

Nothing was known before of which statistic might foretell, nor whether a large or a small value would: the tests are
two-sided, and all statistics that were tried are corrected for together. The null is that what training chose is any
of the candidates, whatever they were at the initialisation: it is drawn by choosing at random among them, in each seed
and layer as many as were chosen (ours).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from ..errors import InputError

_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A statistic of the initialisation over what training could have chosen from, and what it chose."""

    values: np.ndarray
    """One number a candidate (a dimension, or a neuron of one layer)."""
    chosen: tuple[int, ...]
    """Which were chosen."""

    @property
    def ranks(self) -> np.ndarray:
        """1 is the largest; equal ones share the mean of their ranks. All nan where they are all equal."""
        if np.ptp(self.values) == 0:
            return np.full(len(self.values), math.nan)
        return rankdata(-self.values)

    @property
    def places(self) -> np.ndarray:
        """Ranks as shares: near 0 is the top, near 1 the bottom; the mean of all is 1/2."""
        return (self.ranks - 0.5) / len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """What one statistic says of what training chose."""

    place: float
    """Mean over seeds of the mean place of what was chosen; nan where the statistic is the same everywhere."""
    p: float
    """Share of random choices whose mean place is as far on the same side, doubled."""
    lowest: float
    """The mean place below which p would be under ``at``: what so few seeds can show."""
    n_seeds: int


def foretold(
    seeds: Sequence[Sequence[Candidates]],
    *,
    generator: np.random.Generator,
    permutations: int = 20_000,
    at: float = 0.05,
) -> Foretold:
    """How far up, or down, in the rankings what was chosen stands, against random choices.

    Args:
        seeds: of each seed the candidates, in several groups where they are of several layers.
        generator: of the random choices.
        permutations: how many; p is at least 2 / (1 + permutations).
        at: the p at which ``lowest`` is told.

    Raises:
        InputError: no seed, or a seed in which nothing was chosen.
    """
    if not seeds or any(not group or not all(one.chosen for one in group) for group in seeds):
        raise InputError("a seed without a choice cannot be ranked; need one chosen candidate of each group at least")
    observed = np.mean([_mean([one.places[list(one.chosen)] for one in group]) for group in seeds])
    if math.isnan(observed):
        return Foretold(place=math.nan, p=math.nan, lowest=math.nan, n_seeds=len(seeds))
    null = np.zeros(permutations)
    for group in seeds:
        weights = [len(one.chosen) for one in group]
        drawn = [_drawn(one, generator=generator, n=permutations) * len(one.chosen) for one in group]
        null += np.sum(drawn, axis=0) / sum(weights) / len(seeds)
    sides = [(1 + np.sum(side)) / (1 + permutations) for side in (null <= observed + 1e-12, null >= observed - 1e-12)]
    lowest = float(np.quantile(null, at / 2))
    return Foretold(place=float(observed), p=float(min(1.0, 2 * min(sides))), lowest=lowest, n_seeds=len(seeds))


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p over those that are defined: the chance of one false finding among all (Holm 1979)."""
    found = np.asarray(p, dtype=float)
    defined = np.flatnonzero(~np.isnan(found))
    order = defined[np.argsort(found[defined], kind="stable")]
    adjusted = np.full(len(found), math.nan)
    steps = found[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else steps
    return adjusted


def _mean(parts: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(parts).mean())


def _drawn(one: Candidates, *, generator: np.random.Generator, n: int) -> np.ndarray:
    """Mean places of ``n`` random choices of as many."""
    places, k = one.places, len(one.chosen)
    if k == 1:
        return places[generator.integers(len(places), size=n)]
    found = []
    step = max(1, _AT_ONCE // len(places))
    for start in range(0, n, step):
        keys = generator.random((min(step, n - start), len(places)))
        found.append(places[np.argpartition(keys, k - 1, axis=1)[:, :k]].mean(1))
    return np.concatenate(found)
