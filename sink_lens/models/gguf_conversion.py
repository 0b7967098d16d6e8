"""Convert a GGUF file to a safetensors folder, tensor by tensor, with what transformers' reader leaves out.

Transformers reads a GGUF file into memory whole, twice at its peak. Here its names and its operations on each tensor
are taken alone: a tensor is dequantised, written and forgotten. It leaves out settings of attention, scaled rotations,
and that a Llama 3 begins with BOS: these are read here.
"""

import contextlib
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from ..errors import ModelError, first_line_of_error
from ..files import parse_json
from .gguf_header import HeaderReader, metadata_value, read_gguf_header

_ROOM = 32_000_000
"""Free bytes required on the disk in addition to the weights."""
_ROWS = 4096
"""Rows of a tensor that are dequantised at once."""
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
"""Llama 3's scaling: factors of its low and high frequencies, and the context that it was trained on first."""
_SETTINGS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
"""Key of the file about its attention -> the field of the configuration, if it has this field."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""A model of 27B scales its scores by its width over its heads, others by the width of a head (llama.cpp)."""
_BEGIN_WITH_BOS = ("llama-bpe", "llama3", "llama-v3")
"""Pre-tokenizers (``tokenizer.ggml.pre``) whose models begin with BOS where a file does not say."""


def convert_gguf(file: Path, *, folder: Path) -> None:
    """Write the weights in float32, the configuration and the tokenizer of a GGUF file into an empty folder.

    Other files beside it are not read. The caller's random state does not change. After an error the caller removes the
    folder.

    Raises:
        ModelError: the file is damaged, has an unknown architecture or is one part of a split file; it lacks a tensor,
            or has biases, rotations or scalings that its architecture has not; or the disk has no room.
    """
    header = read_gguf_header(file)
    needed, free = header.weight_bytes() + _ROOM, shutil.disk_usage(folder).free
    if free < needed:
        raise _no_room_error(
            file, folder=folder, needed=needed, found=f"{free / 1e6:,.0f} MB are free"
        )
    reader = HeaderReader(file)
    try:
        with torch.random.fork_rng(devices=[]), _parse_file_once():
            config = AutoConfig.from_pretrained(folder, **_load_arguments(file))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            tensors, processor = _match_tensors(file, model)
            tokenizer = (
                _read_tokenizer(reader, file, empty=folder) if header.has_tokenizer else None
            )
    except ModelError:
        raise
    except Exception as error:  # transformers and gguf raise many kinds of error
        raise _unreadable_error(file, error) from error
    try:
        _write_weights(model, tensors=tensors, processor=processor, folder=folder)
        _complete_config(reader, name=file.name, folder=folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise _no_room_error(
            file, folder=folder, needed=needed, found=first_line_of_error(error)
        ) from error
    except (ValueError, NotImplementedError) as error:  # a tensor of a type that gguf does not read
        raise _unreadable_error(file, error) from error


def read_gguf_tokenizer(file: Path) -> Any:
    if not read_gguf_header(file).has_tokenizer:
        return None
    try:
        with tempfile.TemporaryDirectory() as empty, _parse_file_once():
            return _read_tokenizer(HeaderReader(file), file, empty=Path(empty))
    except Exception as error:  # transformers and gguf raise many kinds of error
        raise _unreadable_error(file, error) from error


def _load_arguments(file: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` of an empty folder reads a GGUF file elsewhere.

    transformers looks for a bare name in the working directory first, and reads other files beside it.
    """
    return {"gguf_file": str(file), "trust_remote_code": False, "local_files_only": True}


def _read_tokenizer(reader: HeaderReader, file: Path, *, empty: Path) -> Any:
    """Read the tokenizer of a GGUF file; one of Llama 3 adds BOS unless the file says otherwise.

    ``empty`` is an empty folder, which transformers gets in place of a model's name.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(empty, **_load_arguments(file))
    unsaid = metadata_value(reader, "tokenizer.ggml.add_bos_token") is None
    if unsaid and metadata_value(reader, "tokenizer.ggml.pre") in _BEGIN_WITH_BOS:
        tokenizer.add_bos_token = True
    return tokenizer


@contextlib.contextmanager
def _parse_file_once() -> Iterator[None]:
    """Within the block, transformers parses a GGUF file only once, instead of four times."""
    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def _unreadable_error(file: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{file.name}: its weights or its tokenizer cannot be read ({first_line_of_error(error)}); need a whole GGUF "
        "file of an architecture that transformers reads from GGUF. Fetch it again, or use the "
        "safetensors folder of the same model"
    )


def _no_room_error(file: Path, *, folder: Path, needed: int, found: str) -> ModelError:
    return ModelError(
        f"{file.name} cannot be converted in {folder.parent}: {found}; need about {needed / 1e6:,.0f} MB. Free space "
        "there, or set SINK_LENS_CACHE to a folder with room"
    )


def _match_tensors(file: Path, model: PreTrainedModel) -> tuple[dict[str, Any], TensorProcessor]:
    """Return the file's tensors by their names in ``model``, and the processor by which transformers converts them."""
    held = gguf.GGUFReader(str(file))  # a text, as transformers has it: see _parse_file_once
    processor_class = TENSOR_PROCESSORS.get(
        held.fields["general.architecture"].contents(), TensorProcessor
    )
    processor = processor_class(config=load_gguf_checkpoint(str(file))["config"])
    names = get_gguf_hf_weights_map(model, processor)
    tensors = {names[one.name]: one for one in held.tensors if one.name in names}
    for name, shape in _saved_shapes(model).items():
        size, needed = int(tensors[name].n_elements) if name in tensors else None, math.prod(shape)
        if size != needed:
            raise ModelError(
                f"{file.name} has {'nothing' if size is None else f'{size:,} numbers'} for {name}; need "
                f"{needed:,}. It is damaged or another model's: fetch it again, or load the safetensors "
                "folder of the same model"
            )
    for one in held.tensors:
        if one.name not in names and one.name.endswith(".bias"):
            raise ModelError(
                f"{file.name} has biases such as {one.name}, which its architecture does not have. "
                "Load the safetensors folder of the same model"
            )
    return tensors, processor


def _saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    tied = model.all_tied_weights_keys
    return {
        name: tuple(one.shape)
        for name, one in sorted(model.state_dict().items())
        if name not in tied
    }


def _write_weights(
    model: PreTrainedModel, *, tensors: Mapping[str, Any], processor: TensorProcessor, folder: Path
) -> None:
    model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    shapes = _saved_shapes(model)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    said += b" " * (-len(said) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(said).to_bytes(8, "little") + said)
        for name, shape in shapes.items():
            out.write(_dequantise(tensors[name], processor=processor, name=name, shape=shape).data)


def _dequantise(
    held: Any, *, processor: TensorProcessor, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Convert ``held``, a tensor of a GGUF file, to float32 in the model's layout.

    Raise ValueError if the result does not have ``shape``, that of the model's tensor ``name``.
    """
    values = np.empty([int(size) for size in reversed(held.shape)], dtype="<f4")
    for begin in range(0, len(values), _ROWS):  # gguf itself has all rows twice
        rows = slice(begin, begin + _ROWS)
        values[rows] = gguf.dequantize(held.data[rows], held.tensor_type)
    # GPT-2's processor puts its unembedding into the second table too
    processed = processor.process(weights=values, name=held.name, parsed_parameters={"tensors": {}})
    found = np.ascontiguousarray(processed.weights, dtype="<f4")
    if found.shape != shape:
        raise ValueError(f"{held.name} has the shape {found.shape}; {name} needs {shape}")
    return found


def _complete_config(reader: HeaderReader, *, name: str, folder: Path) -> None:
    """Write the settings of a GGUF file that transformers leaves out into ``folder/config.json``.

    Raises:
        ModelError: the file rotates only a part of each head, which transformers cannot do for this architecture; or it
            scales its rotary positions neither linearly nor as Llama 3 does (by a factor for each frequency).
    """
    path = folder / "config.json"
    config = parse_json(path.read_text("utf-8"))
    known = AutoConfig.from_pretrained(folder).to_dict()
    kind = metadata_value(reader, "general.architecture")

    def entry_of(field: str) -> Any:
        return metadata_value(reader, f"{kind}.{field}")

    found = {field: entry_of(entry) for entry, field in _SETTINGS.items() if field in known}
    heads = entry_of("attention.head_count")
    # heads is a list if layers differ
    each = entry_of("embedding_length") // heads if isinstance(heads, int) and heads else None
    width = entry_of("attention.key_length") or known.get("head_dim") or each
    if "query_pre_attn_scalar" in known:
        found["query_pre_attn_scalar"] = (
            each if entry_of("block_count") == _LAYERS_OF_27B.get(kind) else width
        )
    config |= {field: value for field, value in found.items() if value is not None}
    if config.get("sliding_window") == 0:  # llama.cpp's way to say that there is none
        config["sliding_window"] = None
    config["rope_parameters"] = rope = known["rope_parameters"]
    of_all = rope.get("full_attention", rope)  # Gemma 3 scales its layers without a window alone
    of_all["rope_theta"] = entry_of("rope.freq_base") or of_all["rope_theta"]
    if (theta := entry_of("rope.freq_base_swa")) and "sliding_attention" in rope:
        rope["sliding_attention"]["rope_theta"] = theta
    rotated = entry_of("rope.dimension_count")
    share = rotated / width if rotated and width else None
    if share is not None and share != of_all.get("partial_rotary_factor", 1):
        if "partial_rotary_factor" not in of_all:
            raise ModelError(
                f"{name} rotates {share:.0%} of each head, which is not read from a GGUF file of this "
                "architecture; need the checkpoint's folder with its config.json"
            )
        rounded_down = int(width * share)  # as transformers does
        of_all["partial_rotary_factor"] = (
            share if rounded_down == rotated else (rotated + 0.5) / width
        )
    if of_all.get("rope_type", "default") == "default":  # else transformers read it
        of_all |= _rotary_scaling(reader, kind, theta=float(of_all["rope_theta"]), name=name)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _rotary_scaling(reader: HeaderReader, kind: str, *, theta: float, name: str) -> dict[str, Any]:
    """Return the fields of ``rope_parameters`` for a linear scaling of rotary positions or Llama 3's, if there is one.

    ``kind`` is the architecture in the file.
    """
    scaling, factor, context = (
        metadata_value(reader, f"{kind}.rope.scaling.{entry}")
        for entry in ("type", "factor", "original_context_length")
    )
    context = context or _CONTEXT
    held = {str(tensor.name): tensor for tensor in reader.tensors}
    by_frequency = any(tensor.startswith("rope_factors_") for tensor in held)
    if by_frequency or scaling not in (None, "none", "linear"):
        raise ModelError(
            f"{name} scales its rotary positions ({scaling or 'a factor for each frequency'}), which is not read "
            "from a GGUF file; need the checkpoint's folder with its config.json"
        )
    if "rope_freqs.weight" not in held:
        if scaling != "linear" or factor in (None, 1):
            return {}
        return {"rope_type": "linear", "factor": float(factor)}
    factors = np.asarray(held["rope_freqs.weight"].data, dtype=np.float64).flatten()
    if np.all(factors == 1):
        return {}
    most = float(factors.max())
    inverse = theta ** -(np.arange(len(factors)) / len(factors))
    turns = context * inverse / (2 * math.pi)  # of each frequency, in the first context
    smooth = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / most + smooth), rtol=1e-3):
        raise ModelError(
            f"{name} scales its rotary positions by factors that are not those of Llama 3 for a context of {context:,} "
            "tokens; need the checkpoint's folder with its config.json"
        )
    return {
        "rope_type": "llama3",
        "factor": most,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": context,
    }
