"""Kinds of heads by their pattern: attention to the tokens that followed the same token before.

Padding is on the right, so a real query never sees it. Sigmoid attention is given as `attention.row_shares`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sink_lens.measures.reductions import mean_where, widen


def induction(
    pattern: Float[Tensor, "batch head query key"],
    *,
    tokens: Int[Tensor, "batch query"],
    valid: Bool[Tensor, "batch query"],
) -> Float[Tensor, "batch head"]:
    """Induction score of each head: attention to the tokens that followed earlier occurrences of the query's token.

    The mean over queries whose token occurred before, in [0, 1]; nan without any. Use random tokens in two copies.

    Args:
        pattern: attention weights.
        tokens: the token ids.
        valid: True at real tokens.

    Reference: Olsson et al., arXiv 2209.11895 (the prefix-matching score).
    """
    n = tokens.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril(-1)
    same = (tokens[:, :, None] == tokens[:, None]) & earlier & valid[:, :, None]
    followed = torch.zeros_like(same)
    followed[:, :, 1:] = same[:, :, :-1]
    attended = (widen(pattern) * followed[:, None]).sum(-1)
    return mean_where(attended, where=same.any(-1)[:, None].expand_as(attended), dim=-1)
