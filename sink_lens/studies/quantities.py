"""Quantities that a card gives and that the comparison of two models compares: a number per sequence, or indices."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ..chain.locate import onset_layer
from ..stats import Interval, interval
from .observed import Observed, UnmeasuredError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number per sequence."""

    unit: str
    by_sequence: Callable[[Observed], Float[Tensor, " batch"]]


def with_interval(samples: Float[Tensor, " batch"], *, seed: int) -> Interval:
    """The mean over the sequences on which a quantity is defined, with its 95% interval; nan if there is none."""
    rows = samples.double().numpy()
    rows = rows[~np.isnan(rows)]
    if not len(rows):
        return Interval(estimate=np.nan, low=np.nan, high=np.nan, n=0)
    return interval(rows, generator=np.random.default_rng(seed), n_resamples=1000)


def sink_rate(seen: Observed, *, threshold: float | None = None) -> Float[Tensor, " batch"]:
    """Share of (layer, head) whose sink score at the first token is above the threshold, by default that of ``seen``.

    The score is the mean attention to it, its own query included.

    Reference: arXiv 2410.10781, Sink_1.
    """
    return seen.rated(seen.thresholds.threshold if threshold is None else threshold)


def first_token_share(seen: Observed) -> Float[Tensor, " batch"]:
    """Attention to the first token from the later queries that can see it, mean over layers and heads."""
    return seen.core.stacked("sink_mass")[..., 0].nanmean(dim=(0, 2))


def null_mass(seen: Observed) -> Float[Tensor, " batch"]:
    """Attention that goes to no key (a learned sink logit takes it), mean over rows, heads and layers."""
    return seen.core.stacked("null_mass").nanmean(dim=(0, 2))


def norm_ratio(seen: Observed) -> Float[Tensor, " batch"]:
    """Norm ratio of the first token by sequence, after the layer where it is largest.

    It is that token's norm over the median norm of those from position 8 on.
    """
    ratio = seen.norm_ratio[1:]
    return ratio[int(ratio.nanmean(1).argmax())]


def max_activation(seen: Observed) -> Float[Tensor, " batch"]:
    """Largest magnitude in the residual stream over layers, tokens and dimensions."""
    return seen.core.stacked("largest:resid_post")[..., 0].abs().amax(0)


def kurtosis(seen: Observed) -> Float[Tensor, " batch"]:
    """Excess kurtosis of a token's dimensions in the residual stream by sequence, mean over tokens and layers."""
    return seen.core.stacked("kurtosis").nanmean(dim=(0, 2))


COMPARED = {
    "sink_rate": Quantity(unit="share", by_sequence=sink_rate),
    "first_token_share": Quantity(unit="attention", by_sequence=first_token_share),
    "null_mass": Quantity(unit="attention", by_sequence=null_mass),
    "norm_ratio": Quantity(unit="1", by_sequence=norm_ratio),
    "max_activation": Quantity(unit="stream", by_sequence=max_activation),
    "kurtosis": Quantity(unit="1", by_sequence=kurtosis),
}
"""Quantity of two models -> its definition."""


def sink_onset_layer(seen: Observed, *, threshold: float) -> int | None:
    """First layer whose mean attention to the first token is above the threshold; None if none is."""
    return onset_layer(seen.sink_mass.nanmean(1), threshold=threshold)


def sink_positions(seen: Observed) -> list[int]:
    """At most four positions where at least 5% of (layer, head, sequence) have their sink, the strongest first."""
    return list(seen.location.sink_positions) if seen.location.sink_found else []


def writing_neurons(seen: Observed) -> list[tuple[int, int]]:
    """Neurons (layer, neuron) that make at least 5% of a growth layer's change of the outlier dimension.

    Raises:
        UnmeasuredError: the model's neurons cannot be split here.
    """
    if seen.lens.family.down is None or seen.lens.family.mlp_post_norm is not None:
        raise UnmeasuredError(
            "the model's neurons cannot be split here (a mixture of experts, or a norm after the MLP)"
        )
    return sorted((row["layer"], neuron) for row in seen.writers for neuron, _ in row["neurons"])
