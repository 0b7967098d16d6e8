"""The sizes of a model and its sites, read from the headers of its files: neither weights nor torch are loaded."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..files import parse_json, refuse_pipes_in
from .families import TEXT_PART, family_of
from .family import Family

_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_NAMES = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads"),
    "n_kv_heads": ("num_key_value_heads",),
    "d_model": ("hidden_size", "n_embd"),
    "d_head": ("head_dim",),
    "n_context": ("max_position_embeddings", "n_positions"),
    "d_vocab": ("vocab_size",),
}
"""Size -> what configurations call it."""


def axis_sizes(model: Any, axes: str, *, n_positions: int) -> tuple[int, ...]:
    """Return the size of each axis of a site after the axis of sequences, the smallest if layers differ."""
    sizes = dict.fromkeys(("position", "query", "key"), n_positions)
    sizes |= {"head": model.n_heads, "kv_head": model.n_kv_heads}
    sizes |= zip(("d_q_latent", "d_kv_latent"), model.d_latents, strict=True)
    names = axes.split()[1:]
    return tuple(sizes[name] if name in sizes else getattr(model, name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Sizes of a model, as read from the headers of its files. Hybrids, and models with latents, have none."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    """Neurons in one MLP; 0 where they are not told from the headers."""
    n_context: int | None
    """Longest input in tokens; None where the files do not say."""
    n_body: int
    """Numbers in the weights that each token is multiplied by before the unembedding."""
    n_vocab: int
    """Numbers in the embedding, and in the unembedding."""
    n_weights: int
    d_vocab: int
    has_tokenizer: bool
    architecture: str

    @property
    def family(self) -> Family:
        return family_of(self.architecture)

    def layers_with(self, site: str) -> tuple[int, ...]:
        return tuple(range(self.n_layers))

    @property
    def d_value(self) -> int:
        return self.d_head

    @property
    def d_latents(self) -> tuple[int, int]:
        return (0, 0)

    def has_differing_sizes(self, axes: str) -> bool:
        return False

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Return the size of the weights in type ``dtype``; ``auto`` and None count as float32."""
        return self.n_weights * _BYTES.get(dtype or "float32", _BYTES["float32"])


_OF_IMAGES = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.")


def read_folder_header(folder: Path) -> Header | None:
    """Read a model's sizes from config.json and the headers of its weight files; None if these do not suffice.

    They do not suffice for models with experts, hybrids and models with latent attention, nor for a folder that
    ``load`` would refuse.

    Raises:
        ModelError: the architecture is not known.
    """
    refuse_pipes_in(folder)
    try:
        config = parse_json((folder / "config.json").read_text("utf-8"))
        inner = config.get("text_config", config)
        found: dict[str, Any] = {
            name: next((inner[key] for key in keys if key in inner), None)
            for name, keys in _NAMES.items()
        }
        tensors: list[tuple[str, list[int]]] = []
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as weights:
                names = weights.offset_keys()
                tensors += [(name, weights.get_slice(name).get_shape()) for name in names]
        (named,) = config["architectures"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
    ):
        return None
    architecture = TEXT_PART.get(str(named), str(named))
    family = family_of(architecture)
    if named in TEXT_PART:
        tensors = [(name, shape) for name, shape in tensors if not _OF_IMAGES.search(name)]
    n_layers, n_heads, d_model, d_vocab = needed = [
        found[name] for name in ("n_layers", "n_heads", "d_model", "d_vocab")
    ]
    shapes = [shape for _, shape in tensors]
    unknown = not (family.experts is family.mixer is family.kv_latent is None) or family.own_sizes
    if unknown or not shapes or not all(type(one) is int and one > 0 for one in needed):
        return None
    n_weights, n_vocab = sum(map(math.prod, shapes)), d_vocab * d_model
    ends = sum(len(shape) == 2 and shape[0] == d_vocab for shape in shapes)
    assert family.down is not None  # of a model without experts
    down = "." + ".".join(part for part in (family.mlp, family.down, "weight") if part)
    widths = [shape for name, shape in tensors if name.endswith(down) and len(shape) == 2]
    return Header(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=1 if inner.get("multi_query") else found["n_kv_heads"] or n_heads,
        d_model=d_model,
        d_head=found["d_head"] or d_model // n_heads,
        d_mlp=widths[0][0 if family.transposed else 1] if widths else 0,
        n_context=found["n_context"],
        n_body=max(0, n_weights - ends * n_vocab),
        n_vocab=n_vocab,
        n_weights=n_weights,
        d_vocab=d_vocab,
        has_tokenizer=any((folder / name).is_file() for name in TOKENIZER_FILES),
        architecture=architecture,
    )
