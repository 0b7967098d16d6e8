"""The weights of one layer, in the same layout for all families, read from the plain model mostly without copies."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import SiteError
from ..modes import plain_mode
from .experts import expert_down_projection, expert_gate_and_up, mlp_submodules
from .families import FROM_LATENT, layer_of_keys
from .interfaced import watch_attention_inputs
from .lens import LensModel, check_layers_have_attention
from .offload import in_memory
from .packed import check_not_packed, weight_and_bias
from .running import check_unchanged
from .sites import Address, read_site

NormName = Literal["attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Projections of one layer's attention, split by heads, and their biases (zeros if there are none)."""

    w_q: Float[Tensor, "head d_head d_model"]
    w_k: Float[Tensor, "kv_head d_head d_model"]
    w_v: Float[Tensor, "kv_head d_value d_model"]
    w_o: Float[Tensor, "head d_value d_model"]
    """A head adds ``z_head @ w_o[head]`` to the attention's output."""
    b_q: Float[Tensor, "head d_head"]
    b_k: Float[Tensor, "kv_head d_head"]
    b_v: Float[Tensor, "kv_head d_value"]
    b_o: Float[Tensor, " d_model"]
    latent: "KeyValueLatent | None" = None
    """What is between in latent attention; ``w_q``, ``w_k`` and ``w_v`` are then products of two projections and the
    gain between, and at each token all but the rotary part is divided by the latent's norm."""

    @plain_mode()
    def keys(
        self,
        x: Float[Tensor, "*batch d_model"],
        *,
        dimensions: Sequence[int] | Tensor | None = None,
    ) -> Float[Tensor, "*value kv_head d_head"]:
        """Return each key-value head's keys, without bias, for inputs ``x`` of the attention.

        With ``dimensions``, keys are made from these dimensions of the input only. A tensor of them has a set in each
        row, and the keys get a first axis of sets. In latent attention the keys are those at position 0, where nothing
        is rotated, and the latent is divided by the RMS of the whole input's latent.
        """
        w_k, whole = self.w_k, x
        if dimensions is not None:
            chosen = torch.as_tensor(dimensions)
            x, w_k = x[..., chosen.to(x.device)], w_k[..., chosen.to(w_k.device)]
        w_k = w_k.to(x.device, x.dtype)
        if w_k.ndim == 4:
            found = einsum(
                x, w_k, "... set d_model, kv_head d_head set d_model -> set ... kv_head d_head"
            )
        else:
            found = einsum(x, w_k, "... d_model, kv_head d_head d_model -> ... kv_head d_head")
        if self.latent is None:
            return found
        divisor = self.latent.latent_rms(whole)[..., None, None].to(found.dtype)
        width = self.latent.width
        return torch.cat([found[..., :width] / divisor, found[..., width:]], dim=-1)

    @plain_mode()
    def values(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch kv_head d_value"]:
        """Return each key-value head's values, without bias."""
        w_v = self.w_v.to(x.device, x.dtype)
        found = einsum(x, w_v, "... d_model, kv_head d_value d_model -> ... kv_head d_value")
        if self.latent is None:
            return found
        return found / self.latent.latent_rms(x)[..., None, None].to(found.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueLatent:
    """The latent from which latent attention makes keys and values."""

    w_down: Float[Tensor, "d_kv_latent d_model"]
    eps: float
    width: int
    """Dimensions of a head's key that the latent makes; the others are rotated, and the same in all heads."""

    def latent_rms(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        found = x.float() @ self.w_down.to(x.device).float().T
        return (found.square().mean(-1) + self.eps).sqrt()


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """Projections of one layer's MLP."""

    w_gate: Float[Tensor, "neuron d_model"] | None
    w_up: Float[Tensor, "neuron d_model"]
    w_down: Float[Tensor, "d_model neuron"]
    b_down: Float[Tensor, " d_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An RMSNorm or LayerNorm: ``(x - mean * centred) / divisor * gain + bias``; or the gain alone."""

    gain: Float[Tensor, " value"]
    bias: Float[Tensor, " value"]
    eps: float
    centred: bool
    divides: bool = True
    """False where the model multiplies by a constant, as Granite does before it adds to the stream."""

    def divisor(self, x: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
        """Return what divides ``x``: its root mean square, in a LayerNorm its standard deviation, or 1."""
        x = x.float()
        if not self.divides:
            return torch.ones_like(x[..., 0])
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return (x.square().mean(-1) + self.eps).sqrt()


def output_weights(
    lens: LensModel, *, layer: int
) -> tuple[Float[Tensor, "head d_value d_model"], Float[Tensor, " d_model"]]:
    """Return W_O of a layer, split by heads, and its bias; also if the layer attends to another layer's keys."""
    check_unchanged(lens)
    check_layers_have_attention(lens, [layer], what="weights of an attention")
    return _output_weights(lens, layer)


def _output_weights(
    lens: LensModel, layer: int
) -> tuple[Float[Tensor, "head d_value d_model"], Float[Tensor, " d_model"]]:
    module = lens.layer(layer).get_submodule(lens.family.attention)
    weight, bias = weight_and_bias(module.get_submodule(lens.family.o), dtype=lens.dtype)
    n_heads = lens.head_sizes(layer)["n_heads"]
    return rearrange(weight, "d_model (head value) -> head value d_model", head=n_heads), bias


@plain_mode()
def attention_weights(lens: LensModel, *, layer: int) -> AttentionWeights:
    """Return the projections of one layer's attention, split by heads.

    Raises:
        SiteError: the layer has no attention, or attends to the keys of another layer (Gemma 4).
    """
    check_unchanged(lens)
    check_layers_have_attention(lens, [layer], what="weights of an attention")
    family, module = lens.family, lens.layer(layer).get_submodule(lens.family.attention)
    if family.kv_latent is not None:
        return _latent_weights(lens, module, layer=layer)
    sizes, paths = lens.head_sizes(layer), [family.q, family.k, family.v]
    if family.normed_qkv:
        source = layer_of_keys(lens.config, layer=layer)
        if source != layer:
            raise SiteError(
                f"layer {layer} of {lens.name} attends to the keys and values of layer {source}; ask for it"
            )
        both = "v_proj" if getattr(module, "v_proj", None) is not None else "k_proj"
        paths = ["q_proj", "k_proj", both]
    own = {path: weight_and_bias(module.get_submodule(path), dtype=lens.dtype) for path in {*paths}}

    def by_head(path: str, part: Literal["q", "k", "v"]) -> tuple[Tensor, Tensor]:
        weight, bias = own[path]  # read once where the three are one
        address = Address(module="", side="output", part=part)
        read = partial(read_site, address=address, family=family, batch=1, **sizes)
        w = rearrange(read(weight.T[None]), "1 d_model head d_head -> head d_head d_model")
        if family.gated_q or family.qkv_layout == "interleaved":  # else it is a view without gaps
            w = w.contiguous()
        return w, read(bias[None, None])[0, 0]

    w_q, b_q = by_head(paths[0], "q")
    w_k, b_k = by_head(paths[1], "k")
    w_v, b_v = by_head(paths[2], "v")
    w_o, b_o = _output_weights(lens, layer)
    return AttentionWeights(w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)


def _latent_weights(lens: LensModel, module: Any, *, layer: int) -> AttentionWeights:
    family, d_value = lens.family, lens.d_value
    of_latent, rotated = module.qk_nope_head_dim, module.qk_rope_head_dim

    def weight(name: str) -> Tensor:
        return weight_and_bias(module.get_submodule(name), dtype=lens.dtype)[0].float()

    def unrotated(
        rows: Float[Tensor, "*batch d_head d_model"],
    ) -> Float[Tensor, "*batch d_head d_model"]:
        """Rows of the rotary part in the order, and at the size, in which they enter the product at position 0."""
        if getattr(lens.config, "rope_interleave", False):
            rows = torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)
        rotary: Any = lens.plain.base_model.get_submodule("rotary_emb")
        return rows * rotary.attention_scaling

    norm = _read_norm(module.get_submodule(family.kv_latent), lens)
    w_down, w_rotary = weight(family.k).split([module.kv_lora_rank, rotated])
    up = weight(FROM_LATENT["kv_latent"]).unflatten(0, (lens.n_heads, -1)) * norm.gain
    w_k, w_v = (up @ w_down).split([of_latent, d_value], dim=1)
    w_k = torch.cat([w_k, unrotated(w_rotary).expand(lens.n_heads, -1, -1)], dim=1)
    w_q = weight(family.q)
    if family.q_latent is not None:
        gain = _read_norm(module.get_submodule(family.q_latent), lens).gain
        w_q = (weight(FROM_LATENT["q_latent"]) * gain) @ w_q
    passed, turned = w_q.unflatten(0, (lens.n_heads, -1)).split([of_latent, rotated], dim=1)
    w_o, b_o = _output_weights(lens, layer)
    return AttentionWeights(
        w_q=torch.cat([passed, unrotated(turned)], dim=1),
        w_k=w_k,
        w_v=w_v,
        w_o=w_o,
        b_q=w_k.new_zeros(w_k.shape[:2]),
        b_k=w_k.new_zeros(w_k.shape[:2]),
        b_v=w_v.new_zeros(w_v.shape[:2]),
        b_o=b_o,
        latent=KeyValueLatent(w_down=w_down, eps=norm.eps, width=of_latent),
    )


@plain_mode()
def keys_at_position(
    lens: LensModel, x: Float[Tensor, "batch d_model"], *, layer: int, position: int
) -> Float[Tensor, "batch kv_head d_head"]:
    """Return the keys that a layer makes of inputs ``x`` at one position: what the site ``k`` would be."""
    weights = attention_weights(lens, layer=layer)
    if weights.latent is None:
        found = weights.keys(x.to(weights.w_k.dtype)) + weights.b_k
        norm = norm_weights(lens, layer=layer, which="k_norm") if lens.family.normed_qkv else None
        if norm is None:
            return found
        return (found / norm.divisor(found)[..., None] * norm.gain).to(found.dtype)
    module: Any = lens.layer(layer).get_submodule(lens.family.attention)
    seen: dict[str, Tensor] = {}

    def see(name: str, tensor: Tensor) -> Tensor:
        seen[name] = tensor
        return tensor

    rotary: Any = lens.plain.base_model.get_submodule("rotary_emb")
    x = x.to(lens.device, lens.dtype)[:, None]
    with watch_attention_inputs(module, see), torch.no_grad():
        turned = rotary(x, torch.tensor([[position]], device=x.device))
        module(hidden_states=x, position_embeddings=turned, attention_mask=None)
    return seen["k"][:, :, 0]


def mlp_weights(lens: LensModel, *, layer: int) -> MlpWeights:
    """Return the projections of one layer's MLP; for experts, copies of all experts' weights side by side."""
    check_unchanged(lens)
    family = lens.family
    module = lens.layer(layer).get_submodule(family.mlp or "")
    if family.experts is not None:
        return _mixture_weights(module, width=lens.d_mlp)
    assert family.up is not None
    assert family.down is not None
    w_up, _ = weight_and_bias(module.get_submodule(family.up), dtype=lens.dtype)
    w_down, b_down = weight_and_bias(module.get_submodule(family.down), dtype=lens.dtype)
    w_gate = None
    if family.gate_up_fused:
        w_gate, w_up = w_up.chunk(2)
    elif family.gate is not None:
        w_gate, _ = weight_and_bias(module.get_submodule(family.gate), dtype=lens.dtype)
    return MlpWeights(w_gate=w_gate, w_up=w_up, w_down=w_down, b_down=b_down)


def _mixture_weights(mlp: Any, *, width: int) -> MlpWeights:
    """Return the projections of an MLP with experts, filled up with zeros to ``width`` neurons."""
    parts = mlp_submodules(mlp)
    found = list[tuple[Tensor, Tensor, Tensor]]()
    with contextlib.ExitStack() as loaded:
        for module in (parts.get("experts"), *parts.get("dense", ())):
            if module is not None:
                loaded.enter_context(in_memory(module))
        if "experts" in parts:
            experts = parts["experts"]
            check_not_packed(experts, "gate_up_proj")
            check_not_packed(experts, "down_proj")
            for expert in range(experts.num_experts):
                found.append(
                    (
                        *expert_gate_and_up(experts, expert),
                        expert_down_projection(experts, expert).T,
                    )
                )
        if "dense" in parts:
            of_gate, of_up, of_down = parts["dense"]
            found.append((of_gate.weight, of_up.weight, of_down.weight.T))
        rows = [torch.cat(some).detach() for some in zip(*found, strict=True)]
    missing = (0, 0, 0, width - len(rows[0]))
    w_gate, w_up, w_out = (torch.nn.functional.pad(one, missing) for one in rows)
    return MlpWeights(
        w_gate=w_gate, w_up=w_up, w_down=w_out.T, b_down=w_out.new_zeros(w_out.shape[1])
    )


def norm_weights(lens: LensModel, *, layer: int, which: NormName) -> Norm | None:
    family, width = lens.family_of_layer(layer), lens.d_model
    path: str | None = getattr(family, which)
    if which in ("q_norm", "k_norm"):
        path, width = family.qk_norm and f"{family.attention}.{path}", None
    by = {"attn_post_norm": family.attn_multiplier, "mlp_post_norm": family.mlp_multiplier}.get(
        which, 1.0
    )
    if by != 1:
        gain = torch.full((lens.d_model,), by, device=lens.device, dtype=torch.float32)
        return Norm(gain=gain, bias=torch.zeros_like(gain), eps=0.0, centred=False, divides=False)
    if path is None:
        return None
    norm = _read_norm(lens.layer(layer).get_submodule(path), lens, width=width)
    if which == "attn_norm" and family.attn_in_multiplier != 1:
        by = family.attn_in_multiplier
        return replace(norm, gain=norm.gain * by, bias=norm.bias * by)
    return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConstants:
    """Parts of one layer's attention that come from biases, the same at every position and for every token.

    The softmax cancels a constant of the keys, and one of the values is in every mean over positions, so neither is
    part of what a token brings.
    """

    read: Float[Tensor, " d_model"]
    """The bias of the norm before the attention, in what the attention reads."""
    k: Float[Tensor, "kv_head d_head"]
    v: Float[Tensor, "kv_head d_value"]
    z: Float[Tensor, "head d_value"] | None
    """In the aggregated values; None where weights need not sum to 1, or the values are normed or gated."""
    attn_out: Float[Tensor, " d_model"] | None
    """In what attention adds to the stream; None likewise, or where that is normed."""


@plain_mode()
def attention_constants(lens: LensModel, *, layer: int) -> AttentionConstants:
    (source,) = lens.key_layers([layer])
    family, weights = lens.family, attention_weights(lens, layer=source)
    norm = norm_weights(lens, layer=layer, which="attn_norm")
    read = weights.b_o.new_zeros(lens.d_model, dtype=torch.float32) if norm is None else norm.bias
    k, v = weights.b_k.float() + weights.keys(read), weights.b_v.float() + weights.values(read)
    z = attn_out = None
    no_mean = family.sigmoid or family.sink_logit
    if not (no_mean or family.gated_q or family.head_out or family.normed_qkv):
        z = v.repeat_interleave(lens.n_heads // lens.n_kv_heads, dim=0)
        if family.attn_post_norm is None:
            made = einsum(z, weights.w_o.float(), "head d_head, head d_head d_model -> d_model")
            attn_out = (weights.b_o.float() + made) * family.attn_multiplier
    return AttentionConstants(read=read, k=k, v=v, z=z, attn_out=attn_out)


def final_norm(lens: LensModel) -> Norm:
    return _read_norm(lens.plain.get_submodule(lens.family.final_norm), lens, width=lens.d_model)


def _read_norm(module: nn.Module, lens: LensModel, *, width: int | None = None) -> Norm:
    """Return gain, bias, eps and kind of a norm module.

    ``width`` is the number of entries that it norms. If it is None, the stored gain has as many; a module without a
    gain then norms heads.
    """
    check_unchanged(lens)
    with in_memory(module):
        weight: Any = getattr(module, "weight", None)
        bias = getattr(module, "bias", None)
    if weight is None:  # OLMo's and NanoChat's
        weight = torch.ones(width or lens.d_head, device=lens.device, dtype=torch.float32)
    gain = weight.detach().float() + lens.family.gain_offset
    if width is not None and gain.numel() == 1:  # one gain for all dimensions
        gain = gain.expand(width)
    named = (getattr(module, name, None) for name in ("eps", "variance_epsilon"))
    eps = next((one for one in named if one is not None), 1e-5)  # OLMo's norm has it in its code
    return Norm(
        gain=gain,
        bias=torch.zeros_like(gain) if bias is None else bias.detach().float(),
        eps=float(eps),
        centred=lens.family.centred_norm,
    )
