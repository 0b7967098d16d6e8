"""Checks that a model must pass before it is returned, since wrong numbers are worse than errors."""

import contextlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel

from ..errors import ModelError, SiteError, first_line_of_error
from ..files import is_plain_file_name, parse_json, refuse_pipes_in
from .families import TEXT_PART, family_of, family_of_model
from .family import Family
from .headnorm import HeadNormForCausalLM
from .interfaced import use_attention
from .own_attention import AttentionFunction
from .private_apis import UNCOMPILED, kernel_of
from .running import switch_to_eval_mode, without_compiled_forwards

_COMPARED = 64
"""Tokens on which bridge and plain model are compared; attention with a window or sinks shows on many."""
_FEW_LAYERS = 200
_DEEPEST = 50
"""Configurations within configurations that are looked at."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_OLD_MASK = re.compile(r"\.masked_bias$|\bh\.\d+\.attn(\.attention)?\.bias$")
"""A causal mask that older versions of transformers saved (GPT-2, GPT-J, GPT-Neo)."""


def checked_family(model: PreTrainedModel) -> Family:
    """Return the table row of a model's own class; raise ModelError if the table has no such class.

    A subclass with changed layers would otherwise get its parent's adapter, which skips the changes.
    """
    name, package = type(model).__name__, type(model).__module__.split(".")[0]
    family = family_of_model(name, config=model.config)
    if package != "transformers" and type(model) is not HeadNormForCausalLM:
        raise ModelError(
            f"{type(model).__module__}.{name} has the name of a class of transformers but is a different class; "
            "need the class itself, or one under a name of its own with its own row in sink_lens/models/families.py"
        )
    return family


def check_no_shared_modules(plain: PreTrainedModel, *, family: Family, name: str) -> None:
    """Raise ModelError if two layers share a module with weights, since a hook in one would act in both.

    Layers may share tensors.
    """
    layers: Any = plain.get_submodule(family.layers)
    first: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            before = first.setdefault(id(module), number)
            if before != number and next(module.parameters(), None) is not None:
                raise ModelError(
                    f"layers {before} and {number} of {name} share a module ({path or 'the whole layer'}), so that "
                    "what is read or edited in one is read or edited in both; need a module of its own in each layer. "
                    "Copy it (copy.deepcopy), or give each layer the same tensors"
                )


def check_layers_are_whole(plain: PreTrainedModel, *, family: Family, name: str) -> None:
    """Raise ModelError if a layer has neither attention nor a mixer, as one that another library wrapped."""
    layers: Any = plain.get_submodule(family.layers)
    wanted = [path.partition(".")[0] for path in (family.attention, family.mixer) if path]
    for number, layer in enumerate(layers):
        if not any(getattr(layer, one, None) is not None for one in wanted):
            raise ModelError(
                f"layer {number} of {name} is a {type(layer).__module__}.{type(layer).__qualname__} and has no "
                f"{wanted[0]}; need the decoder layers of transformers. Take off what is around them, and give what it "
                "does as an edit (sink_lens.edits)"
            )


def check_hooks_fire(
    bridge: TransformerBridge, *, plain: PreTrainedModel, family: Family, name: str
) -> None:
    """Raise ModelError if a layer's attention runs beside the bridge's, as a ``forward`` bound to a module does."""
    fired: set[str] = set()

    def note(x: Tensor, hook: Any) -> None:
        fired.add(hook.name)

    having = [number for number, block in enumerate(bridge.blocks) if "attn" in block._modules]
    hooks: list[Any] = [(f"blocks.{number}.attn.hook_z", note) for number in having]
    _run_with_hooks(bridge, probe_tokens(plain), hooks)
    layers: Any = plain.get_submodule(family.layers)
    for number in having:
        own = [one for one in layers[number].named_modules() if "forward" in vars(one[1])]
        if own and f"blocks.{number}.attn.o.hook_in" not in fired:
            path, module = own[0]
            what = f"{path or 'the layer'} (a {type(module).__qualname__})"
            raise ModelError(
                f"hooks in layer {number} of {name} never fire: forward of {what} is a function that keeps another "
                "module; need modules with the forward of their class. Take it off, and wrap the model again"
            )


def check_model_folder(folder: Path) -> None:
    refuse_pipes_in(folder)
    config_file = folder / "config.json"
    if not config_file.is_file():
        saved = sorted(
            folder.glob("checkpoint-*/config.json"),
            key=lambda one: (len(one.parent.name), one.parent.name),
        )
        hint = f". Its checkpoints are models: load({str(saved[-1].parent)!r})" if saved else ""
        raise ModelError(
            f"{folder} has no config.json; need a folder written by save_pretrained{hint}"
        )
    try:
        config = parse_json(config_file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{config_file} cannot be read ({error}); need the file as save_pretrained wrote it"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{config_file} holds no JSON object; need the file as save_pretrained wrote it"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        found = f"only pickled weights ({', '.join(pickles)})" if pickles else "no weights"
        raise ModelError(
            f"{folder} has {found}; need *.safetensors. Pickle can run code when it is read: "
            "convert it where you trust it, with model.save_pretrained(folder)"
        )
    _check_index(folder)
    check_config(config, name=str(folder))
    _check_depth(config, folder)


def _check_index(folder: Path) -> None:
    for index in folder.glob("*.safetensors.index.json"):
        try:
            files = set(parse_json(index.read_text("utf-8"))["weight_map"].values())
            away = sorted(str(name) for name in files if not _is_name_of_safetensors(name))
            lost = sorted(
                name for name in files if name not in away and not (folder / str(name)).is_file()
            )
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{index} cannot be read ({type(error).__name__}: {error}); need the file as save_pretrained wrote it"
            ) from error
        if away or lost:
            raise ModelError(
                f"{index} says that weights are in {', '.join((away or lost)[:3])}; need safetensors of the folder "
                "itself. Fetch the whole model again"
            )


def _is_name_of_safetensors(name: object) -> bool:
    return isinstance(name, str) and is_plain_file_name(name) and name.endswith(".safetensors")


def _check_depth(config: Mapping[str, Any], folder: Path) -> None:
    asked = [config.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers")]
    layers = max((one for one in asked if isinstance(one, int | float)), default=0)
    if layers <= _FEW_LAYERS:
        return
    found = 0
    for file in folder.glob("*.safetensors"):
        with (
            contextlib.suppress(SafetensorError, OSError),
            safetensors.safe_open(file, framework="pt") as opened,
        ):
            found += len(opened.keys())
    if layers > found:
        raise ModelError(
            f"{folder / 'config.json'} says {layers:,} layers and the weights are {found:,} tensors; need a "
            "configuration that belongs to the weights. Fetch it again"
        )


def check_config(config: Mapping[str, Any], *, name: str) -> str | None:
    """Refuse a configuration of an unknown architecture, or one that needs remote code, which is never run.

    If transformers has a class with the same file name and class name, that class is used, and a note returned that
    says so.

    Raises:
        ModelError: the table has no such architecture, its code is not part of transformers, or it names an attention
            kernel of the hub.
    """
    named, code = config.get("architectures") or [], config.get("auto_map") or {}
    if (
        not isinstance(named, list)
        or not all(isinstance(one, str) for one in named)
        or not isinstance(code, dict)
    ):
        raise ModelError(
            f"the configuration of {name} has architectures {named!r:.60} and auto_map {code!r:.60}; need a list of "
            "names and a table. Fetch it again"
        )
    for architecture in map(str, named):
        family_of(TEXT_PART.get(architecture, architecture))
    if fetched := _find_kernel_to_download(config):
        raise ModelError(
            f"the configuration of {name} has {fetched}, which is code that would be fetched from the hub and run; "
            "need none. Remove it from config.json"
        )
    weights = config.get("transformers_weights")  # transformers opens what it names, whatever it is
    if weights is not None and not _is_name_of_safetensors(
        str(weights).removesuffix(".index.json")
    ):
        raise ModelError(
            f"the configuration of {name} names the weights {weights!r:.60}; need safetensors. Pickle can run "
            "code when it is read: convert it where you trust it, with model.save_pretrained(folder)"
        )
    code = code.get("AutoModelForCausalLM")
    if code is None:
        return None
    # "owner/name--file.Class" if the code is in another repository
    reference = str(code).rpartition("--")[2]
    classes = [getattr(transformers, one) for one in named if hasattr(transformers, one)]
    if reference not in [f"{one.__module__.rpartition('.')[2]}.{one.__name__}" for one in classes]:
        raise ModelError(
            f"{name} brings its own code for the model ({reference}), and remote code is never run; "
            "need an architecture that is part of transformers. Convert the checkpoint to one"
        )
    return f"the checkpoint names its own code ({reference}); the class with that name in transformers was used"


def _find_kernel_to_download(config: Any, *, depth: int = 0) -> str | None:
    """Return, as "key = value", a setting that makes transformers download a kernel and run it; None without one."""
    if not isinstance(config, Mapping) or depth > _DEEPEST:
        return None
    for key, value in config.items():
        for one in value.values() if isinstance(value, Mapping) else (value,):
            if "_implementation" in str(key) and isinstance(one, str) and "/" in one:
                return f"{key} = {one[:60]!r}"
        if found := _find_kernel_to_download(value, depth=depth + 1):
            return found
    return None


def check_checkpoint_class(model: PreTrainedModel) -> None:
    named = model.config.architectures or []
    if named and type(model).__name__ not in named:
        raise ModelError(
            f"the checkpoint was written by {named[0]} and transformers opened it as {type(model).__name__}; "
            f"need a class of its own for {named[0]}, registered with AutoModelForCausalLM"
        )


def check_checkpoint_keys(info: dict, *, name: str) -> None:
    """Raise ModelError if a checkpoint lacks weights, or has extra ones or ones of another shape than the model needs.

    ``info`` is what ``from_pretrained`` reports of the loading.
    """
    for key, found, needed in sorted(info.get("mismatched_keys", ())):
        raise ModelError(
            f"{name}: {key} has the shape {tuple(found)} in the checkpoint and {tuple(needed)} by its configuration; "
            "need a config.json and weights that belong together. Fetch both again"
        )
    compiled = any(UNCOMPILED in str(key) for key in info.get("unexpected_keys", ()))
    hint = f" They are those of a compiled model: save its {UNCOMPILED}." if compiled else ""
    for kind in ("missing_keys", "unexpected_keys"):
        if keys := sorted(key for key in map(str, info.get(kind, ())) if not _OLD_MASK.search(key)):
            raise ModelError(
                f"{name}: {kind.replace('_', ' ')} in the checkpoint: {', '.join(keys[:3])}"
                f"{' and more' if len(keys) > 3 else ''} ({len(keys)}); need the weights of exactly this architecture."
                f"{hint}"
            )


def untied_notes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return a note if embedding and unembedding are tied by the configuration and differ in the checkpoint.

    transformers then warns, and computes with the two.
    """
    read: Any = model.get_input_embeddings()
    write: Any = model.get_output_embeddings()
    if not getattr(model.config, "tie_word_embeddings", False) or write is None:
        return ()
    first, last = read.weight, write.weight
    if first is last or first.is_meta or last.is_meta or torch.equal(first, last):
        return ()
    return (
        "config.json has tie_word_embeddings = true, and the checkpoint holds an embedding and an unembedding that "
        "differ: both are used as they are",
    )


