"""One row an architecture: where its parts lie in the Hugging Face module, and what its attention and norms do.

To add a family: add a row to ``FAMILIES``, a tiny random model to ``tiny.py``, and run the tests, which
compare every site of it on both paths.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and conventions of one decoder architecture. Paths are relative to the layer unless said otherwise."""

    architecture: str
    """Class name of the Hugging Face model."""
    layers: str = "model.layers"
    """Path of the decoder layers from the model."""
    final_norm: str = "model.norm"
    """Path of the norm before the unembedding, from the model."""
    attention: str = "self_attn"
    """The attention module; the next five are relative to it."""
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv_layout: Literal["separate", "contiguous", "interleaved"] = "separate"
    """Fused projections: q then k then v, or q, k, v head by head. Then q, k and v name the same module."""
    attn_norm: str | None = "input_layernorm"
    """The norm that the attention reads through; None where it reads the stream itself."""
    attn_post_norm: str | None = None
    """The norm that the attention's output goes through before it is added."""
    mlp: str | None = "mlp"
    """The MLP module; None where the layer holds the projections itself. The next three are relative to it."""
    gate: str | None = "gate_proj"
    """Gate projection; None where the MLP has no gate."""
    up: str | None = "up_proj"
    """Up projection, whose output is the pre-activation where there is no gate; None in a mixture of experts."""
    down: str | None = "down_proj"
    """Down-projection; None in a mixture of experts, whose experts' neurons cannot be hooked."""
    gate_up_fused: bool = False
    """Gate and up are the halves of one projection."""
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm that the MLP reads through; None where it reads the stream itself."""
    mlp_post_norm: str | None = None
    """The norm that the MLP's output goes through before it is added."""
    centred_norm: bool = False
    """LayerNorm (subtracts the mean) rather than RMSNorm."""
    gain_offset: float = 0.0
    """Added to the stored norm weight (Gemma stores gain - 1)."""
    transposed: bool = False
    """Projections are stored (in, out) as in GPT-2's Conv1D."""
    soft_capped: bool = False
    """Attention scores go through a tanh: no fused kernel is exact."""
    sink_logit: bool = False
    """Every head has a learned logit that takes mass and has no key: rows of the pattern sum to less than 1."""
    own_sdpa: bool = False
    """The class itself adds to SDPA what its attention has beyond a softmax."""
    sigmoid: bool = False
    """Weights are the sigmoid of the scores: there is no softmax, and rows of the pattern sum to anything."""
    head_out: str | None = None
    """In the attention: the module that takes the aggregated values by heads, and norms or gates them before W_O;
    None where W_O reads them as they are."""
    qk_norm: str | None = None
    """Query and key go through a norm after their projection: 'head' or 'width', or None."""
    rotates_in_float32: bool = False
    """Query and key are rotated in float32 and rounded afterwards, whatever the type of the weights."""
    same_products: bool = True
    """The bridge and the plain module multiply matrices of the same shapes in the same order, so that the same kernels
    give the same bits. Where it is False, as where one of them splits a fused projection, the two agree within the
    rounding of the type, and to the last bit on some instruction sets only."""
    bridge_architecture: str | None = None
    """Name under which the TransformerLens adapter is registered, where it is not the class name."""

    @property
    def fused_kernel(self) -> bool:
        """Whether a fused kernel computes this family's attention exactly."""
        return not (self.soft_capped or self.sigmoid)

    @property
    def plain_kernel(self) -> str:
        """The Hugging Face attention implementation that is exact for the family and fastest."""
        return "eager" if self.soft_capped or (self.sink_logit and not self.own_sdpa) else "sdpa"


_SANDWICH = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "gain_offset": 1.0,
}

_ROWS = (
    Family(architecture="LlamaForCausalLM"),
    Family(architecture="MistralForCausalLM"),
    Family(architecture="Qwen2ForCausalLM"),
    Family(architecture="Qwen3ForCausalLM", qk_norm="head"),
    Family(architecture="Gemma2ForCausalLM", soft_capped=True, **_SANDWICH),
    Family(architecture="Gemma3ForCausalLM", qk_norm="head", **_SANDWICH),
    Family(
        architecture="Phi3ForCausalLM",
        q="qkv_proj",
        k="qkv_proj",
        v="qkv_proj",
        qkv_layout="contiguous",
        gate="gate_up_proj",
        up="gate_up_proj",
        gate_up_fused=True,
        same_products=False,
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        attn_norm=None,
        attn_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
        qk_norm="width",
        rotates_in_float32=True,
    ),
    Family(
        architecture="GPT2LMHeadModel",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="attn",
        q="c_attn",
        k="c_attn",
        v="c_attn",
        o="c_proj",
        qkv_layout="contiguous",
        attn_norm="ln_1",
        gate=None,
        up="c_fc",
        down="c_proj",
        mlp_norm="ln_2",
        centred_norm=True,
        transposed=True,
        same_products=False,
    ),
    Family(
        architecture="GPTNeoXForCausalLM",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        q="query_key_value",
        k="query_key_value",
        v="query_key_value",
        o="dense",
        qkv_layout="interleaved",
        gate=None,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        centred_norm=True,
        bridge_architecture="SinkLensGPTNeoXForCausalLM",
    ),
    Family(
        architecture="OPTForCausalLM",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        o="out_proj",
        attn_norm="self_attn_layer_norm",
        mlp=None,
        gate=None,
        up="fc1",
        down="fc2",
        mlp_norm="final_layer_norm",
        centred_norm=True,
        bridge_architecture="SinkLensOPTForCausalLM",
        same_products=False,
    ),
    Family(architecture="GptOssForCausalLM", gate=None, up=None, down=None, sink_logit=True),
    Family(architecture="HeadNormForCausalLM", head_out="head_out", own_sdpa=True),
)

FAMILIES = {row.architecture: row for row in _ROWS}
"""Class name of the Hugging Face model -> its row."""


def family_of(architecture: str) -> Family:
    """The row of an architecture, by the class name of the Hugging Face model.

    Raises:
        ModelError: if there is no such row.
    """
    if architecture not in FAMILIES:
        raise ModelError(
            f"the architecture {architecture!r} is not known; need one of {', '.join(FAMILIES)}. "
            "To add it, add its row in sink_lens/models/families.py"
        )
    return FAMILIES[architecture]


def family_of_model(architecture: str, *, config: Any) -> Family:
    """The row of a model: of ``HeadNormForCausalLM``, with what its configuration chooses.

    Raises:
        ModelError: if there is no row of that architecture.
    """
    row = family_of(architecture)
    if row.head_out is None:
        return row
    return replace(
        row,
        sigmoid=config.attention == "sigmoid",
        sink_logit=config.attention == "sink_logit",
        qk_norm="head" if config.qk_norm else None,
    )


def reach_of(config: Any, *, layer: int) -> int | None:
    """How many positions a query of a layer sees, itself included; None where it sees all before it.

    A configuration with a window and no list of layer types has it in every layer (Mistral, Phi-3).
    """
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return int(window) if types is None or types[layer] == "sliding_attention" else None
