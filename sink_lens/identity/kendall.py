"""Kendall's tau-b of many columns at once: the numbers of SciPy's loop, much sooner.

Without ties tau is 1 - 4 I / (n (n - 1)), where I counts inversions: pairs that one variable orders as i, j and the
other as j, i. A value goes to its place on a grid of 3 n places over its column's range, and neighbours are then put
right: sorting takes about n steps. In the order of the second variable, the places that its values have in the order of
the first are marked in a row of bits, 64 a word; how many of them are marked above the present one are its inversions.

Both are compiled, when they are first called on a machine. Columns with ties (two equal float64 are rare here) go to
``measures.kendall``, which counts them.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, no_type_check

import numpy as np
import torch

from ..errors import InputError
from ..measures.kendall import tau_b

try:
    from numba import njit
except ImportError as error:
    raise InputError(
        "numba is not installed; need it for the many taus of a fingerprint. pip install 'sink-lens[fingerprint]'"
    ) from error

_PLACES = 3
"""Places of the grid for each value."""
_PER_TASK = 25
"""Columns that a thread takes at a time."""


def tau(x: np.ndarray, y: np.ndarray, *, threads: int | None = None) -> np.ndarray:
    """Kendall's tau-b of each column of ``x`` with the same column of ``y``: ``scipy.stats.kendalltau``, ties included.

    In [-1, 1]; nan where either column is constant or holds a nan.

    Args:
        x: samples by coordinates.
        y: the same shape.
        threads: that compute; as many as there are cores if None.

    Raises:
        InputError: other shapes, or fewer than two samples.
    """
    for values in (x, y):
        _check(values)
    if x.shape != y.shape:
        raise InputError(f"Kendall's tau of shapes {x.shape} and {y.shape}; need the same samples and columns")
    found = np.empty(x.shape[1])

    def fill(start: int) -> None:
        """Compute some columns."""
        part = slice(start, start + _PER_TASK)
        first, second = _rows(x[:, part]), _rows(y[:, part])
        found[part] = _tau(first, second, _inversions_of_both(*_extreme_rows(first), *_extreme_rows(second)))

    _do_each(fill, range(0, len(found), _PER_TASK), threads=threads)
    return found


def tau_matrix(
    x: np.ndarray, y: np.ndarray, *, threads: int | None = None, advance: Callable[[int], object] | None = None
) -> np.ndarray:
    """Kendall's tau-b of each column of ``x`` with every column of ``y``; each column is sorted only once.

    Args:
        x: samples by coordinates.
        y: the same samples by other coordinates.
        threads: see ``tau``.
        advance: called with how many columns of ``x`` are done, as they are.

    Raises:
        InputError: other samples, or fewer than two.
    """
    for values in (x, y):
        _check(values)
    if len(x) != len(y):
        raise InputError(f"{len(x)} and {len(y)} samples; need the same ones in both")
    first, second = _rows(x), _rows(y)
    (order, plain), (order_too, plain_too) = _sort_rows(*_extreme_rows(first)), _sort_rows(*_extreme_rows(second))
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(order.shape[1], dtype=order.dtype)[None], -1)
    found = np.empty((len(first), len(second)))

    def fill(row: int) -> None:
        """Compute one row."""
        count = _against(places[row], order_too)
        count[~(plain[row] & plain_too)] = -1
        found[row] = _tau(np.broadcast_to(first[row], second.shape), second, count)
        if advance is not None:
            advance(1)

    _do_each(fill, range(len(first)), threads=threads)
    return found


def _check(values: np.ndarray) -> None:
    """Refuse arrays without samples and columns."""
    if np.ndim(values) != 2 or len(values) < 2:
        raise InputError(f"Kendall's tau of an array of shape {np.shape(values)}; need two samples or more, by columns")


def _rows(values: np.ndarray) -> np.ndarray:
    """Columns as contiguous rows."""
    return np.ascontiguousarray(np.asarray(values, dtype=np.float64).T)


def _extreme_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with the lowest and the highest value of each."""
    return rows, rows.min(1), rows.max(1)


