"""The axes of a grid: turn the notation in a file or in Python into the values that are swept.

``each`` sweeps every index, one at a time; ``all`` edits all indices together and makes no axis. A number or ``0-3,7``
sweeps these indices one at a time. In a list every entry is one value; an entry that is a list or a range is a set that
is edited together: ``[3, "4-6", [7, 9]]`` has three values.
"""

import re
from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from ..text import parse_ranges
from .part import Indices


def axis_values(given: Any, *, name: str, size: int, first: int = 0) -> list[Indices]:
    """Turn an axis of a grid into its values: sets of indices from ``first`` to ``size`` - 1 to change together.

    ``given`` is ``each``, ``all``, a number, a range such as ``0-3,7``, or a list of these.
    """
    need = range(first, size)
    if isinstance(given, str) and given == "all":
        return [None]
    if isinstance(given, str) and given == "each":
        found: list[Indices] = [(index,) for index in range(first, size)]
    elif isinstance(given, str | int):
        found = [
            (index,) for index in _entry_indices(given, name=name, need=need, also="each, all, or ")
        ]
    elif isinstance(given, Sequence):
        found = [_entry_indices(one, name=name, need=need) for one in given]
    else:
        raise InputError(
            f"{name} is {given!r}; need each, all, a number, a range such as 0-3,7, or a list of these"
        )
    if not found:
        raise InputError(f"{name} is empty; need at least one value, or all")
    for chosen in found:
        for index in chosen or ():
            if not first <= index < size:
                raise InputError(f"{name}: {index} does not exist; need {first} to {size - 1}")
    if len(set(found)) < len(found):
        raise InputError(f"{name} names a value twice: {given!r}; need each once")
    return found


def _entry_indices(given: Any, *, name: str, need: range, also: str = "") -> tuple[int, ...]:
    """Parse an entry of the axis ``name`` into sorted indices: a number, a range as ``0-3,7`` in ``need``, or a list.

    ``also`` are other words that the axis accepts, for the error.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return (given,)
    if isinstance(given, str):
        for digits in re.findall(
            "[0-9]+", given
        ):  # before a range such as 0-99999999999 is written out
            if len(digits.lstrip("0")) > len(str(need.stop)) or int(digits) not in need:
                raise InputError(
                    f"{name}: {digits} does not exist; need {need.start} to {need.stop - 1}"
                )
        given = parse_ranges(given, name=name, also=also)
    elif not isinstance(given, Sequence) or not all(type(one) is int for one in given):
        raise InputError(
            f"{name} holds {given!r}; need numbers, ranges such as 0-3,7, or lists of numbers"
        )
    if not given or len(set(given)) < len(given):
        raise InputError(f"{name} holds {given!r}; need at least one index, and each once")
    return tuple(sorted(given))
