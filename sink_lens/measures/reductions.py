"""Reductions over the entries that a mask keeps, in float32 or better, and the check and the mask of positions.

A reduction is nan if the mask keeps no entry. Masked entries never matter, not even a nan or an infinity: they are
replaced, not multiplied by 0.
"""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from ..errors import InputError


def widen(x: Num[Tensor, "*value"]) -> Float[Tensor, "*value"]:
    """Convert half precision or integers to float32; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def mean_where(
    x: Num[Tensor, "..."], *, where: Bool[Tensor, "..."], dim: int
) -> Float[Tensor, "..."]:
    """Mean over `dim` of the entries that `where` (broadcast against `x`) keeps; nan if it keeps none."""
    x = widen(x)
    kept = where.broadcast_to(x.shape)
    return torch.where(kept, x, 0.0).sum(dim) / kept.sum(dim)


def median_where(x: Num[Tensor, "..."], *, where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Median over the last axis of the entries that `where` keeps; nan if it keeps none or keeps a nan.

    For an even count it is the mean of the two middle numbers, as in numpy; `torch.median` takes the lower one.
    """
    x = widen(x)
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], math.nan)
    kept = where.broadcast_to(x.shape)
    ordered = sort_last_axis(torch.where(kept, x, math.inf))
    count = kept.sum(-1, keepdim=True)
    lower = ordered.gather(-1, (count - 1).clamp(min=0) // 2)
    upper = ordered.gather(-1, (count // 2).clamp(max=x.shape[-1] - 1))
    # Halve both numbers before adding them: this avoids overflow, and is exact if the two nearly cancel.
    middle = (lower / 2 + upper / 2).squeeze(-1)
    undefined = (count.squeeze(-1) == 0) | (kept & x.isnan()).any(-1)
    return middle.masked_fill(undefined, math.nan)


def sort_last_axis(x: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch value"]:
    """Sort along the last axis, nan last; on a CPU by numpy, which is many times faster than torch."""
    if x.device.type == "cpu" and not x.requires_grad:
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))
    return x.sort(dim=-1).values


def excess_kurtosis(x: Float[Tensor, "..."], *, dim: int) -> Float[Tensor, "..."]:
    """Fourth central moment over the squared variance, minus 3, without bias correction; nan for constant values."""
    centred = x - x.mean(dim, keepdim=True)  # of constant values 0 but for rounding
    # Divide by the largest first: the fourth power of a massive activation would overflow, of small weights vanish.
    squares = (centred / centred.abs().amax(dim, keepdim=True)).square()
    found = squares.square().mean(dim) / squares.mean(dim).square() - 3
    return found.masked_fill(x.amax(dim) == x.amin(dim), math.nan)


def check_position(key: int, *, n_positions: int) -> None:
    """Raise InputError if the position of a key is negative or not below ``n_positions``."""
    if not 0 <= key < n_positions:
        raise InputError(
            f"key position {key} is outside the sequence; need 0 to {n_positions - 1} (0-based). "
            "Pass a position that every query tensor has."
        )


def queries_from(
    valid: Bool[Tensor, "batch query"], *, start: int, end: int | None = None
) -> Bool[Tensor, "batch query"]:
    """Return the mask of the real (`valid`) queries at positions from `start` on, before `end` (None: to the last)."""
    index = torch.arange(valid.shape[1], device=valid.device)
    kept = valid & (index >= start)
    return kept if end is None else kept & (index < end)


def later_queries(
    valid: Bool[Tensor, "batch query"], *, key: int, reach: int | None = None
) -> Bool[Tensor, "batch query"]:
    """Return the mask of the real queries after `key` that see it; InputError if it is outside the sequence."""
    check_position(key, n_positions=valid.shape[1])
    return queries_from(valid, start=key + 1, end=None if reach is None else key + reach)
