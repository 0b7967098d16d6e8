"""A table with one row per architecture: its module paths and conventions; also a layer's head sizes and window.

To add a family, add a row to ``FAMILIES`` and a tiny random model to ``tests/tiny_families.py``, then run the tests.

Two ways to compute the same number (the bridge and the plain module, shared and single forwards, a pass from a later
layer and a whole one) agree within rounding: 1e-5 of a row's norm in float32, eight times the rounding of a
half-precision type. ``engine.trust`` finds out whether they are equal to the last bit.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .family import Family

_SANDWICH = dict[str, Any](
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    gain_offset=1.0,
)
_POST_NORM = dict[str, Any](
    attn_norm=None,
    attn_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_GPT2 = dict[str, Any](
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
)
_ONE_PROJECTION = dict[str, Any](
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    o="dense",
    gate=None,
    up="dense_h_to_4h",
    down="dense_4h_to_h",
    centred_norm=True,
)
_WRITTEN_OUT = dict[str, Any](
    layers="transformer.h",
    final_norm="transformer.ln_f",
    centred_norm=True,
    own_attention=True,
    layer_values=1,
)
_BOTH_HALVES = dict[str, Any](gate="gate_up_proj", up="gate_up_proj", gate_up_fused=True)
_QWEN_HYBRID = dict[str, Any](
    mixer="linear_attn",
    gated_q=True,
    qk_norm="head",
    gain_offset=1.0,
)
_JAMBA = dict[str, Any](
    mixer="mamba",
    final_norm="model.final_layernorm",
    mlp="feed_forward",
    mlp_norm="pre_ff_layernorm",
)
_LFM2 = dict[str, Any](
    mixer="conv",
    final_norm="model.embedding_norm",
    o="out_proj",
    attn_norm="operator_norm",
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    mlp_norm="ffn_norm",
    qk_norm="head",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
)
_EXPERTS = dict[str, Any](gate=None, up=None, down=None, experts="experts")
_MIXED = dict[str, Any](_EXPERTS, dense=("gate_proj", "up_proj", "down_proj"))
_SHARED = dict[str, Any](_MIXED, shared="shared_expert", shared_gate="shared_expert_gate")
_LATENT = dict[str, Any](
    q="q_a_proj",
    k="kv_a_proj_with_mqa",
    v="kv_a_proj_with_mqa",
    q_latent="q_a_layernorm",
    kv_latent="kv_a_layernorm",
)
FROM_LATENT = {"q_latent": "q_b_proj", "kv_latent": "kv_b_proj"}
"""Latent -> the projection that reads it, from the attention."""

_ROWS = (
    Family("LlamaForCausalLM"),
    Family("MistralForCausalLM"),
    Family("Qwen2ForCausalLM"),
    Family("Qwen3ForCausalLM", qk_norm="head"),
    Family("Gemma2ForCausalLM", soft_capped=True, **_SANDWICH),
    Family("Gemma3ForCausalLM", qk_norm="head", **_SANDWICH),
    Family(
        "Phi3ForCausalLM",
        q="qkv_proj",
        k="qkv_proj",
        v="qkv_proj",
        qkv_layout="contiguous",
        **_BOTH_HALVES,
    ),
    Family("Olmo2ForCausalLM", **_POST_NORM, qk_norm="width", rotates_in_float32=True),
    Family("GPT2LMHeadModel", **_GPT2, transposed=True),
    Family(
        "GPTNeoXForCausalLM",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        **_ONE_PROJECTION,
        qkv_layout="interleaved",
    ),
    Family(
        "OPTForCausalLM",
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
    ),
    Family("GptOssForCausalLM", **_EXPERTS, sink_logit=True),
    Family("GemmaForCausalLM", gain_offset=1.0),
    Family("SmolLM3ForCausalLM"),
    Family("GraniteForCausalLM"),
    Family("OlmoForCausalLM", centred_norm=True),
    Family("Olmo3ForCausalLM", **_POST_NORM, qk_norm="width", rotates_in_float32=True),
    Family("Exaone4ForCausalLM", **_POST_NORM, qk_norm="head"),
    Family(
        "Glm4ForCausalLM",
        attn_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        **_BOTH_HALVES,
    ),
    Family("StableLmForCausalLM", centred_norm=True),
    Family("Starcoder2ForCausalLM", gate=None, up="c_fc", down="c_proj", centred_norm=True),
    Family("CohereForCausalLM", mlp_norm="input_layernorm", centred_norm=True),
    Family("Cohere2ForCausalLM", mlp_norm="input_layernorm", centred_norm=True),
    Family("GlmForCausalLM", **_BOTH_HALVES),
    Family("Ministral3ForCausalLM"),
    Family("SeedOssForCausalLM"),
    Family("Ernie4_5ForCausalLM"),
    Family("ArceeForCausalLM", gate=None),
    Family(
        "ApertusForCausalLM",
        attn_norm="attention_layernorm",
        gate=None,
        mlp_norm="feedforward_layernorm",
        qk_norm="head",
    ),
    Family(
        "HunYuanDenseV1ForCausalLM",
        qk_norm="head",
        q_norm="query_layernorm",
        k_norm="key_layernorm",
    ),
    Family("NemotronForCausalLM", gate=None, centred_norm=True, gain_offset=1.0),
    Family(
        "PhiForCausalLM",
        final_norm="model.final_layernorm",
        o="dense",
        gate=None,
        up="fc1",
        down="fc2",
        mlp_norm="input_layernorm",
        centred_norm=True,
    ),
    Family(
        "FalconForCausalLM",
        attention="self_attention",
        **_ONE_PROJECTION | _WRITTEN_OUT,
        qkv_layout="contiguous",
        mlp_norm="input_layernorm",
        own_sdpa=True,
    ),
    Family(
        "GPTJForCausalLM",
        attention="attn",
        o="out_proj",
        attn_norm="ln_1",
        gate=None,
        up="fc_in",
        down="fc_out",
        mlp_norm="ln_1",
        **_WRITTEN_OUT,
    ),
    Family(
        "GPTNeoForCausalLM",
        attention="attn.attention",
        o="out_proj",
        attn_norm="ln_1",
        gate=None,
        up="c_fc",
        down="c_proj",
        mlp_norm="ln_2",
        **_WRITTEN_OUT,
    ),
    Family(
        "BloomForCausalLM",
        attention="self_attention",
        **_ONE_PROJECTION | _WRITTEN_OUT,
        qkv_layout="interleaved",
        alibi=True,
        adds_inside=True,
    ),
    Family("Jais2ForCausalLM", gate=None, centred_norm=True),
    Family(
        "VaultGemmaForCausalLM",
        soft_capped=True,
        mlp_norm="pre_feedforward_layernorm",
        gain_offset=1.0,
    ),
    Family("GPTBigCodeForCausalLM", **_GPT2),
    Family("NanoChatForCausalLM", gate=None, up="fc1", down="fc2", qk_norm="head"),
    Family("BitNetForCausalLM", head_out="attn_sub_norm", head_norm_flat=True),
    Family("MixtralForCausalLM", **_EXPERTS),
    Family("MiniMaxM2ForCausalLM", **_EXPERTS, qk_norm="width"),
    Family(
        "FlexOlmoForCausalLM",
        **_EXPERTS,
        **_POST_NORM,
        qk_norm="width",
        rotates_in_float32=True,
    ),
    Family("GraniteMoeForCausalLM", **_EXPERTS, mlp="block_sparse_moe"),
    Family("PhimoeForCausalLM", **_EXPERTS, centred_norm=True),
    Family("Qwen3MoeForCausalLM", **_EXPERTS, qk_norm="head"),
    Family("OlmoeForCausalLM", **_EXPERTS, qk_norm="width"),
    Family("Qwen2MoeForCausalLM", **_SHARED),
    Family("Glm4MoeForCausalLM", **_MIXED, shared="shared_experts"),
    Family("Ernie4_5_MoeForCausalLM", **_MIXED, shared="shared_experts"),
    Family("Qwen3_5ForCausalLM", **_QWEN_HYBRID),
    Family("Qwen3NextForCausalLM", **_QWEN_HYBRID, **_SHARED),
    Family("Lfm2ForCausalLM", **_LFM2),
    Family("JambaForCausalLM", **_JAMBA, **_MIXED),
    Family("BambaForCausalLM", **_JAMBA, layer_values=2),
    Family("Qwen3_5MoeForCausalLM", **_QWEN_HYBRID, **_SHARED),
    Family("Lfm2MoeForCausalLM", **_LFM2 | _MIXED | dict[str, Any](dense=("w1", "w3", "w2"))),
    Family(
        "GraniteMoeHybridForCausalLM",
        mixer="mamba",
        mlp="shared_mlp",
        gate="input_linear",
        up="input_linear",
        down="output_linear",
        gate_up_fused=True,
        bridge_mlp="shared_mlp",
    ),
    Family(
        "FalconH1ForCausalLM",
        **_JAMBA,
        beside=True,
        mlp_multiplies=True,
        layer_values=1,
    ),
    Family(
        "OlmoHybridForCausalLM",
        **_POST_NORM,
        mixer="linear_attn",
        qk_norm="width",
        rotates_in_float32=True,
        in_mixer_layers={
            "attn_norm": "input_layernorm",
            "attn_post_norm": None,
            "mlp_norm": "post_attention_layernorm",
            "mlp_post_norm": None,
        },
    ),
    Family(
        "Gemma4ForCausalLM",
        **_SANDWICH | dict[str, Any](gain_offset=0.0),
        q="q_norm",
        k="k_norm",
        v="v_norm",
        qk_norm="head",
        normed_qkv=True,
        own_sizes=True,
        shared_keys=True,
        per_layer="post_per_layer_input_norm",
        layer_scale="layer_scalar",
    ),
    Family("DeepseekV2ForCausalLM", **_LATENT, **_MIXED, shared="shared_experts"),
    Family("DeepseekV3ForCausalLM", **_LATENT, **_MIXED, shared="shared_experts"),
    Family("Glm4MoeLiteForCausalLM", **_LATENT, **_MIXED, shared="shared_experts"),
    Family("YoutuForCausalLM", **_LATENT),
    Family("HeadNormForCausalLM", head_out="head_out", own_sdpa=True),
)

FAMILIES = {row.architecture: row for row in _ROWS}
"""Class name of the Hugging Face model -> its row."""

TEXT_PART = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Model that reads images too -> its language model, read in its place (``wrapping.extract_language_model``)."""

