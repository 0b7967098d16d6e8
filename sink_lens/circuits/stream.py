"""What each writer adds to the stream and what each reader makes of it, in closed form.

A head adds ``z_head @ W_O[head]``. A norm behind the attention's output (Gemma, OLMo 2) divides all heads by one number
and multiplies by its gain; with the number of the run itself, what the heads add sums exactly to what the attention
adds. A multiplier (Granite) is a gain alone. The same holds for the neurons of an MLP.

A reader takes the stream x at its place, norms it and projects it: ``q = W_q n(x) + b``. The gradient of a metric m
with respect to the stream as this reader alone sees it is therefore ``J(x)' W_q' dm/dq``, with the Jacobian of the norm

    J(x)' u = (c(g u) - x_hat mean(x_hat g u)) / s,   x_hat = c(x) / s,

where s is the root mean square of c(x), g the gain, and c subtracts the mean in a LayerNorm and does nothing in an
RMSNorm. So one backward pass that stops at q, k, v and the MLP's input gives the gradient of every reader, and neither
split inputs nor repeated key-value heads are needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from ..edits.constructors import Edit, freeze
from ..models.lens import LensModel
from ..models.sites import SITES, bridge_hook_name
from ..models.weights import (
    Norm,
    NormName,
    attention_weights,
    final_norm,
    mlp_weights,
    norm_weights,
)
from .graph import Graph

_TO_READERS = "batch position head d_head, head d_head d_model -> batch head position d_model"
HEADS = ("q", "k", "v", "g")
"""Kinds of readers in an attention, in the order of the graph's readers."""
Tensors = dict[tuple[str, int], Tensor]
"""(site, layer) -> tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWeights:
    """The weights of one layer that its nodes in the graph need."""

    attn_norm: Norm | None
    mlp_norm: Norm | None
    attn_after: Norm | None
    """The norm or multiplier behind the attention."""
    mlp_after: Norm | None
    by_head: Mapping[str, tuple[Float[Tensor, "head d_head d_model"], Float[Tensor, "head d_head"]]]
    """Kind of reader -> weight and bias; the gate has a width of its own."""
    w_o: Float[Tensor, "head d_head d_model"]
    b_o: Float[Tensor, " d_model"]
    w_gate: Float[Tensor, "neuron d_model"] | None
    w_up: Float[Tensor, "neuron d_model"] | None
    w_down: Float[Tensor, "d_model neuron"] | None
    """Gate, up and down are those of the neurons that are a node of their own; None without such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of all nodes."""

    layers: tuple[NodeWeights, ...]
    final_norm: Norm
    dtype: torch.dtype
    """Type of sums and gradients: the model's, float32 at least."""


def read_weights(lens: LensModel, graph: Graph) -> Weights:
    dtype = torch.promote_types(lens.dtype, torch.float32)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to(lens.device, dtype)

    def cast_norm(norm: Norm) -> Norm:
        return replace(norm, gain=norm.gain.to(dtype), bias=norm.bias.to(dtype))

    def read_norm(layer: int, which: NormName) -> Norm | None:
        found = norm_weights(lens, layer=layer, which=which)
        return None if found is None else cast_norm(found)

    layers = []
    for layer in range(graph.n_layers):
        attention = attention_weights(lens, layer=layer)
        by_head = {
            kind: (cast(getattr(attention, f"w_{kind}")), cast(getattr(attention, f"b_{kind}")))
            for kind in ("q", "k", "v")
        }
        if graph.gated:
            gate = lens.layer(layer).get_submodule(f"{lens.family.attention}.head_gate")
            assert isinstance(gate, nn.Linear)
            weight = cast(gate.weight).unflatten(0, (graph.n_heads, -1))
            by_head["g"] = weight, torch.zeros_like(weight[..., 0])
        w_gate = w_up = w_down = None
        if chosen := list(graph.neurons.get(layer, ())):
            mlp = mlp_weights(lens, layer=layer)
            w_gate = None if mlp.w_gate is None else cast(mlp.w_gate[chosen])
            w_up, w_down = cast(mlp.w_up[chosen]), cast(mlp.w_down[:, chosen])
        layers.append(
            NodeWeights(
                attn_norm=read_norm(layer, "attn_norm"),
                mlp_norm=read_norm(layer, "mlp_norm"),
                attn_after=read_norm(layer, "attn_post_norm"),
                mlp_after=read_norm(layer, "mlp_post_norm"),
                by_head=by_head,
                w_o=cast(attention.w_o),
                b_o=cast(attention.b_o),
                w_gate=w_gate,
                w_up=w_up,
                w_down=w_down,
            )
        )
    return Weights(layers=tuple(layers), final_norm=cast_norm(final_norm(lens)), dtype=dtype)


