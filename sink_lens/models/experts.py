"""The neurons of a mixture of experts as a site: each expert's neurons, times the router's weight for the expert.

The experts of transformers keep their weights in one tensor and never show what stands before the down-projection. The
MLP gets a subclass here with a place for it, ``hook_neurons``. The MLP's output is the sum over neurons of activation
times column, as in a dense MLP. The site's axis ``d_mlp`` goes over all experts, ``expert * size + neuron``; experts
that a token is not sent to have 0 there. Where experts have a bias (gpt-oss), it is one more neuron of each, whose
activation is the router's weight.

Where layers differ (routed experts beside a shared one, or a dense MLP in some layers), the routed experts' neurons are
followed by the shared expert's, each times its gate, or the dense MLP's; and by units that are always 0 up to the width
of the widest layer.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from .family import EXPERTS_HOOK as HOOK
from .family import Family
from .offload import in_memory
from .private_apis import (
    gate_neurons,
    n_in_place_changes,
    rebind_forward,
    register_hook_point,
)


class _HookedMixture:
    def forward(
        self, hidden_states: Float[Tensor, "batch position d_model"], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the MLP's output; a token with an edited neuron has it from the edited neurons."""
        block: Any = self
        point, given = getattr(block, HOOK), dict[str, Any]()
        if not (point._forward_hooks or point._forward_pre_hooks):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # of the base class
        parts = mlp_submodules(block)
        with contextlib.ExitStack() as stack:
            for name, module in parts.items():
                if name == "gate":
                    handle = module.register_forward_hook(lambda _, __, out: given.update(gate=out))
                else:
                    module = module if name == "experts" else module.down
                    keep = lambda _, inputs, name=name: given.update({name: inputs})  # noqa: E731
                    handle = module.register_forward_pre_hook(keep)
                stack.callback(handle.remove)
            returned = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # of the base class
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        with contextlib.ExitStack() as stack:
            for name, module in parts.items():
                stack.enter_context(in_memory(module.down if name == "dense" else module))
            sent, some = None, []
            if "experts" in parts:
                experts = parts["experts"]
                x, index, by = given["experts"]
                weights = by.new_zeros(len(x), experts.num_experts).scatter(1, index, by)
                sent = torch.zeros_like(weights, dtype=torch.bool).scatter(1, index, value=True)
                some.append(_expert_neurons(experts, x, weights=weights, sent=sent).flatten(1))
            if "dense" in parts:
                (neurons,) = given["dense"]
                by = torch.sigmoid(given["gate"]).flatten(0, -2) if "gate" in parts else 1.0
                some.append(neurons.flatten(0, -2) * by)
            whole = torch.cat(some, dim=-1)
            whole = torch.nn.functional.pad(whole, (0, block.__dict__["width"] - whole.shape[-1]))
            version = n_in_place_changes(whole)
            edited = point(whole.unflatten(0, hidden_states.shape[:-1])).flatten(0, -2)
            changed = (edited != whole).any(-1) | (n_in_place_changes(whole) != version)
            if edited.requires_grad:  # a gradient is asked for, with or without a change
                out = _mixture_output(parts, edited, sent=sent).view_as(out)
            elif bool(changed.any()):  # the other tokens keep every bit
                found = out.flatten(0, -2).clone()
                new = _mixture_output(
                    parts, edited[changed], sent=None if sent is None else sent[changed]
                )
                found[changed] = new.to(found.dtype)
                out = found.view_as(out)
        return (out, *returned[1:]) if isinstance(returned, tuple) else out


def _expert_neurons(
    experts: Any, x: Tensor, *, weights: Tensor, sent: Tensor
) -> Float[Tensor, "position sample neuron"]:
    """Compute each expert's neurons for inputs ``x``, times the router's weights; 0 where a token is not sent."""
    whole = x.new_zeros(*sent.shape, expert_width(experts))
    for expert in sent.any(0).nonzero().flatten().tolist():
        rows = sent[:, expert].nonzero().flatten()
        by, weight = weights[rows, expert, None], experts.gate_up_proj[expert]
        projected = x[rows] @ (weight if experts.is_transposed else weight.T)
        if experts.has_bias:
            projected = projected + experts.gate_up_proj_bias[expert]
        neurons = gate_neurons(experts, projected) * by
        if experts.has_bias:
            neurons = torch.cat([neurons, by], dim=-1)
        whole = whole.index_put((rows, torch.full_like(rows, expert)), neurons.to(x.dtype))
    return whole


