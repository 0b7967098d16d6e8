"""Models with adapters of peft (LoRA and its kin) are measured as a copy into which the adapters are merged.

An adapted layer adds a product of its own to its base layer's. What reads weights would read the base's, the bridge
cannot split a fused projection that is one, and neurons in front of one would have another column than the one that
they write. So peft merges the adapters into copies of the adapted layers' weights. What of the user's model was copied
can no longer be followed, so a change of it is refused later (``unchanged``).
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError, first_line_of_error
from ..files import parse_json
from ..text import size_text
from .checks import logit_tolerance, probe_tokens, relative_error
from .memory import copy_sharing_tensors, weight_bytes
from .packed import packed_kinds
from .private_apis import forget_adapter, has_own_adapter
from .running import switch_to_eval_mode, without_compiled_forwards

_LOG = logging.getLogger(__name__)
_ADVICE = "Merge it yourself, where the base model is whole: model.merge_and_unload() of peft"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedModel:
    """A copy of a model with its adapters merged into its weights, and a record of the user's model."""

    plain: PreTrainedModel
    source: PreTrainedModel
    copied: tuple[tuple[str, Tensor], ...]
    """Tensors of the user's model whose values went into the copy."""
    states: Callable[[], object]
    """Active adapters with their scales."""
    note: str


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside a ``PeftModel``, adapter layers included; return other models unchanged.

    Raises:
        ModelError: the adapter does not change weights, such as one that adds prompts.
    """
    peft: Any = sys.modules.get("peft")  # who has such a model has imported it
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    given: Any = model
    config = given.peft_config[next(iter(given.active_adapters))] if given.active_adapters else None
    if getattr(config, "is_prompt_learning", False):
        raise ModelError(
            f"the adapter ({_adapter_type(config)}) puts vectors in front of the tokens or keys and changes no weight, "
            "so there is nothing to merge; need an adapter of weights, such as LoRA, or the base model"
        )
    return given.get_base_model() if isinstance(model, peft.PeftModel) else given.base_model.model


def injected_adapters_note(model: nn.Module) -> str | None:
    """Return a note that a model given as it is, not as a ``PeftModel``, holds active adapters; None if it does not.

    ``get_peft_model`` puts adapters into the base model's own object.
    """
    layers = [layer for _, layer in _adapted_layers(model)]
    if has_own_adapter(model) or _all_disabled(layers):
        return None
    return (
        f"{type(model).__name__} holds adapters in {len(layers)} layers, which are measured with it: get_peft_model "
        "put them into this object, which is the base model no more. For the base model load it again, or measure the "
        "PeftModel within its disable_adapter()"
    )


def merge_adapters(model: PreTrainedModel, *, name: str) -> MergedModel | None:
    """Return a copy of the model with its adapters merged into its weights; None without adapters.

    Adapters of packed weights (QLoRA) are left where they are, since to merge them is to round the weights again: both
    paths run the same modules, and weights are read as the matrix that base and adapter compute together (``packed``).

    Raises:
        ModelError: memory has no room for the copy, the adapter cannot be merged, or the copy gives other logits.
    """
    layers = list(_adapted_layers(model))
    if not layers or any(packed_kinds(_base_layer(layer)) for _, layer in layers):
        return None
    needed = sum(weight_bytes(_base_layer(layer)) for _, layer in layers)
    free = psutil.virtual_memory().available
    said = f"the {len(layers)} adapted layers of {name} are measured as a merged copy, which takes {size_text(needed)}"
    if needed > free:
        raise ModelError(
            f"{said}, and {size_text(free)} of memory are free; need a merged model. {_ADVICE}"
        )
    _LOG.warning("%s more memory", said)
    plain = copy_sharing_tensors(model)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # of adapters that were merged already, and of tied weights, which are cut
            warnings.simplefilter("ignore")
            for path, layer in list(_adapted_layers(plain)):
                parent, _, leaf = path.rpartition(".")
                plain.get_submodule(parent)._modules[leaf] = _merged_layer(layer)
    except Exception as error:
        raise ModelError(
            f"the adapter of {name} cannot be merged ({first_line_of_error(error)}); need one "
            f"that peft can merge into weights of 16 or 32 bit. {_ADVICE}"
        ) from error
    if hasattr(plain, "peft_config"):
        del plain.peft_config
    forget_adapter(plain)
    inner, outer = plain.get_input_embeddings(), plain.get_output_embeddings()
    if outer is not None and inner.weight is not outer.weight:  # an adapter was merged into one
        plain.config.tie_word_embeddings = False
        if getattr(plain, "all_tied_weights_keys", None):
            plain.all_tied_weights_keys = {}
    _check_same_logits(plain, model, name=name)
    copied = tuple(
        (f"{path}.{key}", one)
        for path, layer in layers
        for key, one in (*layer.named_parameters(), *layer.named_buffers())
    )
    found = [layer for _, layer in layers]
    configs = (getattr(model, "peft_config", None) or {}).values()
    kinds = ", ".join(sorted(set(map(_adapter_type, configs)))) or "adapter layers"
    are = "disabled" if _all_disabled(found) else "merged"
    return MergedModel(
        plain=plain,
        source=model,
        copied=copied,
        states=lambda: list(map(_adapter_state, found)),
        note=f"measured as a copy of the model with its adapters {are} ({kinds})",
    )


def _all_disabled(layers: Iterable[Any]) -> bool:
    return all(getattr(layer, "disable_adapters", False) for layer in layers)


def check_no_adapter(folder: Path) -> None:
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    try:
        config = dict(parse_json(file.read_text("utf-8")))
    except (ValueError, TypeError, OSError):
        config = {}
    base = str(config.get("base_model_name_or_path") or "its base model")
    raise ModelError(
        f"{folder} holds an adapter ({_adapter_type(config)}) of {base}, which is no model by itself; need the model "
        f"with it. In Python: model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), "
        f"{str(folder)!r}), then wrap(model); or model.merge_and_unload().save_pretrained(...) and that folder"
    )


def _adapter_type(config: Any) -> str:
    kind = (
        config.get("peft_type") if isinstance(config, dict) else getattr(config, "peft_type", None)
    )
    return str(getattr(kind, "value", kind) or "of an unknown kind")


def _adapted_layers(model: nn.Module, *, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, module) of each layer that has an adapter, but not of layers inside such a layer."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for key, one in list(model.named_children()):
        here = f"{path}.{key}" if path else key
        if isinstance(one, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield here, one
        else:
            yield from _adapted_layers(one, path=here)


def _base_layer(layer: Any) -> nn.Module:
    return layer.original_module if hasattr(layer, "original_module") else layer.get_base_layer()


def _merged_layer(layer: Any) -> nn.Module:
    for module in _base_layer(layer).modules():
        for key, one in list(module._parameters.items()):
            if one is not None:
                module._parameters[key] = nn.Parameter(
                    one.detach().clone(), requires_grad=one.requires_grad
                )
    if getattr(layer, "disable_adapters", False):
        if getattr(layer, "merged", False):
            layer.unmerge()
        return _base_layer(layer)
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    if not getattr(layer, "merged", False):  # where some are merged, peft computes with those alone
        layer.merge(safe_merge=False, adapter_names=None)
    return _base_layer(layer)


def _check_same_logits(plain: PreTrainedModel, model: PreTrainedModel, *, name: str) -> None:
    ids = probe_tokens(model)
    logits = []
    for one in (model, plain):
        with switch_to_eval_mode(one), without_compiled_forwards(one), torch.no_grad():
            logits.append(one(ids, use_cache=False).logits.double())
    error, tolerance = relative_error(logits[1], logits[0]), logit_tolerance(plain.dtype)
    if not error <= tolerance:
        raise ModelError(
            f"{name} with its adapters merged gives other logits, by {error:.1e} of their norm on {ids.shape[1]} "
            f"tokens; need at most {tolerance:.0e}, and an adapter that is a change of weights alone. {_ADVICE}"
        )


def _adapter_state(layer: Any) -> tuple[object, ...]:
    scales = getattr(layer, "scaling", None) or {}
    return (
        tuple(getattr(layer, "active_adapters", ())),
        bool(getattr(layer, "disable_adapters", False)),
        tuple(getattr(layer, "merged_adapters", ())),
        tuple(sorted(scales.items())) if isinstance(scales, dict) else scales,
    )