def hook_name_of(lens: LensModel, site: str, layer: int) -> str:
    """Return the bridge's hook point of a site; the site ``g`` is the gate of the heads' output."""
    if site == "g":
        return f"blocks.{layer}.attn.head_gate.hook_out"
    return bridge_hook_name(SITES[site], family=lens.family, layer=layer)


def apply_norm(
    x: Float[Tensor, "*batch d_model"], norm: Norm | None
) -> Float[Tensor, "*batch d_model"]:
    """Apply a norm, or a multiplier, to the stream ``x``; return ``x`` itself if the norm is None."""
    if norm is None:
        return x
    if not norm.divides:
        return x * norm.gain
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.gain + norm.bias


def mlp_read_edits(
    x: Float[Tensor, "batch position d_model"],
    change: Float[Tensor, "batch position d_model"],
    *,
    layer: int,
    norm: Norm | None,
    whole: bool,
    units: Sequence[int],
    projections: Mapping[
        str, tuple[Float[Tensor, "neuron d_model"], Float[Tensor, "batch position neuron"]]
    ],
    **where: Any,
) -> list[Edit]:
    """Make edits under which a layer's MLP (``whole``), or its neurons ``units`` alone, read ``x`` minus ``change``.

    If the MLP does, the ``units`` still read ``x``. ``projections``: gate and up -> rows of the units, and their values
    in the run. ``where`` has the positions of ``x`` and the edits' label.
    """
    read = apply_norm(x - change, norm)
    found = [freeze("mlp_in", {layer: read}, **where)] if whole else []
    shift = torch.zeros_like(read) if whole else read - apply_norm(x, norm)
    for site, (weight, values) in projections.items():
        moved = shift.to(weight.dtype) @ weight.T
        found.append(freeze(site, {layer: values.to(moved) + moved}, units=units, **where))
    return found


def gradient_before_norm(
    u: Float[Tensor, "batch reader position d_model"],
    x: Float[Tensor, "batch position d_model"],
    norm: Norm | None,
    *,
    held: bool = False,
) -> Float[Tensor, "batch reader position d_model"]:
    """Return the gradients of a norm's input ``x`` from those of its output, ``u``; None is no norm.

    With ``held``, the norm's divisor is a constant.
    """
    if norm is None:
        return u
    u = u * norm.gain
    if norm.centred:
        x, u = x - x.mean(-1, keepdim=True), u - u.mean(-1, keepdim=True)
    inverse = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    if held:
        return u * inverse[:, None]
    x_hat = (x * inverse)[:, None]
    return (u - x_hat * (u * x_hat).mean(-1, keepdim=True)) * inverse[:, None]


def reader_gradients(
    place: tuple[str, int],
    *,
    graph: Graph,
    weights: Weights,
    gradients: Tensors,
    x: Float[Tensor, "batch position d_model"],
    held: bool = False,
) -> Float[Tensor, "batch reader position d_model"]:
    """Return the metric's gradient with respect to the stream as each reader at one place reads it.

    ``place``: (attention, mlp or logits; layer). ``x``: the stream there. ``gradients``: those at ``reader_sites``.
    With ``held``, divisors of norms are constants.
    """
    name, layer = place
    if name == "logits":
        after, norm = gradients["final", layer][:, None], weights.final_norm
    elif name == "attention":
        own, parts = weights.layers[layer], []
        for kind, (weight, _) in own.by_head.items():
            given = gradients[kind, layer]
            given = given.unflatten(-1, (weight.shape[0], -1)) if given.dim() == 3 else given
            parts.append(einsum(given, weight, _TO_READERS))
        after, norm = torch.cat(parts, dim=1), own.attn_norm
    else:
        own, whole = weights.layers[layer], gradients["mlp_in", layer]
        after, norm = whole[:, None], own.mlp_norm
        if own.w_up is not None:
            chosen = list(graph.neurons[layer])
            of_neurons = gradients["up", layer][..., chosen] @ own.w_up
            if own.w_gate is not None:
                of_neurons = of_neurons + gradients["gate", layer][..., chosen] @ own.w_gate
            after = torch.stack([of_neurons, whole - of_neurons], dim=1)
    return gradient_before_norm(after, x, norm, held=held)


