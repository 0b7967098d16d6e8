"""An OPT adapter whose attention edits take effect.

TransformerLens delegates OPT's attention to the Hugging Face module, which returns the pattern only after it
has been used: an edit of `scores` or `pattern` is thrown away with a warning, and the hook of the scores
carries the pattern. This adapter is the stock one with the attention rebuilt step by step
(`PositionEmbeddingsAttentionBridge`, which skips the rotation where the model passes none), as on most other
families. It has a name of its own, so the stock adapter stays as it is for everybody else.
"""

from typing import Any

from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge.generalized_components import (
    LinearBridge,
    PositionEmbeddingsAttentionBridge,
)
from transformer_lens.model_bridge.supported_architectures import OptArchitectureAdapter

EDITABLE_OPT = "SinkLensOPTForCausalLM"
"""The architecture name to give `build_bridge_from_module`."""


class EditableOptAdapter(OptArchitectureAdapter):
    """The stock OPT adapter with attention that is computed between its hooks.

    Hugging Face multiplies the query by `d_head ** -0.5` before the product, the bridge the scores after it:
    equal up to rounding. The site `q` is the unscaled projection on both. A 4-D mask needs `position_ids`
    beside it, as in Hugging Face, which otherwise reads OPT's positions from a 2-D mask. Attention dropout, a
    training matter, is not applied.
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
    """The name `EDITABLE_OPT`, under which the adapter is known to TransformerLens from now on.

    Calling it again changes nothing.
    """
    ArchitectureAdapterFactory.register_adapter(EDITABLE_OPT, EditableOptAdapter)
    return EDITABLE_OPT
