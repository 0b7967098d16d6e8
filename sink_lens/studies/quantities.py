"""Quantities that a card gives and that the comparison of two models compares: a number per sequence, or indices."""

from jaxtyping import Float
from torch import Tensor

from ..chain.locate import onset_layer
from .observed import ObservedModel


def sink_rate_by_sequence(seen: ObservedModel) -> Float[Tensor, " batch"]:
    """Return for each sequence the share of all heads whose sink score at the sink is above the threshold.

    The sink is the strongest; position 0 without one.

    Reference: arXiv 2410.10781, Sink_k.
    """
    return seen.sink_panel.sink_rate(seen.thresholds.threshold)


def sink_mass(seen: ObservedModel) -> Float[Tensor, "layer batch head"]:
    """Return the mean attention to the sink (position 0 without one) from the later queries that can see it."""
    return seen.sink_panel.at_sink("sink_mass", seen.location.sink_position)


def first_token_share(seen: ObservedModel) -> Float[Tensor, " batch"]:
    """Return for each sequence the mean attention to the first token from the later queries that can see it."""
    return seen.panel.at_sink("sink_mass", 0).nanmean(dim=(0, 2))


def null_mass_by_sequence(seen: ObservedModel) -> Float[Tensor, " batch"]:
    """Return for each sequence the mean attention that goes to no key, since a learned sink logit takes it."""
    return seen.panel["null_mass"].nanmean(dim=(0, 2))


def norm_ratio(seen: ObservedModel) -> Float[Tensor, " batch"]:
    """Return for each sequence the norm of the first token over the median norm from position 8 on.

    The ratio is taken after the layer where its mean over sequences is largest.
    """
    ratio = seen.panel.norm_ratio()[1:]
    return ratio[int(ratio.nanmean(1).argmax())]


def max_activation(seen: ObservedModel) -> Float[Tensor, " batch"]:
    """Return for each sequence the largest magnitude in the residual stream, of any layer and token."""
    return seen.panel["largest:resid_post"][..., 0].abs().amax(0)


def kurtosis(seen: ObservedModel) -> Float[Tensor, " batch"]:
    """Return for each sequence the excess kurtosis over residual dimensions, averaged over tokens and layers."""
    return seen.panel["kurtosis"].nanmean(dim=(0, 2))


COMPARED = {
    "sink_rate": ("share", sink_rate_by_sequence),
    "first_token_attention": ("attention", first_token_share),
    "attention_to_no_key": ("attention", null_mass_by_sequence),
    "first_token_norm_ratio": ("1", norm_ratio),
    "largest_activation": ("stream", max_activation),
    "kurtosis": ("1", kurtosis),
}
"""Quantity of two models -> (its unit, its definition)."""


def sink_onset_layer(seen: ObservedModel, *, threshold: float) -> int | None:
    return onset_layer(sink_mass(seen).nanmean(1).nanmean(1), threshold=threshold)


def found_sink_positions(seen: ObservedModel) -> list[int]:
    """Return up to four positions, the strongest first, that are a sink in 5% or more of all heads and sequences."""
    return list(seen.location.sink_positions) if seen.location.sink_found else []


def writing_neurons(seen: ObservedModel) -> list[tuple[int, int]]:
    """Return the neurons, as (layer, neuron), that make at least 5% of a growth step's change of the outlier dimension.

    Empty in a mixture of experts, or with a norm after the MLP.
    """
    if seen.lens.family.down is None or seen.lens.family.mlp_post_norm is not None:
        return []
    return sorted(
        (row["layer"], neuron) for row in seen.outlier_writers for neuron, _ in row["neurons"]
    )
