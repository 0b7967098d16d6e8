"""Locking of queries on to the sink's key: alignment, sign, and the parts of the key's logit.

The norm turns a token with one dominant dimension c into nearly a basis vector. Its key is therefore nearly the column
W_K[:, c], and every query meets this same key (arXiv 2605.06611). All measures are before the rotary embedding unless
rotated tensors are passed.
"""

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from .heads import expand_kv
from .reductions import later_queries, mean_where, widen


def qk_alignment(
    w_q: Float[Tensor, "head d_head d_model"], *, w_k_column: Float[Tensor, "kv_head d_head"]
) -> Float[Tensor, " head"]:
    """|cosine| between the direction that a head's queries have most in common and the key of the dominant dimension.

    It is |<u_1, k / |k|>|, in [0, 1]; a random key gives about 1 / sqrt(d_head). nan for a key or a W_Q of zeros.

    Args:
        w_q: each head's query weights; u_1 is their first left singular vector, a direction of d_head.
        w_k_column: each key-value head's W_K column of the dominant dimension.

    Raises:
        InputError: the number of query heads is not a multiple of the number of key-value heads.

    Reference: arXiv 2605.06611.
    """
    keys = expand_kv(w_k_column.double()[None], n_heads=w_q.shape[0])[0]
    # The eigenvectors of W W^T are W's left singular vectors; float64 makes up for the squaring.
    wide = w_q.double()
    gram = wide @ wide.mT
    first = torch.linalg.eigh(gram).eigenvectors[..., -1]
    shared = einsum(first, keys, "head d_head, head d_head -> head")
    cosine = shared.abs() / torch.linalg.vector_norm(keys, dim=-1)
    empty = gram.diagonal(dim1=-2, dim2=-1).sum(-1) == 0
    return cosine.clamp(max=1).masked_fill(empty, torch.nan).to(widen(w_q).dtype)


def positive_share(
    q: Float[Tensor, "batch position head d_head"],
    *,
    k: Float[Tensor, "batch kv_head d_head"],
    valid: Bool[Tensor, "batch position"],
    key: int,
    reach: int | None = None,
) -> Float[Tensor, "batch head"]:
    """Share of queries whose product with the key vector of `key` is positive, among the later queries that see it.

    In [0, 1]: 1 if every product is positive, 1/2 by chance. nan if no real query follows. A query sees ``reach``
    positions, itself included, under a sliding window; None is all.

    Raises:
        InputError: `key` is outside the sequence, or the key-value heads do not divide the query heads evenly.

    Reference: arXiv 2605.06611.
    """
    later = later_queries(valid, key=key, reach=reach)
    q, keys = widen(q), expand_kv(widen(k), n_heads=q.shape[2])
    product = einsum(q, keys.to(q.dtype), "batch query head d, batch head d -> batch head query")
    return mean_where((product > 0).float(), where=later[:, None], dim=-1)


def logit_split(
    query: Float[Tensor, "batch head query d_head"],
    *,
    parts: Float[Tensor, "batch kv_head sample d_head"],
    scale: float,
) -> Float[Tensor, "batch head query sample"]:
    """Contribution of each part of a key to the attention logit: scale x (q . part).

    Summed over `sample`, the contributions of the parts (dominant dimension, rest, bias) give the logit of the whole
    key, before a soft cap. They have either sign. If keys go through a norm, pass parts that are already multiplied by
    the norm's scale.

    Args:
        query: queries, rotated if the parts are.
        parts: vectors that sum to the key, for each key-value head.
        scale: the factor by which the model multiplies q.k, usually 1 / sqrt(d_head).

    Raises:
        InputError: the number of query heads is not a multiple of the number of key-value heads.

    Reference: arXiv 2605.06611; the split is ours.
    """
    query, parts = widen(query), expand_kv(widen(parts), n_heads=query.shape[1])
    of_parts = "batch head query d, batch head sample d -> batch head query sample"
    return scale * einsum(query, parts.to(query.dtype), of_parts)