def reader_sites(place: tuple[str, int], graph: Graph) -> tuple[str, ...]:
    """Return the sites whose gradients ``reader_gradients`` needs at ``place``, such as ("mlp", 3)."""
    name, layer = place
    if name == "logits":
        return ("final",)
    if name == "attention":
        return HEADS if graph.gated else HEADS[:3]
    return ("mlp_in", "gate", "up") if layer in graph.neurons else ("mlp_in",)


def writer_sites(graph: Graph) -> list[tuple[str, int]]:
    found = [("resid_pre", 0)]
    for layer in range(graph.n_layers):
        found += [("z", layer), ("mlp_out", layer)]
        if layer in graph.neurons:
            found += [("neurons", layer), ("down_out", layer)]
    return found


def writer_outputs(
    tensors: Tensors, *, graph: Graph, weights: Weights
) -> Float[Tensor, "batch writer position d_model"]:
    """Compute what each writer adds to the stream from ``tensors`` at ``writer_sites``; 0 if a layer did not run."""
    first = tensors["resid_pre", 0].to(weights.dtype)
    batch, positions, width = first.shape
    found = first.new_zeros(batch, len(graph.writers), positions, width)
    found[:, 0] = first
    for layer in range(graph.n_layers):
        own = found[:, graph.writers_of_layer(layer)]
        fill_outputs(tensors, own, layer=layer, graph=graph, weights=weights)
    return found


def fill_outputs(
    tensors: Tensors,
    into: Float[Tensor, "batch writer position d_model"],
    *,
    layer: int,
    graph: Graph,
    weights: Weights,
) -> None:
    """Write the outputs of a layer's attention and MLP, as far as ``tensors`` has them, into ``into``."""
    own = weights.layers[layer]

    def read(site: str) -> Tensor:
        return tensors[site, layer].to(weights.dtype)

    if ("z", layer) in tensors:
        heads = einsum(read("z"), own.w_o, _TO_READERS)
        factor = post_norm_factor(heads.sum(1) + own.b_o, own.attn_after)
        into[:, : graph.n_heads] = heads * factor[:, None]
    if ("mlp_out", layer) in tensors:
        into[:, -1] = read("mlp_out")
        if own.w_down is not None:
            part = read("neurons")[..., list(graph.neurons[layer])] @ own.w_down.T
            part = part * post_norm_factor(read("down_out"), own.mlp_after)
            into[:, graph.n_heads] = part
            into[:, -1] -= part


def output_biases(graph: Graph, weights: Weights) -> Float[Tensor, "layer d_model"]:
    """Return the output bias of each layer's attention, which belongs to no head."""
    rows = []
    for own in weights.layers:
        after = own.attn_after
        # no family has a bias and a norm behind
        assert after is None or not after.divides or not bool(own.b_o.any())
        rows.append(own.b_o if after is None else own.b_o * after.gain)
    return torch.stack(rows)


def post_norm_factor(total: Float[Tensor, "batch position d_model"], after: Norm | None) -> Tensor:
    """Return the factor by which the norm ``after`` a sublayer multiplies its output ``total``; 1 if it is None."""
    if after is None:
        return total.new_ones(1, 1, 1)
    if not after.divides:
        return after.gain[None, None]
    assert not after.centred
    variance = total.to(after.gain.device).square().mean(-1, keepdim=True)
    return (variance + after.eps).rsqrt() * after.gain