def probe_tokens(model: PreTrainedModel, length: int = 8) -> Int[Tensor, "batch position"]:
    """Return ``length`` token ids, or as many as the model's context has, spread over the vocabulary."""
    most = getattr(model.config, "max_position_embeddings", None) or length
    ids = (torch.arange(1, min(length, most) + 1) * 7919) % model.config.vocab_size
    return ids[None].to(model.get_input_embeddings().weight.device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def logit_tolerance(dtype: torch.dtype) -> float:
    return max(1e-5, 8 * torch.finfo(dtype).eps)


def check_own_attention(
    plain: PreTrainedModel, own: AttentionFunction, *, family: Family, name: str
) -> None:
    if family.own_attention:
        raise ModelError(
            f"the class of {name} computes attention itself and never calls {own}; need "
            "model.set_attn_implementation('eager')"
        )
    ids = probe_tokens(plain, _COMPARED)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % plain.config.vocab_size
    first, second = (_plain_logits(plain, one)[:, :-1] for one in (ids, changed))
    if not relative_error(second, first) <= logit_tolerance(plain.dtype):
        raise ModelError(
            f"under the attention function {own} the last token changes the logits of earlier ones: transformers gives "
            "it no mask; need a mask function of the same name. Register one before wrap: "
            f"transformers.AttentionMaskInterface.register({own.name!r}, transformers.masking_utils.eager_mask)"
        )


def check_bridge_logits(
    bridge: TransformerBridge, *, plain: PreTrainedModel, family: Family
) -> tuple[str, ...]:
    """Raise ModelError if the bridge's logits differ from the plain model's, under its own kernel, on 64 tokens.

    If they do, an adapter skips a part. A model that does not run, or whose logits are not finite or all 0, is refused
    too. A kernel that is exact for the family may round otherwise, which some models enlarge: eager attention must then
    give the bridge's logits, and a note is returned.
    """
    ids, kernel = probe_tokens(plain, _COMPARED), kernel_of(plain.config)
    try:
        expected = _plain_logits(plain, ids)
        if not expected.isfinite().all():  # a late position may overflow in half precision
            ids = probe_tokens(plain)
            expected = _plain_logits(plain, ids)
        with switch_to_eval_mode(bridge), torch.no_grad():
            found: Tensor = bridge(ids, use_cache=False).float()
    except (RuntimeError, ValueError) as error:
        need = "a model that runs as transformers and as TransformerLens have it"
        if plain.dtype != torch.float32:
            need = "a type in which both the plain model and TransformerLens run. Use float32"
        raise ModelError(
            f"a forward pass in {plain.dtype} with {kernel!r} attention fails ({first_line_of_error(error)}); need "
            f"{need}"
        ) from error
    if not expected.isfinite().all():
        raise ModelError(
            f"the model's logits in {plain.dtype} are not finite on {ids.shape[1]} tokens; need a type whose range "
            "is large enough. Load it in float32 or bfloat16; if that does not help, the weights are broken"
        )
    if not expected.any():
        raise ModelError(
            f"every logit of the model is 0 on {ids.shape[1]} tokens: its weights are 0, or its last ones; need "
            "trained or random weights. Fetch or save them again"
        )
    own = error = relative_error(found, expected)
    tolerance = logit_tolerance(plain.dtype)
    if not error <= tolerance and kernel == family.plain_kernel != "eager":
        with use_attention(plain, "eager"):
            error = relative_error(found, _plain_logits(plain, ids))
    if not error <= tolerance:
        raise ModelError(
            f"the bridge's logits differ from the plain model's by {error:.1e} of their norm on {ids.shape[1]} tokens; "
            f"need at most {tolerance:.0e}. Either the adapter skips a part of this model, such as a change of its "
            "attention, or the bridge's weights or hooks were changed: boot a fresh bridge"
        )
    note = (
        f"{kernel!r} rounds otherwise than eager attention, under which the model is edited, and the model enlarges "
        f"that to {own:.0e} of the logits' norm"
    )
    return () if own <= tolerance else (note,)


def uneditable_sites(
    bridge: TransformerBridge, *, plain: PreTrainedModel, own: bool = False
) -> frozenset[str]:
    """Return the names of the attention sites (scores, pattern) whose edits have no effect on this bridge.

    TransformerLens delegates the attention of some architectures to Hugging Face, discards edits of the scores and the
    pattern, and only warns. So both are edited here on eight tokens, and a site counts as uneditable if no logit
    changes, with the model's values and with others that differ from key to key: where all values are alike, the
    attention is not seen in the logits. The user's ``own`` attention function has no scores, and a pattern if it is
    linear; "mask" is among the names if no key can be hidden from it.
    """

    def attend_first_key(pattern: Float[Tensor, "batch head query key"], hook: object) -> Tensor:
        edited = torch.zeros_like(pattern)
        edited[..., 0] = 1
        return edited

    def block_first_key(scores: Float[Tensor, "batch head query key"], hook: object) -> Tensor:
        edited = scores.clone()
        edited[..., 1:, 0] = torch.finfo(scores.dtype).min
        return edited

    def with_other_values(values: Tensor, hook: object) -> Tensor:
        ramp = torch.linspace(-1.0, 1.0, values.shape[1], device=values.device, dtype=values.dtype)
        return values + ramp.view(1, -1, *[1] * (values.dim() - 2))

    ids = probe_tokens(plain)
    if own:
        lacking = {"scores"}
        for name, hook, edit in (
            ("pattern", "hook_pattern", lambda pattern, hook: None),
            ("mask", "hook_own_mask", block_first_key),
        ):
            every: list[Any] = [
                (one, edit) for one in bridge.hook_dict if one.endswith(f".attn.{hook}")
            ]
            try:
                _run_with_hooks(bridge, probe_tokens(plain, _COMPARED), every)
            except SiteError:
                lacking.add(name)
        return frozenset(lacking)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the discarded edits are what this check looks for
        layers = [at for at, block in enumerate(bridge.blocks) if "attn" in block._modules]
        other_values: list[Any] = [
            (point, with_other_values)
            for at in layers
            if (point := f"blocks.{at}.attn.hook_v") in bridge.hook_dict
        ]
        found = {
            "pattern": ("hook_pattern", attend_first_key),
            "scores": ("hook_attn_scores", block_first_key),
        }
        for values in ([], other_values):
            if not found:
                break
            baseline = _run_with_hooks(bridge, ids, values)
            for site, (hook, edit) in list(found.items()):
                hooks = [*values, *((f"blocks.{at}.attn.{hook}", edit) for at in layers)]
                if not torch.equal(_run_with_hooks(bridge, ids, hooks), baseline):
                    del found[site]
    return frozenset(found)


def _run_with_hooks(bridge: TransformerBridge, ids: Tensor, hooks: list[Any]) -> Tensor:
    with switch_to_eval_mode(bridge), torch.no_grad():
        return bridge.run_with_hooks(ids, fwd_hooks=hooks, use_cache=False)


def _plain_logits(plain: PreTrainedModel, ids: Tensor) -> Tensor:
    with switch_to_eval_mode(plain), without_compiled_forwards(plain), torch.no_grad():
        return plain(ids, use_cache=False).logits.float()
