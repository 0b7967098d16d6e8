"""A GPT-NeoX adapter that shares the query, key and value weights with the Hugging Face module.

GPT-NeoX stores them head by head in one matrix, so the query, key and value parts are not contiguous in memory.
TransformerLens copies the parts, and a later change of the weights (a training step, an edit) would never reach the
bridge. This adapter reads each part from the shared matrix in every forward pass.
"""

from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.supported_architectures import NeoxArchitectureAdapter

SHARED_NEOX = "SinkLensGPTNeoXForCausalLM"
"""The architecture name to pass to `build_bridge_from_module`."""


class PartOfFused(nn.Module):
    """A linear map whose weight is the query, key or value part of a shared projection."""

    def __init__(self, fused: nn.Linear, *, part: int, n_heads: int) -> None:
        """Part 0 is the query, 1 the key, 2 the value."""
        super().__init__()
        self.part, self.n_heads = part, n_heads
        self._fused = (fused,)  # in a tuple: it is a submodule of the attention already, and stays one only there

    @property
    def weight(self) -> Float[Tensor, "value d_model"]:
        """A copy of the part's current weights; gradients flow back to the shared projection."""
        return self._rows_of_part(self._fused[0].weight)

    @property
    def bias(self) -> Float[Tensor, " value"] | None:
        """A copy of the part's current bias; None if the projection has no bias."""
        bias = self._fused[0].bias
        return None if bias is None else self._rows_of_part(bias[:, None])[:, 0]

    def forward(self, x: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position value"]:
        """Project with this part; all heads are side by side in the output."""
        return nn.functional.linear(x, self.weight, self.bias)

    def _rows_of_part(self, tensor: Tensor) -> Tensor:
        """The part's rows of the fused tensor, which holds query, key and value of each head in turn."""
        by_part = rearrange(tensor, "(head part d_head) x -> part (head d_head) x", part=3, head=self.n_heads)
        return by_part[self.part]


class SharedNeoxAdapter(NeoxArchitectureAdapter):
    """The stock GPT-NeoX adapter, except that the parts of the fused projection are shared instead of copied."""

    def split_qkv_matrix(self, original_attention_component: Any) -> Any:
        """The three parts; TransformerLens puts its hooks around each."""
        fused = original_attention_component.query_key_value
        return tuple(PartOfFused(fused, part=part, n_heads=self.cfg.n_heads) for part in range(3))


def register() -> str:
    """Register the adapter with TransformerLens and return its name, `SHARED_NEOX`. Repeated calls change nothing."""
    ArchitectureAdapterFactory.register_adapter(SHARED_NEOX, SharedNeoxAdapter)
    return SHARED_NEOX
