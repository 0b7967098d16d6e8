"""A cache that evicts: which keys each query still sees when only some tokens are kept for good.

When the cache is full, the oldest token that is not kept leaves it. Since a token's key and value are computed once,
from what it saw itself, a mask in every layer gives exactly what generating with such a cache gives.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ..data.given import laid_by_text
from ..errors import InputError
from .constructors import At, Edit, edit, kept_of_pass


def visible_keys(
    kept: Bool[Tensor, "batch position"], *, size: int
) -> Bool[Tensor, "batch query key"]:
    """Return a mask that is True at the keys that each query sees: itself and the earlier tokens still in the cache.

    Each sequence must have fewer ``kept`` tokens than ``size``, the query's own included.
    """
    length = kept.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    evicted = (torch.arange(length) + 1 - size).clamp(
        min=0
    )  # tokens that have left the cache, at each query
    rank = (~kept).long().cumsum(1) - (~kept).long()  # tokens that leave it before each token
    return causal & ((rank[:, None] >= evicted[:, None]) | kept[:, None])


def window(size: int, *, keep: int | Bool[Tensor, "batch position"] = 0, label: str = "") -> Edit:
    """Make an edit that attends as if a cache of ``size`` tokens evicted the oldest; positions stay as they are.

    The size counts the query's own token. ``keep`` are tokens that are never evicted: a number of first tokens, or a
    mask that lies as the run's tokens do, such as that of ``sink_mask``. The edit changes the scores after the model's
    own mask, so sliding windows and padding keep their effect.

    Raises:
        InputError: the cache is too small for the tokens that are kept.
    """
    least = keep if isinstance(keep, int) else int(keep.sum(1).max())
    if least < 0 or size <= least:
        raise InputError(
            f"a cache of {size} tokens cannot keep {least} of them; need a larger cache, or fewer kept"
        )

    def change(scores: Tensor, at: At) -> Tensor:
        numbers = torch.arange(at.valid.shape[1])[None]
        kept = numbers < keep if isinstance(keep, int) else kept_of_pass(keep, at).cpu()
        hidden = ~visible_keys(kept, size=size)[:, at.positions].to(scores.device)
        return scores.masked_fill(hidden[:, None], torch.finfo(scores.dtype).min)

    made = replace(edit("scores", change, label=label or f"window of {size}"), hides=True)
    if isinstance(keep, int):
        return made
    return replace(made, laid=lambda given: window(size, keep=laid_by_text(keep, given)).change)
