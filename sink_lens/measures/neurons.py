"""Neurons that write the outlier dimension, by contribution and by the other criteria in use.

A super neuron contributes at least a given share of its layer's change of the outlier dimension at the sink.
Activation spike, weight norm, selectivity and channel sparsity are further evidence. Weight norm alone misses some
super neurons and selects neurons that are none.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import InputError
from .reductions import excess_kurtosis, widen


class Selectivity(NamedTuple):
    """Projections of each token's MLP input on one neuron's gate and up rows."""

    cosine: Float[Tensor, "batch position"]
    """Cosine of the MLP input and the gate row."""
    up: Float[Tensor, "batch position"]
    """Projection on the up row."""
    gate: Float[Tensor, "batch position"]
    """Gate pre-activation: projection on the gate row."""


def contributions(
    activations: Float[Tensor, "batch neuron"],
    *,
    weights: Float[Tensor, " neuron"],
    scale: Float[Tensor, " batch"] | None = None,
    gain: float = 1.0,
    mean_weights: Float[Tensor, " neuron"] | None = None,
) -> Float[Tensor, "batch neuron"]:
    """Amount that each neuron adds to one residual dimension: its activation x its down-projection entry.

    Summed over neurons, the amounts give the MLP's output in that dimension without biases. They are in the unit of the
    residual stream and have either sign. Where a norm follows the MLP (Gemma, OLMo2), give its scale and gain.

    Args:
        activations: input of the down-projection at one token of each sequence.
        weights: the down-projection's entries into the dimension, W_down[dimension].
        scale: the factor by which the norm multiplied each token, 1 / RMS (or 1 / std), not the RMS itself.
        gain: the norm's gain at the dimension (for Gemma, 1 + the stored weight).
        mean_weights: for a norm that centres, the mean of each neuron's column over output dimensions.
    """
    column = widen(weights) if mean_weights is None else widen(weights) - widen(mean_weights)
    terms = widen(activations) * column * gain
    return terms if scale is None else terms * widen(scale)[:, None]


def contribution_share(
    terms: Float[Tensor, "batch neuron"], *, change: Float[Tensor, " batch"]
) -> Float[Tensor, " neuron"]:
    """Each neuron's share of a layer's change in one residual dimension: mean term over mean change, over sequences.

    It may be negative, and it exceeds 1 if other neurons work against this one. nan if the mean change is 0.

    Args:
        terms: `contributions` at the sink token.
        change: value of the dimension after the layer minus before it, including the attention's part.
    """
    total = widen(change).mean()
    return torch.where(total != 0, widen(terms).mean(0) / total, math.nan)


def super_neurons(
    shares: Float[Tensor, " neuron"], *, share: float = 0.05
) -> Bool[Tensor, " neuron"]:
    """Mark the neurons whose contribution share is at least `share`."""
    return shares >= share


def spike_ratio(
    at_sink: Float[Tensor, "batch neuron"], *, elsewhere: Float[Tensor, "batch neuron"]
) -> Float[Tensor, " neuron"]:
    """Mean |activation| of each neuron at the sink, divided by its mean |activation| at the other positions.

    In [0, inf]: infinite for a neuron that fires only at the sink, nan for one that never fires. ``elsewhere`` has each
    sequence's mean |activation| over its other positions.
    """
    return widen(at_sink).abs().mean(0) / widen(elsewhere).mean(0)


def row_norms(w: Float[Tensor, "neuron d_model"]) -> Float[Tensor, " neuron"]:
    """L2 norm of each neuron's row of the gate or up projection, in [0, inf).

    Reference: arXiv 2605.06611 (which looks at the 5 largest).
    """
    dtype = torch.float64 if w.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(w, dim=-1, dtype=dtype)


def norm_rank(norms: Float[Tensor, " neuron"]) -> Int[Tensor, " neuron"]:
    """Rank of each neuron in its layer by weight norm; 1 is the largest, and equal norms share the better rank.

    Reference: arXiv 2605.06611 (the criterion of the released code; it misses some super neurons).
    """
    return 1 + len(norms) - torch.searchsorted(norms.sort().values, norms.contiguous(), right=True)


def selectivity(
    x: Float[Tensor, "batch position d_model"],
    *,
    gate_row: Float[Tensor, " d_model"],
    up_row: Float[Tensor, " d_model"],
) -> Selectivity:
    """Cosine and projections of each token's MLP input, after the norm, on a neuron's gate and up rows.

    The cosine is in [-1, 1] and nan for a token or row of zeros. The projections are unbounded and exclude biases. In
    an MLP without a gate a neuron has one input row: pass it as both.

    Reference: arXiv 2605.06611.
    """
    x, gate_row, up_row = widen(x), widen(gate_row), widen(up_row)
    gate = x @ gate_row
    cosine = gate / (torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(gate_row))
    return Selectivity(cosine=cosine.clamp(-1, 1), up=x @ up_row, gate=gate)


def column_kurtosis(
    w_down: Float[Tensor, "d_model neuron"], *, chunk: int = 1024
) -> Float[Tensor, " neuron"]:
    """Excess kurtosis of each neuron's column of the down-projection: 0 for a Gaussian column.

    Without bias correction, as in `scipy.stats.kurtosis`. In [-2, d_model - 5 + 1/(d_model - 1)]; a column with a
    single nonzero entry reaches the upper end. nan for a constant column. ``chunk`` columns are processed at once,
    which bounds the memory.

    Raises:
        InputError: chunk is under 1.

    Reference: arXiv 2605.06611 (channel sparsity).
    """
    if chunk < 1:
        raise InputError(f"chunk is {chunk}; need at least one column at once")
    return torch.cat(
        [excess_kurtosis(widen(columns), dim=0) for columns in w_down.split(chunk, dim=1)]
    )
