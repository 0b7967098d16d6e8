"""The readings of the studied key: what makes it, and what advantage it has over the other keys."""

import math

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from ..activations.record import LayerView, Reading
from ..measures import locking
from ..measures.reductions import mean_where
from ..models.lens import LensModel
from ..models.weights import attention_weights, norm_weights
from .locate import Finding
from .readings import OTHERS_FROM, RANDOM_SETS, control_positions

KEY_COSINES = ("sink", "random_dimensions", "other_positions")
"""What ``key_cosine`` holds on its last axis."""
LOGIT_PARTS = ("dimension", "rest", "bias", "random_dimensions")
"""What ``logit_split`` holds on its last axis: the parts of the sink's logit, and a control."""
ADVANTAGES = ("sink", "other_positions")
"""What ``logit_advantage`` holds on its last axis."""


def key_readings(lens: LensModel, *, finding: Finding, generator: torch.Generator) -> list[Reading]:
    """How far the outlier dimensions make the studied key, and how far that key makes the logits.

    Read in every layer that outlier dimensions enter. The logits are split where the key is not turned: in
    models without rotary positions, and at position 0. A key's advantage is its logit over the mean
    logit of the other keys up to the query. Logits are those before a soft cap; sliding windows are not regarded.
    """
    key = finding.position
    layers = frozenset(layer for layer in range(lens.n_layers) if finding.entering(layer))

    def positive_share(view: LayerView) -> Tensor:
        places = finding.positions
        shares = [locking.positive_share(view["q"], k=view["k"][:, p], valid=view.valid, key=p) for p in places]
        return torch.stack(shares, dim=-1)

    readings = [Reading(name="positive_share", sites=("q", "k"), function=positive_share)]
    if not layers:
        return readings
    random_sets = {
        layer: [
            torch.randperm(lens.d_model, generator=generator)[: len(finding.entering(layer))]
            for _ in range(RANDOM_SETS)
        ]
        for layer in sorted(layers)
    }

    def part(x: Tensor, w_k: Tensor, dims: Tensor) -> Tensor:
        return einsum(x[..., dims].float(), w_k[..., dims].float(), "... dim, kv_head d_head dim -> ... kv_head d_head")

    def cosine(view: LayerView) -> Tensor:
        w_k = attention_weights(lens, layer=view.layer).w_k
        dims = torch.tensor(finding.entering(view.layer), device=w_k.device)
        x, k = view["attn_in"], view["k"].float()
        along = torch.cosine_similarity(k, part(x, w_k, dims), dim=-1).abs()
        other = view.valid.clone()
        other[:, :OTHERS_FROM] = False
        other[:, key] = False
        drawn = [
            torch.cosine_similarity(k[:, key], part(x[:, key], w_k, some.to(w_k.device)), dim=-1).abs()
            for some in random_sets[view.layer]
        ]
        return torch.stack(
            [along[:, key], torch.stack(drawn).mean(0), mean_where(along, where=other[..., None], dim=1)], dim=-1
        )

    def split(view: LayerView) -> Tensor:
        weights = attention_weights(lens, layer=view.layer)
        dims = torch.tensor(finding.entering(view.layer), device=weights.w_k.device)
        x, k = view["attn_in"][:, key], view["k"][:, key].float()
        dimension, bias = part(x, weights.w_k, dims), weights.b_k.float().expand_as(k)
        drawn = torch.stack([part(x, weights.w_k, some.to(k.device)) for some in random_sets[view.layer]]).mean(0)
        parts = torch.stack([dimension, k - dimension - bias, bias, drawn], dim=2) * _key_norm(lens, view.layer, k)
        # Where the rotary tables are stretched for long contexts (YaRN), even an unturned key is: by one number.
        as_used = view["rotated_k"][:, :, key].float().norm(dim=-1)
        parts = parts * (as_used / parts[:, :, :3].sum(2).norm(dim=-1))[..., None, None]
        query = view["rotated_q"].float()
        logits = locking.logit_split(query, parts=parts, scale=1.0)
        return mean_where(logits, where=_later(view, key)[:, None, :, None], dim=2)

    def advantage(view: LayerView) -> Tensor:
        query, keys = view["rotated_q"].float(), view["rotated_k"].float()
        n_keys = keys.shape[2]
        count = torch.arange(n_keys, device=keys.device).clamp(min=1)  # of the other keys that a later query sees
        seen = _logit(query, keys.cumsum(2))
        found = []
        for place in [key, *control_positions(n_keys, key=key)]:
            at_place = _logit(query, keys[:, :, place : place + 1])
            over = at_place - (seen - at_place) / count
            found.append(mean_where(over, where=_later(view, place)[:, None], dim=2))
        controls = torch.stack(found[1:]).nanmean(0) if len(found) > 1 else torch.full_like(found[0], math.nan)
        return torch.stack([found[0], controls], dim=-1)

    readings.append(Reading(name="key_cosine", sites=("attn_in", "k"), function=cosine, layers=layers))
    if key == 0 or not rotary(lens):
        sites = ("attn_in", "k", "rotated_q", "rotated_k")
        readings.append(Reading(name="logit_split", sites=sites, function=split, layers=layers))
    readings.append(
        Reading(name="logit_advantage", sites=("rotated_q", "rotated_k"), function=advantage, layers=layers)
    )
    return readings


def rotary(lens: LensModel) -> bool:
    """Whether keys are rotated by position."""
    return getattr(lens.config, "rope_parameters", None) is not None


def _key_norm(lens: LensModel, layer: int, k: Float[Tensor, "batch kv_head d_head"]) -> Tensor | float:
    """What a norm of the key multiplies each of its parts by; 1 where there is none."""
    norm = norm_weights(lens, layer=layer, which="k_norm")
    if norm is None:
        return 1.0
    if norm.gain.numel() == k.shape[-1]:
        return (norm.gain / norm.scale(k)[..., None])[:, :, None]
    width = k.flatten(1)
    return (norm.gain / norm.scale(width)[:, None]).unflatten(-1, k.shape[1:])[:, :, None]


def _logit(query: Float[Tensor, "batch head query d_head"], keys: Tensor) -> Float[Tensor, "batch head query"]:
    """Product of each query with the one key that stands at its place (or with the same for all)."""
    return (query.unflatten(1, (keys.shape[1], -1)) * keys[:, :, None]).sum(-1).flatten(1, 2)


def _later(view: LayerView, key: int) -> Bool[Tensor, "batch query"]:
    return view.valid & (torch.arange(view.valid.shape[1], device=view.valid.device) > key)
