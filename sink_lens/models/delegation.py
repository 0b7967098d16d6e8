"""Passes over the bridge's blocks in which Hugging Face computes the attention, and where such a pass starts or stops.

Inside a bridge, ``bridge.original_model`` is the Hugging Face model whose parts are the bridge's components: calling it
fires the hook points. Only the attention is computed by TransformerLens itself, with the whole pattern. Within
``delegate_attention``, each attention component calls the Hugging Face module that it wraps, so that the function which
the configuration names (``AttentionInterface``) computes it. Four kinds of hook points are then fired here.

- Queries, keys and values of latent attention: what the module gives to its attention function.
- Queries, keys and values of a fused projection: parts of its one product.
- z, where the bridge does not wrap the output projection (GPT-2).
- Scores and pattern: by the attention function, if it has them (``engine.layout``).
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import AttentionInterface, PreTrainedModel

from ..errors import ModelError
from .families import head_sizes
from .family import Family
from .interfaced import replace_forward, watch_attention_inputs
from .lens import LensModel
from .own_attention import (
    MASK_HOOK,
    AttentionFunction,
    ignored_mask_error,
    no_pattern_error,
    own_pattern,
    weighted_values,
    with_hidden_keys,
)
from .private_apis import n_in_place_changes, register_hook_point, use_kernel
from .sites import Address, read_site

_OWN = "sink_lens_own"
_RUNNING: ContextVar[tuple[Any, AttentionFunction]] = ContextVar("sink_lens_own")
Masks = dict[int, Tensor | None]
"""Layer -> the mask that an attention function of the user's own is given."""
_MASKS: ContextVar[Masks | None] = ContextVar("sink_lens_masks", default=None)


def attention_component(lens: LensModel, layer: int) -> Any:
    return lens.bridge.blocks[layer].attn


def inner_model(lens: LensModel) -> PreTrainedModel:
    """Return the Hugging Face model inside the bridge; calling it runs the functions at the bridge's hook points.

    Raises:
        ModelError: the model can only be measured.
    """
    if lens.why_measured_only is not None:
        raise ModelError(lens.why_measured_only)
    model = lens.bridge.original_model
    assert isinstance(model, PreTrainedModel)  # wrap refuses other bridges
    return model


@contextlib.contextmanager
def delegate_attention(
    lens: LensModel, *, layers: range | None = None
) -> Iterator[PreTrainedModel]:
    """Within the block, these layers compute attention by Hugging Face's modules; yield the model to call."""
    model, family = inner_model(lens), lens.family
    blocks = list(lens.bridge.blocks)
    with contextlib.ExitStack() as stack:
        for block in blocks if layers is None else blocks[layers.start : layers.stop]:
            component = block._modules.get("attn")
            if component is None:  # a mixer in its place
                continue
            attend = partial(_attend_between_hooks, component)
            stack.enter_context(replace_forward(component, attend))
            if lens.own_attention is not None:  # the other hooks are fired in every pass
                continue
            if family.kv_latent is not None:
                see = partial(_fire_qkv_hook, component)
                stack.enter_context(watch_attention_inputs(component.original_component, see))
            sizes = lens.head_sizes(0)
            for module, forward in _hooked_forwards(component, family=family, sizes=sizes):
                stack.enter_context(replace_forward(module, forward))
        yield model


def hook_own_attention(
    bridge: TransformerBridge, *, family: Family, own: AttentionFunction
) -> None:
    """Make a bridge's attention components call Hugging Face's attention with the model's ``own`` function.

    They fire the hooks of the pattern, whose edits take effect, in whatever pass runs them; ``hook_own_mask`` is the
    hook point of edits that hide keys.
    """
    AttentionInterface.register(_OWN, _attend_by_own_function)
    config: Any = bridge.original_model.config  # type: ignore[union-attr]  # of transformers
    sizes = head_sizes(config, family=family, layer=0)
    for layer, block in enumerate(bridge.blocks):
        component = block._modules.get("attn")
        if component is not None:
            component.add_module("hook_own_mask", point := HookPoint())
            point.name = MASK_HOOK.format(layer)
            register_hook_point(bridge, point)
            for module, forward in _hooked_forwards(component, family=family, sizes=sizes):
                object.__setattr__(module, "forward", forward)
            object.__setattr__(component, "forward", partial(_run_own_attention, component, own))


def masks_of_own_function(lens: LensModel, n_positions: int) -> Masks:
    found: Masks = {}
    token = _MASKS.set(found)
    try:
        with torch.no_grad():
            tokens = torch.zeros(1, n_positions, dtype=torch.long, device=lens.device)
            inner_model(lens).base_model(tokens, use_cache=False)
    finally:
        _MASKS.reset(token)
    return found


