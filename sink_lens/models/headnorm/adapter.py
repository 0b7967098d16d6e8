"""The TransformerLens adapter of ``HeadNormForCausalLM``: Llama's, with the attention's variants between its hooks.

The stock attention is computed step by step, and three of its seams are used: the softmax, which becomes a sigmoid;
the learned sink logits, which it knows from gpt_oss by the name ``sinks``; and what comes before W_O. The scores'
hook carries the masked scores, the pattern's hook the weights, whatever the variant. Values before the norm and the
gate are at ``blocks.{layer}.attn.head_out.hook_in``, those after them at ``hook_z``.
"""

from typing import Any

import torch
from torch import Tensor
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.generalized_components import (
    LinearBridge,
    PositionEmbeddingsAttentionBridge,
    RMSNormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures import LlamaArchitectureAdapter

from ...errors import InputError
from . import HeadNormForCausalLM

HEAD_NORM = HeadNormForCausalLM.__name__
"""The architecture name to give `build_bridge_from_module`."""


class QueryBridge(LinearBridge):
    """The query projection, which keeps its input until the gate has read it."""

    seen: Tensor | None = None

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the stock one."""
        self.seen = input
        return super().forward(input, *args, **kwargs)


class HeadOutputBridge(GeneralizedComponent):
    """Hooks around ``HeadOutput``: aggregated values by heads go in, the input of W_O comes out."""

    def forward(
        self, z_raw: Tensor, gamma: Tensor | None, gate: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """The norm or the scale, and the gate, between the hooks."""
        assert self.original_component is not None
        return self.hook_out(self.original_component(self.hook_in(z_raw), gamma, gate, positions))


class HeadNormAttentionBridge(PositionEmbeddingsAttentionBridge):
    """The stock step-by-step attention with the variants' steps."""

    hook_aliases = {  # noqa: RUF012  # as TransformerLens declares it
        **PositionEmbeddingsAttentionBridge.hook_aliases,
        "hook_z_raw": "head_out.hook_in",
    }

    _positions: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock one, with the positions kept until the heads' output is scaled by them."""
        self._positions = self._attention.counted(kwargs.get("position_ids"))
        return super().forward(*args, **kwargs)

    def _masked_softmax(self, attn_scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._attention.variant == "sigmoid":
            return attn_scores.to(dtype).sigmoid()
        return super()._masked_softmax(attn_scores, dtype=dtype)

    def _pre_output_projection(self, attn_output: Tensor) -> Tensor:
        gate = None
        if self._attention.gated:
            seen, self.q.seen = self.q.seen, None
            if seen is None:
                raise InputError("use_split_qkv_input and use_attn_in give the gate no single input; switch them off")
            gate = self.head_gate(seen)
        z_raw = attn_output.unflatten(-1, (-1, self._attention.head_dim))
        positions, self._positions = self._positions, None
        return self.head_out(z_raw, self._attention.gamma, gate, positions)

    @property
    def _attention(self) -> Any:
        return self.original_component


class HeadNormAdapter(LlamaArchitectureAdapter):
    """Llama's adapter with the attention above. Weights are not folded or centred: a norm or a gate lies between."""

    _attention_bridge_cls = HeadNormAttentionBridge

    def __init__(self, cfg: Any) -> None:
        """Build Llama's components with our attention."""
        super().__init__(cfg)
        self.supports_fold_ln = False
        self.supports_center_writing_weights = False

    def _build_attention_bridge(self) -> Any:
        head_out = HeadOutputBridge(name="head_out")
        head_out.mark_pos_dim(1)
        norms = {
            name: RMSNormalizationBridge(name=name, config=self.cfg, optional=True) for name in ("q_norm", "k_norm")
        }
        gate = LinearBridge(name="head_gate", optional=True)
        more = {"q": QueryBridge(name="q_proj"), "head_gate": gate, "head_out": head_out, **norms}
        return self._qkvo_attention_bridge(extra_submodules=more)


def register() -> str:
    """The name `HEAD_NORM`, under which the adapter is known to TransformerLens, installed as an entry point or not.

    Calling it again changes nothing.
    """
    ArchitectureAdapterFactory.discover_entry_points()  # first, since it warns of a name that is registered already
    ArchitectureAdapterFactory.register_adapter(HEAD_NORM, HeadNormAdapter)
    return HEAD_NORM
