"""Private names of other libraries that the package touches. Tests meet each in the installed releases.

No other module names such a thing, but for what a subclass overrides or calls of its own base, the tables of
``torch.nn.Module`` (``_modules``, ``_parameters``, ``_buffers``, its hooks) and a tensor's ``_version``: a test lists
each with its reason.
"""

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import PreTrainedModel

__all__ = ["build_bridge_from_module"]

# --- torch

COMPILED = "_compiled_call_impl"
"""What ``Module.compile`` made of a module's call, an entry of ``vars(module)``."""
UNCOMPILED = "_orig_mod"
"""Name of the module within one that ``torch.compile`` made."""
WRAPPED = (UNCOMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names of the module within a wrapper, that of FSDP and of activation checkpoints too."""


def store_of_processes() -> "torch.distributed.distributed_c10d.Store":
    return torch.distributed.distributed_c10d._get_default_store()


def fused_attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float
) -> tuple[Any, ...]:
    """Run flash attention on the CPU, causal without a mask; return output and log-sum-exp of each query."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def fused_attention_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Any, ...]:
    """Run memory-efficient attention on CUDA; return output and padded log-sum-exp."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )


def n_in_place_changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 of one made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


# --- transformers

NAME_OF_CONFIG = "_name_or_path"
"""Where a configuration says what it was read from."""
INNER_KERNEL = "_attn_implementation_internal"
"""Where a configuration keeps the name of its attention function; the setter changes those within it too."""
LENIENT = "_raise_exceptions_for_missing_entries"
"""Argument of ``cached_file``; False lets a missing file be None."""


def source_of_config(config: Any) -> str:
    return config._name_or_path


def kernel_of(config: Any) -> str:
    return str(config._attn_implementation)


def use_default_attention(config: Any) -> None:
    """Set a configuration's attention and experts so that no kernel is downloaded."""
    config._attn_implementation = config._experts_implementation = None


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Choose the attention function of a model, even if its class refuses other functions."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name


@contextlib.contextmanager
def use_kernel(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = before


def was_loaded(thing: nn.Module | Tensor | None) -> bool:
    return bool(getattr(thing, "_is_hf_initialized", False))


def has_own_adapter(model: nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_adapter(model: Any) -> None:
    if has_own_adapter(model):
        model._hf_peft_config_loaded = False


def gate_neurons(experts: Any, x: Tensor) -> Tensor:
    """Return the experts' neurons, gate times up, from the joint output ``x`` of both projections."""
    return experts._apply_gate(x)


# --- accelerate


def offload_device(module: nn.Module) -> Any:
    """Return the device on which accelerate runs a module; None if the module is not offloaded."""
    return getattr(getattr(module, "_hf_hook", None), "execution_device", None)


def rebind_forward(module: Any) -> None:
    """Make accelerate's hook call the forward of a module's present class, after its class was changed."""
    if hasattr(module, "_old_forward"):
        module._old_forward = MethodType(type(module).forward, module)


# --- TransformerLens

PROCESSED = "_weights_processed"
"""Where a bridge says that its weights were folded or centred."""


def is_processed(bridge: TransformerBridge) -> bool:
    return bool(bridge.compatibility_mode or bridge._weights_processed)


def name_in_plain_model(path: str) -> str:
    return path.replace("._original_component", "").replace("_original_component.", "")


def register_hook_point(bridge: TransformerBridge, point: HookPoint) -> None:
    assert point.name is not None  # it was named
    bridge._hook_registry[point.name] = point
