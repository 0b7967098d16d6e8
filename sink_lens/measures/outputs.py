"""Output of a head that attends to the sink: nothing (no-op), or the same vector everywhere (broadcast).

Norms after W_O are computed with the triangular factor of each head's W_O (d_head x d_head), so no tensor of size
positions x heads x d_model is built.
"""

import math

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from .heads import heads_per_kv_head
from .reductions import check_position, mean_where, widen


def value_norms(
    v: Float[Tensor, "batch position kv_head d_head"],
    *,
    factor: Float[Tensor, "head sample d_head"],
) -> Float[Tensor, "batch head position"]:
    """Norm of what each head writes to the stream for each position's value; ``factor`` is ``triangular_factor(W_O)``.

    Raises:
        InputError: the number of query heads is not a multiple of the number of key-value heads.
    """
    v = widen(v)
    group = heads_per_kv_head(factor.shape[0], n_kv_heads=v.shape[2])
    grouped = factor.to(v.dtype).unflatten(0, (-1, group))
    written = einsum(
        v, grouped, "batch key kv_head d, kv_head group e d -> batch key kv_head group e"
    )
    return torch.linalg.vector_norm(written, dim=-1).flatten(2).mT


def value_norm_ratio(
    norms: Float[Tensor, "batch head position"], *, valid: Bool[Tensor, "batch position"], key: int
) -> Float[Tensor, "batch head"]:
    """Norm of the sink's value after W_O (`value_norms`), over the mean of that norm at the other real positions.

    In [0, inf]. The paper calls at most 0.2 a no-op: attending to the sink then writes nearly nothing. nan if the key
    is padding or the only real position. Biases of W_O are left out.

    Raises:
        InputError: `key` is outside the sequence.

    Reference: arXiv 2606.08105.
    """
    check_position(key, n_positions=norms.shape[2])
    others = valid & (torch.arange(norms.shape[2], device=norms.device) != key)
    ratio = norms[..., key] / mean_where(norms, where=others[:, None], dim=-1)
    return ratio.masked_fill(~valid[:, key, None], math.nan)


def sink_head_label(ratio: float, *, is_sink: bool) -> str:
    """Label a sink head by its value-norm ratio.

    "no-op" up to 0.2, "broadcast" above it, "undecided" for nan; "" for a head without a sink.

    Reference: arXiv 2606.08105.
    """
    if not is_sink:
        return ""
    if math.isnan(ratio):
        return "undecided"
    return "no-op" if ratio <= 0.2 else "broadcast"


def triangular_factor(
    w_o: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "head sample d_head"]:
    """Return the triangular factor R of W_O^T = Q R, which gives norms cheaply: |x W_O| = |R x|."""
    return torch.linalg.qr(widen(w_o).mT, mode="r").R
