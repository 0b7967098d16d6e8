"""How far one or two residual dimensions dominate a token, and how firm a threshold's answer is.

Every ratio is taken in one layer: the maximum over layers before the median would hide an outlier that lives
in one layer only.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sink_lens.errors import InputError
from sink_lens.measures.reductions import check_position, mean_where, median_where, queries_from, widen


class ThresholdRange(NamedTuple):
    """Thresholds in (low, high] give the same answer."""

    low: float
    """The largest ratio that does not pass; 0 where all pass."""
    high: float
    """The smallest ratio that passes; infinite where none does."""


def dominance_ratio(h: Float[Tensor, "batch d_model"]) -> Float[Tensor, " batch"]:
    """Largest magnitude of a token over its mean magnitude: max_j |h_j| / mean_k |h_k|.

    From 1 (all dimensions equal) to d_model (one holds everything); nan for a token of zeros.

    Reference: arXiv 2605.06611, the text's definition.
    """
    magnitude = widen(h).abs()
    return magnitude.amax(-1) / magnitude.mean(-1)


def dominance_ratio_fixed(h: Float[Tensor, "batch d_model"], *, dimension: int) -> float:
    """Mean magnitude of one given dimension over that of the other dimensions: a ratio of sample means.

    In [0, inf]; nan where everything is 0, or for one dimension alone. Taken after the attention-input norm
    in the paper (Llama-2-7B, dimension 2533: 262.88); a trace's ``layers.dominance_ratio_fixed`` is taken on the
    residual stream.

    Raises:
        InputError: `dimension` is outside the tensor.

    Reference: arXiv 2605.06611, Table 1 (mean over the other dimensions, ratio of sample averages).
    """
    check_dimension(dimension, d_model=h.shape[1])
    magnitude = widen(h).abs()
    others = torch.arange(h.shape[1], device=h.device) != dimension
    ratio = magnitude[:, dimension].mean() / mean_where(magnitude, where=others, dim=-1).mean()
    return float(ratio)


def outlier_dimensions(energy: Float[Tensor, " d_model"], *, energy_frac: float = 0.8) -> Int[Tensor, " dimension"]:
    """The smallest set of dimensions that holds `energy_frac` of a token's energy, largest first.

    Always an answer: whether the few dimensions are outliers is for the dominance ratio to say. Empty where
    the energy is 0 or not finite.

    Args:
        energy: square of each dimension at the token, summed or averaged over sequences.
        energy_frac: share of the total to hold, in (0, 1].

    Raises:
        InputError: `energy_frac` is outside (0, 1].
    """
    if not 0 < energy_frac <= 1:
        raise InputError(f"found energy_frac = {energy_frac}; need a share in (0, 1]. 0.8 is the default.")
    ordered, index = energy.double().sort(descending=True, stable=True)
    held = ordered.cumsum(0)
    if energy.numel() == 0 or not held[-1].isfinite() or held[-1] <= 0:
        return index[:0]
    # The last sum is the total by construction, so that a share of 1 cannot be missed by rounding.
    n_short = int((held < energy_frac * held[-1]).sum())
    return index[: n_short + 1]


def massive_activations(
    h: Float[Tensor, "batch d_model"], *, absolute: float = 100.0, relative: float = 1000.0
) -> Bool[Tensor, "batch d_model"]:
    """Entries over `absolute` in magnitude and at least `relative` times their token's median magnitude.

    The defaults are the paper's and find nothing in models under about a billion parameters: report
    `massive_ratio` and the `stable_range` of its threshold beside them.

    Reference: Sun et al., arXiv 2402.17762.
    """
    magnitude = widen(h).abs()
    return (magnitude > absolute) & (magnitude >= relative * _median(magnitude)[:, None])


def massive_ratio(h: Float[Tensor, "batch d_model"]) -> Float[Tensor, " batch"]:
    """Largest magnitude of a token over its median magnitude.

    In [1, inf]: infinite where over half the dimensions are 0 but not all; nan for a token of zeros.

    Reference: Sun et al., arXiv 2402.17762.
    """
    magnitude = widen(h).abs()
    return magnitude.amax(-1) / _median(magnitude)


def stable_range(ratios: Float[Tensor, " sample"], *, threshold: float) -> ThresholdRange:
    """Thresholds over which the samples with ratio >= threshold stay the ones that pass at `threshold`.

    The answer is the same at every threshold in (low, high]; a range that reaches little past `threshold`
    says that the answer is an accident of it. Undefined (nan) ratios pass nowhere and are left out; both
    ends are nan where none is defined.
    """
    known = ratios[~ratios.isnan()].double()
    if known.numel() == 0:
        return ThresholdRange(low=math.nan, high=math.nan)
    passing, failing = known[known >= threshold], known[known < threshold]
    return ThresholdRange(
        low=float(failing.max()) if failing.numel() else 0.0,
        high=float(passing.min()) if passing.numel() else math.inf,
    )


def growth_ratio(
    norms: Float[Tensor, "batch position"],
    *,
    valid: Bool[Tensor, "batch position"],
    key: int,
    others_from: int = 8,
) -> Float[Tensor, " batch"]:
    """Norm of the token at `key` over the median norm of the real positions from `others_from` on.

    In [0, inf]. A layer in which it at least doubles belongs to a growth step; the raw norm says less, for
    an early layer may multiply every token's. nan where `key` is padding or no other position is left.

    Raises:
        InputError: `key` is outside the sequence.
    """
    check_position(key, n_positions=norms.shape[1])
    others = queries_from(valid, start=others_from)
    others = others & (torch.arange(norms.shape[1], device=norms.device) != key)
    ratio = widen(norms)[:, key] / median_where(norms, where=others)
    return ratio.masked_fill(~valid[:, key], math.nan)


def check_dimension(dimension: int, *, d_model: int) -> None:
    """Refuse a residual dimension that the model does not have.

    Raises:
        InputError: `dimension` is outside 0 .. d_model - 1.
    """
    if not 0 <= dimension < d_model:
        raise InputError(
            f"dimension {dimension} is outside the residual stream; need 0 to {d_model - 1}. "
            "Pass a dimension of this model: they do not transfer between models."
        )


def _median(magnitude: Float[Tensor, "batch d_model"]) -> Float[Tensor, " batch"]:
    return median_where(magnitude, where=torch.ones_like(magnitude, dtype=torch.bool))
