"""Gradients: of the loss for each token's residual stream, and of a metric for a site, from one backward pass each."""

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric, evaluate
from ..edits.outcome import Outcome
from ..errors import InputError
from ..measures.attention import row_shares, sink_mass
from ..models.delegation import delegated, hooked
from ..models.foreign import kernel_of
from ..models.interfaced import attention_as
from ..models.lens import LensModel
from ..models.running import running, turn
from ..models.sites import SITES, bridge_hook
from ..models.unembedding import logits_of
from ..progress import tqdm
from .forward import sequence_loss

_TOKENS_OF_LOGITS = 256
"""Number of tokens that are unembedded at once."""


def position_gradients(
    lens: LensModel, batch: TokenBatch, *, progress: bool = False
) -> Float[Tensor, "layer batch position"]:
    """Norm of the gradient of each sequence's mean next-token loss with respect to the stream after each layer.

    0 or more, in nats per unit of the stream; nan at padding. The gradient at a token has two sources: the token's own
    prediction, and all later tokens that read it. One forward and one backward pass, a sequence at a time; parameters
    get no gradient. A sequence of a single token has no loss, and is nan.

    Args:
        lens: the model; dropout is off during the pass.
        batch: the sequences.
        progress: show a progress bar.

    Reference: arXiv 2603.17771 (gradient sinks; the definition is ours).
    """
    found = torch.full((lens.n_layers, batch.n_sequences, batch.n_positions), math.nan, dtype=torch.float32)
    rows = tqdm(range(batch.n_sequences), desc="gradients", unit="seq", disable=not progress, leave=False)
    for row in rows:
        length = int(batch.lengths[row])
        if length < 2:
            continue
        for layer, gradient in enumerate(_gradients(lens, batch[row : row + 1].cut(length))):
            found[layer, row, :length] = gradient[0].float().norm(dim=-1).cpu()
    return found


def _gradients(lens: LensModel, one: TokenBatch) -> tuple[Tensor, ...]:
    """Return the gradient at the output of each layer, for one sequence without padding."""
    zeros: dict[tuple[str, int], Tensor] = {}
    added = [partial(zero_added, into=zeros, key=("resid_post", layer)) for layer in range(lens.n_layers)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(lens))
        if lens.why_measured_only is None:
            model = stack.enter_context(delegated(lens))
            points = [(_hook(lens, "resid_post", layer), function) for layer, function in enumerate(added)]
            stack.enter_context(hooked(lens, points))
            stack.enter_context(attention_as(model, kernel_of(lens.plain.config)))
        else:
            model = lens.plain
            for layer, function in zip(lens.layers, added, strict=True):
                stack.callback(layer.register_forward_hook(partial(_at_module, function=function)).remove)
        stack.enter_context(torch.enable_grad())
        tokens = one.tokens.to(lens.device)
        final = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        gradient = _loss_gradient(lens, final.detach(), tokens)
        return torch.autograd.grad(final, list(zeros.values()), grad_outputs=gradient)


def _at_module(module: nn.Module, args: object, output: Any, *, function: Callable[[Tensor, object], Tensor]) -> Any:
    """Apply a function of a hook point to a layer's output, which some layers give in a tuple."""
    return (function(output[0], None), *output[1:]) if isinstance(output, tuple) else function(output, None)


def _loss_gradient(lens: LensModel, final: Tensor, tokens: Tensor) -> Tensor:
    """Gradient of the mean loss with respect to the last norm's output, with the logits of a few tokens at a time."""
    gradient = torch.zeros_like(final)
    predicted = tokens.shape[1] - 1
    for places in torch.arange(predicted, device=final.device).split(_TOKENS_OF_LOGITS):
        states = final[:, places].requires_grad_()
        logits = logits_of(lens, states)
        targets = tokens[:, places + 1].to(logits.device)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / predicted
        gradient[:, places] = torch.autograd.grad(loss, states)[0]
    return gradient