def _run_own_attention(component: Any, own: AttentionFunction, *args: Any, **kwargs: Any) -> Any:
    token = _RUNNING.set((component, own))
    try:
        with use_kernel(component.original_component.config, _OWN):
            return _attend_between_hooks(component, *args, **kwargs)
    finally:
        _RUNNING.reset(token)


def _attend_by_own_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute attention by the function that runs; if a hook is at the pattern, from the pattern as it leaves it."""
    component, own = _RUNNING.get()
    if (found := _MASKS.get()) is not None:
        found[int(module.layer_idx)] = attention_mask  # type: ignore[arg-type]  # every attention of transformers
    hidden = None
    if component.hook_own_mask.has_hooks():
        like = query.new_empty(()).expand(*query.shape[:3], key.shape[2])
        attention_mask, hidden = with_hidden_keys(
            attention_mask, component.hook_own_mask, like=like
        )
    attend = own.of_values(module, query, key, attention_mask, **given)
    output = attend(value)
    if hidden is None and not component.hook_pattern.has_hooks():
        return output, None
    pattern = own_pattern(attend, value, output)
    if pattern is None:
        raise no_pattern_error(own)
    if hidden is not None and bool(pattern[hidden].any()):
        raise ignored_mask_error(own)
    version = n_in_place_changes(pattern)
    found = component.hook_pattern(pattern)
    unchanged = found is pattern and n_in_place_changes(pattern) == version
    return output if unchanged else weighted_values(found, value), None


def _hooked_forwards(
    component: Any, *, family: Family, sizes: dict[str, int]
) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules inside an attention component that fire no hook themselves, with a forward that does."""
    wrapped = component.original_component
    if family.qkv_layout != "separate":
        fused = wrapped.get_submodule(family.q)
        yield (
            fused,
            partial(
                _fire_fused_hooks, fused.forward, component=component, family=family, sizes=sizes
            ),
        )
    output = wrapped.get_submodule(family.o)
    if not isinstance(output, GeneralizedComponent):
        yield output, partial(_project_between_hooks, output.forward, component=component.o)


@contextlib.contextmanager
def start_passes_at(lens: LensModel, layer: int, stream: Tensor) -> Iterator[None]:
    """Within the block, forward passes skip the layers before ``layer`` and continue from the given ``stream``.

    The model is still called with tokens: masks and position embeddings are made from them. ``start_at_layer`` of
    TransformerLens runs the earlier layers, and passes the stream through the norm that BLOOM has after its embedding.
    """
    blocks = lens.bridge.blocks
    entry = (
        blocks[layer]
        if layer < len(blocks)
        else inner_model(lens).get_submodule(lens.family.final_norm)
    )

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None)[: lens.family.layer_values] if lens.family.layer_values else hidden

    with contextlib.ExitStack() as stack:
        for block in list(blocks)[:layer]:
            stack.enter_context(replace_forward(block, pass_on))
        stack.callback(entry.register_forward_pre_hook(begin, with_kwargs=True).remove)
        yield


class _EndedError(Exception):
    """Raised to end a forward pass where it is no longer needed."""


@contextlib.contextmanager
def stop_pass_after(module: nn.Module) -> Iterator[None]:
    """Within the block, the forward pass stops once ``module`` has run; the rest of the block is skipped too."""

    def end(module: nn.Module, args: object, output: object) -> None:
        raise _EndedError

    handle = module.register_forward_hook(end)
    try:
        yield
    except _EndedError as ended:
        # on Python 3.13 it is part of a cycle, whose frames keep the pass's tensors
        ended.__traceback__ = None
    finally:
        handle.remove()


def _attend_between_hooks(component: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        args = (component.hook_in(args[0]), *args[1:])
    else:
        kwargs["hidden_states"] = component.hook_in(kwargs["hidden_states"])
    output = component.original_component(*args, **kwargs)
    return (component.hook_out(output[0]), *output[1:])


def _fire_qkv_hook(component: Any, name: Literal["q", "k", "v"], tensor: Tensor) -> Tensor:
    point: HookPoint = getattr(component, f"hook_{name}")
    return point(tensor) if point.has_hooks() else tensor


def _fire_fused_hooks(
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    component: Any,
    family: Family,
    sizes: dict[str, int],
) -> Tensor:
    whole = forward(x)
    for part in ("q", "k", "v"):
        point: HookPoint = getattr(component, part).hook_out
        if not point.has_hooks():
            continue
        address = Address(module="", side="output", part=part)
        view = partial(read_site, address=address, family=family, batch=len(whole), **sizes)
        old = view(whole).flatten(-2)
        new = point(old)
        if new is not old:
            whole = whole.clone()
            own = view(whole)
            own.copy_(new.view_as(own))
    return whole


def _project_between_hooks(
    forward: Callable[[Tensor], Tensor], x: Tensor, *, component: Any
) -> Tensor:
    return component.hook_out(forward(component.hook_in(x)))
