"""The steps of attention in which families differ, each written once, in the order of operations of Hugging Face.

Heads may share keys and values; scores may be capped by a tanh, or have slope times position of the key added (ALiBi);
weights are a softmax, with a learned sink logit in its denominator or without, or sigmoids.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def repeat_kv_heads(
    tensor: Float[Tensor, "batch kv_head key d_head"], *, n_heads: int
) -> Float[Tensor, "batch head key d_head"]:
    """Repeat each key-value head's keys or values for every query head that shares them."""
    groups = n_heads // tensor.shape[1]
    if groups == 1:
        return tensor
    return tensor[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def softcap_scores(
    scores: Float[Tensor, "... query key"], softcap: float | None
) -> Float[Tensor, "... query key"]:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def add_alibi(
    scores: Float[Tensor, "batch head query key"], slopes: Float[Tensor, " head"] | None
) -> Float[Tensor, "batch head query key"]:
    """Add ALiBi's bias to scores: each head's slope times the position of the key."""
    if slopes is None:
        return scores
    keys = torch.arange(scores.shape[-1], device=scores.device)
    return scores + (slopes[:, None, None] * keys).to(scores.dtype)


def append_alibi_dimension(
    query: Tensor, key: Tensor, *, slopes: Float[Tensor, " head"]
) -> tuple[Tensor, Tensor]:
    """Append to each query its head's slope and to each key its position: products then contain ALiBi's bias."""
    places = torch.arange(key.shape[2], device=key.device, dtype=key.dtype)[:, None].expand(
        *key.shape[:3], 1
    )
    turned = slopes.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    return torch.cat([query, turned], -1), torch.cat([key, places], -1)


def weights_from_scores(
    scores: Float[Tensor, "batch head query key"],
    *,
    sink: Tensor | None = None,
    sigmoid: bool = False,
) -> Float[Tensor, "batch head query key"]:
    """Compute attention weights in float32 from masked scores: by softmax, or by a ``sigmoid``.

    ``sink`` has logits, one for each head or for each query of each head; they take mass and belong to no key.
    """
    if sigmoid:
        return scores.float().sigmoid()
    if sink is None:
        return nn.functional.softmax(scores, dim=-1, dtype=torch.float32)
    column = sink if sink.dim() == 3 else sink[:, None].expand(scores.shape[:3])
    both = torch.cat([scores, column[..., None].to(scores.dtype)], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return nn.functional.softmax(both, dim=-1, dtype=torch.float32)[..., :-1]


def add_sink_logits(
    lse: Float[Tensor, "batch head query"], sink: Tensor | None
) -> Float[Tensor, "batch head query"]:
    """Return the log-sum-exp of each query's scores, whose own is ``lse``, and its sink logit."""
    if sink is None:
        return lse
    sink = sink.detach().float()
    return torch.logaddexp(lse, sink if sink.dim() == 3 else sink[:, None])