def metric_gradients(
    lens: LensModel,
    batch: TokenBatch,
    *,
    metric: Metric,
    at: Mapping[tuple[str, int], Tensor],
    embedding: Float[Tensor, "batch position d_model"] | None = None,
) -> dict[tuple[str, int], Tensor]:
    """Gradient of a metric, summed over sequences, for the tensors of sites in a baseline run of the bridge.

    It is taken through a zero tensor that is added at the site, since the tensor that a hook receives is not always the
    one that later computations use.

    Args:
        lens: the model.
        batch: the sequences, all of which are in one pass.
        metric: what is derived.
        at: (site, layer) -> a tensor of the site's shape.
        embedding: the stream before layer 0; None is the sequences' own.

    Raises:
        InputError: the metric has no gradient.
    """
    with turn(lens), torch.enable_grad():
        zeros = {key: torch.zeros_like(tensor, device=lens.device, requires_grad=True) for key, tensor in at.items()}
        given = None if embedding is None else embedding.to(lens.device)
        hooks: list[Any] = [] if given is None else [(_hook(lens, "resid_pre", 0), lambda x, hook: given)]
        hooks += [(_hook(lens, *key), partial(_add, zero=zero)) for key, zero in zeros.items()]
        values = evaluate(metric, hooked_outcome(lens, batch, metric=metric, hooks=hooks))
        if not values.requires_grad:
            raise InputError(
                f"the metric {metric.name!r} has no gradient; need one made of the run's tensors by "
                "differentiable operations, without detach, item, argmax or counts. Use patch for this metric"
            )
        total = values[~values.isnan()].sum()
        found = torch.autograd.grad(total, list(zeros.values()), allow_unused=True)
    return {
        key: torch.zeros_like(zero, device="cpu") if gradient is None else gradient.detach().cpu()
        for (key, zero), gradient in zip(zeros.items(), found, strict=True)
    }


def _hook(lens: LensModel, site: str, layer: int) -> str:
    """The name of a site's hook point in a layer."""
    return bridge_hook(SITES[site], family=lens.family, layer=layer)


def _add(x: Tensor, hook: object, *, zero: Tensor) -> Tensor:
    """The tensor plus a zero whose gradient is taken."""
    return x + zero.to(x.device)


def zero_added(x: Tensor, hook: object, *, into: dict[tuple[str, int], Tensor], key: tuple[str, int]) -> Tensor:
    """Add a zero tensor whose gradient can be taken, and keep it under its key: a hook of the bridge."""
    into[key] = torch.zeros_like(x, requires_grad=True)
    return x + into[key]


def hooked_outcome(
    lens: LensModel, batch: TokenBatch, *, metric: Metric, hooks: list[Any], sequences: slice = slice(None)
) -> Outcome:
    """A run of the bridge with hooks of one's own, read as ``run_with`` does, with gradients where they are enabled.

    Args:
        lens: the model.
        batch: the sequences, all of which are in one pass.
        metric: what is read.
        hooks: pairs (hook name, function).
        sequences: indices of the batch's sequences among all those of the metric.
    """
    layers, valid = metric.over(lens.n_layers) or (lens.n_layers - 1,), batch.valid.to(lens.device)
    mass: dict[int, Tensor] = {}
    state: dict[int, Tensor] = {}
    tensors: dict[tuple[str, int], Tensor] = {}

    def read_mass(x: Tensor, hook: object, *, layer: int) -> None:
        """Read attention to the metric's positions."""
        x = row_shares(x) if lens.family.sigmoid else x
        at = {"valid": valid.to(x.device), "reach": lens.reach(layer)}
        found = [sink_mass(x[..., key].float(), key=key, **at) for key in metric.positions]
        mass[layer] = torch.stack(found, dim=-1).cpu()

    def read_state(x: Tensor, hook: object, *, layer: int) -> None:
        """Read the stream at the metric's positions."""
        state[layer] = x[:, list(metric.positions)].float().cpu()

    def keep(x: Tensor, hook: object, *, key: tuple[str, int]) -> None:
        """Keep a site's tensor."""
        tensors[key] = x.cpu()

    reads: list[Any] = []
    for layer in layers:
        if layer in lens.attention_layers:
            reads.append((_hook(lens, "pattern", layer), partial(read_mass, layer=layer)))
        else:
            mass[layer] = torch.full((len(valid), lens.n_heads, len(metric.positions)), math.nan, dtype=torch.float32)
        reads.append((_hook(lens, "resid_post", layer), partial(read_state, layer=layer)))
    for site in metric.sites:
        for key in (
            [(site, layer) for layer in layers if layer in lens.having(site)] if SITES[site].per_layer else [(site, 0)]
        ):
            reads.append((_hook(lens, *key), partial(keep, key=key)))
    stop: dict[str, Any] = {} if metric.whole else {"stop_at_layer": max(layers) + 1}
    with running(lens):
        out = lens.bridge.run_with_hooks(batch.tokens.to(lens.device), fwd_hooks=hooks + reads, use_cache=False, **stop)
    return Outcome(
        positions=metric.positions,
        layers=layers,
        valid=batch.valid.cpu(),
        mass=torch.stack([mass[layer] for layer in layers]),
        state=torch.stack([state[layer] for layer in layers]),
        loss=sequence_loss(out, batch).cpu() if metric.loss else None,
        logits=out.cpu() if metric.logits else None,
        tensors=tensors,
        sequences=sequences,
    )
