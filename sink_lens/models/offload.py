"""Models that only the plain path runs: those whose weights do not fit into memory.

accelerate reads a module's weights from the checkpoint when its forward begins and drops them when it ends. Hooks on
the plain module see the same tensors as in a model that is whole in memory, so everything that measures works. The
bridge is built on parameters that are there, so it does not exist, and what needs it is refused.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from ..errors import ModelError
from .private_apis import offload_device


def bytes_on_disk(model: nn.Module) -> int:
    return sum(
        one.numel() * one.element_size()
        for _, one in _distinct_parameters(model)
        if one.device.type == "meta"
    )


def _distinct_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    named = list(model.named_parameters())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = {name for name, _ in named}
    return [(name, one) for name, one in named if tied.get(name) not in names]


in_memory = align_module_device
"""Context manager: a module's offloaded parameters are loaded; a tensor taken from it stays afterwards."""


def compute_device(parameter: Tensor, module: nn.Module) -> torch.device:
    if parameter.device.type != "meta":
        return parameter.device
    return torch.device(offload_device(module) or "cpu")


def load_parameters_in_turn(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of every parameter, in order of name; load those on disk one at a time."""
    for name in sorted(parameter_names(model)):
        with loaded_parameter(model, name) as values:
            yield name, values


def parameter_names(model: nn.Module) -> list[str]:
    return [name for name, _ in _distinct_parameters(model)]


@contextlib.contextmanager
def loaded_parameter(model: nn.Module, name: str) -> Iterator[Tensor]:
    """Within the block, the values of a parameter are in memory."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    with in_memory(module):
        yield getattr(module, leaf).detach()


class NoBridge:
    """Placeholder for the bridge of a model that can only be measured; any use raises an error with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError(self.reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> "NoBridge":
        return self


def why_not_editable(model: nn.Module, *, name: str) -> str:
    whole = sum(one.numel() * one.element_size() for _, one in _distinct_parameters(model))
    return (
        f"{bytes_on_disk(model) / 1e9:.2f} of {whole / 1e9:.2f} GB of the weights of {name} are on disk, and "
        f"interventions need them in memory; need about {1.2 * whole / 1e9:.2f} GB, or a smaller type "
        "(dtype='bfloat16'). Without it the model can be measured"
    )
