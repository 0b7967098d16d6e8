"""Quantities that a card gives and that the comparison of two models compares: a number per sequence, or indices."""

import math

from jaxtyping import Float
from torch import Tensor

from ..chain.locate import onset_layer
from .observed import Observed


def sink_rate(seen: Observed, *, threshold: float | None = None) -> Float[Tensor, " batch"]:
    """Share of (layer, head) whose sink score at the first token is above the threshold, by default that of ``seen``.

    The score is the mean attention to it, its own query included.

    Reference: arXiv 2410.10781, Sink_1.
    """
    score = seen.core.stacked("sink_score")[..., 0]
    over = score > (seen.thresholds.threshold if threshold is None else threshold)
    return over.float().masked_fill(score.isnan(), math.nan).nanmean(dim=(0, 2))


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
    "sink_rate": ("share", sink_rate),
    "first_token_attention": ("attention", first_token_share),
    "attention_to_no_key": ("attention", null_mass),
    "first_token_norm_ratio": ("1", norm_ratio),
    "largest_activation": ("stream", max_activation),
    "kurtosis": ("1", kurtosis),
}
"""Quantity of two models -> (its unit, its definition)."""


def sink_onset_layer(seen: Observed, *, threshold: float) -> int | None:
    """First layer whose mean attention to the first token is above the threshold; None if none is."""
    return onset_layer(seen.sink_mass.nanmean(1), threshold=threshold)


def sink_positions(seen: Observed) -> list[int]:
    """At most four positions where at least 5% of (layer, head, sequence) have their sink, the strongest first."""
    return list(seen.location.sink_positions) if seen.location.sink_found else []


def writing_neurons(seen: Observed) -> list[tuple[int, int]]:
    """Neurons (layer, neuron) that make at least 5% of a growth layer's change of the outlier dimension.

    Empty if the model's neurons cannot be told apart (a mixture of experts, or a norm after the MLP).
    """
    if seen.lens.family.down is None or seen.lens.family.mlp_post_norm is not None:
        return []
    return sorted((row["layer"], neuron) for row in seen.writers for neuron, _ in row["neurons"])
