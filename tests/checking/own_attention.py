"""Attention functions of a user's own, with the signature of transformers' attention interface."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sink_lens import TokenBatch


def batch(seed: int = 0, *, n: int = 2, length: int = 19) -> TokenBatch:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch.from_tensor(torch.randint(3, 60, (n, length), generator=generator))


@contextlib.contextmanager
def use(
    model: Any, name: str, *, function: Callable[..., Any] | None = None, mask: Any = eager_mask
) -> Iterator[None]:
    """Within the block, the model runs an attention function, registered with its mask under ``name``."""
    functions = {name: function or FUNCTIONS.get(name, softmax1)}
    masks = {} if mask is None or name == "sdpa" else {name: mask}
    before = model.config._attn_implementation
    with (
        mock.patch.dict(AttentionInterface._global_mapping, functions),
        mock.patch.dict(AttentionMaskInterface._global_mapping, masks),
    ):
        model.set_attn_implementation(name)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def scores_of(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Masked scores, causal without a mask, of query heads that may share keys."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask


def of_pattern(pattern_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """The attention function whose pattern is ``pattern_of(scores, query)``."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **given):
        pattern = pattern_of(scores_of(query, key, attention_mask, scaling), query)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (pattern @ value).transpose(1, 2).contiguous(), None

    return attend


def _softmax1(scores: Tensor, query: Tensor) -> Tensor:
    """A softmax with a 1 in its denominator: no key has to be attended to."""
    return torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1).softmax(-1)[..., :-1]


softmax1 = of_pattern(_softmax1)
softmax1.__qualname__ = "softmax1"
PATTERNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax1": _softmax1,
    "sigmoid": lambda scores, query: scores.sigmoid() / 4,
    "relu": lambda scores, query: scores.clamp(min=0) / 8,
    "gated": lambda scores, query: scores.softmax(-1) * query.mean(-1, keepdim=True).sigmoid(),
}
FUNCTIONS = {name: of_pattern(one) for name, one in PATTERNS.items()} | {"softmax1": softmax1}
