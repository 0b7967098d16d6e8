"""``load`` makes a ``LensModel`` from a name, folder, GGUF file or object; also its hash and random-init baseline."""

import contextlib
import copy
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as of_transformers
from transformers.utils.hub import cached_file

from ..data.cache import expand_home
from ..errors import InputError, ModelError, first_line_of_error, is_panic
from ..files import check_file_name
from ..schema import DEFAULT_MODEL
from . import checks
from .adapters import check_no_adapter
from .bundled import bundled_gguf, converted_folder
from .families import TEXT_PART
from .header import TOKENIZER_FILES, read_folder_header
from .lens import LensModel
from .offload import load_parameters_in_turn
from .private_apis import LENIENT, NAME_OF_CONFIG, set_attention, use_default_attention
from .running import exclusive_use
from .wrapping import assemble_lens, extract_language_model, keep_random_state, wrap

__all__ = ["LensModel", "ModelLike", "as_lens", "load", "random_init", "weights_hash", "wrap"]

ModelLike = LensModel | PreTrainedModel | TransformerBridge | nn.Module | str | Path
"""The kinds of model argument; a module may be a ``PeftModel``."""

_FROM_GGUF = "the weights are those of {}: if it is quantised, so is what is studied here"
_QUANTISED = "the weights were stored in {}: what is studied here is the quantised model"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
_LOG = logging.getLogger(__name__)
_NOT_COMPUTED = (
    NAME_OF_CONFIG,
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "use_cache",
)
"""Entries of a configuration that change no number, or, as the type, are known otherwise."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load(
    model: str | Path | PreTrainedModel | TransformerBridge | nn.Module = DEFAULT_MODEL,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: str | None = None,
    revision: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> LensModel:
    """Load a ``LensModel``: the default model, a hub name, a folder, a ``.gguf`` file or a model object.

    Weights must be safetensors or GGUF, and remote code is never run. Before returning, ``load`` checks that the bridge
    and the plain model give the same logits on 64 tokens, and marks attention sites whose edits have no effect.

    Args:
        model: the default model's name, a folder, a GGUF file, a hub name (which needs a network), or a model object,
            which is passed to ``wrap``.
        tokenizer: used instead of the tokenizer beside the weights.
        device: by default the first CUDA device, or the CPU if there is none.
        dtype: ``"float32"`` (the default), ``"bfloat16"``, ``"float16"``, ``"float64"``, or ``"auto"`` for the type of
            the checkpoint.
        device_map: how Hugging Face spreads the model over devices; replaces ``device``. With ``"auto"``, weights that
            fit neither the GPUs nor memory stay on disk: such a model can be measured, and interventions are refused.
        max_memory: most main memory for the weights, as ``"8GB"``; needs ``device_map``.
        revision: branch, tag or commit of a hub name.
        announce: called with one line before something slow, such as the one-time conversion of a GGUF file.

    Raises:
        ModelError: the model cannot be loaded or fails a check.
        InputError: arguments are unknown or contradict each other.
    """
    if isinstance(model, nn.Module):
        given = dict[str, Any](
            device=device,
            dtype=dtype,
            device_map=device_map,
            max_memory=max_memory,
            revision=revision,
        )
        if asked := [key for key, value in given.items() if value is not None]:
            raise InputError(
                f"{', '.join(asked)} given with a model object; they go with a name only. Move or cast the object "
                "yourself"
            )
        return wrap(model, tokenizer=tokenizer)
    if not isinstance(model, (str, Path)):
        raise ModelError(
            f"found {type(model).__name__}; need a transformers PreTrainedModel, a TransformerBridge, or the name or "
            "path of a model"
        )
    name = str(model)
    wanted = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if wanted not in (*_DTYPES, "auto"):
        raise InputError(f"dtype {wanted!r} is not known; need {', '.join(_DTYPES)} or auto")
    torch_dtype = _DTYPES.get(wanted, "auto")
    placement = _placement_arguments(device, device_map, max_memory)
    folder, notes = _find_or_convert_folder(name, announce)
    if revision is not None and folder is not None:
        raise InputError(
            f"revision {revision!r} was given with {name}, which is not a hub name; a revision goes with a hub "
            "name only"
        )
    source, branch = str(folder or name), revision or "main"
    scratch = tempfile.mkdtemp(prefix="sink_lens_offload_") if "device_map" in placement else None
    if folder is not None:
        check_no_adapter(folder)
        checks.check_model_folder(folder)
        if placement.get("device") == torch.device("cpu"):
            _check_memory(folder, torch_dtype, name=name)
    try:
        config, _ = PreTrainedConfig.get_config_dict(source, revision=branch)
        note = checks.check_config(config, name=name)
        with torch.random.fork_rng(devices=[]), _without_bars_and_conversion():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=_read_configuration(source, branch=branch),
                dtype=torch_dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                revision=branch,
                ignore_mismatched_sizes=True,  # check_checkpoint_keys refuses them, and says which
                **({} if "device" in placement else placement | {"offload_folder": scratch}),
            )
    except ModelError:
        shutil.rmtree(scratch or "", ignore_errors=True)
        raise
    except Exception as error:  # transformers raises many kinds
        raise ModelError(_load_error_text(name, folder, error)) from error
    plain, info = loaded
    if scratch is not None:  # experts' weights are written to it in the layout of the class
        weakref.finalize(plain, shutil.rmtree, scratch, ignore_errors=True)
    checks.check_checkpoint_class(plain)
    checks.check_checkpoint_keys(info, name=name)
    plain = extract_language_model(plain)
    beside_images = [one for one in config.get("architectures") or () if one in TEXT_PART]
    notes += tuple(f"the language model of {one}, which reads images too" for one in beside_images)
    family = checks.checked_family(plain)
    set_attention(plain, family.plain_kernel)
    if "device" in placement:
        plain.to(placement["device"])
    if tokenizer is None:
        tokenizer = _load_tokenizer(source, branch=branch)
    if quantised := config.get("quantization_config"):
        notes += (_QUANTISED.format(quantised.get("quant_method", "a quantised type")),)
    notes += () if note is None else (note,)
    notes += checks.untied_notes(plain)
    notes += () if revision is None else (f"revision {revision}",)
    return assemble_lens(plain, tokenizer=tokenizer, family=family, name=name, notes=notes)


def as_lens(model: ModelLike) -> LensModel:
    return model if isinstance(model, LensModel) else load(model)


def weights_hash(lens: LensModel) -> str:
    """Return the SHA-256 of the names, shapes, types and bytes of all parameters, in order of name."""
    digest = hashlib.sha256()
    with exclusive_use(lens):
        for name, parameter in load_parameters_in_turn(lens.plain):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_hash(lens: LensModel) -> str:
    told = {
        name: value for name, value in lens.config.to_dict().items() if name not in _NOT_COMPUTED
    }
    text = json.dumps([type(lens.plain).__name__, told], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def random_init(lens: LensModel, *, seed: int) -> LensModel:
    """Make the random-init baseline: a model with the same configuration and random weights, drawn with ``seed``.

    The caller's random state does not change.
    """
    if lens.offloaded:
        raise ModelError(
            f"the weights of {lens.name} do not fit into memory, so neither do those of its random-init baseline; need "
            "the trace without it (random_init=False)"
        )
    with keep_random_state(), torch.device("cpu"):
        # torch.manual_seed would reseed the caller's GPUs too
        torch.default_generator.manual_seed(seed)
        # Build it in the model's type from the start: a later cast would also cast the rotary tables.
        plain = AutoModelForCausalLM.from_config(
            copy.deepcopy(lens.config),
            attn_implementation=lens.family.plain_kernel,
            dtype=lens.dtype,
        )
    plain = plain.to(device=lens.device).eval()
    name = f"random init of {lens.name} (seed {seed})"
    return assemble_lens(plain, tokenizer=lens.tokenizer, family=lens.family, name=name)


def _check_memory(folder: Path, dtype: torch.dtype | str, *, name: str) -> None:
    header = read_folder_header(folder)
    # a link may lead nowhere
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.exists())
    needed = stored
    if header is not None and isinstance(dtype, torch.dtype):
        needed = header.n_weights * dtype.itemsize
    free = psutil.virtual_memory().available
    if needed <= free:
        return
    own = (
        f"dtype='auto', which keeps the {stored / 1e9:.1f} GB of the checkpoint; "
        if needed > 1.5 * stored
        else ""
    )
    raise ModelError(
        f"the weights of {name} take {needed / 1e9:.1f} GB as {str(dtype).removeprefix('torch.')} and "
        f"{free / 1e9:.1f} GB of memory are free; need {own}a smaller type (dtype='bfloat16'), or weights that stay on "
        "disk (device_map='auto'), which can be measured and not edited"
    )


@contextlib.contextmanager
def _without_bars_and_conversion() -> Iterator[None]:
    """Within the block, transformers shows no progress bar and asks no hub service to convert pickled weights."""
    had_bars, name = of_transformers.is_progress_bar_enabled(), "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    of_transformers.disable_progress_bar()
    os.environ[name] = "1"
    try:
        yield
    finally:
        if had_bars:
            of_transformers.enable_progress_bar()
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _find_or_convert_folder(
    name: str, announce: Callable[[str], None] | None
) -> tuple[Path | None, tuple[str, ...]]:
    """Return the local folder of a model (None for a hub name), and notes for the reader of the results."""
    check_file_name(name, what="the name of a model")
    path = bundled_gguf() if name == DEFAULT_MODEL else expand_home(name)
    if path.suffix == ".gguf":
        return converted_folder(path, announce=announce), (_FROM_GGUF.format(path.name),)
    if path.is_dir():
        return path, ()
    if path.exists():
        raise ModelError(
            f"{path} is a file; need a folder written by save_pretrained, a .gguf file or a hub name"
        )
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"there is no folder {path}; need one written by save_pretrained, a .gguf file, {DEFAULT_MODEL!r} "
            "(bundled), or a hub name, as OWNER/NAME. Check the path"
        )
    (announce or _LOG.info)(f"There is no folder {name}: looking for it on the hub")
    return None, ()


def _load_error_text(name: str, folder: Path | None, error: Exception) -> str:
    reason = first_line_of_error(error)
    if folder is None:
        return (
            f"{name!r} is no folder and no file here, and the hub gave: {reason.rstrip('.')}. Need a folder "
            f"written by save_pretrained, a .gguf file, {DEFAULT_MODEL!r} (bundled), or a hub name and a network"
        )
    config: Any = None
    try:
        config = _read_configuration(folder)
        with keep_random_state(), torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as fault:  # noqa: BLE001  # as above
        wrong, pad = first_line_of_error(fault), getattr(config, "pad_token_id", None)
        if "padding_idx" in wrong.lower():  # torch's word for it
            wrong = f"pad_token_id is {pad}, and the vocabulary has {config.vocab_size} tokens"
        return f"{name}: config.json describes no model ({wrong}); need the file as save_pretrained wrote it"
    return f"{name}: the weights cannot be read ({reason}); need whole safetensors files, written by save_pretrained"


def _read_configuration(source: str | Path, *, branch: str = "main") -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, revision=branch)
    use_default_attention(config)
    return config


def _load_tokenizer(source: str, *, branch: str) -> PreTrainedTokenizerBase | None:
    options: dict[str, Any] = {LENIENT: False, "revision": branch}
    try:
        if all(cached_file(source, file, **options) is None for file in TOKENIZER_FILES):
            return None
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=False, revision=branch)
        own = found.init_kwargs.get("model_specific_special_tokens") or {}
        if taken := [name for name in own if hasattr(type(found), name)]:
            raise ValueError(
                f"it calls a special token {taken[0]!r:.60}, as an attribute of every tokenizer"
            )
        found("a")  # a setting of another type shows when it is first used
        bos, eos = (found.bos_token, found.bos_token_id), (found.eos_token, found.eos_token_id)
        for token, number in (bos, eos):
            if token is not None and not (isinstance(token, str) and isinstance(number, int)):
                raise ValueError(f"its special token {token!r:.60} has the id {number!r:.60}")
    except BaseException as error:  # tokenizers raises a bare Exception, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(
            f"the tokenizer of {source} cannot be read ({first_line_of_error(error)}); need its files as "
            "save_pretrained wrote them. Repair them, or pass tokenizer="
        ) from error
    return found


def _placement_arguments(
    device: str | torch.device | None,
    device_map: str | Mapping[str, Any] | None,
    max_memory: str | None,
) -> dict[str, Any]:
    """Return the arguments that place the weights: ``device``, or else ``device_map`` with ``max_memory``."""
    if device is not None and device_map is not None:
        raise InputError("both device and device_map were given; need at most one")
    if max_memory is not None and device_map is None:
        raise InputError(
            "max_memory was given without device_map; need device_map='auto' beside it"
        )
    if isinstance(device_map, str) and device_map.partition(":")[0] in ("cpu", "cuda", "mps"):
        device, device_map = device_map, None  # transformers takes a device's name here too
    if isinstance(device_map, str) and device_map not in _DEVICE_MAPS:
        raise InputError(
            f"device_map {device_map!r} is not known; need {', '.join(_DEVICE_MAPS)}, or a mapping"
        )
    if device_map is None:
        return {"device": find_device(device)}
    if max_memory is None:
        return {"device_map": device_map}
    try:
        most = convert_file_size_to_int(max_memory)
    except (ValueError, TypeError) as error:
        raise InputError(f"max_memory is {max_memory!r}; need a size, such as 8GB") from error
    gpus = range(torch.cuda.device_count())
    free = {index: torch.cuda.mem_get_info(index)[0] for index in gpus}
    return {"device_map": device_map, "max_memory": {**free, "cpu": most}}


def find_device(device: torch.device | str | None) -> torch.device:
    """Return the device of this name, or raise InputError; for None, the first GPU, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, TypeError) as error:  # what torch raises, by device
        raise InputError(
            f"device {device!s} cannot be used here ({first_line_of_error(error)}); need cpu, cuda or cuda:N"
        ) from error
    return found
