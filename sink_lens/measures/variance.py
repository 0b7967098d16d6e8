"""Variance of the aggregated values by position, the laws that it should follow, and whether W_O keeps it.

The first token attends only to itself, and token i averages i + 1 value vectors. The variance of the attention's output
therefore falls with position (arXiv 2605.06611). S1 is the standard deviation over samples, S2 the standard deviation
within a token.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import InputError
from .kendall import tau_b
from .reductions import mean_where, median_where, widen

_WEIGHTS_AT_ONCE = 2**22
"""Weights whose correlations are computed at once, which bounds the memory (about 40 bytes each)."""


def token_std(x: Float[Tensor, "batch position *value"]) -> Float[Tensor, "batch position"]:
    """Unbiased standard deviation over all coordinates of one token, with heads concatenated.

    In [0, inf), in the unit of `x`. nan for a token with a single coordinate. S2 is its mean over sequences.

    Reference: arXiv 2605.06611.
    """
    flat = widen(x).flatten(2) if x.ndim > 2 else widen(x)[..., None]
    if flat.shape[-1] < 2:
        return flat.new_full(flat.shape[:2], math.nan)
    # Two passes over the values: many times faster than torch.std over the last axis, and as exact.
    deviation = flat - flat.mean(-1, keepdim=True)
    return torch.linalg.vector_norm(deviation, dim=-1) / math.sqrt(flat.shape[-1] - 1)


def s2(
    x: Float[Tensor, "batch position *value"], *, valid: Bool[Tensor, "batch position"]
) -> Float[Tensor, " position"]:
    """S2, variance within a token: mean over sequences of the token's standard deviation.

    In [0, inf); nan at positions that no sequence reaches. The paper computes it on text.

    Reference: arXiv 2605.06611, s[t] = mean_n std_k(z[n, t, k]).
    """
    return mean_where(token_std(x), where=valid, dim=0)


def s1(
    x: Float[Tensor, "batch position *value"], *, valid: Bool[Tensor, "batch position"]
) -> Float[Tensor, " position"]:
    """S1, spread over samples: the unbiased standard deviation of each value over sequences, averaged over values.

    In [0, inf); nan at positions that fewer than two sequences reach. The paper computes it on random tokens. Sequences
    that do not fit in memory go into `Moments` batch by batch.

    Reference: arXiv 2605.06611, s[t] = mean_k std_n(z[n, t, k]).
    """
    moments = Moments.empty(
        n_positions=x.shape[1], n_values=math.prod(x.shape[2:]), device=x.device
    )
    moments.update(x, valid=valid)
    return moments.std().mean(-1).to(widen(x).dtype)


@dataclass(slots=True, kw_only=True)
class Moments:
    """Running count, mean and sum of squared deviations over sequences, by position and coordinate, in float64.

    Any split into batches gives the same result (Chan, Golub and LeVeque 1979), up to the rounding of the input's type.
    """

    count: Int[Tensor, " position"]
    """Number of real tokens seen at each position."""
    mean: Float[Tensor, "position value"]
    """Mean over the sequences seen."""
    m2: Float[Tensor, "position value"]
    """Sum of the squared deviations from the mean."""

    @classmethod
    def empty(
        cls, *, n_positions: int, n_values: int, device: torch.device | str | None = None
    ) -> "Moments":
        """Return moments that have seen no sequence yet."""
        zeros = torch.zeros(n_positions, n_values, dtype=torch.float64, device=device)
        count = torch.zeros(n_positions, dtype=torch.int64, device=device)
        return cls(count=count, mean=zeros, m2=zeros.clone())

    def update(
        self, x: Float[Tensor, "batch position *value"], *, valid: Bool[Tensor, "batch position"]
    ) -> None:
        """Update the moments in place with more sequences; padding (not `valid`) is left out."""
        flat = widen(x.flatten(2) if x.ndim > 2 else x[..., None])
        added = valid.sum(0)
        whole = bool(valid.all())  # then no mask is needed, which takes most of the time here
        kept = valid[..., None]
        # max(1) only avoids 0/0 at positions without tokens, where every term is 0.
        n = added.clamp(min=1)[:, None]

        def sums(values: Tensor) -> Tensor:
            return (values if whole else torch.where(kept, values, 0.0)).sum(0).double()

        # Compute in the type of x, about ten times faster than float64. The rounding error of the mean is the mean
        # of the deviations from it, which corrects both results.
        rough = sums(flat) / n
        deviation = flat - rough.to(flat.dtype)
        missed = sums(deviation) / n
        batch_mean = rough.to(flat.dtype).double() + missed
        batch_m2 = (sums(deviation.square()) - added[:, None] * missed.square()).clamp(min=0)
        total = self.count + added
        # Divide as float64: two integers would give float32.
        frac = (added.double() / total.clamp(min=1))[:, None]
        shift = batch_mean - self.mean
        self.m2 = self.m2 + batch_m2 + shift.square() * self.count[:, None] * frac
        self.mean = self.mean + shift * frac
        self.count = total

    def std(self) -> Float[Tensor, "position value"]:
        """Return the unbiased standard deviation over the sequences; nan at positions with fewer than two."""
        freedom = (self.count - 1)[:, None]
        return (self.m2 / freedom.clamp(min=1)).sqrt().masked_fill(freedom < 1, math.nan)


def decay_exponent(s: Float[Tensor, " position"]) -> Float[Tensor, ""]:
    """Least-squares slope of log s on log(position + 1), with s the standard deviation by position, S1 or S2.

    It is -1/2 under uniform attention over independent values. Positions where `s` is not finite and positive are left
    out; nan if fewer than two positions are left.
    """
    s = widen(s)
    chosen = (s.isfinite() & (s > 0)).nonzero()[:, 0]
    x = (chosen + 1).double().log()
    x = x - x.mean()
    spread = x.square().sum()
    slope = (x * s[chosen].double().log()).sum() / spread
    return torch.where(spread > 0, slope, math.nan).to(s.dtype)


def variance_ratio(s: Float[Tensor, " position"], *, others_from: int = 8) -> Float[Tensor, ""]:
    """Ratio of the standard deviation `s` at the first position to its median from position `others_from` on.

    In [0, inf); a ratio above 1 is a variance discrepancy. nan if there are no such positions; nan ones do not count.

    Raises:
        InputError: there is no position.
    """
    if not len(s):
        raise InputError("s has no position; need at least the first")
    others = s[others_from:]
    return widen(s)[0] / median_where(others, where=~others.isnan())


def output_preservation(
    w_o: Float[Tensor, "d_model value"],
    *,
    first_std: Float[Tensor, " value"],
    per_dimension: Int[Tensor, " dimension"] | None = None,
) -> Float[Tensor, " dimension"]:
    """Rank correlation of each output dimension's |W_O weights| with the inputs' standard deviation at the first token.

    It is Kendall's tau-b, in [-1, 1]; high if W_O reads most from the inputs in which the first token varies most. nan
    if either side is constant or has a nan. The paper reports a mean of 0.32 on Llama-2-7B.

    Args:
        w_o: output projection, with one row per output dimension and heads concatenated in `value`.
        first_std: standard deviation over samples of each input at the first position.
        per_dimension: the output dimensions to compute; by default all.

    Reference: arXiv 2605.06611.
    """
    rows = w_o if per_dimension is None else w_o[per_dimension.to(w_o.device)]
    reference = widen(first_std).to(w_o.device)
    chunk = max(1, _WEIGHTS_AT_ONCE // max(1, w_o.shape[1]))
    parts = [
        tau_b(widen(part).abs(), reference=reference.expand(part.shape))
        for part in rows.split(chunk)
    ]
    return torch.cat(parts) if parts else widen(rows).new_empty(0)