_NORM_OF_HEADS = (
    "it norms queries and keys with a gain of its own for each head; need a model without that norm"
)
_CLIPPED = "it clips its queries, keys and values; need a model that does not"
_BIASED_LATENT = "its latents have biases, so that part of each key and value is no token's; need a model without"
_REFUSED: dict[str, dict[str, str]] = {
    "StableLmForCausalLM": {"qk_layernorm": _NORM_OF_HEADS},
    "CohereForCausalLM": {"use_qk_norm": _NORM_OF_HEADS},
    "PhiForCausalLM": {
        "qk_layernorm": "its norm of queries and keys is not known here; need a model without it"
    },
    "FalconForCausalLM": {
        "alibi": "its positions are ALiBi's; need a Falcon with rotary positions, such as 7B",
        "new_decoder_architecture": "its keys and values are laid out in groups; need one of the first kind, as 7B has",
    },
    "BloomForCausalLM": {
        "apply_residual_connection_post_layernorm": "its sublayers add to the normed stream; need a BLOOM without it"
    },
    "OlmoForCausalLM": {"clip_qkv": _CLIPPED},
    "OlmoeForCausalLM": {"clip_qkv": _CLIPPED},
    **{
        row.architecture: {"attention_bias": _BIASED_LATENT}
        for row in _ROWS
        if row.kv_latent is not None
    },
}
"""Architecture -> field of the configuration -> why a model where it is set cannot be opened."""

