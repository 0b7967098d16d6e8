"""Memory that was freed goes back to the system: the C library of Linux keeps it, and finds no use for much of it.

Large tensors that come and go between small ones that stay leave holes. A measuring pass of many forwards held half as
much again as it needed, and a model on disk two thirds of its size.
"""

import ctypes
import functools
import sys
from collections.abc import Callable


def give_back() -> None:
    """Give freed memory back to the system; nothing happens where the C library has no such call."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
