"""Each family's tiny model, built once in a process for all files of tests that only look at it."""

import dataclasses
import functools

import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from sink_lens.models.lens import LensModel
from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.tiny_families import (
    BY_LAYER_FAMILIES,
    HYBRID_FAMILIES,
    LATENT_FAMILIES,
    MORE_FAMILIES,
    TINY_FAMILIES,
    tiny,
)

ALL_FAMILIES = (
    *TINY_FAMILIES,
    *MORE_FAMILIES,
    *BY_LAYER_FAMILIES,
    *LATENT_FAMILIES,
    *HYBRID_FAMILIES,
)
_AS_BUILT: dict[str, tuple[LensModel, dict[str, torch.Tensor], str]] = {}


def lens_of(family: str = "llama") -> LensModel:
    """The family's model. A test that changes weights builds one of its own."""
    if family not in _AS_BUILT:
        lens = wrap(tiny(family))
        weights = {name: tensor.clone() for name, tensor in lens.plain.state_dict().items()}
        _AS_BUILT[family] = lens, weights, kernel_of(lens)
    return _AS_BUILT[family][0]


@functools.cache
def speaking(family: str = "llama") -> LensModel:
    return dataclasses.replace(lens_of(family), tokenizer=tiny_tokenizer())


def tokens(sequences: int = 2, length: int = 24, *, seed: int = 1) -> torch.Tensor:
    """Random ids of ordinary tokens."""
    return torch.randint(
        3, VOCAB_SIZE, (sequences, length), generator=torch.Generator().manual_seed(seed)
    )


def stock_opt(kernel: str = "eager") -> LensModel:
    """OPT under the adapter of TransformerLens itself, which leaves attention to Hugging Face."""
    inner = tiny("opt", attn_implementation=kernel)
    return wrap(build_bridge_from_module(inner, "OPTForCausalLM", hf_config=inner.config))


def changed() -> list[str]:
    """The families whose model is no longer as it was built; they are built anew when next asked for."""
    found = []
    for family, (lens, before, kernel) in list(_AS_BUILT.items()):
        now = lens.plain.state_dict()
        same = kernel_of(lens) == kernel and all(
            torch.equal(now[name], tensor) for name, tensor in before.items()
        )
        if lens.plain.training or not same:
            found.append(family)
            del _AS_BUILT[family]
            speaking.cache_clear()
    return found


def kernel_of(lens: LensModel) -> str:
    return str(lens.plain.config._attn_implementation)
