"""Error bars of circuits: how often an edge is chosen when the pairs are drawn again.

The scores are kept by pair, so that a bootstrap is a weighted mean of them: no pass is run again. Pairs are drawn with
replacement within their template, or from all where a template has a single pair, which would be in every draw. The
inclusion probability of an edge is the share of the draws in which it is among the n largest. Edges with at least 95%
in every setting (every template alone, every ablation that was run) are the *core* of the circuit. Edges with at least
95% in some setting and not in another are *undecided*. All others that are in the circuit of some setting are
*contingent*.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import hypergeom

from ..stats import FEWEST_DRAWN, t_intervals
from .choice import largest_edges
from .graph import EdgeMask, EdgeValues

_AT_ONCE = 32


def bootstrap_weights(
    templates: Sequence[str], *, draws: int, generator: np.random.Generator
) -> Float[np.ndarray, "sample pair"]:
    if min(Counter(templates).values()) == 1:
        templates = [""] * len(templates)
    weights = np.zeros((draws, len(templates)), dtype=np.float32)
    for rows in rows_by_template(templates).values():
        for column in generator.integers(len(rows), size=(draws, len(rows))).T:
            weights[np.arange(draws), rows[column]] += 1
    return weights / len(templates)


def rows_by_template(templates: Sequence[str]) -> dict[str, np.ndarray]:
    names = np.asarray(templates, dtype=object)
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(templates)}


def inclusion_probabilities(
    values: Float[np.ndarray, "pair edge"], weights: Float[np.ndarray, "sample pair"], *, n: int
) -> EdgeValues:
    """Return for each edge the share of bootstrap samples in which its mean score is among the ``n`` largest.

    Of one pair alone all are nan.
    """
    counts = np.full(values.shape[1], 0.0 if len(values) > 1 else np.nan)
    for start in range(0, len(weights), _AT_ONCE):
        for mean in weights[start : start + _AT_ONCE] @ values:
            counts += largest_edges(mean, n)
    return counts / len(weights)


def bootstrap_bounds(
    values: Float[np.ndarray, "pair edge"], weights: Float[np.ndarray, "sample pair"]
) -> tuple[EdgeValues, EdgeValues]:
    """Return the lower and upper 95% bounds of each edge's mean score; Student's below 8 pairs, nan for one."""
    if len(values) < FEWEST_DRAWN:
        found = t_intervals(values.T)
        return np.array([one.low for one in found]), np.array([one.high for one in found])
    low, high = np.quantile(weights @ values, [0.025, 0.975], axis=0)
    return low, high


def upper_bound_of_count(found: int, *, sampled: int, total: int) -> int:
    """Return the exact upper 95% bound of how many of ``total`` edges are of a kind, if ``found`` of ``sampled`` are.

    The sample is drawn without replacement (hypergeometric).
    """
    counts = range(found, total - sampled + found + 1)
    too_many = bisect_left(
        counts, True, key=lambda n: bool(hypergeom.cdf(found, total, n, sampled) <= 0.05)
    )
    return found - 1 + too_many


def jaccard(first: EdgeMask, second: EdgeMask) -> float:
    """Return the number of edges in ``first`` and ``second`` over the number in either; nan if both are empty."""
    either = int((first | second).sum())
    return float((first & second).sum()) / either if either else np.nan


def random_halves(
    templates: Sequence[str], *, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Divide the pairs of each template at random."""
    halves: tuple[list[int], list[int]] = [], []
    for own in rows_by_template(templates).values():
        rows = generator.permutation(own).tolist()
        short = int(len(halves[0]) > len(halves[1]))
        halves[short].extend(rows[::2])
        halves[1 - short].extend(rows[1::2])
    first, second = (np.sort(np.array(half, dtype=int)) for half in halves)
    return first, second
