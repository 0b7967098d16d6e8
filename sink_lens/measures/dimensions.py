"""Dominance of a few residual dimensions at a token, and entries and tokens that are far larger than others.

Every ratio is computed within one layer. A maximum over layers taken before the median would hide an outlier that
exists in one layer only.
"""

import math
from statistics import NormalDist

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import InputError
from .reductions import (
    check_position,
    excess_kurtosis,
    mean_where,
    median_where,
    queries_from,
    widen,
)


def dominance_ratio(h: Float[Tensor, "batch d_model"]) -> Float[Tensor, " batch"]:
    """Largest magnitude of a token over its mean magnitude: max_j |h_j| / mean_k |h_k|.

    From 1 (all dimensions equal) to d_model (one holds everything); nan for a token of zeros.

    Reference: arXiv 2605.06611, the text's definition.
    """
    magnitude = widen(h).abs()
    return magnitude.amax(-1) / magnitude.mean(-1)


def dominance_ratio_fixed(h: Float[Tensor, "batch d_model"], *, dimension: int) -> float:
    """Mean magnitude of one given dimension over that of all other dimensions, both averaged over samples.

    In [0, inf]; nan if everything is 0, or if there is only one dimension. The paper computes it after the
    attention-input norm (Llama-2-7B, dimension 2533: 262.88), a trace on the residual stream.

    Raises:
        InputError: `dimension` is outside the tensor.

    Reference: arXiv 2605.06611, Table 1 (mean over the other dimensions, ratio of sample averages).
    """
    if not 0 <= dimension < h.shape[1]:
        raise InputError(
            f"dimension {dimension} is outside the residual stream; need 0 to {h.shape[1] - 1}. "
            "Pass a dimension of this model: they do not transfer between models."
        )
    magnitude = widen(h).abs()
    others = torch.arange(h.shape[1], device=h.device) != dimension
    ratio = magnitude[:, dimension].mean() / mean_where(magnitude, where=others, dim=-1).mean()
    return float(ratio)


def outlier_dimensions(
    energy: Float[Tensor, " d_model"], *, energy_frac: float = 0.8
) -> Int[Tensor, " dimension"]:
    """Return the fewest dimensions that together hold `energy_frac` of a token's energy, the largest first.

    The set exists for any token; the dominance ratio decides whether its dimensions are outliers. It is empty if the
    energy (squares, summed or averaged over sequences) is 0 or not finite.

    Raises:
        InputError: `energy_frac` is outside (0, 1].
    """
    if not 0 < energy_frac <= 1:
        raise InputError(
            f"found energy_frac = {energy_frac}; need a share in (0, 1]. 0.8 is the default."
        )
    ordered, index = energy.double().sort(descending=True, stable=True)
    held = ordered.cumsum(0)
    if energy.numel() == 0 or not held[-1].isfinite() or held[-1] <= 0:
        return index[:0]
    # Set the last sum to the total, so that rounding cannot miss a share of 1.
    n_short = int((held < energy_frac * held[-1]).sum())
    return index[: n_short + 1]


def random_energy_share(n: int, *, width: int) -> float:
    """Compute the share of a random token's energy that its ``n`` largest of ``width`` dimensions hold, as expected.

    The dimensions are independent, normal and many: the largest n/d are the magnitudes above t, with
    2 (1 - Phi(t)) = n/d, and hold n/d + 2 t phi(t) of the energy.
    """
    if n <= 0 or n >= width:
        return float(n > 0)
    normal = NormalDist()
    least = normal.inv_cdf(1 - n / width / 2)
    return n / width + 2 * least * normal.pdf(least)


def massive_activations(
    h: Float[Tensor, "batch d_model"], *, absolute: float = 100.0, relative: float = 1000.0
) -> Bool[Tensor, "batch d_model"]:
    """Mark entries above `absolute` in magnitude and at least `relative` times their token's median magnitude.

    The defaults are the paper's. They find nothing in models below about a billion parameters, so also report
    `massive_ratio`.

    Reference: Sun et al., arXiv 2402.17762.
    """
    magnitude = widen(h).abs()
    return (magnitude > absolute) & (magnitude >= relative * median_magnitude(magnitude)[:, None])


def residual_outliers(
    h: Float[Tensor, "batch position d_model"],
    *,
    valid: Bool[Tensor, "batch position"],
    factor: float = 20.0,
) -> Bool[Tensor, "batch position d_model"]:
    """Mark entries over `factor` times their token's median magnitude; False at padding.

    Reference: arXiv 2601.22966 (residual sinks: dimensions that are large on most tokens); the threshold is ours.
    """
    magnitude = widen(h).abs()
    return (magnitude > factor * median_magnitude(magnitude)[..., None]) & valid[..., None]


def token_kurtosis(h: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position"]:
    """Excess kurtosis of each token's dimensions: 0 for Gaussian ones, d_model - 5 + 1/(d_model - 1) at most.

    Without bias correction. nan for a constant token.

    Reference: arXiv 2506.19697, which reports it as the outlier measure of training.
    """
    return excess_kurtosis(widen(h), dim=-1)


def massive_ratio(h: Float[Tensor, "batch d_model"]) -> Float[Tensor, " batch"]:
    """Largest magnitude of a token over its median magnitude.

    In [1, inf]: infinite if more than half of the dimensions, but not all, are 0; nan for a token of zeros.

    Reference: Sun et al., arXiv 2402.17762.
    """
    magnitude = widen(h).abs()
    return magnitude.amax(-1) / median_magnitude(magnitude)


def growth_ratio(
    norms: Float[Tensor, "batch position"],
    *,
    valid: Bool[Tensor, "batch position"],
    key: int,
    others_from: int = 8,
) -> Float[Tensor, " batch"]:
    """Norm of the token at `key` over the median norm of the real positions from `others_from` on.

    In [0, inf]; nan if `key` is padding or no other position is left. A layer in which the ratio at least doubles
    belongs to a growth step. The raw norm says less: an early layer may multiply the norm of every token.

    Raises:
        InputError: `key` is outside the sequence.
    """
    check_position(key, n_positions=norms.shape[1])
    others = queries_from(valid, start=others_from)
    others = others & (torch.arange(norms.shape[1], device=norms.device) != key)
    ratio = widen(norms)[:, key] / median_where(norms, where=others)
    return ratio.masked_fill(~valid[:, key], math.nan)


def median_magnitude(magnitude: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
    """Return the median of each token's magnitudes; of an even number the mean of the two middle ones."""
    # torch gives the lower of the two
    return magnitude.median(-1).values / 2 - (-magnitude).median(-1).values / 2
