"""Estimate the cost of a run before it begins: time small pieces of it and read this process's memory.

torch is imported where a model is timed, so that a dry run that reads headers does without it.
"""

import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

if TYPE_CHECKING:
    import torch

    from ..models.header import Header
    from ..models.lens import LensModel

LIBRARIES = 650_000_000
"""Bytes that the imported libraries take."""
_TOKENS_A_FORWARD = 1024
_COPIES = 3
"""Copies of what a layer computes that a forward pass holds at a time."""
_COPIES_OF_LOGITS = 1.3
"""The same of its logits; the greatest of each row is one more number."""
_TIMED = 4
"""Products that are timed, of which the fastest counts."""
_OF_A_PARAMETER, _OF_A_TOKEN = 2_000, 10_000_000
"""Operations that take as long as a parameter's or a token's share in the conversion of a GGUF file: files of 0.13B,
0.27B and 1.5B parameters with 49,152 to 262,144 tokens, in Q4_1, Q4_K_M and Q8_0, are within a third."""
BACKWARD = 3
"""Passes that a forward and a backward count as."""
_ROWS_OF_READING = 64
"""Rows whose products take as long as reading the weights: 896 x 4,864 took 3.0 times as long a row for 32 rows as for
512 of a square product, 2.0 for 64 and 1.3 for 256."""
_GPU_FILES = ("nvidia", "nvhost", "nvgpu", "nvmap", "dxg", "kfd")
"""How the names of the files begin that Linux has for GPUs of NVIDIA (Jetson and Windows' subsystem too) and AMD."""
_OVERHEAD = 400.0
"""The time of a pass over that of its products of matrices alone is 1 and this over the width of the stream, since what
is no product goes with the width and products with its square: 1.5 to 2.0 in forward passes of SmolLM2-135M (576), 1.4
at 0.5B (896), 1.1 at 1.5B (1,536)."""


def seconds_of(piece: Callable[[], object], *, device: "torch.device | str", warm_up: int = 0) -> float:
    """Wall time of a piece of the work, measured after ``warm_up`` runs that are not timed."""
    for _ in range(warm_up):
        piece()
    begun = now(device)
    piece()
    return now(device) - begun


def operations_a_second(*, rows: int = 512, width: int = 2048) -> float:
    """Operations a second of the CPU in a product as large as those of a forward pass; takes half a second."""
    a, b = np.ones((rows, width), dtype=np.float32), np.ones((width, width), dtype=np.float32)
    fastest = min(timeit.repeat(lambda: a @ b, number=1, repeat=_TIMED + 1)[1:])  # others may run beside it
    return 2 * rows * width**2 / fastest


def seconds_a_token(header: "Header", *, whole: bool = True, rows: int | None = None) -> float:
    """Time of a forward pass for each token on the CPU: the model's operations at the speed of a product of matrices.

    Without ``whole`` the unembedding is left out. With few ``rows`` (tokens of a forward) each takes longer, since all
    weights are read and laid out for them.

    Too little for models of a few million parameters, whose time is that of Python, and where a sequence is so long
    (several thousand tokens) that attention takes longer than the weights.
    """
    few = 1.0 if rows is None else 1 + _ROWS_OF_READING / rows
    return few * overhead(header.d_model) * 2 * (header.n_body + whole * header.n_vocab) / operations_a_second()


def overhead(d_model: int) -> float:
    """Estimate the time of a pass relative to that of its products of matrices."""
    return 1 + _OVERHEAD / max(1, d_model)


def conversion(header: "Header", *, path: Path) -> str:
    """Say what the first command on a GGUF file takes before it measures; empty for other files."""
    if path.suffix != ".gguf":
        return ""
    operations = _OF_A_PARAMETER * (header.n_body + header.n_vocab) + _OF_A_TOKEN * header.d_vocab
    seconds = operations / operations_a_second()
    return f"{path.name} is converted first, once: {about(seconds)} and {size(header.weight_bytes)} in the cache"


def peak_by_header(header: "Header", *, weights: int, tokens: int) -> int:
    """Peak memory of a process on the CPU, roughly: libraries, weights (bytes), and a forward pass with logits."""
    held = min(tokens, _TOKENS_A_FORWARD)
    logits = round(_COPIES_OF_LOGITS * 4 * held * header.d_vocab)
    return LIBRARIES + weights + logits + bytes_of_a_layer(header, tokens=held)


def bytes_of_a_layer(header: "Header", *, tokens: int) -> int:
    """Return what a forward pass holds of a layer's activations: they are about as wide as its weights."""
    return _COPIES * 4 * tokens * 2 * header.n_body * header.d_vocab // (header.n_layers * header.n_vocab)


def free_bytes() -> int:
    """Main memory that a process can still take."""
    return psutil.virtual_memory().available


def runs_on_gpu(device: str | None) -> bool:
    """Tell whether a model that is loaded with this setting stands on a GPU; torch is asked where there may be one."""
    if device is not None:
        return device.partition(":")[0] != "cpu"
    if "torch" not in sys.modules and sys.platform == "linux":
        if not any(file.name.startswith(_GPU_FILES) for file in Path("/dev").iterdir()):
            return False
    import torch

    return torch.cuda.is_available()


def has_gpu() -> bool:
    """Tell whether a training takes a GPU where no device is named."""
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()


def now(device: "torch.device | str") -> float:
    """The current time, read after the GPU has finished its work."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def weight_bytes(lens: "LensModel") -> int:
    """The model's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in lens.plain.parameters())


def held_bytes() -> int:
    """Main memory that this process uses now, in bytes."""
    return psutil.Process().memory_info().rss


def peak_bytes(device: "torch.device | str") -> int:
    """Peak memory of this process in bytes: GPU memory if the work runs on a GPU, else main memory."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    found = psutil.Process().memory_info()
    if sys.platform == "win32":
        return int(getattr(found, "peak_wset", found.rss))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def duration(seconds: float) -> str:
    """A time in words: ``under 1 s``, ``80 s``, ``12 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def about(seconds: float) -> str:
    """A time that is estimated, in words."""
    return duration(seconds) if seconds < 1 else f"about {duration(seconds)}"


def size(n_bytes: int) -> str:
    """A number of bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:,.1f} {unit}"
    return f"{n_bytes / 1e3:,.0f} kB"
