"""Error bars of circuits: how often an edge is chosen when the pairs are drawn again.

The scores are kept by pair, so that a bootstrap is a weighted mean of them: no pass is run again. Pairs are drawn with
replacement within their template, or from all where a template has a single pair, which would be in every draw. The
inclusion probability of an edge is the share of the draws in which it is among the n largest. Edges with at least 95%
in every setting (every template alone, every ablation that was run) are the *core* of the circuit. Edges with at least
95% in some setting and not in another are *undecided*: what the circuit is hangs on the setting. All other edges that
are in the circuit of some setting are *contingent*.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import hypergeom

from .choice import largest_edges

_AT_ONCE = 32


def bootstrap_weights(
    templates: Sequence[str], *, draws: int, generator: np.random.Generator
) -> Float[np.ndarray, "sample pair"]:
    """Draw ``draws`` bootstrap samples of the pairs within each template; return each pair's weight in each sample.

    If a template has a single pair, they are drawn from all pairs.
    """
    names = np.asarray(templates, dtype=object)
    names = names if min(Counter(templates).values()) > 1 else np.full(len(names), "", dtype=object)
    weights = np.zeros((draws, len(names)), dtype=np.float32)
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero(names == name)
        for column in generator.integers(len(rows), size=(draws, len(rows))).T:
            weights[np.arange(draws), rows[column]] += 1
    return weights / len(names)


def inclusion_probabilities(
    values: Float[np.ndarray, "pair edge"], weights: Float[np.ndarray, "sample pair"], *, n: int
) -> Float[np.ndarray, " edge"]:
    """Return for each edge the share of bootstrap samples in which its mean score is among the ``n`` largest.

    ``values``: scores. ``weights``: weight of each pair in each sample. Of one pair alone all are nan.
    """
    counts = np.full(values.shape[1], 0.0 if len(values) > 1 else np.nan)
    for start in range(0, len(weights), _AT_ONCE):
        for mean in weights[start : start + _AT_ONCE] @ values:
            counts += largest_edges(mean, n)
    return counts / len(weights)


def bootstrap_bounds(
    values: Float[np.ndarray, "pair edge"], weights: Float[np.ndarray, "sample pair"]
) -> tuple[Float[np.ndarray, " edge"], Float[np.ndarray, " edge"]]:
    """Return the lower and upper 95% bounds of each edge's mean score, nan for one pair.

    ``weights``: of each pair in each bootstrap.
    """
    low, high = np.quantile(weights @ values, [0.025, 0.975], axis=0)
    return (low, high) if len(values) > 1 else (low * np.nan, high * np.nan)


def upper_bound_of_count(found: int, *, sampled: int, total: int) -> int:
    """Return an upper 95% bound of how many of ``total`` edges are of some kind, if ``found`` of ``sampled`` ones are.

    The sample is drawn without replacement, and the bound is exact (hypergeometric).
    """
    counts = range(found, total - sampled + found + 1)
    return (
        found
        - 1
        + bisect_left(
            counts, True, key=lambda n: bool(hypergeom.cdf(found, total, n, sampled) <= 0.05)
        )
    )


def jaccard(first: Bool[np.ndarray, " edge"], second: Bool[np.ndarray, " edge"]) -> float:
    """Return the number of edges in ``first`` and ``second`` over the number in either; nan if both are empty."""
    either = int((first | second).sum())
    return float((first & second).sum()) / either if either else float("nan")


def random_halves(
    templates: Sequence[str], *, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Divide the pairs of each template at random; return the indices of the pairs in each half."""
    names = np.asarray(templates, dtype=object)
    halves: tuple[list[int], list[int]] = [], []
    for name in dict.fromkeys(names.tolist()):
        rows = generator.permutation(np.flatnonzero(names == name)).tolist()
        short = int(len(halves[0]) > len(halves[1]))
        halves[short].extend(rows[::2])
        halves[1 - short].extend(rows[1::2])
    first, second = (np.sort(np.array(half, dtype=int)) for half in halves)
    return first, second
