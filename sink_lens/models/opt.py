"""An OPT adapter whose attention edits take effect.

TransformerLens delegates OPT's attention to the Hugging Face module, which returns the pattern only after using it.
An edit of `scores` or `pattern` is therefore discarded with a warning, and the hook of the scores carries the pattern.
This adapter is the stock one with the attention rebuilt step by step (`PositionEmbeddingsAttentionBridge`, which skips
the rotation if the model has none), as in most other families. It is registered under its own name, so the stock
adapter does not change for other users.
"""

from typing import Any

from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.generalized_components import (
    LinearBridge,
    PositionEmbeddingsAttentionBridge,
)
from transformer_lens.model_bridge.supported_architectures import OptArchitectureAdapter

EDITABLE_OPT = "SinkLensOPTForCausalLM"
"""The architecture name to pass to `build_bridge_from_module`."""


class EditableOptAdapter(OptArchitectureAdapter):
    """The stock OPT adapter, with an attention whose steps can be hooked and edited.

    Hugging Face scales the query by `d_head ** -0.5` before the product; the bridge scales the scores after it. The
    two are equal up to rounding. The site `q` is the unscaled projection on both paths. A 4-D mask needs
    `position_ids` as well, as in Hugging Face, which otherwise derives OPT's positions from a 2-D mask. Attention
    dropout, which matters only in training, is not applied.
    """

    def __init__(self, cfg: Any) -> None:
        """Build the stock components and put the rebuilt attention in the blocks."""
        super().__init__(cfg)
        mapping = self.component_mapping
        assert mapping is not None  # set by the stock adapter's __init__
        mapping["blocks"].submodules["attn"] = PositionEmbeddingsAttentionBridge(
            name="self_attn",
            config=self.cfg,
            submodules={
                "q": LinearBridge(name="q_proj"),
                "k": LinearBridge(name="k_proj"),
                "v": LinearBridge(name="v_proj"),
                "o": LinearBridge(name="out_proj"),
            },
        )


def register() -> str:
    """Register the adapter with TransformerLens and return its name, `EDITABLE_OPT`. Repeated calls change nothing."""
    ArchitectureAdapterFactory.register_adapter(EDITABLE_OPT, EditableOptAdapter)
    return EDITABLE_OPT
