"""Memory that was freed goes back to the system, and weights that are not needed for a while wait in a file.

The C library of Linux keeps what was freed, and finds no use for much of it: large tensors that come and go between
small ones that stay leave holes. A measuring pass of many forwards held half as much again as it needed, and a model on
disk two thirds of its size.
"""

import contextlib
import ctypes
import functools
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

LOSS_CHUNK = 256
"""Tokens whose logits are in memory at a time where only their loss is read."""


def give_back() -> None:
    """Give freed memory back to the system; nothing happens where the C library has no such call."""
    trim = _trim()
    if trim is not None:
        trim(0)


def collect() -> None:
    """Free what refers to itself, as models with a bridge and runs with a cache do, and give it back to the system."""
    gc.collect()
    give_back()


@contextlib.contextmanager
def set_aside(model: "nn.Module", *, folder: Path) -> Iterator[None]:
    """Within the block, a model's parameters take no memory: they wait in a file without a name, and come back equal.

    Args:
        model: a model in main memory, of which nothing is asked within the block.
        folder: where the file lies; it is gone after the block, however that ends.
    """
    import torch

    sizes = [(one, one.shape) for one in model.parameters()]
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            for one, _ in sizes:
                file.write(one.detach().flatten().view(torch.uint8).numpy().data)
                one.data = one.data.new_empty(0)
            give_back()
            yield
        finally:
            file.seek(0)
            for one, shape in sizes:
                if one.shape != shape:
                    one.data = one.data.new_empty(shape)
                    file.readinto(one.detach().flatten().view(torch.uint8).numpy().data)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The C library's function that gives memory back; None where there is none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
