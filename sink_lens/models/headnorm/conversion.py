"""Convert Llama-like checkpoints to ``HeadNormForCausalLM``; name the parameters that training must not decay."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...errors import InputError, ModelError
from ..families import sliding_window_of
from ..private_apis import kernel_of
from .configuration import HeadNormConfig
from .modeling import HeadNormAttention, HeadNormForCausalLM
from .norm import HeadNorm

_SOURCES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"attention_bias": True, "output_bias": False},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "HeadNormForCausalLM": {},
}
"""Class name -> the values of our configuration's fields that describe the class."""
_NEW = (
    ".self_attn.value_norm.gain",
    ".self_attn.sinks",
    ".self_attn.key_bias",
    ".self_attn.head_gate.weight",
)
"""Name endings of weights that only our class has."""
_NOT_TAKEN = (
    "model_type",
    "architectures",
    "transformers_version",
    "layer_types",
    "sliding_window",
)
"""Fields of a checkpoint's configuration that belong to its own class."""


def convert(model: PreTrainedModel, *, seed: int = 0, **changes: Any) -> HeadNormForCausalLM:
    """Copy a Llama, Mistral, Qwen2, Qwen3 or HeadNorm model into a HeadNorm model, with changes of the configuration.

    Without changes the logits are equal within rounding. New weights are initialised as in a new model: a norm's gain
    from the checkpoint's own weights, a sink logit as 0, a gate at random. The copy has the same type, device and mode.

    Args:
        model: the checkpoint. It is not modified.
        seed: seed of the weights that are drawn; the caller's random state does not change.
        **changes: fields of ``HeadNormConfig``, such as ``value_norm="shared"``.

    Raises:
        ModelError: the model has another class, or a sliding window shorter than its context.
        InputError: a field does not exist, or a value is not one of those listed.
    """
    name, package = type(model).__name__, type(model).__module__.split(".")[0]
    known_class = package == "transformers" or type(model) is HeadNormForCausalLM
    if name not in _SOURCES or not known_class:
        raise ModelError(
            f"found {type(model).__module__}.{name}; need one of {', '.join(_SOURCES)}, which differ from a Llama in "
            "biases and norms only"
        )
    _check_window_length(model)
    known = {*vars(HeadNormConfig()), *HeadNormConfig.attribute_map}
    if unknown := sorted(set(changes) - known):
        raise InputError(
            f"{', '.join(unknown)}: no field of HeadNormConfig; use its names, as in value_norm='shared'"
        )
    taken = {
        key: value
        for key, value in model.config.to_dict().items()
        if key in known and key not in _NOT_TAKEN
    }
    config = HeadNormConfig(**copy.deepcopy(taken | _SOURCES[name] | changes))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.device("cpu"):
        # torch.manual_seed would reseed the GPUs of the caller too
        torch.default_generator.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=kernel_of(model.config)
        )
        copied = _copy_weights(made, model)
        # all gains have one shape
        if not any(name.endswith(".value_norm.gain") for name in copied):
            made.initialise_gains()
        for module in made.modules():
            if isinstance(module, HeadNormAttention) and module.variant == "off_by_one":
                assert module.sinks is not None  # it has them
                module.sinks.zero_()  # those of a sink_logit were learned
    device = model.get_input_embeddings().weight.device
    return made.to(device).train(model.training)


def _check_window_length(model: PreTrainedModel) -> None:
    config = model.config
    reaches = (sliding_window_of(config, layer=layer) for layer in range(config.num_hidden_layers))
    window = next((reach for reach in reaches if reach is not None), None)
    if window is not None and window < config.max_position_embeddings:
        raise ModelError(
            f"{type(model).__name__} has a sliding window of {window} positions and a context of "
            f"{config.max_position_embeddings}; need attention to the whole context, since the class has no window. "
            "Set max_position_embeddings of the checkpoint to the window, or below, and keep to it"
        )


def _copy_weights(made: nn.Module, model: PreTrainedModel) -> frozenset[str]:
    """Copy from ``model`` to ``made`` the weights that both have in the same shape; return their names.

    Raise InputError if they differ in another weight than those that a variant adds.
    """
    wanted, given = made.state_dict(), model.state_dict()
    common = {
        key: value
        for key, value in given.items()
        if key in wanted and value.shape == wanted[key].shape
    }
    if odd := sorted(key for key in {*wanted, *given} - {*common} if not key.endswith(_NEW)):
        raise InputError(
            f"{', '.join(odd[:3])}{' and more' if len(odd) > 3 else ''}: not of the same shape in the checkpoint and "
            "under the changes; need changes that leave the sizes as they are"
        )
    made.load_state_dict(common, strict=False)
    return frozenset(common)


def undecayed(model: nn.Module, *, unshared_gain: bool = True) -> frozenset[str]:
    """Return the names of the model's parameters that get no weight decay.

    These are all parameters with one axis (norm gains, biases, sink logits), key biases and the gains of the heads'
    norm, whatever their shape. Other Trainers recognise gains and biases by their names, and decay sink logits.

    Args:
        model: the model whose parameters are listed.
        unshared_gain: also return gains with the axes [head d_head]; the released code of arXiv 2605.06611 decays them.
    """
    gains = {one.gain for one in model.modules() if unshared_gain and isinstance(one, HeadNorm)}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1 or name.endswith(".key_bias") or parameter in gains
    )
