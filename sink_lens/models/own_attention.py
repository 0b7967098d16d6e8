"""The attention function that a model runs: one of transformers, or one of the user's own.

``AttentionInterface.register(name, function)`` and ``model.set_attn_implementation(name)`` put another function in the
place of softmax attention; a function may also be put over the name ``sdpa``, or over ``eager_attention_forward`` of a
file of transformers. A mask is made for it only if ``AttentionMaskInterface`` has one of the same name.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .family import Family
from .private_apis import kernel_of

_FILES = str(Path(transformers.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFunction:
    """What a model's configuration names: the attention function behind a name, and the function of its mask."""

    name: str
    function: Callable[..., Any] | None
    mask: Callable[..., Any] | None

    def __str__(self) -> str:
        return f"{self.name!r} ({getattr(self.function, '__qualname__', type(self.function).__name__)})"


def attention_function(model: PreTrainedModel, *, family: Family) -> AttentionFunction | None:
    """Return the attention function of a model; None if it is the softmax that the family's row describes."""
    layers: Any = model.get_submodule(family.layers)
    having = [one for one in layers if getattr(one, family.attention.partition(".")[0], None) is not None]
    name = kernel_of(model.config)
    exact = name == "eager" or family.own_attention or not (family.soft_capped or family.sink_logit)
    return own_function(having[0].get_submodule(family.attention), name=name, exact=exact)


def own_function(module: nn.Module, *, name: str, exact: bool = True) -> AttentionFunction | None:
    """Return the attention function that an attention module finds under ``name``; None if it is of transformers.

    If transformers' functions are not ``exact`` for the module, they are returned too.
    """
    function = _eager_function(module) if name == "eager" else AttentionInterface().get(name)
    mask = AttentionMaskInterface().get(name)
    if exact and all(one is None or _is_of_transformers(one) for one in (function, mask)):
        return None
    return AttentionFunction(name=name, function=function, mask=mask)


def _eager_function(module: nn.Module) -> Any:
    """Return the eager attention function in the file of a module's class; None if there is none."""
    files = (vars(sys.modules[one.__module__]) for one in type(module).__mro__ if one.__module__ in sys.modules)
    return next((file["eager_attention_forward"] for file in files if "eager_attention_forward" in file), None)


def _is_of_transformers(function: Any) -> bool:
    """Check whether a function stands in a file of transformers, whatever it calls itself."""
    code = getattr(inner_function(function), "__code__", None)
    return code is not None and code.co_filename.startswith(_FILES)


def inner_function(function: Any) -> Any:
    """Return the function of which ``functools.partial`` made this one; any other object itself."""
    return inner_function(function.func) if isinstance(function, functools.partial) else function
