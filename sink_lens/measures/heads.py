"""Heads: how many query heads share a key-value head, and which heads are induction heads.

Padding is on the right, so a real query never sees it. Sigmoid attention is given as `attention.row_shares`.
"""

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from ..errors import InputError
from .reductions import mean_where, widen


def induction(
    pattern: Float[Tensor, "batch head query key"],
    *,
    tokens: Int[Tensor, "batch query"],
    valid: Bool[Tensor, "batch query"],
) -> Float[Tensor, "batch head"]:
    """Induction score of each head: attention to the tokens that followed earlier occurrences of the query's token.

    It is the mean over the queries whose token occurred before, in [0, 1]; nan if no token did. Use sequences of random
    tokens that are repeated once.

    Reference: Olsson et al., arXiv 2209.11895 (the prefix-matching score).
    """
    n = tokens.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril(-1)
    same = (tokens[:, :, None] == tokens[:, None]) & earlier & valid[:, :, None]
    followed = torch.zeros_like(same)
    followed[:, :, 1:] = same[:, :, :-1]
    attended = (widen(pattern) * followed[:, None]).sum(-1)
    return mean_where(attended, where=same.any(-1)[:, None].expand_as(attended), dim=-1)


def expand_kv(
    x: Num[Tensor, "batch kv_head ..."], *, n_heads: int
) -> Num[Tensor, "batch head ..."]:
    """Repeat each key-value head for the query heads that share it (axis 1): query head h reads head h // group.

    Raises:
        InputError: the number of query heads is not a multiple of the number of key-value heads.
    """
    return x.repeat_interleave(heads_per_kv_head(n_heads, n_kv_heads=x.shape[1]), dim=1)


def heads_per_kv_head(n_heads: int, *, n_kv_heads: int) -> int:
    """Number of query heads that share a key-value head.

    Raises:
        InputError: the number of query heads is not a multiple of the number of key-value heads.
    """
    if n_heads % n_kv_heads != 0:
        raise InputError(
            f"{n_heads} query heads over {n_kv_heads} key-value heads; need a multiple. "
            "Pass the tensors of one layer, heads unmerged."
        )
    return n_heads // n_kv_heads
