"""``wrap`` makes a ``LensModel`` from a model object that already exists; both paths share its parameters."""

import contextlib
import copy
import dataclasses
import logging
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ModelError, first_line_of_error
from . import adapters, bridge_adapters, checks, delegation, experts, interfaced, points
from .families import TEXT_PART
from .family import Family
from .headnorm import adapter as headnorm
from .lens import LensModel, layers_without_attention_text
from .memory import copy_sharing_tensors, return_freed_memory
from .offload import NoBridge, bytes_on_disk, why_not_editable
from .own_attention import AttentionFunction, attention_function, first_attention
from .packed import is_packed, packed_kinds
from .pass_lock import LensState
from .private_apis import (
    NAME_OF_CONFIG,
    UNCOMPILED,
    build_bridge_from_module,
    is_processed,
    name_in_plain_model,
    offload_device,
    set_attention,
    source_of_config,
)
from .running import new_lens_state, take_turn_to_wrap
from .unchanged import ModelRecord

_LOG = logging.getLogger(__name__)
_BRIDGE_BOS = (
    "the tokenizer is the bridge's, which puts BOS in front of a text even if the model's own does not; "
    "give wrap the model's own tokenizer"
)
_BRIDGE_COPIES = (
    "this bridge holds copies of the query, key and value weights: "
    "later changes of the plain model do not reach it"
)


def wrap(
    model: TransformerBridge | nn.Module,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
) -> LensModel:
    """Wrap an existing Hugging Face model or ``TransformerBridge`` in a ``LensModel``.

    Parameters and buffers are shared with the object (a bridge's buffers are copied), so that changes of their values
    reach the lens; any other change of the object is refused at the next call (``unchanged``). A Hugging Face model
    becomes ``.plain``, with subclasses for attention modules that do not take transformers' attention interface
    (``interfaced``) and for routed experts (``experts``). A bridge becomes ``.bridge``, and ``.plain`` is rebuilt from
    its parameters; one of GPT-NeoX that TransformerLens built keeps copies of its fused projections, as ``notes`` then
    says. An object in training mode stays in it, but every measurement runs in eval mode.

    A model with adapters of peft (a ``PeftModel``, or adapter layers inside) is measured as a copy into which they are
    merged (``adapters``): that takes the memory of the adapted layers once more, which a warning says first.

    Args:
        model: the model object.
        tokenizer: the model's own tokenizer. Without it, a bridge's tokenizer is used, which puts BOS in front of a
            text even if the model's own does not; ``notes`` then says so.
        name: name of the model.

    Raises:
        ModelError: the class belongs to no known family; or a bridge has folded or centred weights, gives other logits
            than its weights do, or was not built from a Hugging Face model.
    """
    if isinstance(model, TransformerBridge):
        with take_turn_to_wrap(model, name=name or model.cfg.model_name):
            return _wrap_bridge(model, tokenizer=tokenizer, name=name)
    given = getattr(model, UNCOMPILED, model)
    model = adapters.unwrap_peft(given)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"found {type(model).__name__}; need a transformers PreTrainedModel or a TransformerBridge"
        )
    note = adapters.injected_adapters_note(model) if model is given else None
    model = extract_language_model(model)
    family = checks.checked_family(model)
    if not name:
        name = source_of_config(model.config)
        if not name or re.fullmatch("[0-9a-f]{64}", Path(name).name):  # of a converted file
            name = family.architecture
    if note is not None:
        _LOG.warning("%s", note)
    notes = () if note is None else (note,)
    with take_turn_to_wrap(model.base_model, name=name):
        return assemble_lens(model, tokenizer=tokenizer, family=family, name=name, notes=notes)


