"""Routed experts whose neurons are a site: each expert's neurons, times the router's weight for the expert.

The experts of transformers keep their weights in one tensor and never show what stands before the down-projection. A
subclass here has a place for it, ``hook_neurons``: the neurons of every expert that a token is sent to, times the
router's weight. What the experts add to the stream is the sum over neurons of activation times column, as in a dense
MLP, so the site ``neurons`` of a mixture of experts means what it means elsewhere. Its axis ``d_mlp`` goes over all
experts, ``expert * size + neuron``; experts that a token is not sent to have 0 there. Where experts have a bias
(gpt-oss), it is one more neuron of each, whose activation is the router's weight.

Where layers differ (routed experts beside a shared one, or a dense MLP in some layers), the axis is that of the whole
MLP: the routed experts' neurons, then the shared expert's, each times its gate, or the dense MLP's; and units that are
always 0 up to the width of the widest layer. The place for them is on the MLP itself (``_Mixed``).

The tensor of all experts is made only while something reads or edits the site. The numbers of the model are those of
its own class, within rounding, at every token where no edit changed a neuron.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from .family import EXPERTS_HOOK as HOOK
from .family import Family
from .private_apis import gate_neurons, rebind_forward, register_hook_point


class _Shown:
    """Experts whose neurons can be read and edited; the base class comes behind it."""

    def forward(
        self,
        hidden_states: Float[Tensor, "position d_model"],
        top_k_index: Int[Tensor, "position sample"],
        top_k_weights: Float[Tensor, "position sample"],
    ) -> Float[Tensor, "position d_model"]:
        """Compute what experts add to the stream at each token; where an edit changed something, by neurons."""
        experts: Any = self
        out = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]  # of the base class
        point = getattr(experts, HOOK)
        if not (point._forward_hooks or point._forward_pre_hooks):
            return out
        weights = top_k_weights.new_zeros(len(hidden_states), experts.num_experts)
        weights = weights.scatter(1, top_k_index, top_k_weights)
        sent = torch.zeros_like(weights, dtype=torch.bool).scatter(1, top_k_index, value=True)
        whole = _expert_neurons(experts, hidden_states, weights=weights, sent=sent)
        batch = experts.__dict__.get("n_sequences", 1)
        edited = point(whole.flatten(1).unflatten(0, (batch, -1))).flatten(0, 1).unflatten(-1, whole.shape[1:])
        if edited.requires_grad:  # a gradient is asked for, with or without a change
            return _sum_neurons(experts, edited, sent=sent)
        changed = (edited != whole).any(-1).any(-1)
        if bool(changed.any()):  # the other tokens keep every bit
            out = out.clone()
            out[changed] = _sum_neurons(experts, edited[changed], sent=sent[changed])
        return out


def _expert_neurons(
    experts: Any, x: Tensor, *, weights: Tensor, sent: Tensor
) -> Float[Tensor, "position sample neuron"]:
    """Activations of every expert's neurons at every token, times the router's weight; 0 for tokens not sent there."""
    whole = x.new_zeros(*sent.shape, expert_width(experts))
    for expert in sent.any(0).nonzero().flatten().tolist():
        rows = sent[:, expert].nonzero().flatten()
        by = weights[rows, expert, None]
        neurons = gate_neurons(experts, _gate_and_up(experts, x[rows], expert)) * by
        if experts.has_bias:
            neurons = torch.cat([neurons, by], dim=-1)
        whole = whole.index_put((rows, torch.full_like(rows, expert)), neurons.to(x.dtype))
    return whole


def _sum_neurons(experts: Any, neurons: Tensor, *, sent: Tensor) -> Float[Tensor, "position d_model"]:
    """Output of the experts from their neurons, over experts that have a token or whose neurons an edit changed."""
    out = neurons.new_zeros(len(neurons), expert_columns(experts, 0).shape[0])
    used = sent | (neurons != 0).any(-1)
    for expert in used.any(0).nonzero().flatten().tolist():
        rows = used[:, expert].nonzero().flatten()
        out = out.index_add(0, rows, neurons[rows, expert] @ expert_columns(experts, expert).T)
    return out


def _gate_and_up(experts: Any, x: Tensor, expert: int) -> Tensor:
    """Gate and up-projection of one expert."""
    weight = experts.gate_up_proj[expert]
    projected = x @ (weight if experts.is_transposed else weight.T)
    return projected + experts.gate_up_proj_bias[expert] if experts.has_bias else projected


def expert_width(experts: Any) -> int:
    """Number of neurons of one expert; a bias of its down-projection counts as one more."""
    inner = experts.down_proj.shape[1 if experts.is_transposed else 2]
    return int(inner) + int(experts.has_bias)


def expert_columns(experts: Any, expert: int) -> Float[Tensor, "d_model neuron"]:
    """The down-projection of one expert, its bias as the last column."""
    weight = experts.down_proj[expert]
    columns = weight.T if experts.is_transposed else weight
    return torch.cat([columns, experts.down_proj_bias[expert][:, None]], dim=1) if experts.has_bias else columns


def expert_rows(experts: Any, expert: int) -> tuple[Float[Tensor, "neuron d_model"], Float[Tensor, "neuron d_model"]]:
    """Gate and up-projection of one expert, a row per neuron; the neuron that stands for a bias has a row of zeros."""
    weight = experts.gate_up_proj[expert]
    weight = weight.T if experts.is_transposed else weight
    gate, up = weight.chunk(2) if experts.is_concatenated else (weight[::2], weight[1::2])
    if experts.has_bias:
        gate, up = (torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (gate, up))
    return gate, up


def _is_shown(experts: Any) -> bool:
    """Check whether these are experts as transformers' models have them, with a gate and nothing behind their sum."""
    projections = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    tensors = all(isinstance(one, Tensor) and one.dim() == 3 for one in projections)
    return tensors and bool(getattr(experts, "has_gate", False)) and not experts.has_post_expert_norm


