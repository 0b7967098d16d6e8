"""Null distributions of a mean Kendall tau, and the steps from two models' states to that tau.

``tau_bar`` is the mean over the shared coordinates S of tau between two models, over n inputs (arXiv 2509.26404).

* ``analytical`` (paper): n independent inputs, |S| independent coordinates: ``sigma(n) / sqrt(|S|)``.
* ``matrices`` (paper): random normal [n, |S|], softmax and tau.
* ``pipeline`` (paper): random normal [n, d] through the whole of it, the choice of coordinates included.
* ``shuffled`` (ours): the two models' own states, the inputs of one in random order. Keeps how the coordinates of a
  model go together.
* ``relabelled`` (ours): the two models' own states, input by input, coordinate j of one with coordinate pi(j) of the
  other. Keeps also what any two models have in common because they read the same inputs, such as a factor by which one
  input scales all coordinates. Its mean and variance over all |S|! relabellings have a closed form (Hoeffding 1951).

On *token inputs*, ``relabelled`` is exact for models that were initialised and trained apart, given S: their
coordinates could have been numbered otherwise. The published nulls hold nearly for untrained models and fail for
trained ones. On *embedding inputs*, coordinate j of an input enters coordinate j of both streams, and no null here
knows of that (``docs/identity.md``).
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import log_ndtr, log_softmax

from ..arguments import check_calls
from ..errors import InputError
from ..measures.kendall import tau_b
from ..schema import NULLS as NULLS

Convention = Literal["paper", "code"]
"""How z becomes p: in the text of arXiv 2509.26404 by 1 - Phi(z), in its code by min(1, 2 (1 - Phi(z)))."""
_VALUES_AT_ONCE = 2**21


def tau_deviation(n: int) -> float:
    """Return the standard deviation of Kendall's tau of n independent pairs: sqrt(2 (2n + 5) / (9 n (n - 1))).

    Raises:
        InputError: n is below 2.
    """
    if n < 2:
        raise InputError(f"Kendall's tau over {n} inputs; need two or more")
    return math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))


def log10_p(z: float, *, convention: Convention = "paper") -> float:
    """Return log10 of the p value of a z score, without underflow: z = 153.76 gives -5136, nan gives nan."""
    found = float(log_ndtr(-z)) / math.log(10)
    return found if convention == "paper" else min(0.0, found + math.log10(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Null:
    """Null distribution: which values ``tau_bar`` takes if two models are unrelated."""

    name: str
    mean: float
    sd: float
    draws: np.ndarray | None = None
    """Simulated values of tau_bar; None where the null is a formula alone."""
    floor: float = -math.inf
    """log10 of the smallest p that there is: of |S|! relabellings, 1 / |S|!."""

    def z(self, tau_bar: float) -> float:
        """Return the distance from the mean in standard deviations; nan if these are 0."""
        return (tau_bar - self.mean) / self.sd if self.sd > 0 else math.nan

    @check_calls
    def log10_p(self, tau_bar: float, *, convention: Convention = "paper") -> float:
        """Return log10 of the p value of ``tau_bar`` (normal approximation); at least ``floor``."""
        return max(log10_p(self.z(tau_bar), convention=convention), self.floor)

    def p_by_draws(self, tau_bar: float) -> float:
        """Return the p value of ``tau_bar``, (1 + draws at least as large) / (1 + all draws); nan without draws."""
        if self.draws is None or not len(self.draws):
            return math.nan
        return (1 + int((self.draws >= tau_bar).sum())) / (1 + len(self.draws))


def analytical_null(n: int, *, shared: int) -> Null:
    return Null(name="analytical", mean=0.0, sd=tau_deviation(n) / math.sqrt(shared))


def identity_coordinates(features: np.ndarray, *, count: int) -> np.ndarray:
    """Return, sorted, the ``count`` dimensions of states [n, d] with the smallest means over inputs."""
    return np.sort(np.argsort(features.mean(0, dtype=np.float64), kind="stable")[:count])


def log_softmax_states(
    features: np.ndarray, *, coordinates: np.ndarray, temperature: float
) -> np.ndarray:
    """Return the log softmax of states [n, d] over the given coordinates alone; the log cannot underflow to ties."""
    return log_softmax(np.asarray(features[:, coordinates], dtype=np.float64) / temperature, axis=1)


def tau_by_column(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return tau_b(torch.from_numpy(x.T), reference=torch.from_numpy(y.T)).numpy()


@functools.lru_cache(maxsize=64)  # it depends on sizes alone: many pairs of models share it
def simulate_null(
    name: str, *, n: int, width: int, count: int, temperature: float, draws: int, seed: int
) -> Null:
    """Return a null with random normal matrices [n, width] in place of the states of the two models.

    In ``pipeline`` the matrices are as wide as the states, and ``count`` coordinates are chosen as from states. In
    ``matrices`` they have the shared coordinates alone, so that all are used.
    """
    generator, found = np.random.default_rng([seed, NULLS.index(name), width, count]), []
    for _ in range(draws):
        pair = [generator.standard_normal((n, width)) for _ in range(2)]
        first, second = (identity_coordinates(one, count=count) for one in pair)
        shared = np.intersect1d(first, second)
        if len(shared) > 1:
            soft = [
                log_softmax_states(one, coordinates=shared, temperature=temperature) for one in pair
            ]
            found.append(float(tau_by_column(*soft).mean()))
    return _null_of_draws(name, np.array(found))


def shuffled_null(
    x: np.ndarray, y: np.ndarray, *, draws: int, generator: np.random.Generator
) -> Null:
    """Return the null ``shuffled``: ``tau_bar`` of softened states, with the rows of ``y`` shuffled."""
    at_once = max(1, min(draws, _VALUES_AT_ONCE // x.size))
    found: list[float] = []
    while len(found) < draws:
        orders = [generator.permutation(len(y)) for _ in range(at_once)]
        many = tau_by_column(np.tile(x, at_once), np.hstack([y[order] for order in orders]))
        found += many.reshape(at_once, -1).mean(1).tolist()
    return _null_of_draws("shuffled", np.array(found[:draws]))


def relabelled_null(matrix: np.ndarray, *, draws: int, generator: np.random.Generator) -> Null:
    """Return the null ``relabelled``, with exact mean and deviation.

    ``matrix[i, j]`` is tau of coordinate i of one model with coordinate j of the other.
    """
    size = len(matrix)
    found = np.array(
        [matrix[np.arange(size), generator.permutation(size)].mean() for _ in range(draws)]
    )
    floor = -math.lgamma(size + 1) / math.log(10)
    sd = spread_over_permutations(matrix)
    return Null(name="relabelled", mean=float(matrix.mean()), sd=sd, draws=found, floor=floor)


def spread_over_permutations(matrix: np.ndarray) -> float:
    """Return the standard deviation of the mean of ``matrix[i, pi(i)]``, over all permutations pi.

    With d the matrix centred by rows and columns, the sum has the variance sum d^2 / (size - 1) (Hoeffding 1951).
    """
    centred = matrix - matrix.mean(0) - matrix.mean(1, keepdims=True) + matrix.mean()
    return math.sqrt((centred**2).sum() / (len(matrix) - 1)) / len(matrix)


def _null_of_draws(name: str, draws: np.ndarray) -> Null:
    if len(draws) < 2:
        return Null(name=name, mean=math.nan, sd=math.nan, draws=draws)
    return Null(name=name, mean=float(draws.mean()), sd=float(draws.std(ddof=1)), draws=draws)
