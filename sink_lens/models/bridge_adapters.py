"""Adapters by which TransformerLens builds a bridge, where its own would copy weights or lack a hook point."""

from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.generalized_components import RMSNormalizationBridge
from transformer_lens.model_bridge.supported_architectures import (
    BitNetArchitectureAdapter,
    BloomArchitectureAdapter,
    FalconArchitectureAdapter,
    NeoxArchitectureAdapter,
    PhiMoEArchitectureAdapter,
)


class FusedRowsLinear(nn.Module):
    """A linear layer whose weight is some rows of a fused projection, such as its rows for the keys.

    TransformerLens copies these parts, and a later change of the weights would never reach the bridge.
    """

    def __init__(self, fused: nn.Linear, *, rows: slice | Int[Tensor, " row"]) -> None:
        super().__init__()
        self.rows = rows
        self._fused = (fused,)  # in a tuple: it is a submodule of the attention, and only there

    @property
    def weight(self) -> Float[Tensor, "value d_model"]:
        return self._fused[0].weight[self.rows]

    @property
    def bias(self) -> Float[Tensor, " value"] | None:
        bias = self._fused[0].bias
        return None if bias is None else bias[self.rows]

    def forward(
        self, x: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "batch position value"]:
        return nn.functional.linear(x, self.weight, self.bias)


class _SharedInterleavedAdapter:
    """Mixin for adapters of a fused projection whose rows are query, key and value of each head in turn."""

    cfg: Any

    def split_qkv_matrix(self, original_attention_component: Any) -> Any:
        fused = original_attention_component.query_key_value
        numbers = torch.arange(fused.out_features, device=fused.weight.device)
        parts = rearrange(
            numbers, "(head part d_head) -> part (head d_head)", part=3, head=self.cfg.n_heads
        )
        return tuple(FusedRowsLinear(fused, rows=rows) for rows in parts)


class SharedNeoxAdapter(_SharedInterleavedAdapter, NeoxArchitectureAdapter):
    """The stock GPT-NeoX adapter; the parts of the fused projection are shared."""


class SharedBloomAdapter(_SharedInterleavedAdapter, BloomArchitectureAdapter):
    """The stock BLOOM adapter; the parts of the fused projection are shared."""


class HookedBitNetAdapter(BitNetArchitectureAdapter):
    """The stock BitNet adapter, with hooks around the norm of the aggregated values."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        norm = RMSNormalizationBridge(name="attn_sub_norm", config=self.cfg)
        self.component_mapping["blocks"].submodules["attn"].submodules["attn_sub_norm"] = norm  # type: ignore[index]


class SharedFalconAdapter(FalconArchitectureAdapter):
    """The stock Falcon adapter; the parts of the fused projection are shared."""

    def _split_falcon_qkv(self, original_attention_component: Any) -> Any:
        fused, d_head = original_attention_component.query_key_value, self.cfg.d_head
        ends = [0, *((self.cfg.n_heads + part) * d_head for part in range(3))]
        return tuple(FusedRowsLinear(fused, rows=slice(*pair)) for pair in pairwise(ends))


SHARED = (SharedNeoxAdapter, SharedBloomAdapter, SharedFalconAdapter)

_ADAPTERS = {
    "GPTNeoXForCausalLM": SharedNeoxAdapter,
    "FalconForCausalLM": SharedFalconAdapter,
    "BloomForCausalLM": SharedBloomAdapter,
    "BitNetForCausalLM": HookedBitNetAdapter,
    "PhimoeForCausalLM": PhiMoEArchitectureAdapter,
}
"""Architecture -> the adapter in place of TransformerLens's, which may know none by this name."""


def register_adapter(architecture: str) -> str:
    """Register this library's adapter for an architecture, if it has one; return the name that finds the adapter."""
    if architecture not in _ADAPTERS:
        return architecture
    name = f"SinkLens{architecture}"
    # a second call changes nothing
    ArchitectureAdapterFactory.register_adapter(name, _ADAPTERS[architecture])
    return name
