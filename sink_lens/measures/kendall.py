"""Kendall's tau-b of many lists at once, without a loop over them.

tau-b counts pairs. Sort a list by its reference: the discordant pairs are then its inversions, pairs whose earlier
entry is the larger one. Inversions are counted in blocks that double: two neighbouring blocks are sorted together, and
the places of the entries that came from the right block say how many of the left one are smaller. In the smallest
blocks each entry is compared with every later one, which takes fewer steps than sorting.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .reductions import widen

_BLOCK = 64
"""Entries of the smallest blocks: their counts of inversions by offset fit into int8."""
_VALUES_AT_ONCE = 2**17
"""Values in a chunk of rows, so that what it needs stays in the processor's cache."""


def tau_b(
    x: Float[Tensor, "dimension value"], *, reference: Float[Tensor, "dimension value"]
) -> Float[Tensor, " dimension"]:
    """Kendall's tau-b of each row of `x` with the same row of `reference`.

    In [-1, 1], the same number as `scipy.stats.kendalltau`; nan if either row is constant, has a nan, or has
    fewer than two values. Time n log^2 n per row of n values.
    """
    x, reference = widen(x), widen(reference)
    rows, by = _to_numpy(x), _to_numpy(reference)
    found = np.empty(len(rows))

    def fill(part: slice) -> None:
        order, plain = _sort_orders_and_untied(rows[part])
        order_by, plain_by = _sort_orders_and_untied(by[part])
        found[part] = _tau_without_ties(np.take_along_axis(_ranks(order_by), order, -1))
        if (tied := ~(plain & plain_by)).any():
            found[part][tied] = _tau_with_ties(rows[part][tied], by[part][tied])

    _run_in_chunks(fill, rows.shape)
    return torch.from_numpy(found).to(x.device, x.dtype)


def tau_b_matrix(
    x: Float[Tensor, "dimension sample"], y: Float[Tensor, "value sample"]
) -> Float[Tensor, "dimension value"]:
    """Kendall's tau-b of each row of `x` with every row of `y`; each row is sorted only once. See `tau_b`."""
    x, y = widen(x), widen(y)
    rows, others = _to_numpy(x), _to_numpy(y)
    order, plain = _sort_orders_and_untied(rows)
    order_others, plain_others = _sort_orders_and_untied(others)
    ranks, found = _ranks(order), np.empty((len(rows), len(others)))

    def fill(part: slice) -> None:
        for index, row in enumerate(rows):
            found[index, part] = _tau_without_ties(ranks[index][order_others[part]])
            if (tied := ~(plain[index] & plain_others[part])).any():
                some = others[part][tied]
                found[index, part][tied] = _tau_with_ties(np.broadcast_to(row, some.shape), some)

    _run_in_chunks(fill, others.shape)
    return torch.from_numpy(found).to(x.device, x.dtype)


def _to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().contiguous().numpy()


def _run_in_chunks(work: Callable[[slice], None], shape: tuple[int, int]) -> None:
    n_rows, n_values = shape
    size = max(1, _VALUES_AT_ONCE // n_values)
    chunks = [slice(start, start + size) for start in range(0, n_rows, size)]
    if len(chunks) < 2:
        for part in chunks:
            work(part)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(len(chunks), cores or 1)) as pool:
        list(pool.map(work, chunks))


def _sort_orders_and_untied(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = rows.argsort(-1)
    ascending = np.take_along_axis(rows, order, -1)
    return order, np.asarray((ascending[:, 1:] > ascending[:, :-1]).all(-1))


def _ranks(order: np.ndarray) -> np.ndarray:
    ranks = np.empty(order.shape, np.int32)
    np.put_along_axis(ranks, order, np.arange(order.shape[1], dtype=np.int32)[None], -1)
    return ranks


def _tau_without_ties(permutations: np.ndarray) -> np.ndarray:
    """Return each row's tau, from the ranks of one variable in ascending order of the other."""
    pairs = math.comb(permutations.shape[1], 2)
    return _tau_from_counts(pairs - 2 * _count_inversions(permutations), pairs, pairs)


def _tau_with_ties(x: np.ndarray, reference: np.ndarray) -> np.ndarray:
    pairs = math.comb(x.shape[1], 2)
    # Sort by the reference, and ties in it by x, so that a pair tied in the reference is no inversion.
    order = np.lexsort((x, reference), axis=-1)
    x, reference = np.take_along_axis(x, order, -1), np.take_along_axis(reference, order, -1)
    by_x = x.argsort(-1, kind="stable")  # a pair tied in x is none either
    x_changes, changes = x[:, 1:] != x[:, :-1], reference[:, 1:] != reference[:, :-1]
    ascending = np.take_along_axis(x, by_x, -1)
    ties_x = _count_tied_pairs(ascending[:, 1:] != ascending[:, :-1])
    ties_reference = _count_tied_pairs(changes)
    concordant_or_not = pairs - ties_x - ties_reference + _count_tied_pairs(x_changes | changes)
    difference = concordant_or_not - 2 * _count_inversions(_ranks(by_x))
    found = _tau_from_counts(difference, pairs - ties_x, pairs - ties_reference)
    found[np.isnan(x).any(-1) | np.isnan(reference).any(-1)] = np.nan
    return found


def _tau_from_counts(
    difference: np.ndarray, pairs_x: np.ndarray | int, pairs_y: np.ndarray | int
) -> np.ndarray:
    """Return tau-b of each row, given its numbers of pairs: concordant minus discordant, and untied in each variable.

    The roots divide one after the other, since the product of two counts can overflow.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(difference / np.sqrt(pairs_x) / np.sqrt(pairs_y), -1, 1)


def _count_tied_pairs(changes: np.ndarray) -> np.ndarray:
    """Count the tied pairs in each sorted row; ``changes`` is True where a value differs from the one before."""
    place = np.arange(1, changes.shape[1] + 1)
    run_start = np.maximum.accumulate(np.where(changes, place, 0), axis=-1)
    # The k-th element of a run (from 0) is tied with the k elements before it.
    return (place - run_start).sum(-1)


def _count_inversions(permutations: np.ndarray) -> np.ndarray:
    """Count the inversions in each row of ranks: pairs of places i < j with the larger rank at i."""
    n_rows, n_values = permutations.shape
    size = max(_BLOCK, 1 << (n_values - 1).bit_length())
    entries = np.empty((n_rows, size), np.int32)
    entries[:, :n_values] = permutations
    entries[:, n_values:] = np.arange(n_values, size)  # larger than all before: no inversion
    first = np.ascontiguousarray(entries.reshape(-1, _BLOCK).T)
    found = np.zeros(n_rows, np.int64)
    for offset in range(1, _BLOCK):
        larger = (first[:-offset] > first[offset:]).view(np.int8)
        found += (
            np.add.reduce(larger, axis=0, dtype=np.int8).reshape(n_rows, -1).sum(-1, dtype=np.int64)
        )
    half = _BLOCK
    while half < size:
        pair = 2 * entries.reshape(n_rows, -1, 2, half)
        pair[:, :, 1] += 1  # the lowest bit marks the right block
        pair = pair.reshape(-1, 2 * half)
        pair.sort(-1)
        places = (pair & 1).astype(np.float64) @ np.arange(2 * half, dtype=np.float64)
        smaller = places.reshape(n_rows, -1).sum(-1) - size // (2 * half) * (half * (half - 1) // 2)
        found += size // 2 * half - smaller.astype(np.int64)
        half *= 2
    return found
