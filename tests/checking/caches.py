"""The cache of keys and values: transformers calls it ``cache`` from 5.24 on, and ``past_key_values`` before."""

import inspect
from typing import Any

from torch import Tensor
from transformers import LlamaForCausalLM

NAME = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def run(model: Any, ids: Tensor, cache: Any, **more: Any) -> tuple[Tensor, Any]:
    """Logits and cache of a forward that goes on with ``cache`` (None: a new one)."""
    out = model(input_ids=ids, use_cache=True, **{NAME: cache}, **more)
    return out.logits, getattr(out, NAME)
