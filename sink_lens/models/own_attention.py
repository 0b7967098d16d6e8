"""The attention function that a model runs: one of transformers, or one of the user's own.

``AttentionInterface.register(name, function)`` and ``model.set_attn_implementation(name)`` put another function in the
place of softmax attention; one may also be put over the name ``sdpa``, or over ``eager_attention_forward`` of a file of
transformers. A mask is made for it only if ``AttentionMaskInterface`` has one of the same name.

**The pattern of such a function** is what it gives for one-hot values: if value ``j`` is 1 in one dimension, this
dimension of the output is the weight of key ``j``. ``ceil(keys / d_value)`` calls give all weights. They are a pattern
only if the pattern times the values is its output: if the function is linear in the values, and mixes no dimensions.

It has no scores. What hides keys from queries changes the mask that the function is given (``with_hidden_keys``); its
weights of the hidden keys must then be 0.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..errors import SiteError
from .attention import repeat_kv_heads
from .family import Family
from .private_apis import kernel_of

MASK_HOOK = "blocks.{}.attn.hook_own_mask"
"""Name of a layer's hook point for edits that hide keys from an attention function of the user's own."""
_FILES = str(Path(transformers.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFunction:
    """The attention function behind a name, and the function of its mask."""

    name: str
    function: Callable[..., Any] | None
    mask: Callable[..., Any] | None

    def of_values(
        self, module: nn.Module, query: Tensor, key: Tensor, *others: Any, **more: Any
    ) -> Callable[[Tensor], Tensor]:
        """Return the function of the values alone; ``others`` are what is behind them."""

        def attend(values: Tensor) -> Tensor:
            assert self.function is not None  # else the class computes attention itself
            return self.function(module, query, key, values, *others, **more)[0]

        return attend

    def __str__(self) -> str:
        return f"{self.name!r} ({getattr(self.function, '__qualname__', type(self.function).__name__)})"


def attention_function(model: PreTrainedModel, *, family: Family) -> AttentionFunction | None:
    """Return the attention function of a model; None if it is the softmax that the family's row describes."""
    name = kernel_of(model.config)
    exact = name == "eager" or family.own_attention or family.plain_kernel == "sdpa"
    return own_function(first_attention(model, family=family), name=name, exact=exact)


def first_attention(model: PreTrainedModel, *, family: Family) -> nn.Module:
    layers: Any = model.get_submodule(family.layers)
    part = family.attention.partition(".")[0]
    having = next(one for one in layers if getattr(one, part, None) is not None)
    return having.get_submodule(family.attention)


def own_function(module: nn.Module, *, name: str, exact: bool = True) -> AttentionFunction | None:
    """Return the attention function that a module finds under ``name``; None if it is of transformers.

    If transformers' functions are not ``exact`` for the module, they are returned too.
    """
    function = _eager_function(module) if name == "eager" else AttentionInterface().get(name)
    mask = AttentionMaskInterface().get(name)
    if exact and all(one is None or _is_of_transformers(one) for one in (function, mask)):
        return None
    return AttentionFunction(name=name, function=function, mask=mask)


def own_pattern(
    attend: Callable[[Tensor], Tensor],
    value: Float[Tensor, "batch kv_head key d_value"],
    output: Float[Tensor, "batch query head d_value"],
) -> Float[Tensor, "batch head query key"] | None:
    """Return the pattern of an attention function, whose output for some values is ``attend(values)``.

    ``output`` is that for the model's own values; None if the pattern times these is another one.
    """
    n_keys, width = value.shape[2:]
    parts = []
    for first in range(0, n_keys, width):
        chosen = torch.zeros(n_keys, width, dtype=value.dtype, device=value.device)
        chosen[first : first + width].fill_diagonal_(1)
        parts.append(attend(chosen.expand(value.shape).contiguous()))
    pattern = torch.cat(parts, dim=-1)[..., :n_keys].transpose(1, 2)
    off = (weighted_values(pattern, value) - output).detach().abs().max()
    room = 1e-4 if value.itemsize >= 4 else 8 * torch.finfo(value.dtype).eps
    return pattern if off <= room * output.detach().abs().max().clamp(min=1e-6) else None


def with_hidden_keys(
    mask: Tensor | None,
    hide: Callable[[Tensor], Tensor],
    *,
    like: Float[Tensor, "batch head query key"],
) -> tuple[Tensor, Bool[Tensor, "batch head query key"]]:
    """Return an attention function's mask as ``hide`` changes it, and True where a key was hidden from a query.

    ``hide`` gets scores of 0 in the shape and type of ``like``, plus what the mask adds, and the least number where it
    hides a key. A function without a mask sees no later token, or is refused (``checks.check_own_attention``).
    """
    least, seen = torch.finfo(like.dtype).min, mask
    if seen is None:
        seen = torch.ones_like(like, dtype=torch.bool).tril(like.shape[-1] - like.shape[-2])
    before = seen.expand_as(like)
    if seen.dtype == torch.bool:
        before = torch.zeros_like(like).masked_fill(~seen, least)
    after = hide(before)
    hidden = (after <= least / 2) & (before > least / 2)
    return after if mask is None or mask.dtype != torch.bool else after > least / 2, hidden


def ignored_mask_error(own: AttentionFunction) -> SiteError:
    return SiteError(
        f"the attention function {own} gives weight to keys that its mask hides, so that none can be hidden from a "
        "query; need a function that reads attention_mask"
    )


def no_pattern_error(own: AttentionFunction) -> SiteError:
    return SiteError(
        f"the attention function {own} has no 'pattern': its output is not the same weights times any values; need a "
        "function that is linear in the values, and alike in their dimensions, or other sites, such as 'z'"
    )


def weighted_values(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch kv_head key d_value"],
) -> Float[Tensor, "batch query head d_value"]:
    return (pattern @ repeat_kv_heads(value, n_heads=pattern.shape[1])).transpose(1, 2).contiguous()


def _eager_function(module: nn.Module) -> Any:
    for one in type(module).__mro__:
        found = getattr(sys.modules.get(one.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None


def _is_of_transformers(function: Any) -> bool:
    code = getattr(inner_function(function), "__code__", None)
    return code is not None and code.co_filename.startswith(_FILES)


def inner_function(function: Any) -> Any:
    """Return the function of which ``functools.partial`` made this one."""
    return inner_function(function.func) if isinstance(function, functools.partial) else function