@functools.cache
def _showing_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an experts' class whose forward has a hook point for their neurons."""
    return type(f"Shown{kind.__name__}", (_Shown, kind), {"__module__": __name__})


def show_experts(model: nn.Module, *, family: Family) -> None:
    """Give a model's experts a hook point for their neurons; the modules stay the same objects."""
    if family.dense:
        _show_mixed(model, family)
        return
    for block in model.modules():
        experts: Any = getattr(block, "experts", None)
        if isinstance(experts, _Shown) or not _is_shown(experts):
            continue
        experts.__class__ = _showing_class(type(experts))
        rebind_forward(experts)
        experts.add_module(HOOK, HookPoint())
        block.register_forward_pre_hook(_keep_batch_shape)


def _keep_batch_shape(block: Any, args: tuple[Any, ...]) -> None:
    """Forward pre-hook that keeps the batch's shape, since experts are given tokens without their sequences."""
    block.experts.__dict__["n_sequences"] = args[0].shape[0]


class _Mixed:
    """An MLP in a mixture whose layers differ, with a place for all its neurons; the base class comes behind it."""

    def forward(self, hidden_states: Float[Tensor, "batch position d_model"], *args: Any, **kwargs: Any) -> Tensor:
        """Compute what the MLP adds to the stream at each token; where an edit changed something, by neurons."""
        block: Any = self
        point, given = getattr(block, HOOK), dict[str, Any]()
        if not (point._forward_hooks or point._forward_pre_hooks):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # of the base class
        parts = mlp_parts(block)
        with contextlib.ExitStack() as stack:
            for name, module in parts.items():
                if name == "gate":
                    handle = module.register_forward_hook(lambda _, __, out: given.update(gate=out))
                else:
                    module = module if name == "experts" else module.down
                    keep = lambda _, inputs, name=name: given.update({name: inputs})  # noqa: E731
                    handle = module.register_forward_pre_hook(keep)
                stack.callback(handle.remove)
            out = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]  # of the base class
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
        edited = point(whole.unflatten(0, hidden_states.shape[:-1])).flatten(0, -2)
        if edited.requires_grad:  # a gradient is asked for, with or without a change
            return _mixture_output(parts, edited, sent=sent).view_as(out)
        changed = (edited != whole).any(-1)
        if bool(changed.any()):  # the other tokens keep every bit
            found = out.flatten(0, -2).clone()
            new = _mixture_output(parts, edited[changed], sent=None if sent is None else sent[changed])
            found[changed] = new.to(found.dtype)
            out = found.view_as(out)
        return out