_NO_ATTENTION = "it has no attention"
_GATED_HEADS = "its heads have gates that no row tells of yet"
_OWN_ATTENTION = "its attention does not take transformers' attention interface"
_OTHER_LATENT = "its attention reads compressed keys and values in a way of its own"
LEFT_OUT = {
    "AfmoeForCausalLM": _GATED_HEADS,
    "CodeGenForCausalLM": _OWN_ATTENTION,
    "DeepseekV32ForCausalLM": _OTHER_LATENT,
    "DeepseekV4ForCausalLM": "its layers have several streams (hyper-connections)",
    "FalconMambaForCausalLM": _NO_ATTENTION,
    "Gemma3nForConditionalGeneration": "it has four streams (AltUp)",
    "GlmMoeDsaForCausalLM": "which keys a token sees depends on the length of the text",
    "HrmTextForCausalLM": "it is recurrent in depth",
    "JetMoeForCausalLM": "its attention is a mixture of experts",
    "KimiLinearForCausalLM": _OTHER_LATENT,
    "LagunaForCausalLM": _GATED_HEADS,
    "Llama4ForCausalLM": "its attention sees chunks of a text, which no window says",
    "LongcatFlashForCausalLM": _OTHER_LATENT,
    "Mamba2ForCausalLM": _NO_ATTENTION,
    "MambaForCausalLM": _NO_ATTENTION,
    "MiniCPM3ForCausalLM": _OTHER_LATENT,
    "ModernBertDecoderForCausalLM": "its windows are counted in another way",
    "MptForCausalLM": _OWN_ATTENTION,
    "NemotronHForCausalLM": "its layers are attention, Mamba or an MLP, one of the three",
    "OpenAIGPTLMHeadModel": "it norms behind its sublayers",
    "RecurrentGemmaForCausalLM": _OWN_ATTENTION,
    "RwkvForCausalLM": _NO_ATTENTION,
    "XGLMForCausalLM": _OWN_ATTENTION,
    "Zamba2ForCausalLM": "its attention reads two streams and is shared by layers",
}
"""Architecture without a row -> why."""


