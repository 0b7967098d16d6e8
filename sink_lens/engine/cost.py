"""What a run would take, before it is begun: seconds of small pieces of it, memory of this process, both in words."""

import sys
import time
from collections.abc import Callable

import psutil
import torch

from ..models.lens import LensModel


def seconds_of(piece: Callable[[], object], *, device: torch.device | str, warm_up: int = 0) -> float:
    """Wall time of a piece of the work, once it has run ``warm_up`` times unmeasured."""
    for _ in range(warm_up):
        piece()
    begun = now(device)
    piece()
    return now(device) - begun


def now(device: torch.device | str) -> float:
    """The clock, once a GPU has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def weight_bytes(lens: LensModel) -> int:
    """The model's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in lens.plain.parameters())


def held_bytes() -> int:
    """What this process holds now, in main memory."""
    return psutil.Process().memory_info().rss


def peak_bytes(device: torch.device | str) -> int:
    """The most that this process has held: on the GPU where the work is there, else in main memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    found = psutil.Process().memory_info()
    if sys.platform == "win32":
        return int(getattr(found, "peak_wset", found.rss))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def duration(seconds: float) -> str:
    """A time as ``under 1 s``, ``80 s``, ``12 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(n_bytes: int) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:,.1f} {unit}"
    return f"{n_bytes / 1e3:,.0f} kB"
