"""A Llama with optional sigmoid attention, gates or sink logits, and an optional norm of the heads' outputs.

The attention has two implementations that give the same numbers: ``eager``, which returns the pattern, and ``sdpa``.
Fused kernels do not support sigmoid attention, so both write it out. In the fused kernel, the sink logit is an extra
key whose value is zero: an extra coordinate, 1 in every query and 0 in every ordinary key, contains the logit in it.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
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
from ..attention import weights_from_scores
from ..private_apis import kernel_of, was_loaded
from .configuration import HeadNormConfig
from .norm import HeadNorm, z_rms_without_norm

_DRAWS = {"dummy_pass": 1, "first_token": 64}
"""``value_norm_init`` -> the number of random first tokens over which the first gain is averaged."""
_SEQUENCES, _LONGEST, _TOKENS = 64, 4096, 16_384
"""Random sequences on which ``matched`` is measured, and the most tokens of each, unless the configuration names a
number, and of all."""
_WITH_SINKS = ("sink_logit", "off_by_one")
"""Attentions with a logit in the denominator of the softmax that belongs to no key."""


class StreamWriter(nn.Linear):
    """A projection whose output is added to the residual stream; its initial weights are smaller."""


class HeadOutput(nn.Module):
    """Map aggregated values (``z_raw``) to the input of W_O: norm or scale, then gate."""

    def forward(
        self,
        z_raw: Float[Tensor, "batch position head d_head"],
        norm: HeadNorm | None,
        gate: Tensor | None,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "batch position value"]:
        """Norm, scale by sqrt(position + 1) or gate the aggregated values, and put the heads side by side.

        A gate has one number per element, or per head, at a token; its sigmoid is taken.
        """
        z = z_raw if norm is None else norm(z_raw)
        if positions is not None:
            # averaging t independent values divides their deviation by sqrt(t); the idea is from arXiv 2602.05927
            # (variance calibration), the formula is ours
            z = z * (positions + 1).to(torch.float32).sqrt().to(z.dtype)[..., None, None]
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
        self.o_proj = StreamWriter(
            n_heads * d_head, config.hidden_size, bias=bool(config.output_bias)
        )
        if self.gated:
            width = n_heads if config.attention == "gate_headwise" else n_heads * d_head
            self.head_gate = nn.Linear(config.hidden_size, width, bias=False)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(d_head, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(d_head, eps=config.rms_norm_eps)
        self.value_norm = None
        """The heads' norm; the Trainer of transformers does not decay names with ``_norm``."""
        if config.value_norm in ("shared", "per_head"):
            with_gains = n_heads if config.value_norm == "per_head" else None
            self.value_norm = HeadNorm(d_head, with_gains, eps=config.value_norm_eps)
        self.sinks = None
        if config.attention in _WITH_SINKS:
            self.sinks = nn.Parameter(
                torch.zeros(n_heads), requires_grad=config.attention == "sink_logit"
            )
        self.key_bias = (
            nn.Parameter(torch.zeros(n_heads, d_head)) if config.attention == "key_bias" else None
        )
        self.head_out = HeadOutput()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        positions = self.scaling_positions(position_ids)
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(by_head)
        sink = self.sinks if self.key_bias is None else self.key_bias_scores(query)
        key = self.k_proj(hidden_states).view(by_head)
        value = self.v_proj(hidden_states).view(by_head).transpose(1, 2)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(
            query.transpose(1, 2), key.transpose(1, 2), *position_embeddings
        )
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        extra: dict[str, Any] = {} if sink is None else {"s_aux": sink}
        if self.variant == "sigmoid":
            extra["weighting"] = "sigmoid"
        kernel = kernel_of(self.config)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager_attention_forward)
        if kernel == "sdpa" and sink is not None:
            attend = fused_sink_attention
        elif extra and kernel in ("eager", "sdpa"):
            attend = unfused_attention
        z_raw, pattern = attend(
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
        return self.o_proj(self.head_out(z_raw, self.value_norm, gate, positions)), pattern

    def key_bias_scores(
        self, query: Float[Tensor, "batch position head d_head"]
    ) -> Float[Tensor, "batch head position"] | None:
        if self.key_bias is None:
            return None
        return (query * self.key_bias).sum(-1).transpose(1, 2) * self.scaling

    def scaling_positions(self, position_ids: Tensor | None) -> Tensor | None:
        if self.config.value_norm != "position":
            return None
        if position_ids is None:
            raise InputError(
                "value_norm 'position' was given no position_ids; need each token's position, from 0 on"
            )
        return position_ids

    @torch.no_grad()
    def initialise_gain(self) -> None:
        """Initialise the gain of the heads' norm as ``value_norm_init`` says, unless it was loaded.

        ``matched`` depends on the layers before: ``initialise_gains`` sets it.
        """
        if self.value_norm is None or was_loaded(self.value_norm.gain):
            return
        if self.config.value_norm_init == "ones":
            self.value_norm.reset_parameters()
        elif self.config.value_norm_init in _DRAWS:
            draws = _DRAWS[self.config.value_norm_init]
            self.value_norm.draw_gain(self.v_proj.weight, self.v_proj.bias, draws=draws)


def unfused_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Float[Tensor, "..."] | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention with a sink logit, or sigmoid attention; return output [batch query head d_head] and weights.

    The sink logit (``s_aux``) takes mass and adds nothing, as in gpt_oss: one number per head, or one for each query of
    each head ("batch head query"). If it is None, weights are ``sigmoid(q.k scaling)``, and exactly 0 where masked. A
    mask is boolean (True is visible) or is added to the scores; None means causal.
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
    pattern = weights_from_scores(scores, sink=s_aux, sigmoid=s_aux is None).to(query.dtype)
    pattern = nn.functional.dropout(pattern, p=dropout, training=module.training)
    return torch.matmul(pattern, repeat_kv(value, groups)).transpose(1, 2).contiguous(), pattern


def fused_sink_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Float[Tensor, "..."],
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute softmax attention with a sink logit by SDPA; return the output [batch query head d_head], and None.

    The logit (``s_aux``, as in ``unfused_attention``) is an extra first key. Without a mask, an extra first query is
    added too, so that every query sees the extra key under the kernel's own causal mask. Heads are enlarged by one
    coordinate and then to a multiple of 8, as the CUDA kernels require.
    """
    n_query, d_head = query.shape[2:]
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    causal = attention_mask is None and n_query > 1
    if causal:  # a static cache may be longer than the input
        key, value = key[:, :, :n_query], value[:, :, :n_query]
    grown = 8 - d_head % 8
    by_query = (
        s_aux.dim() == 3
    )  # the logits are then the queries' extra coordinate, and 1 the key's
    logit = (s_aux / scaling).to(key.dtype)
    logit = logit[..., None] if by_query else logit.view(1, -1, 1, 1).expand(len(key), -1, 1, 1)
    one = torch.ones_like(logit[:, :, :1])
    sink = nn.functional.pad(one if by_query else logit, (d_head, grown - 1))
    key = torch.cat([sink, nn.functional.pad(key, (0, grown))], dim=2)
    value = nn.functional.pad(value, (0, grown, 1, 0))
    query = torch.cat([query, logit if by_query else one.expand(-1, -1, n_query, -1)], dim=-1)
    query = nn.functional.pad(query, (0, grown - 1, int(causal), 0))
    if attention_mask is not None:
        seen = torch.full_like(attention_mask[..., :1], attention_mask.dtype == torch.bool)
        attention_mask = torch.cat([seen, attention_mask], -1)
    z_raw = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
    )
    return z_raw[:, :, int(causal) :, :d_head].transpose(1, 2).contiguous(), None


class SingleScaleRMSNorm(LlamaRMSNorm):
    """An RMSNorm with one gain for all dimensions (SSNorm of arXiv 2506.19697), initially 1."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight = nn.Parameter(torch.ones(1))


class HeadNormDecoderLayer(LlamaDecoderLayer):
    """Llama's decoder layer with ``HeadNormAttention``."""

    def __init__(self, config: HeadNormConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = HeadNormAttention(config, layer_idx)
        self.mlp.down_proj = StreamWriter(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )
        if config.norm == "single_scale":
            size, eps = config.hidden_size, config.rms_norm_eps
            self.input_layernorm = SingleScaleRMSNorm(size, eps=eps)
            self.post_attention_layernorm = SingleScaleRMSNorm(size, eps=eps)


class HeadNormPreTrainedModel(LlamaPreTrainedModel):
    """Common base of ``HeadNormModel`` and ``HeadNormForCausalLM``."""

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
        """Initialise weights from N(0, initializer_range), and sink logits as 0.

        The standard deviation of projections that write to the stream is divided by sqrt(2 layers).
        """
        if isinstance(module, StreamWriter):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            initialization.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                initialization.zeros_(module.bias)
            return
        super()._init_weights(module)
        if isinstance(module, HeadNormAttention):
            for logits in (module.sinks, module.key_bias):
                if logits is not None:
                    initialization.zeros_(logits)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        begun = all(was_loaded(norm) for norm in self._norms())
        super().initialize_weights()
        if not begun:
            self.initialise_gains()

    @torch.no_grad()
    def initialise_gains(self) -> None:
        """Initialise the gains of the heads' norm as ``value_norm_init`` says, except those that were loaded.

        Gains of a model on the device ``meta`` stay as they are.
        """
        if self.config.value_norm_init != "matched":
            for one in self.modules():
                if isinstance(one, HeadNormAttention):
                    one.initialise_gain()
            return
        new = {norm for norm in self._norms() if not was_loaded(norm.gain)}
        if not new or any(parameter.is_meta for parameter in self.parameters()):
            return
        length = self.config.value_norm_length or min(self.config.max_position_embeddings, _LONGEST)
        shape = (max(1, min(_SEQUENCES, _TOKENS // length)), length)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
        batches = tokens.to(self.device).split(max(1, _LONGEST // length))
        for norm, sizes in z_rms_without_norm(self.base_model, batches, use_cache=False).items():
            if norm in new:
                norm.set_gain(sizes)

    @torch.no_grad()
    def mean_gains(self) -> list[float]:
        return [norm.gain.float().mean().item() for norm in self._norms()]

    def _norms(self) -> list[HeadNorm]:
        return [module for module in self.modules() if isinstance(module, HeadNorm)]


class HeadNormModel(HeadNormPreTrainedModel, LlamaModel):
    """Llama's stack of layers, with ``HeadNormDecoderLayer``."""

    def __init__(self, config: HeadNormConfig) -> None:
        super(LlamaModel, self).__init__(config)  # Llama's own would build and draw Llama's layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            HeadNormDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        norm = SingleScaleRMSNorm if config.norm == "single_scale" else LlamaRMSNorm
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class HeadNormForCausalLM(HeadNormPreTrainedModel, LlamaForCausalLM):
    """``HeadNormModel`` with an unembedding: the model to train, generate from and pass to ``sink_lens.load``."""

    def __init__(self, config: HeadNormConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = HeadNormModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