def _mixture_output(
    parts: Mapping[str, Any], neurons: Tensor, *, sent: Tensor | None
) -> Float[Tensor, "position d_model"]:
    """Output of an MLP from the neurons of all its parts: the routed experts' and then the dense part's."""
    out, start = 0.0, 0
    if sent is not None:
        experts = parts["experts"]
        start = experts.num_experts * expert_width(experts)
        out = _sum_neurons(experts, neurons[:, :start].unflatten(1, (experts.num_experts, -1)), sent=sent)
    if "dense" in parts:
        weight = parts["dense"].down.weight
        out = out + neurons[:, start : start + weight.shape[1]] @ weight.T
    assert isinstance(out, Tensor)  # there is a part
    return out


class Dense(NamedTuple):
    """Projections of a dense MLP, or of a shared expert."""

    gate: Any
    up: Any
    down: Any


def mlp_parts(block: Any) -> dict[str, Any]:
    """Modules of an MLP by name, as it has them: routed ``experts``, ``dense`` part, and ``gate`` of that part."""
    names = block.__dict__["names"]

    def bare(name: str, of: Any = block) -> Any:
        """A module without the bridge's components around it."""
        found = getattr(of, name, None)
        while isinstance(getattr(found, "original_component", None), nn.Module):
            found = found.original_component  # type: ignore[union-attr]  # a component
        return found

    experts = bare("experts")
    dense = block if experts is None else bare(names["shared"]) if names["shared"] else None
    found: dict[str, Any] = {} if experts is None else {"experts": experts}
    if dense is not None:
        found["dense"] = Dense(*(bare(name, dense) for name in names["dense"]))
    if experts is not None and names["gate"]:
        found["gate"] = bare(names["gate"])
    return found


def count_neurons(block: Any) -> int:
    """Number of neurons of an MLP, over all its experts and its dense part."""
    parts = mlp_parts(block)
    dense = parts["dense"].down.weight.shape[1] if "dense" in parts else 0
    return dense + (parts["experts"].num_experts * expert_width(parts["experts"]) if "experts" in parts else 0)


@functools.cache
def _mixed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an MLP's class whose forward has a hook point for the neurons of all its parts."""
    return type(f"Mixed{kind.__name__}", (_Mixed, kind), {"__module__": __name__})


def _show_mixed(model: nn.Module, family: Family) -> None:
    """Give every MLP a hook point for its neurons, in a mixture of experts whose layers differ."""
    layers = model.get_submodule(family.layers).children()
    blocks: list[Any] = [layer.get_submodule(str(family.mlp)) for layer in layers]
    names = {"shared": family.shared, "gate": family.shared_gate, "dense": family.dense}
    for block in blocks:
        block.__dict__["names"] = names
    width = max(map(count_neurons, blocks))
    for block in blocks:
        block.__dict__["width"] = width
        if not isinstance(block, _Mixed):
            block.__class__ = _mixed_class(type(block))
            rebind_forward(block)
            block.add_module(HOOK, HookPoint())


def hook_experts(bridge: TransformerBridge) -> None:
    """Name the hook points of experts in a bridge, so that the bridge finds them by name."""
    for layer, block in enumerate(bridge.blocks):
        original = getattr(getattr(block, "mlp", None), "original_component", None)
        point = getattr(original if isinstance(original, _Mixed) else getattr(original, "experts", None), HOOK, None)
        if point is not None:
            point.name = f"blocks.{layer}.mlp.{HOOK}"
            register_hook_point(bridge, point)
