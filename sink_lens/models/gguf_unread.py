"""Contents of a GGUF file that transformers' reader leaves out: settings, scaled rotations, BOS."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from ..errors import ModelError
from ..text import json_value
from .gguf_header import HeaderReader, metadata_value

_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
"""Llama 3's scaling: factors of its low and high frequencies, and the context that it was trained on first."""
_FREQUENCIES = "rope_freqs.weight"
_SETTINGS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
"""What a file says of its attention -> the configuration's field, where it has one."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""A model of 27B scales its scores by its width over its heads, others by the width of a head (llama.cpp)."""
_BEGIN_WITH_BOS = ("llama-bpe", "llama3", "llama-v3")
"""Pre-tokenizers (``tokenizer.ggml.pre``) whose models begin with BOS where a file does not say."""


def add_settings(gguf: Path, *, folder: Path) -> None:
    """Copy a GGUF file's settings of attention that transformers does not read into its conversion's configuration.

    Transformers takes the class's default instead: for Gemma 2's caps, Phi 3's window and rotated share, and the scale
    of Gemma's scores, which is that of 27B where the file has its layers.

    Raises:
        ModelError: the file rotates a part of each head, and its architecture, as transformers has it, the whole.
    """
    reader = HeaderReader(gguf)
    kind = metadata_value(reader, "general.architecture")
    path = folder / "config.json"
    config = json_value(path.read_text("utf-8"))

    def entry_of(name: str) -> Any:
        return metadata_value(reader, f"{kind}.{name}")

    known = AutoConfig.from_pretrained(folder).to_dict()
    found = {field: entry_of(name) for name, field in _SETTINGS.items() if field in known}
    heads = entry_of("attention.head_count")
    each = (
        entry_of("embedding_length") // heads if isinstance(heads, int) and heads else None
    )  # a list where layers differ
    width = entry_of("attention.key_length") or known.get("head_dim") or each
    if "query_pre_attn_scalar" in known:
        found["query_pre_attn_scalar"] = each if entry_of("block_count") == _LAYERS_OF_27B.get(kind) else width
    config |= {field: value for field, value in found.items() if value is not None}
    if config.get("sliding_window") == 0:  # llama.cpp's way to say that there is none
        config["sliding_window"] = None
    rope = known.get("rope_parameters")
    if rope:
        of_all = rope.get("full_attention", rope)
        of_all["rope_theta"] = entry_of("rope.freq_base") or of_all["rope_theta"]
        if entry_of("rope.freq_base_swa") and "sliding_attention" in rope:
            rope["sliding_attention"]["rope_theta"] = entry_of("rope.freq_base_swa")
        rotated = entry_of("rope.dimension_count")
        share = rotated / width if rotated and width else None
        if share is not None and share != of_all.get("partial_rotary_factor", 1):
            if "partial_rotary_factor" not in of_all:
                raise ModelError(
                    f"{gguf.name} rotates {share:.0%} of each head, which is not read from a GGUF file of this "
                    "architecture; need the checkpoint's folder with its config.json"
                )
            rounded_down = int(width * share)  # as transformers does
            of_all["partial_rotary_factor"] = share if rounded_down == rotated else (rotated + 0.5) / width
        config["rope_parameters"] = rope
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def scale_positions(gguf: Path, *, folder: Path) -> None:
    """Copy the scaling of rotary positions that a GGUF file has into its conversion's configuration.

    Linear scaling and that of Llama 3 (a factor for each frequency) are known.

    Raises:
        ModelError: the file has another scaling.
    """
    reader = HeaderReader(gguf)
    kind = metadata_value(reader, "general.architecture")
    held = {str(tensor.name): tensor for tensor in reader.tensors}
    scaling, factor = (metadata_value(reader, f"{kind}.rope.scaling.{name}") for name in ("type", "factor"))
    path = folder / "config.json"
    config = json_value(path.read_text("utf-8"))
    rope = config.get("rope_parameters") or {}
    of_all = rope.get("full_attention", rope)  # Gemma 3 scales its layers without a window alone
    if of_all.get("rope_type", "default") != "default":  # transformers read it
        return
    if any(name.startswith("rope_factors_") for name in held) or scaling not in (None, "none", "linear"):
        raise ModelError(
            f"{gguf.name} scales its rotary positions ({scaling or 'a factor for each frequency'}), which is not read "
            "from a GGUF file; need the checkpoint's folder with its config.json"
        )
    if _FREQUENCIES in held:
        factors = np.asarray(held[_FREQUENCIES].data, dtype=np.float64).flatten()
        context = metadata_value(reader, f"{kind}.rope.scaling.original_context_length") or _CONTEXT
        of_all |= _llama3_scaling(factors, theta=float(of_all["rope_theta"]), context=context, name=gguf.name)
    elif scaling == "linear" and factor not in (None, 1):
        of_all |= {"rope_type": "linear", "factor": float(factor)}
    else:
        return
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def put_bos_first(gguf: Path, tokenizer: Any) -> Any:
    """Return the tokenizer of a Llama 3 set to put BOS first if the GGUF file does not say; any other unchanged."""
    reader = HeaderReader(gguf)
    said = metadata_value(reader, "tokenizer.ggml.add_bos_token")
    if said is None and metadata_value(reader, "tokenizer.ggml.pre") in _BEGIN_WITH_BOS:
        tokenizer.add_bos_token = True
    return tokenizer


def _llama3_scaling(factors: np.ndarray, *, theta: float, context: int, name: str) -> dict[str, Any]:
    """The ``rope_scaling`` of Llama 3 that gives these factors of the wavelengths; empty if all factors are 1."""
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
