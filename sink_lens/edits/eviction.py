"""A cache that evicts: which keys each query still sees when only some tokens are kept for good.

The cache holds a number of tokens. When it is full, the oldest token that is not kept leaves it. Since a token's key
and value are computed once, from what it saw itself, a mask in every layer gives exactly what generating with such a
cache gives, one token after the other.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import InputError
from .constructors import At, Edit, EditError, edit


def first_tokens(n: int, *, sequences: int, length: int) -> Bool[Tensor, "batch position"]:
    """The first n tokens of every sequence, as tokens to keep."""
    return (torch.arange(length) < n).expand(sequences, length)


def evictions(length: int, *, size: int) -> Int[Tensor, " query"]:
    """Number of tokens that a cache of ``size`` tokens, the query's own included, has evicted at each query."""
    return (torch.arange(length) + 1 - size).clamp(min=0)


def ranks(kept: Bool[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
    """Number of evictable tokens before each token, which is its place in the order of eviction."""
    return (~kept).long().cumsum(1) - (~kept).long()


def seen_keys(kept: Bool[Tensor, "batch position"], *, size: int) -> Bool[Tensor, "batch query key"]:
    """The keys that each query sees: itself and earlier tokens that are kept or not evicted yet.

    Args:
        kept: True at tokens that are never evicted.
        size: tokens in the cache, the query's own included.

    Raises:
        InputError: a sequence keeps as many tokens as the cache holds, or more.
    """
    most = int(kept.sum(1).max())
    if size <= most:
        raise InputError(f"a cache of {size} tokens cannot keep {most} of them; need a larger cache, or fewer kept")
    length = kept.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    still = ranks(kept)[:, None] >= evictions(length, size=size)[:, None]
    return causal & (still | kept[:, None])


def window(size: int, *, keep: int | Bool[Tensor, "batch position"] = 0, label: str = "") -> Edit:
    """Attend as with a cache of some tokens; each token keeps its position in the text.

    The edit changes the scores after the model's own mask, so sliding windows and padding keep their effect.

    Args:
        size: tokens in the cache, the query's own included.
        keep: tokens that are never evicted: the first so many, or True at each of them, one row for each sequence.
        label: name of the edit.

    Raises:
        InputError: the cache is too small for the tokens that are kept.
    """
    least = keep if isinstance(keep, int) else int(keep.sum(1).max())
    if least < 0 or size <= least:
        raise InputError(f"a cache of {size} tokens cannot keep {least} of them; need a larger cache, or fewer kept")

    def change(scores: Tensor, at: At) -> Tensor:
        """Mask the keys that a cache of this size has evicted."""
        length = at.valid.shape[1]
        if isinstance(keep, int):
            kept = first_tokens(keep, sequences=1, length=length)
        else:
            if keep.shape != (at.n_sequences, length):
                raise EditError(
                    f"the kept tokens have the shape {tuple(keep.shape)} and the run has {at.n_sequences} sequences of "
                    f"{length} tokens; need one row for each sequence"
                )
            kept = keep[at.sequences].cpu()
        hidden = ~seen_keys(kept, size=size)[:, at.positions].to(scores.device)
        return scores.masked_fill(hidden[:, None], torch.finfo(scores.dtype).min)

    return edit("scores", change, label=label or f"window of {size}")