_NEEDED: dict[str, list[tuple[Callable[[Any], Any], str]]] = {
    "FalconForCausalLM": [
        (
            lambda config: config.multi_query and config.parallel_attn,
            "this FalconForCausalLM has several key heads, or an MLP behind its attention; need multi_query and "
            "parallel_attn, which 7B has",
        )
    ],
    "GPTBigCodeForCausalLM": [
        (
            lambda config: config.multi_query,
            "this GPTBigCodeForCausalLM has several key heads; need one with multi_query",
        )
    ],
    "OPTForCausalLM": [
        (
            lambda config: (
                config.do_layer_norm_before and config.word_embed_proj_dim == config.hidden_size
            ),
            "this OPTForCausalLM norms behind its sublayers, or projects its embeddings to another width, as 350M "
            "does; need one of the other sizes",
        )
    ],
    "Qwen3MoeForCausalLM": [
        (
            lambda config: not config.mlp_only_layers and config.decoder_sparse_step == 1,
            "some of its layers have no experts; need a Qwen3-MoE whose layers all have them",
        )
    ],
    "GraniteMoeHybridForCausalLM": [
        (
            lambda config: config.position_embedding_type in ("rope", "nope"),
            "the position_embedding_type of this GraniteMoeHybridForCausalLM is {config.position_embedding_type!r}; "
            "need 'rope' or 'nope'. Set it in config.json",
        ),
        (
            lambda config: not config.num_local_experts,
            "the layers of this GraniteMoeHybridForCausalLM have routed experts beside a shared MLP, and no module "
            "adds up what they give; need one without routed experts",
        ),
    ],
    "Gemma4ForCausalLM": [
        (
            lambda config: config.use_bidirectional_attention != "all",
            "the tokens of this Gemma4ForCausalLM see those behind them; need a causal model",
        )
    ],
}
"""Architecture -> what its configuration must meet, each with the error of one that does not."""

_BY_CONFIG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "StableLmForCausalLM": lambda config: (
        {"mlp_norm": FAMILIES["StableLmForCausalLM"].attn_norm}
        if config.use_parallel_residual
        else {}
    ),
    "Gemma4ForCausalLM": lambda config: {
        **({} if config.hidden_size_per_layer_input else {"per_layer": None}),
        **(dict.fromkeys(("gate", "up", "down")) if config.enable_moe_block else {}),
    },
    "JambaForCausalLM": lambda config: (
        {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "experts": None, "dense": ()}
        if max(config.layers_num_experts or [1]) == 1
        else {}
    ),
    "Glm4MoeForCausalLM": lambda config: {"qk_norm": "head"} if config.use_qk_norm else {},
    "FalconH1ForCausalLM": lambda config: {
        "attn_in_multiplier": float(config.attention_in_multiplier),
        "attn_multiplier": float(config.attention_out_multiplier),
        "mixer_multiplier": float(config.ssm_out_multiplier),
        "mlp_multiplier": float(config.mlp_multipliers[1]),
    },
    "HeadNormForCausalLM": lambda config: {
        "sigmoid": config.attention == "sigmoid",
        "sink_logit": config.attention in ("sink_logit", "off_by_one", "key_bias"),
        "head_gate": "head_gate" if config.attention.startswith("gate_") else None,
        "qk_norm": "head" if config.qk_norm else None,
    },
}
"""Architecture -> the fields of its row that its configuration changes."""