def _do_each(work: Callable[[Any], None], items: Sequence[Any], *, threads: int | None) -> None:
    """Do the work of every item: what is compiled runs side by side."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if len(items) == 1:
        work(items[0])
        return
    with ThreadPoolExecutor(threads or cores) as pool:
        for _ in pool.map(work, items):
            pass


def _tau(x: np.ndarray, y: np.ndarray, inversions: np.ndarray) -> np.ndarray:
    """Kendall's tau of pairs of rows from their numbers of inversions.

    A negative number marks rows with ties or with nan, which are computed as tau-b instead.
    """
    n = x.shape[1]
    pairs = n * (n - 1) // 2
    # Divided and cut as SciPy does, to the last bit.
    found = np.clip((pairs - 2 * inversions) / np.sqrt(pairs) / np.sqrt(pairs), -1, 1)
    if (tied := inversions < 0).any():
        found[tied] = tau_b(torch.tensor(x[tied]), reference=torch.tensor(y[tied])).numpy()
    return found


@njit(nogil=True, cache=True)
@no_type_check
def _put_in_order(
    x: np.ndarray,
    low: float,
    high: float,
    order: np.ndarray,
    ends: np.ndarray,
    places: np.ndarray,
    ascending: np.ndarray,
) -> bool:
    """Write the sorting permutation of ``x`` into ``order``; False, with ``order`` undefined, on ties or nan."""
    if not 0 < high - low < np.inf:  # a nan is its column's lowest and highest
        return False
    scale = (ends.size - 2) / (high - low)
    ends[:] = 0
    for i in range(x.size):
        places[i] = np.int32((x[i] - low) * scale)
        ends[places[i] + 1] += 1
    below = 0
    for place in range(ends.size):
        below += ends[place]
        ends[place] = below
    for i in range(x.size):
        end = ends[places[i]]
        order[end], ascending[end] = i, x[i]
        ends[places[i]] = end + 1
    steps = 0
    for i in range(1, x.size):
        if ascending[i - 1] <= ascending[i]:
            continue
        moved, value, at = order[i], ascending[i], i
        while at > 0 and ascending[at - 1] > value:
            order[at], ascending[at] = order[at - 1], ascending[at - 1]
            at -= 1
        order[at], ascending[at] = moved, value
        steps += i - at
        if steps > 64 * x.size:  # heavy tails: most values on few places
            order[:] = np.argsort(x)
            ascending[:] = x[order]
            break
    ties = 0
    for i in range(1, x.size):
        ties += ascending[i - 1] == ascending[i]
    return ties == 0


@njit(nogil=True, cache=True)
@no_type_check
def _inversions(places: np.ndarray, order: np.ndarray, marks: np.ndarray, above: np.ndarray) -> int:
    """Pairs i < j with ``places[order[i]]`` the larger."""
    marks[:], above[:] = 0, 0
    total = 0
    for one in order:
        word, bit = places[one] >> 6, np.uint64(places[one] & 63)
        rest = marks[word] >> bit
        marks[word] |= np.uint64(1) << bit
        # Bits that are set, counted in pairs, fours, eights, and all.
        rest -= (rest >> np.uint64(1)) & np.uint64(0x5555555555555555)
        rest = (rest & np.uint64(0x3333333333333333)) + ((rest >> np.uint64(2)) & np.uint64(0x3333333333333333))
        rest = (rest + (rest >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        total += above[word] + np.int64((rest * np.uint64(0x0101010101010101)) >> np.uint64(56))
        for lower in range(above.size):
            above[lower] += np.int32(lower < word)
    return total


@njit(nogil=True, cache=True)
@no_type_check
def _sort_rows(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorting permutation of each row, and whether the row has no ties."""
    n_rows, n = x.shape
    order, plain = np.zeros((n_rows, n), np.int32), np.empty(n_rows, np.bool_)
    ends, places, ascending = np.empty(_PLACES * n + 2, np.int32), np.empty(n, np.int32), np.empty(n, x.dtype)
    for row in range(n_rows):
        plain[row] = _put_in_order(x[row], low[row], high[row], order[row], ends, places, ascending)
        if not plain[row]:
            order[row] = np.arange(n)
    return order, plain


@njit(nogil=True, cache=True)
@no_type_check
def _against(places: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Inversions of one row's places in the order of each of others."""
    words = (places.size + 63) // 64
    marks, above = np.empty(words, np.uint64), np.empty(words, np.int32)
    found = np.empty(len(orders), np.int64)
    for row in range(len(orders)):
        found[row] = _inversions(places, orders[row], marks, above)
    return found


@njit(nogil=True, cache=True)
@no_type_check
def _inversions_of_both(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, y: np.ndarray, low_y: np.ndarray, high_y: np.ndarray
) -> np.ndarray:
    """Inversions of each row of ``x`` with the same of ``y``; -1 where there are ties, or no order."""
    n_rows, n = x.shape
    ends, places, ascending = np.empty(_PLACES * n + 2, np.int32), np.empty(n, np.int32), np.empty(n, x.dtype)
    order, again, itself = np.empty(n, np.int32), np.empty(n, np.int32), np.arange(n)
    along = np.empty(n, x.dtype)
    marks, above = np.empty((n + 63) // 64, np.uint64), np.empty((n + 63) // 64, np.int32)
    found = np.full(n_rows, -1, np.int64)
    for row in range(n_rows):
        if _put_in_order(x[row], low[row], high[row], order, ends, places, ascending):
            for i in range(n):
                along[i] = y[row, order[i]]
            if _put_in_order(along, low_y[row], high_y[row], again, ends, places, ascending):
                found[row] = _inversions(itself, again, marks, above)
    return found