def extract_language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model inside a model that reads images, with shared parameters; other models unchanged."""
    whole = type(model).__name__
    if whole not in TEXT_PART or type(model) is not getattr(transformers, whole):
        return model
    config: Any = model.config
    inner: Any = model.model
    with torch.device("meta"):
        text: Any = getattr(transformers, TEXT_PART[whole])(config.text_config)
    text.model, text.lm_head = inner.language_model, model.lm_head
    text.generation_config = model.generation_config
    setattr(text.config, NAME_OF_CONFIG, source_of_config(config))
    return text.train(model.training)


def _wrap_bridge(
    model: TransformerBridge, *, tokenizer: PreTrainedTokenizerBase | None, name: str | None
) -> LensModel:
    if is_processed(model):  # folding keeps most families' logits, and changes neurons and norms
        raise ModelError(
            "the bridge is in compatibility mode, where weights are folded or centred; need the weights as they "
            "were loaded. Boot it without enable_compatibility_mode and process_weights"
        )
    plain = _rebuild_plain(model)
    family = checks.checked_family(plain)
    if family.mixer is not None or family.kv_latent is not None or family.own_sizes:
        widths = "a model whose heads have widths of their own,"
        kind = widths if family.mixer is None else "the hybrid"
        raise ModelError(
            f"found a bridge of {kind} {family.architecture}; need the Hugging Face model itself"
        )
    for one in (plain, cast("PreTrainedModel", model.original_model)):
        interfaced.give_attention_interface(one)
        experts.add_expert_hook_points(one, family=family)
    experts.register_expert_hook_points(model)
    set_attention(plain, family.plain_kernel)
    if own := attention_function(plain, family=family):
        raise ModelError(
            f"found a bridge, and attention is computed by {own}, a function of your own, which the bridge does not "
            "call; need the Hugging Face model itself"
        )
    notes = () if tokenizer is not None or model.tokenizer is None else (_BRIDGE_BOS,)
    copied: Sequence[tuple[str, torch.Tensor]] = ()
    fused_by_head = family.qkv_layout == "interleaved" or family.architecture == "FalconForCausalLM"
    if fused_by_head and not isinstance(model.adapter, bridge_adapters.SHARED):
        notes += (_BRIDGE_COPIES,)
        copied = [(name, one) for name, one in plain.named_parameters() if f".{family.q}." in name]
    notes += checks.check_bridge_logits(model, plain=plain, family=family)
    return LensModel(
        bridge=model,
        plain=plain,
        state=_record_state(plain, family=family, bridge=model, copied=copied),
        tokenizer=model.tokenizer if tokenizer is None else tokenizer,
        family=family,
        name=name or model.cfg.model_name,
        notes=notes,
        uneditable=checks.uneditable_sites(model, plain=plain),
    )


def assemble_lens(
    plain: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    family: Family,
    name: str,
    notes: tuple[str, ...] = (),
) -> LensModel:
    """Make a ``LensModel`` from a plain model of a known family: build a bridge on its parameters, and check it."""
    merged = adapters.merge_adapters(plain, name=name)
    if merged is not None:
        plain, notes = merged.plain, (*notes, merged.note)
    checks.check_no_shared_modules(plain, family=family, name=name)
    checks.check_layers_are_whole(plain, family=family, name=name)
    own = attention_function(plain, family=family)
    if own is not None:
        checks.check_own_attention(plain, own, family=family, name=name)
    interfaced.give_attention_interface(plain)
    experts.add_expert_hook_points(plain, family=family)
    if bytes_on_disk(plain) and all(offload_device(one) is None for one in plain.modules()):
        raise ModelError(
            f"weights of {name} are on the device meta, which holds none; need them in memory. Load the model again"
        )
    reason = (
        why_not_editable(plain, name=name)
        if bytes_on_disk(plain)
        else _why_not_split(plain, family=family, name=name)
    )
    if reason is not None:
        bridge, uneditable = cast("TransformerBridge", NoBridge(reason)), frozenset[str]()
        state = _record_state(plain.eval(), family=family, bridge=None, merged=merged)
    else:
        with keep_random_state():
            bridge = _build_bridge(
                copy_sharing_tensors(plain), family=family, own=own, tokenizer=tokenizer, name=name
            )
        notes += checks.check_bridge_logits(bridge, plain=plain, family=family)
        checks.check_hooks_fire(bridge, plain=plain, family=family, name=name)
        state = _record_state(plain, family=family, bridge=bridge, merged=merged)
        uneditable = checks.uneditable_sites(bridge, plain=plain, own=own is not None)
    if (kinds := packed_kinds(plain)) and not any("quantised" in one for one in notes):
        notes += (
            f"the weights are packed ({', '.join(kinds)}): what is studied here is the quantised model",
        )
    lens = LensModel(
        bridge=bridge,
        plain=plain,
        state=state,
        tokenizer=tokenizer,
        family=family,
        name=name,
        notes=notes,
        uneditable=uneditable,
        own_attention=own,
    )
    for layer in lens.layers if lens.offloaded else ():
        layer.register_forward_hook(lambda *_: return_freed_memory())
    skipped = layers_without_attention_text(lens)
    notes += (f"{skipped}: they are skipped where attention is read",) if skipped else ()
    notes += () if reason is None else (reason.partition(", and interventions")[0],)
    return dataclasses.replace(lens, notes=notes)


def _record_state(
    plain: PreTrainedModel,
    *,
    family: Family,
    bridge: TransformerBridge | None,
    merged: adapters.MergedModel | None = None,
    copied: Sequence[tuple[str, torch.Tensor]] = (),
) -> LensState:
    def attention() -> object:
        return attention_function(plain, family=family) or "transformers' softmax"

    states: list[tuple[str, Callable[[], object]]] = [("the attention function", attention)]
    parts: list[nn.Module] = [plain.base_model] if bridge is None else [plain.base_model, bridge]
    source = None
    if merged is not None:
        source, copied = merged.source, merged.copied
        states.append(("the state of the adapters", merged.states))
        parts.append(source.base_model)
    record = ModelRecord(plain, bridge=bridge, source=source, copied=copied, states=states)
    return new_lens_state(record, *parts)


def _why_not_split(plain: PreTrainedModel, *, family: Family, name: str) -> str | None:
    if family.qkv_layout == "separate" and not family.gate_up_fused:
        return None
    module = first_attention(plain, family=family).get_submodule(family.q)
    if not is_packed(module):
        return None
    return (
        f"the fused projections of {name} are packed ({type(module).__name__}), and interventions need to split them; "
        "need weights in 16 or 32 bit. Without it the model can be measured"
    )


def _build_bridge(
    model: PreTrainedModel,
    *,
    family: Family,
    own: AttentionFunction | None,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
) -> TransformerBridge:
    headnorm.register_head_norm_adapter()
    if own is None:
        set_attention(model, "eager")
    # Some adapters make new projections, whose random weights are drawn before the model's replace them.
    with _reloadable_tokenizer(tokenizer) as reloadable, torch.random.fork_rng(devices=[]):
        try:
            bridge = build_bridge_from_module(
                model,
                bridge_adapters.register_adapter(family.architecture),
                hf_config=model.config,
                tokenizer=reloadable,
                model_name=name,
            )
        except (AssertionError, AttributeError, TypeError, KeyError) as error:
            raise ModelError(
                f"TransformerLens makes no bridge of {name} ({first_line_of_error(error)}); need modules in the layout "
                "of transformers. Take off what stands in their place"
            ) from error
    owns = [(one, getattr(one, "original_component", None)) for one in bridge.modules()]
    norms: list[Any] = [(one, own) for one, own in owns if isinstance(own, nn.LayerNorm)]
    if len({norm.eps for _, norm in norms}) == 1:
        # TransformerLens does not read it from every name that configurations give it
        for one, norm in norms:
            one.config.eps = norm.eps
    if own is None:
        interfaced.hook_delegated_attention(bridge)
    else:
        delegation.hook_own_attention(bridge, family=family, own=own)
    experts.register_expert_hook_points(bridge)
    points.add_hook_points(bridge, family=family)
    points.reshape_head_hooks(bridge, family=family)
    if family.head_out is not None and family.head_norm_flat:
        for block in bridge.blocks:
            point = block.attn.get_submodule(family.head_out).hook_in
            point.hook_conversion = block.attn.o.hook_in.hook_conversion
    if family.rotates_in_float32 and model.dtype != torch.float32:
        dtype = model.dtype  # Hugging Face casts rotated queries and keys to it
        for block in bridge.blocks:
            for hook in (block.attn.hook_rot_q, block.attn.hook_rot_k):
                hook.add_perma_hook(lambda tensor, hook: tensor.to(dtype))
    if tokenizer is not None:
        bridge.tokenizer.name_or_path = tokenizer.name_or_path
    return bridge


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """After the block, restore the random states of Python, numpy and torch, which TransformerLens seeds."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that is changed
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextlib.contextmanager
def _reloadable_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[PreTrainedTokenizerBase | None]:
    """Yield a copy of the tokenizer that the bridge can load by its name, and change.

    The files that the name stands for are removed after the block.
    """
    if tokenizer is None:
        yield None
        return
    own = copy.deepcopy(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        try:
            own.save_pretrained(folder)
        except ValueError as error:  # such as half of a character that needs two
            raise ModelError(
                f"the tokenizer cannot be saved ({error}); need one whose settings save_pretrained can write"
            ) from error
        own.init_kwargs["name_or_path"] = folder
        yield own


def _rebuild_plain(bridge: TransformerBridge) -> PreTrainedModel:
    original = bridge.original_model
    if not isinstance(original, PreTrainedModel):
        raise ModelError(
            f"the bridge holds a {type(original).__name__}; need one built from a Hugging Face model"
        )
    checks.checked_family(original)
    held = {
        name_in_plain_model(key): value
        for key, value in original.named_parameters(remove_duplicate=False)
    }
    buffers = {
        name_in_plain_model(key): value
        for key, value in original.named_buffers(remove_duplicate=False)
    }
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        plain = type(original)(copy.deepcopy(original.config))
    for key, _ in list(plain.named_parameters(remove_duplicate=False)):
        if key not in held:
            raise ModelError(
                f"the bridge has no parameter {key}; need a bridge with its weights as they were loaded"
            )
        _set_tensor(plain, key, held[key])
    for key, _ in list(plain.named_buffers(remove_duplicate=False)):
        _set_tensor(plain, key, buffers[key].clone())
    return plain.eval()


def _set_tensor(model: nn.Module, key: str, tensor: torch.Tensor) -> None:
    path, _, leaf = key.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
