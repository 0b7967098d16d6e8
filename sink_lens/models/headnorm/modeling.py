"""A Llama whose attention may be sigmoid or gated or have a sink logit, and whose heads' outputs may be normed.

Everything but the attention is Llama's own. The attention runs in two ways, which give the same numbers: ``eager``,
which has the pattern, and ``sdpa``. Fused kernels know no sigmoid attention, so that one is written out in both. The
sink logit runs in the fused kernel as one more key: a coordinate that is 1 in every query and 0 in every key holds
the logit in that key, whose value is zero.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import initialization
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)

from ...errors import InputError
from .configuration import HeadNormConfig

_DRAWS = 64
"""Random first tokens over which the beginning of gamma is averaged."""


def head_norm(z: Float[Tensor, "... d_head"], gamma: Tensor, *, eps: float) -> Float[Tensor, "... d_head"]:
    """``z / RMS(z) * gamma`` over the last axis, the root mean square in float32."""
    found: Tensor = _HeadNorm.apply(z, gamma, eps)
    return found


class _HeadNorm(torch.autograd.Function):
    """The norm with its gradient written out, which takes half the time of autograd's and keeps ``z`` alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, gamma: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = z.float()
        return gamma * (wide * _inverse_rms(wide, eps)).to(z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        z, gamma, ctx.eps = inputs
        ctx.save_for_backward(z, gamma)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        z, gamma = ctx.saved_tensors
        wide = z.float()
        inverse = _inverse_rms(wide, ctx.eps)
        normed = wide * inverse
        by_element = grad * normed
        along = (by_element * gamma).mean(-1, keepdim=True)
        to_z = torch.addcmul(grad * gamma, normed, along, value=-1) * inverse
        return to_z.to(z.dtype), by_element.sum_to_size(gamma.shape).to(gamma.dtype), None


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def calibrated(
    z: Float[Tensor, "batch position head d_head"], positions: Int[Tensor, "#batch position"]
) -> Float[Tensor, "batch position head d_head"]:
    """``z * sqrt(position + 1)``: the average of t independent values is ``sqrt(t)`` times narrower than one of them.

    The idea is that of arXiv 2602.05927 (variance calibration); the formula is ours.
    """
    return z * (positions + 1).to(torch.float32).sqrt().to(z.dtype)[..., None, None]


class StreamWriter(nn.Linear):
    """A projection whose output is added to the residual stream; its weights begin smaller."""


class HeadOutput(nn.Module):
    """From the aggregated values, ``z_raw``, to the input of W_O, ``z``: norm or scale, then gate. No weights."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(
        self,
        z_raw: Float[Tensor, "batch position head d_head"],
        gamma: Tensor | None,
        gate: Tensor | None,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "batch position value"]:
        """The heads side by side; the gate is [batch position], and a number an element or a head.

        With a gain they are normed, with positions scaled.
        """
        z = z_raw if gamma is None else head_norm(z_raw, gamma, eps=self.eps)
        if positions is not None:
            z = calibrated(z, positions)
        if gate is not None:
            z = z * gate.sigmoid().unflatten(-1, (z.shape[-2], -1))
        return z.flatten(-2)


class HeadNormAttention(LlamaAttention):
    """Llama's attention in the variants of ``HeadNormConfig``."""

    def __init__(self, config: HeadNormConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        n_heads, d_head = config.num_attention_heads, self.head_dim
        self.variant = config.attention
        self.gated = config.attention in ("gate_elementwise", "gate_headwise")
        self.o_proj = StreamWriter(n_heads * d_head, config.hidden_size, bias=bool(config.output_bias))
        if self.gated:
            width = n_heads if config.attention == "gate_headwise" else n_heads * d_head
            self.head_gate = nn.Linear(config.hidden_size, width, bias=False)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(d_head, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(d_head, eps=config.rms_norm_eps)
        shape = {"shared": (d_head,), "per_head": (n_heads, d_head)}.get(config.value_norm)
        self.value_norm = None if shape is None else nn.Parameter(torch.ones(shape))  # any Trainer spares what ends so
        self.sinks = nn.Parameter(torch.zeros(n_heads)) if config.attention == "sink_logit" else None
        self.head_out = HeadOutput(eps=config.value_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As Llama's, up to the aggregated values, which pass through ``head_out`` before W_O; no pattern from SDPA."""
        positions = self.counted(position_ids)
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(by_head)
        key = self.k_proj(hidden_states).view(by_head)
        value = self.v_proj(hidden_states).view(by_head).transpose(1, 2)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        extra: dict[str, Any] = {}
        if self.variant == "sigmoid":
            extra["weighting"] = "sigmoid"
        if self.sinks is not None:
            extra["s_aux"] = self.sinks
        z_raw, pattern = self._kernel()(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **extra,
            **kwargs,
        )
        gate = self.head_gate(hidden_states) if self.gated else None
        return self.o_proj(self.head_out(z_raw, self.gamma, gate, positions)), pattern

    @property
    def gamma(self) -> nn.Parameter | None:
        """The gain of the heads' norm, [d_head] or [head d_head]; None without a norm.

        As a parameter it is called ``value_norm``: the Trainer of transformers keeps names with ``_norm`` out of decay.
        """
        return self.value_norm

    def counted(self, position_ids: Tensor | None) -> Tensor | None:
        """The positions by which the heads' output is scaled; None where it is not.

        Raises:
            InputError: it is, and they were not given.
        """
        if self.config.value_norm != "position":
            return None
        if position_ids is None:
            raise InputError("value_norm 'position' was given no position_ids; need those of the tokens, from 0 on")
        return position_ids

    def _kernel(self) -> Callable[..., tuple[Tensor, Any]]:
        implementation = str(self.config._attn_implementation)
        if implementation in ("eager", "sdpa") and self.variant == "sigmoid":
            return sigmoid_attention
        if implementation in ("eager", "sdpa") and self.variant == "sink_logit":
            return sink_attention if implementation == "sdpa" else eager_sink_attention
        return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)

    @torch.no_grad()
    def first_token_size(self, *, draws: int = _DRAWS, biased: bool = False) -> Float[Tensor, " head"]:
        """Standard deviation over d_head of the first token's head output, mean over random inputs.

        The first token attends to itself alone, so the output of a head is its value. The inputs are standard normal
        numbers, drawn from torch's generator.

        Args:
            draws: random inputs; the released code of arXiv 2605.06611 takes one.
            biased: divide by d_head instead of d_head - 1, as that code does.
        """
        weight, bias = self.v_proj.weight, self.v_proj.bias
        inputs = torch.randn(draws, weight.shape[1], device=weight.device, dtype=torch.float32)
        values = nn.functional.linear(inputs, weight.float(), None if bias is None else bias.float())
        sizes = values.unflatten(-1, (-1, self.head_dim)).std(-1, correction=0 if biased else 1).mean(0)
        return sizes.repeat_interleave(self.num_key_value_groups)

    @torch.no_grad()
    def begin_gamma(self) -> None:
        """Give gamma the value that ``value_norm_init`` names; nothing where it was loaded."""
        if self.gamma is None or getattr(self.gamma, "_is_hf_initialized", False):
            return
        if self.config.value_norm_init == "ones":
            initialization.ones_(self.gamma)
            return
        is_theirs = self.config.value_norm_init == "dummy_pass"
        sizes = self.first_token_size(draws=1, biased=True) if is_theirs else self.first_token_size()
        sizes = sizes.mean() if self.gamma.ndim == 1 else sizes[:, None]
        initialization.copy_(self.gamma, sizes.to(self.gamma.dtype).expand_as(self.gamma))


def sigmoid_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Weights ``sigmoid(q.k scaling)``, exactly 0 where masked; output [batch query head d_head] and the weights.

    A mask is boolean (True is seen) or added to the scores; None is plainly causal, as in ``sdpa``.
    """
    groups = query.shape[1] // key.shape[1]
    scores = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)) * scaling
    if attention_mask is None and query.shape[2] > 1:
        size = query.shape[2], key.shape[2]
        attention_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    pattern = scores.float().sigmoid().to(query.dtype)
    pattern = nn.functional.dropout(pattern, p=dropout, training=module.training)
    return torch.matmul(pattern, repeat_kv(value, groups)).transpose(1, 2).contiguous(), pattern


def eager_sink_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Float[Tensor, " head"],
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax over the keys and one logit more, which takes mass and gives nothing; in the steps of gpt_oss."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
    scores = torch.cat([scores, sink], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    pattern = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :-1]
    pattern = nn.functional.dropout(pattern, p=dropout, training=module.training)
    return torch.matmul(pattern, repeat_kv(value, groups)).transpose(1, 2).contiguous(), pattern


def sink_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Float[Tensor, " head"],
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same in the fused kernel, with the logit as the first of the keys.

    Without a mask the queries get one in front too, so that the first key is seen by all under the kernel's own causal
    mask. Heads grow by the one coordinate, and to a multiple of 8, as the kernels of CUDA need it.
    """
    n_query, d_head = query.shape[2:]
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    causal = attention_mask is None and n_query > 1
    if causal:
        key, value = key[:, :, :n_query], value[:, :, :n_query]  # a static cache may be longer
    grown = 8 - d_head % 8
    logit = (s_aux / scaling).to(key.dtype).reshape(1, -1, 1, 1).expand(key.shape[0], -1, 1, 1)
    sink = nn.functional.pad(logit, (d_head, grown - 1))
    key = torch.cat([sink, nn.functional.pad(key, (0, grown))], dim=2)
    value = nn.functional.pad(value, (0, grown, 1, 0))
    query = nn.functional.pad(nn.functional.pad(query, (0, 1), value=1.0), (0, grown - 1, int(causal), 0))
    if attention_mask is not None:
        seen = torch.ones_like(attention_mask[..., :1])
        attention_mask = torch.cat([seen if seen.dtype == torch.bool else torch.zeros_like(seen), attention_mask], -1)
    z_raw = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return z_raw[:, :, int(causal) :, :d_head].transpose(1, 2).contiguous(), None


class HeadNormDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with the other attention."""

    def __init__(self, config: HeadNormConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = HeadNormAttention(config, layer_idx)
        self.mlp.down_proj = StreamWriter(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)


class HeadNormPreTrainedModel(LlamaPreTrainedModel):
    """What the model with and without a head share: kernels, recording, the first weights."""

    config_class = HeadNormConfig
    _no_split_modules = ["HeadNormDecoderLayer"]  # noqa: RUF012  # as transformers declares it
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": HeadNormDecoderLayer,
        "attentions": HeadNormAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range); what writes to the stream has it over sqrt(2 layers); sink logits are 0.

        The modules of a layer come before the layer's own, so that gamma finds W_V drawn.
        """
        if isinstance(module, StreamWriter):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            initialization.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                initialization.zeros_(module.bias)
            return
        super()._init_weights(module)
        if isinstance(module, HeadNormAttention):
            module.begin_gamma()
            if module.sinks is not None:
                initialization.zeros_(module.sinks)


class HeadNormModel(HeadNormPreTrainedModel, LlamaModel):
    """Llama's stack with the other layers."""

    def __init__(self, config: HeadNormConfig) -> None:
        super(LlamaModel, self).__init__(config)  # Llama's own would make, and draw, layers of its own
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(HeadNormDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class HeadNormForCausalLM(HeadNormPreTrainedModel, LlamaForCausalLM):
    """The language model, for ``AutoModelForCausalLM``, training, generation and ``sink_lens.load``."""

    def __init__(self, config: HeadNormConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = HeadNormModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
