"""The TransformerLens adapter of ``HeadNormForCausalLM``: Llama's adapter with the variants of the attention.

The variants change three steps of the stock attention: the softmax can become a sigmoid; the learned sink logits use
the name ``sinks``, which it knows from gpt_oss; and a norm or gate can come before W_O. In every variant the hook of
the scores carries the masked scores and that of the pattern the attention weights. The aggregated values before norm
and gate are at ``blocks.{layer}.attn.head_out.hook_in``, and after them at ``hook_z``.

After ``import sink_lens.models.headnorm.adapter``, ``TransformerBridge.boot_transformers("folder")`` opens a saved
model. The package's entry point does not suffice: TransformerLens reads it only after it has looked the architecture up
in ``SUPPORTED_ARCHITECTURES``, and transformers must know the configuration.
"""

from typing import Any

import torch
from torch import Tensor
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.generalized_components import (
    LinearBridge,
    PositionEmbeddingsAttentionBridge,
    RMSNormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures import LlamaArchitectureAdapter

from ...errors import InputError
from ..attention import weights_from_scores
from . import HeadNorm, HeadNormForCausalLM

HEAD_NORM = HeadNormForCausalLM.__name__
"""The architecture name to pass to `build_bridge_from_module`."""


class QueryBridge(LinearBridge):
    """The query projection; keeps its input (for the gate) and output (for the key bias)."""

    seen: Tensor | None = None
    given: Tensor | None = None

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = input
        self.given = super().forward(input, *args, **kwargs)
        return self.given


class HeadOutputBridge(GeneralizedComponent):
    """Hooks around ``HeadOutput``: before it are the aggregated values by heads, after it the input of W_O."""

    def forward(
        self,
        z_raw: Tensor,
        norm: HeadNorm | None,
        gate: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        assert self.original_component is not None
        return self.hook_out(self.original_component(self.hook_in(z_raw), norm, gate, positions))


class HeadNormAttentionBridge(PositionEmbeddingsAttentionBridge):
    """TransformerLens's attention, with the steps that the variants of ``HeadNormConfig`` change."""

    hook_aliases = {  # noqa: RUF012  # as TransformerLens declares it
        **PositionEmbeddingsAttentionBridge.hook_aliases,
        "hook_z_raw": "head_out.hook_in",
    }

    _positions: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._positions = self._attention.scaling_positions(kwargs.get("position_ids"))
        return super().forward(*args, **kwargs)

    def _masked_softmax(self, attn_scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._attention.variant == "sigmoid":
            return attn_scores.to(dtype).sigmoid()
        if self._attention.key_bias is not None:
            query, self.q.given = self.q.given, None
            logits = self._attention.key_bias_scores(
                query.unflatten(-1, (attn_scores.shape[1], -1))
            )
            return weights_from_scores(attn_scores, sink=logits)
        return super()._masked_softmax(attn_scores, dtype=dtype)

    def _pre_output_projection(self, attn_output: Tensor) -> Tensor:
        gate = None
        if self._attention.gated:
            seen, self.q.seen = self.q.seen, None
            if seen is None:
                raise InputError(
                    "use_split_qkv_input and use_attn_in split the gate's input; switch them off"
                )
            gate = self.head_gate(seen)
        z_raw = attn_output.unflatten(-1, (-1, self._attention.head_dim))
        positions, self._positions = self._positions, None
        return self.head_out(z_raw, self._attention.value_norm, gate, positions)

    @property
    def _attention(self) -> Any:
        return self.original_component


class HeadNormAdapter(LlamaArchitectureAdapter):
    """TransformerLens's adapter of ``HeadNormForCausalLM``; weights are never folded or centred."""

    _attention_bridge_cls = HeadNormAttentionBridge

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.supports_fold_ln = False
        self.supports_center_writing_weights = False

    def _build_attention_bridge(self) -> Any:
        head_out = HeadOutputBridge(name="head_out")
        head_out.mark_pos_dim(1)
        norms = {
            name: RMSNormalizationBridge(name=name, config=self.cfg, optional=True)
            for name in ("q_norm", "k_norm")
        }
        gate = LinearBridge(name="head_gate", optional=True)
        more = {"q": QueryBridge(name="q_proj"), "head_gate": gate, "head_out": head_out, **norms}
        return self._qkvo_attention_bridge(extra_submodules=more)


def register_head_norm_adapter() -> str:
    """Register the adapter with TransformerLens, unless an entry point already did; return its name."""
    ArchitectureAdapterFactory.discover_entry_points()  # first, since registering a name twice warns
    ArchitectureAdapterFactory.register_adapter(HEAD_NORM, HeadNormAdapter)
    return HEAD_NORM


SUPPORTED_ARCHITECTURES[HEAD_NORM] = HeadNormAdapter