def _mixture_output(
    parts: Mapping[str, Any], neurons: Tensor, *, sent: Tensor | None
) -> Float[Tensor, "position d_model"]:
    """Compute an MLP's output from its ``neurons`` and its submodules.

    ``sent`` marks the experts that each token is sent to (None: no routed experts). Another expert adds to the output
    too if an edit made one of its neurons other than 0.
    """
    start, terms = 0, []
    if sent is not None:
        experts = parts["experts"]
        start = experts.num_experts * expert_width(experts)
        routed = neurons[:, :start].unflatten(1, (experts.num_experts, -1))
        out = neurons.new_zeros(len(neurons), expert_down_projection(experts, 0).shape[0])
        used = sent | (routed != 0).any(-1)
        for expert in used.any(0).nonzero().flatten().tolist():
            rows = used[:, expert].nonzero().flatten()
            w_down = expert_down_projection(experts, expert)
            out = out.index_add(0, rows, routed[rows, expert] @ w_down.T)
        terms.append(out)
    if "dense" in parts:
        weight = parts["dense"].down.weight
        terms.append(neurons[:, start : start + weight.shape[1]] @ weight.T)
    return functools.reduce(torch.add, terms)


def expert_width(experts: Any) -> int:
    """Return the number of neurons of one expert; a bias of its down-projection counts as one more."""
    inner = experts.down_proj.shape[1 if experts.is_transposed else 2]
    return int(inner) + int(experts.has_bias)


def expert_down_projection(experts: Any, expert: int) -> Float[Tensor, "d_model neuron"]:
    """Return the down-projection of one expert; if it has a bias, the bias is the last column."""
    weight = experts.down_proj[expert]
    columns = weight.T if experts.is_transposed else weight
    if not experts.has_bias:
        return columns
    return torch.cat([columns, experts.down_proj_bias[expert][:, None]], dim=1)


def expert_gate_and_up(
    experts: Any, expert: int
) -> tuple[Float[Tensor, "neuron d_model"], Float[Tensor, "neuron d_model"]]:
    """Return the gate and the up-projection of one expert; the neuron that stands for a bias has zeros."""
    weight = experts.gate_up_proj[expert]
    weight = weight.T if experts.is_transposed else weight
    gate, up = weight.chunk(2) if experts.is_concatenated else (weight[::2], weight[1::2])
    if experts.has_bias:
        gate, up = (torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (gate, up))
    return gate, up


class Dense(NamedTuple):
    """Projections of a dense MLP, or of a shared expert."""

    gate: Any
    up: Any
    down: Any


def mlp_submodules(mlp: Any) -> dict[str, Any]:
    """Return an MLP's submodules by name, without those that it lacks.

    ``experts`` holds the routed experts, ``dense`` the projections of the shared expert or of a dense MLP, and ``gate``
    the projection whose sigmoid multiplies the shared expert's output.
    """
    family: Family = mlp.__dict__["family"]
    experts = _unwrapped_module(mlp, "experts")
    dense, found = mlp, dict[str, Any]()
    if experts is not None:
        found["experts"] = experts
        dense = _unwrapped_module(mlp, family.shared) if family.shared else None
    if dense is not None:
        found["dense"] = Dense(*(_unwrapped_module(dense, name) for name in family.dense))
    if experts is not None and family.shared_gate:
        found["gate"] = _unwrapped_module(mlp, family.shared_gate)
    return found


def _unwrapped_module(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    while isinstance(getattr(found, "original_component", None), nn.Module):
        found = found.original_component  # type: ignore[union-attr]  # a component
    return found


@functools.cache
def _subclass_with_hook_point(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Mixture{kind.__name__}", (_HookedMixture, kind), {"__module__": __name__})


def add_expert_hook_points(model: nn.Module, *, family: Family) -> None:
    if family.experts is None:
        return
    layers = model.get_submodule(family.layers).children()  # components in a bridge's model
    blocks = [_unwrapped_module(layer, str(family.mlp)) for layer in layers]
    widths = []
    for block in blocks:
        block.__dict__["family"] = family
        parts = mlp_submodules(block)
        width = parts["dense"].down.weight.shape[1] if "dense" in parts else 0
        if "experts" in parts:
            width += parts["experts"].num_experts * expert_width(parts["experts"])
        widths.append(width)
    for block in blocks:
        block.__dict__["width"] = max(widths)
        if not isinstance(block, _HookedMixture):
            block.__class__ = _subclass_with_hook_point(type(block))
            rebind_forward(block)
            block.add_module(HOOK, HookPoint())


def register_expert_hook_points(bridge: TransformerBridge) -> None:
    for layer, block in enumerate(bridge.blocks):
        mixture = getattr(getattr(block, "mlp", None), "original_component", None)
        if isinstance(mixture, _HookedMixture):
            point = getattr(mixture, HOOK)
            point.name = f"blocks.{layer}.mlp.{HOOK}"
            register_hook_point(bridge, point)
