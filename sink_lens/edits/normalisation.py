"""Variance calibration and head-wise RMSNorm as edits, to measure their effect on sink and loss without training.

Both change the aggregated values z of a token before W_O. Calibration moves z towards a centre or away from it,
``z <- mu + factor (z - mu)`` (the claim is from arXiv 2602.05927; the formula is ours). Head-wise RMSNorm is
``z <- z / RMS(z) * gamma`` in each head (arXiv 2605.06611, which trains a model with it). A trained model expects z at
its usual size, which ``natural_rms`` measures.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.forward import resolve
from ..activations.record import Reading, stream
from ..activations.views import LayerView
from ..data.tokens import Prompts
from ..errors import InputError
from ..measures.reductions import widen
from ..models.load import ModelLike
from .constructors import At, Edit, EditError, edit

FIRST_POSITION = 8
"""First position at which the natural size is measured, behind a sink at the first positions."""


def variance_calibration(
    factor: float | Float[Tensor, " head"],
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    centre: Mapping[int, Float[Tensor, "head d_head"]] | None = None,
    label: str = "",
) -> Edit:
    """Make an edit that amplifies (factor above 1) or attenuates (below 1) aggregated values around a centre.

    The factor is one number, or one for each head of the model (also for heads that are not chosen). With a factor of 1
    the result is bit-identical. ``centre`` is layer -> mu for each head of the model; without it mu is 0, and the edit
    scales z. None means all positions or query heads; for ``layers``, those of the centre, or all without one.

    Raises:
        InputError: the factor is not finite or has no head axis, or a layer has no centre.

    Reference: arXiv 2602.05927 (variance calibration removes sinks; definition ours).
    """
    given = torch.as_tensor(factor, dtype=torch.float32)
    if given.dim() > 1 or not bool(given.isfinite().all()):
        raise InputError(f"the factor is {factor}; need a finite number, or one for each head")
    if centre is not None:
        layers = _layers_to_edit(centre, layers, what="centre")

    def change(z: Tensor, at: At) -> Tensor:
        pick = partial(_select_heads, d_value=z.shape[-1], at=at)
        by_head = given if given.dim() == 0 else pick(given[:, None], what="factor")
        mu = 0.0 if centre is None else pick(centre[at.layer], what="centre")
        return torch.where(by_head == 1, z, (mu + by_head * (widen(z) - mu)).to(z.dtype))

    spoken = f"{given.item():g}" if given.dim() == 0 else "a factor by head"
    return edit(
        "z_raw",
        change,
        reads="q",  # it has the heads of z
        label=label or f"calibration x {spoken}",
        layers=layers,
        positions=positions,
        heads=heads,
    )


def head_rms_norm(
    target: float | Mapping[int, Tensor],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    eps: float = 1e-6,
    label: str = "",
) -> Edit:
    """Make an edit that divides aggregated values by the head's root mean square, and multiplies them by ``target``.

    The target is the paper's gamma: one number, or layer -> a tensor [head], [d_head] or [head d_head] with all heads
    of the model. Without training, its value is a guess; ``natural_rms`` measures a good one. ``eps`` is added to the
    mean square. None means all positions or query heads; for ``layers``, those of the target, or all if it has none.

    Raises:
        InputError: the target is not finite, eps is below 0, or a layer has no target.

    Reference: arXiv 2605.06611 (z_hat = z / RMS(z) * gamma per head, after aggregation and before W_O).
    """
    if not eps >= 0:
        raise InputError(f"eps is {eps}; need 0 or a small positive number")
    if isinstance(target, Mapping):
        layers = _layers_to_edit(target, layers, what="target")
    elif not math.isfinite(target):
        raise InputError(f"the target is {target}; need a finite number, or layer -> tensor")

    def change(z: Tensor, at: At) -> Tensor:
        wide = widen(z)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if not isinstance(target, Mapping):
            return normed * target
        return normed * _select_heads(target[at.layer], d_value=z.shape[-1], at=at, what="target")

    spoken = "target by layer" if isinstance(target, Mapping) else f"target {target:g}"
    return edit(
        "z_raw",
        change,
        reads="q",  # it has the heads of z
        label=label or f"head RMSNorm, {spoken}",
        layers=layers,
        positions=positions,
        heads=heads,
    )


def natural_rms(
    model: ModelLike,
    tokens: Prompts,
    *,
    layers: Sequence[int] | None = None,
    first_position: int = FIRST_POSITION,
    progress: bool = True,
) -> dict[int, Float[Tensor, " head"]]:
    """Measure layer -> mean root mean square of each head's aggregated values over real tokens, a target for the norm.

    This takes one pass of the plain model. Tokens before ``first_position`` are left out: they average few values, or
    are the sink, and are larger than the others.

    Raises:
        InputError: there is no real token at ``first_position`` or later, or layers do not exist.
    """
    lens, batch = resolve(model, tokens)
    counted = batch.valid & (
        torch.arange(batch.n_positions, device=batch.valid.device) >= first_position
    )
    if first_position < 0 or not bool(counted.any()):
        raise InputError(
            f"no real token stands at position {first_position} or after it; need longer sequences: "
            f"found at most {int(batch.lengths.max())} tokens"
        )
    if layers is not None and not layers:
        raise InputError("no layers were given; need at least one to measure, or None for all")

    def sums(view: LayerView) -> Tensor:
        size = widen(view["z_raw"]).square().mean(-1).sqrt()
        here = view.valid & (torch.arange(size.shape[1], device=size.device) >= first_position)
        return torch.where(here[..., None], size, 0.0).sum(1)

    reading = Reading(
        name="rms",
        sites=("z_raw",),
        function=sums,
        layers=None if layers is None else frozenset(layers),
    )
    found = stream(lens, batch, [reading], progress=progress, label="natural size of z").values[
        "rms"
    ]
    return {
        layer: by_sequence.sum(0) / int(counted.sum())
        for layer, by_sequence in sorted(found.items())
    }


def _layers_to_edit(
    by_layer: Mapping[int, Tensor], layers: Sequence[int] | None, *, what: str
) -> Sequence[int]:
    if any(layer < 0 for layer in by_layer):
        raise InputError(
            f"the {what} is for layers {list(by_layer)}; need layers counted from 0 on"
        )
    if layers is None:
        return tuple(by_layer)
    if missing := sorted(set(layers) - set(by_layer)):
        raise InputError(f"there is no {what} for layers {missing}; need one tensor per layer")
    return layers


def _select_heads(given: Tensor, *, d_value: int, at: At, what: str) -> Tensor:
    assert at.read is not None  # reads="q"
    n_heads, d_head, shape = at.read.shape[2], d_value, tuple(given.shape)
    if shape == (n_heads,) and n_heads == d_head:
        raise EditError(
            f"the {what} of layer {at.layer} has {n_heads} numbers, and there are as many heads as dimensions of a "
            "head; need an axis of size 1 beside it: [head 1] or [1 d_head]"
        )
    if given.dim() == 1:
        given = given[:, None] if shape == (n_heads,) else given[None]
    if given.dim() != 2 or given.shape[0] not in (1, n_heads) or given.shape[1] not in (1, d_head):
        raise EditError(
            f"the {what} of layer {at.layer} has the shape {shape}; need the model's {n_heads} heads, its {d_head} "
            "dimensions of a head, or both, heads first"
        )
    heads = at.part.heads
    return widen(given if heads is None or given.shape[0] == 1 else given[list(heads)]).to(
        at.read.device
    )
