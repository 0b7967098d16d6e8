"""Kendall's tau-b of many lists at once.

tau-b counts pairs. Sort a list by its reference; the discordant pairs are then inversions. A merge sort over all lists
at once counts them level by level, in time n log^2 n per list instead of n^2.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sink_lens.measures.reductions import widen


def tau_b(
    x: Float[Tensor, "dimension value"], *, reference: Float[Tensor, "dimension value"]
) -> Float[Tensor, " dimension"]:
    """Kendall's tau-b of each row of `x` with the same row of `reference`.

    In [-1, 1], the same number as `scipy.stats.kendalltau`; nan if either row is constant or has a nan. It needs about
    40 bytes of memory per entry of `x`, so pass many rows in chunks.
    """
    n_values = x.shape[1]
    x, reference = widen(x), widen(reference)
    # Sort by the reference, and ties in it by x, so that a pair tied in the reference is no inversion.
    by_x = x.argsort(dim=-1)
    by_reference = reference.gather(-1, by_x).argsort(dim=-1, stable=True)
    order = by_x.gather(-1, by_reference)
    x, r = x.gather(-1, order), reference.gather(-1, order)

    x_changes = x[:, 1:] != x[:, :-1]
    r_changes = r[:, 1:] != r[:, :-1]
    ordered_x = x.sort(dim=-1).values
    ties_x = _tied_pairs(ordered_x[:, 1:] != ordered_x[:, :-1])
    ties_r = _tied_pairs(r_changes)
    ties_both = _tied_pairs(x_changes | r_changes)

    pairs = n_values * (n_values - 1) // 2
    discordant = _inversions(x)
    concordant = pairs - discordant - ties_x - ties_r + ties_both
    # Take the two roots separately: the product of two counts of pairs can overflow an integer.
    scale = (pairs - ties_x).double().sqrt() * (pairs - ties_r).double().sqrt()
    tau = ((concordant - discordant).double() / scale).clamp(-1, 1)
    undefined = (scale == 0) | x.isnan().any(-1) | reference.isnan().any(-1)
    return tau.masked_fill(undefined, math.nan).to(x.dtype)


def _tied_pairs(changes: Bool[Tensor, "dimension sample"]) -> Int[Tensor, " dimension"]:
    """Number of tied pairs, sum of t (t - 1) / 2 over runs of t equal neighbours, from where neighbours differ."""
    place = torch.arange(1, changes.shape[1] + 1, device=changes.device)
    run_start = torch.where(changes, place, 0).cummax(dim=-1).values
    # The k-th element of a run (from 0) is tied with the k elements before it.
    return (place - run_start).sum(-1)


def _inversions(x: Float[Tensor, "dimension value"]) -> Int[Tensor, " dimension"]:
    """Number of pairs in each row whose earlier entry is strictly larger."""
    n_rows, n_values = x.shape
    size = 1 << max(0, n_values - 1).bit_length()
    # Pad the end with infinities: nothing is larger than they are, so they add no inversion.
    blocks = torch.nn.functional.pad(x, (0, size - n_values), value=math.inf)
    count = torch.zeros(n_rows, dtype=torch.int64, device=x.device)
    half = 1
    while half < size:
        left, right = blocks.reshape(n_rows, size // (2 * half), 2, half).unbind(2)
        not_larger = torch.searchsorted(left.contiguous(), right.contiguous(), right=True)
        count = count + (half - not_larger).sum((1, 2))
        blocks = blocks.reshape(n_rows, size // (2 * half), 2 * half).sort(dim=-1).values
        half *= 2
    return count
