"""Numbers that a run folder holds, computed again before the run goes on: equal to 1e-6, or the run is refused.

No hash says what a number was computed from: a function reads a file, an environment variable, a patched module. So the
baseline and some finished cells are computed again by the call that goes on. Hashes are only the quick first refusal.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import RunError
from ..files import parse_json
from .provenance import plain_json
from .reading import damaged_file_error
from .writing import RunWriter

_Computed = TypeVar("_Computed")
TOLERANCE = 1e-6
"""Largest allowed difference, relative to a number's magnitude if that is above 1."""
MOST, FEW = 32, 4
"""Parts of which a cell is computed again; fewer where all cells are computed by one and the same function, since what
changes the model, the tokens or a metric changes every cell."""


def sample_parts(names: Sequence[str], *, most: int) -> list[str]:
    """Return all ``names``, or ``most`` of them drawn at random, the same ones each time, in their order."""
    drawn = set(np.random.default_rng(0).permutation(len(names))[:most].tolist())
    return [name for index, name in enumerate(names) if index in drawn]


def refuse_other_numbers(
    folder: Path,
    found: Any,
    computed: Any,
    *,
    what: str,
    tolerance: float = TOLERANCE,
    scale: float = 1,
) -> None:
    """Refuse a run folder unless the numbers ``found`` in it equal those ``computed`` now; nan equals nan.

    They may differ by ``tolerance`` times the number or ``scale``, whichever is larger. The error says the first pair
    that does not, and ``what`` they are.
    """
    if how := _difference(found, computed, tolerance=tolerance, scale=scale):
        raise RunError(
            f"{folder} holds numbers of something else: {what} {how}. A model, its configuration, a function, or what "
            "one reads has changed; need what the run was begun with. Repeat that, choose another folder, or "
            "overwrite=True to replace the run."
        )


def compute_until_equal(
    found: Any, *ways: Callable[[], _Computed], numbers: Callable[[_Computed], Any]
) -> _Computed:
    """Return what the first of ``ways`` computes whose ``numbers`` equal those ``found``, or what the last computes.

    A cell alone takes a forward of its own size, which may round otherwise than the larger one that it had part in.
    """
    for way in ways[:-1]:
        computed = way()
        if not _difference(found, numbers(computed)):
            return computed
    return ways[-1]()


def keep_or_compare(
    writer: RunWriter, filename: str, values: Mapping[str, Sequence[float]]
) -> None:
    """Write named numbers to a JSON file of the run, or compare them with those that the folder has."""
    if not writer.has(filename):
        writer.write_text(filename, json.dumps(plain_json(values)) + "\n")
        return
    path = writer.folder / filename
    try:
        held = parse_json(path.read_text("utf-8"))
        there = {name: np.array(held[name], dtype=float) for name in values}  # None is nan
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged_file_error(path, error) from error
    for name, computed in values.items():
        refuse_other_numbers(
            writer.folder, there[name], plain_json(computed), what=f"the metric ({name})"
        )


def _difference(
    found: Any, computed: Any, *, tolerance: float = TOLERANCE, scale: float = 1
) -> str:
    """Return the first difference of numbers as the end of a sentence; "" if they are equal."""
    there, here = (np.asarray(one, dtype=float).ravel() for one in (found, computed))
    if there.shape != here.shape:
        return f"has {len(there):,} numbers there and {len(here):,} here"
    with np.errstate(invalid="ignore"):
        near = np.abs(there - here) <= tolerance * np.fmax(scale, np.abs(there))
    same = near | (there == here) | (np.isnan(there) & np.isnan(here))
    first = int(np.argmin(same)) if len(same) else 0
    return "" if same.all() else f"is {there[first]:.9g} there and {here[first]:.9g} here"
