"""Gradients: of the loss for each token's residual stream, and of a metric for a site, from one backward pass each."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric, evaluate
from ..edits.outcome import Outcome
from ..errors import InputError
from ..measures.attention import row_shares, sink_mass
from ..models.lens import LensModel
from ..models.packed import check_gradients_pass
from ..models.running import exclusive_use, prepare_pass
from ..models.sites import SITES, bridge_hook_name
from ..models.unembedding import next_token_losses
from .forward import mean_loss


def metric_gradients(
    lens: LensModel,
    batch: TokenBatch,
    *,
    metric: Metric,
    at: Mapping[tuple[str, int], Tensor],
    embedding: Float[Tensor, "batch position d_model"] | None = None,
) -> dict[tuple[str, int], Tensor]:
    """Compute (site, layer) -> gradient of a metric's sum over sequences with respect to the site's baseline tensor.

    It is that of a zero tensor which is added at the site, since later computations do not always use the tensor that a
    hook receives. All sequences are in one pass. ``at`` has any tensor of the site's shape; ``embedding`` is the stream
    before layer 0, if not the sequences' own.
    """
    check_gradients_pass(lens.plain)
    with exclusive_use(lens), torch.enable_grad():
        zeros = {
            key: torch.zeros_like(tensor, device=lens.device, requires_grad=True)
            for key, tensor in at.items()
        }
        hooks: list[Any] = [
            (_hook_name(lens, *key), lambda x, hook, zero=zero: x + zero.to(x.device))
            for key, zero in zeros.items()
        ]
        if embedding is not None:
            given = embedding.to(lens.device)
            hooks.insert(0, (_hook_name(lens, "resid_pre", 0), lambda x, hook: given))
        values = evaluate(metric, run_with_hooks(lens, batch, metric=metric, hooks=hooks))
        if not values.requires_grad:
            raise InputError(
                f"the metric {metric.name!r} has no gradient; need one made of the run's tensors by "
                "differentiable operations, without detach, item, argmax or counts. Use patch for this metric"
            )
        found = torch.autograd.grad(
            values[~values.isnan()].sum(), list(zeros.values()), allow_unused=True
        )
    return {
        key: torch.zeros_like(zero, device="cpu") if gradient is None else gradient.detach().cpu()
        for (key, zero), gradient in zip(zeros.items(), found, strict=True)
    }


def _hook_name(lens: LensModel, site: str, layer: int) -> str:
    return bridge_hook_name(SITES[site], family=lens.family, layer=layer)


def add_zero(
    x: Tensor, hook: object, *, into: dict[tuple[str, int], Tensor], key: tuple[str, int]
) -> Tensor:
    """Add a zero tensor, kept in ``into``, to a hook's tensor, so that it gets a gradient."""
    into[key] = torch.zeros_like(x, requires_grad=True)
    return x + into[key]


def keep_tensor(x: Tensor, hook: object, *, into: dict[Any, Tensor], key: Any) -> None:
    into[key] = x


def run_with_hooks(
    lens: LensModel,
    batch: TokenBatch,
    *,
    metric: Metric,
    hooks: list[Any],
    sequences: slice = slice(None),
) -> Outcome:
    """Run one pass of the bridge with ``hooks``; return an outcome with all that ``metric`` reads, and its gradients.

    ``sequences`` are those of the metric that are in the batch.
    """
    layers = metric.read_layers(lens.n_layers) or (lens.n_layers - 1,)
    valid = batch.valid.to(lens.device)
    mass: dict[int, Tensor] = {}
    state: dict[int, Tensor] = {}
    tensors: dict[tuple[str, int], Tensor] = {}

    def read_mass(x: Tensor, hook: object, *, layer: int) -> None:
        x = row_shares(x) if lens.family.sigmoid else x
        own, reach = valid.to(x.device), lens.reach(layer)
        found = [
            sink_mass(x[..., key].float(), key=key, valid=own, reach=reach)
            for key in metric.positions
        ]
        mass[layer] = torch.stack(found, dim=-1).cpu()

    def read_state(x: Tensor, hook: object, *, layer: int) -> None:
        at = list(metric.positions)
        ended = ~valid[:, at, None].to(x.device)
        state[layer] = x[:, at].float().masked_fill(ended, math.nan).cpu()

    def keep(x: Tensor, hook: object, *, key: tuple[str, int]) -> None:
        tensors[key] = x.cpu()

    reads: list[Any] = []
    for layer in layers:
        if layer in lens.attention_layers:
            reads.append((_hook_name(lens, "pattern", layer), partial(read_mass, layer=layer)))
        else:
            shape = (len(valid), lens.n_heads, len(metric.positions))
            mass[layer] = torch.full(shape, math.nan, dtype=torch.float32)
        reads.append((_hook_name(lens, "resid_post", layer), partial(read_state, layer=layer)))
    for site in metric.sites:
        having = lens.layers_with(site)
        chosen = [one for one in layers if one in having] if SITES[site].per_layer else [0]
        for layer in chosen:
            reads.append((_hook_name(lens, site, layer), partial(keep, key=(site, layer))))
    stop: dict[str, Any] = {} if metric.reads_past_layers else {"stop_at_layer": max(layers) + 1}
    with prepare_pass(lens):
        out = lens.bridge.run_with_hooks(
            batch.tokens.to(lens.device), fwd_hooks=hooks + reads, use_cache=False, **stop
        )
    return Outcome(
        positions=metric.positions,
        layers=layers,
        valid=batch.valid.cpu(),
        mass=torch.stack([mass[layer] for layer in layers]),
        state=torch.stack([state[layer] for layer in layers]),
        loss=mean_loss(next_token_losses(out, batch.tokens), batch).cpu() if metric.loss else None,
        logits=out.cpu() if metric.logits else None,
        tensors=tensors,
        sequences=sequences,
    )
