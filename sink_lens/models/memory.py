"""Memory: what is used and free, copies that share it or move it, and weights that wait in a file for a while.

The C library of Linux keeps what was freed, and finds no use for much of it: large tensors that come and go between
small ones that stay leave holes.
"""

import contextlib
import copy
import ctypes
import gc
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import ModelError, first_line_of_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

LOSS_CHUNK = 256
"""Tokens whose logits are in memory at a time where only their loss is read."""
_COPIED = 2**26
"""Bytes of tensors that are joined for one copy from a GPU, where they then are twice."""


def free_bytes() -> int:
    return psutil.virtual_memory().available


def used_bytes() -> int:
    return psutil.Process().memory_info().rss


def peak_bytes(device: "torch.device | str") -> int:
    """Return the peak of GPU memory for a GPU, else of main memory."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    found = psutil.Process().memory_info()
    if sys.platform == "win32":
        return int(getattr(found, "peak_wset", found.rss))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def weight_bytes(model: "nn.Module") -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def return_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def collect_garbage() -> None:
    """Free objects in reference cycles, such as models with a bridge."""
    gc.collect()
    return_freed_memory()


@contextlib.contextmanager
def store_parameters_on_disk(model: "nn.Module", *, folder: Path) -> Iterator[None]:
    """Within the block, keep a model's parameters in an unnamed file in ``folder``, so that they take no memory.

    The model is in main memory, and is not used within the block.
    """
    import torch

    sizes = [(one, one.shape) for one in model.parameters()]
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            for one, _ in sizes:
                file.write(one.detach().flatten().view(torch.uint8).numpy().data)
                one.data = one.data.new_empty(0)
            return_freed_memory()
            yield
        finally:
            file.seek(0)
            for one, shape in sizes:
                if one.shape != shape:
                    one.data = one.data.new_empty(shape)
                    file.readinto(one.detach().flatten().view(torch.uint8).numpy().data)


def copy_sharing_tensors(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a copy of a model, in eval mode, that shares the model's parameters and buffers."""
    memo: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    try:
        return copy.deepcopy(model, dict(memo)).eval()
    except Exception as error:
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                try:
                    _ = key == "_modules" or copy.deepcopy(value, dict(memo))
                except Exception:  # noqa: BLE001  # an object of the user's may raise anything
                    raise ModelError(
                        f"{key} of {name or 'the model'} (a {type(module).__qualname__}) cannot be copied "
                        f"({first_line_of_error(error)}), and the bridge is made of copies of modules; need modules "
                        "without it. Remove what keeps it there, and wrap the model again"
                    ) from error
        raise


def copy_to_device(
    tensor: "Tensor", device: "torch.device", dtype: "torch.dtype | None" = None
) -> "Tensor":
    """Copy a tensor to a device, if it is not there in this type, without waiting for a GPU.

    ``tensor`` may be changed as soon as this returns.
    """
    return tensor.to(device, dtype, non_blocking=device.type == "cuda")


def copy_lists_to_cpu(lists: "Sequence[list[Tensor]]") -> None:
    away = [
        (parts, at) for parts in lists for at, part in enumerate(parts) if part.device.type != "cpu"
    ]
    for kind in dict.fromkeys((parts[at].device, parts[at].dtype) for parts, at in away):
        own, held = [], 0
        for parts, at in away:
            if (parts[at].device, parts[at].dtype) == kind:
                own.append((parts, at))
                held += parts[at].nbytes
            if held > _COPIED:
                _copy_entries_to_cpu(own)
                own, held = [], 0
        _copy_entries_to_cpu(own)


def _copy_entries_to_cpu(entries: "Sequence[tuple[list[Tensor], int]]") -> None:
    import torch

    if entries:
        home = torch.cat([parts[at].detach().flatten() for parts, at in entries]).cpu()
        pieces = home.split([parts[at].numel() for parts, at in entries])
        for (parts, at), values in zip(entries, pieces, strict=True):
            parts[at] = values.view(parts[at].shape)