def family_of(architecture: str) -> Family:
    if architecture not in FAMILIES:
        why = LEFT_OUT.get(architecture)
        more = (
            "To add it, add its row in sink_lens/models/families.py"
            if why is None
            else f"It is left out: {why}"
        )
        raise ModelError(
            f"the architecture {architecture!r} is not known; need one of {', '.join(FAMILIES)}. {more}"
        )
    return FAMILIES[architecture]


def family_of_model(architecture: str, *, config: Any) -> Family:
    """Look up the table row of a model's architecture, adapted to the model's configuration.

    Raise ModelError if there is no row, or if a setting is not supported.
    """
    row = family_of(architecture)
    for name, reason in _REFUSED.get(architecture, {}).items():
        if getattr(config, name, None):
            raise ModelError(f"this {architecture} has {name}={getattr(config, name)!r}: {reason}")
    for is_met, message in _NEEDED.get(architecture, ()):
        if not is_met(config):
            raise ModelError(message.format(config=config))
    changes = _changed_fields(architecture, config, row)
    return replace(row, **changes) if changes else row


def _changed_fields(architecture: str, config: Any, row: Family) -> dict[str, Any]:
    if architecture in _BY_CONFIG:
        return _BY_CONFIG[architecture](config)
    if row.kv_latent is not None and config.q_lora_rank is None:  # V2-Lite
        return {"q": "q_proj", "q_latent": None}
    if (by := setting_of(config, "residual_multiplier")) is not None:
        return dict.fromkeys(("attn_multiplier", "mixer_multiplier", "mlp_multiplier"), float(by))
    return {}


def setting_of(config: Any, name: str) -> Any:
    """Return a setting that the configuration's class has or takes; None for others, which no model of it reads."""
    kind = type(config)
    read = name in _taken_names(kind) or hasattr(kind, name)
    return getattr(config, name, None) if read else None


@functools.cache
def _taken_names(kind: Any) -> frozenset[str]:
    return frozenset((*kind.attribute_map, *inspect.signature(kind.__init__).parameters))


def head_sizes(config: Any, *, family: Family, layer: int) -> dict[str, int]:
    """Return the sizes of a layer's heads by name: n_heads, n_kv_heads, d_head (of queries and keys), d_value."""
    n_heads = config.num_attention_heads
    if family.own_sizes:
        config = config.per_layer_config[layer]
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    if getattr(config, "multi_query", False):
        n_kv_heads = 1
    d_value = d_head = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    if family.kv_latent is not None:
        n_kv_heads, d_value = n_heads, config.v_head_dim
        d_head = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head, "d_value": d_value}


def layer_of_keys(config: Any, *, layer: int) -> int:
    """Return the layer whose keys and values ``layer`` attends to: itself, or an earlier one."""
    n_own, types = config.num_hidden_layers - config.num_kv_shared_layers, config.layer_types
    if layer < n_own:
        return layer
    return max(at for at in range(n_own) if types[at] == types[layer])


def sliding_window_of(config: Any, *, layer: int) -> int | None:
    """Return how many positions a layer's sliding window has, the query's own included; None without a window.

    A window without a list of layer types is one of every layer (Mistral, Phi-3).
    """
    if getattr(config, "attention_layers", None) is not None:  # GPT-Neo
        return int(config.window_size) if config.attention_layers[layer] == "local" else None
    window = setting_of(config, "sliding_window")
    if window is None or setting_of(config, "use_sliding_window") is False:
        return None
    types = setting_of(config, "layer_types")
    return int(window) if types is None or types[layer] == "sliding_attention" else None
