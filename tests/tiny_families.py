"""Tiny random models of every family that `load` opens, for tests, analyses, benchmarks and tools.

A tiny random model runs the code path of its family, with sliding windows shorter than a test sequence, soft caps,
and biases and gains that are not trivial. A dropped bias or a misread head size therefore changes its output.
"""

from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sink_lens.errors import InputError, ModelError
from sink_lens.models.headnorm import HeadNormConfig
from sink_lens.models.tiny import SIZES, VOCAB_SIZE, build_random_model

WINDOW = 8
"""Sliding window of the families that have a window: a query sees itself and the 7 positions before it."""

_LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 80, "initializer_range": 0.2}
_WIDE_HEAD = _LLAMA | {"head_dim": 16}  # 4 heads of 16 are 64, not d_model = 48
_ALTERNATING = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_PARTIAL = {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
_WINDOWED = {"sliding_window": WINDOW}
_GEMMA = _WIDE_HEAD | _WINDOWED | {"query_pre_attn_scalar": 20}
_CAPPED = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
_GRANITE = {
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_GPT = SIZES | {"initializer_range": 0.2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FEW_OF = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SHARED = _FEW_OF | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | _WINDOWED,
    "qwen2": _LLAMA,
    "qwen3": _WIDE_HEAD,
    "gemma2": _GEMMA | _CAPPED,
    "gemma3": _GEMMA,
    "phi3": _LLAMA | _WINDOWED | {"original_max_position_embeddings": 256},
    "olmo2": _LLAMA,
    "gpt2": _GPT | {"n_inner": 80},
    "gpt_neox": _GPT | {"intermediate_size": 80} | _PARTIAL,
    "opt": SIZES | {"ffn_dim": 80, "init_std": 0.2},
    "gpt_oss": _WIDE_HEAD | _WINDOWED | _EXPERTS | {"rope_parameters": _ROPE},
    # the variants of our own class: norm of the values, sigmoid weights, gates, sink logit
    "headnorm": _LLAMA | {"value_norm": "shared"},
    "headnorm_sigmoid": _LLAMA | {"attention": "sigmoid"},
    "headnorm_gate": _WIDE_HEAD
    | {"attention": "gate_elementwise", "value_norm": "per_head", "qk_norm": True},
    "headnorm_sink": _WIDE_HEAD | {"attention": "sink_logit"},
}
_MORE: dict[str, dict[str, Any]] = {
    "gemma": _WIDE_HEAD,
    "smollm3": _LLAMA | {"no_rope_layers": [1, 0, 1]},
    "granite": _LLAMA | _GRANITE,
    "olmo": _LLAMA,
    "olmo3": _LLAMA | _WINDOWED,
    "exaone4": _LLAMA | _WINDOWED | {"sliding_window_pattern": 4},
    "glm4": _WIDE_HEAD | _PARTIAL,
    "stablelm": _LLAMA | _PARTIAL,
    "starcoder2": _LLAMA | _WINDOWED,
    "cohere": _LLAMA | {"logit_scale": 0.5},
    "cohere2": _LLAMA
    | _WINDOWED
    | {"logit_scale": 0.5, "layer_types": [*_ALTERNATING, "sliding_attention"]},
    "glm": _WIDE_HEAD | _PARTIAL,
    "ministral3": _WIDE_HEAD,
    "seed_oss": _WIDE_HEAD,
    "ernie4_5": _LLAMA | {"head_dim": 12},
    "arcee": _LLAMA,
    "apertus": _LLAMA,
    "hunyuan": _WIDE_HEAD,
    "nemotron": _LLAMA | _PARTIAL,
    "phi": _LLAMA | _PARTIAL,
    "falcon": _GPT | {"ffn_hidden_size": 80, "bias": True},
    "gptj": _GPT | {"n_inner": 80, "rotary_dim": 6},
    # its scores are not divided by the root of the head's width
    "gpt_neo": SIZES
    | {"intermediate_size": 80, "initializer_range": 0.1, "window_size": WINDOW}
    | {"attention_types": [[["global", "local", "global"], 1]]},
    "bloom": _GPT,
    "mixtral": _LLAMA | _EXPERTS,
    "qwen3_moe": _WIDE_HEAD | _FEW_OF | {"moe_intermediate_size": 40, "norm_topk_prob": True},
    "olmoe": _LLAMA | _FEW_OF,
    "jais2": _LLAMA,
    "vaultgemma": _GEMMA | _CAPPED,
    "gpt_bigcode": _GPT | {"n_inner": 80},
    "nanochat": _LLAMA | {"final_logit_softcapping": 5.0},
    "bitnet": _LLAMA,
    "minimax_m2": _WIDE_HEAD | _EXPERTS | _PARTIAL,
    "flex_olmo": _LLAMA | _FEW_OF,
    "granitemoe": _LLAMA | _EXPERTS | _GRANITE,
    "phimoe": _LLAMA | _EXPERTS | _WINDOWED,
    "qwen2_moe": _LLAMA | _SHARED | {"mlp_only_layers": [1]},
    "glm4_moe": _WIDE_HEAD
    | _ROUTED
    | _PARTIAL
    | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
    | {"use_qk_norm": True, "routed_scaling_factor": 1.5},
    "ernie4_5_moe": _LLAMA
    | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2}
    | {"moe_intermediate_size": 40, "moe_layer_start_index": 1},
}
"""Families that came later: not every test goes through them, see `tests/models/test_more_families.py`."""
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
_COMPRESSED = _LLAMA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "rms_norm_eps": 1e-3,
    "rope_parameters": _ROPE | _YARN | {"original_max_position_embeddings": 64},
}
_BESIDE = _ROUTED | {"n_routed_experts": 4, "n_shared_experts": 1, "routed_scaling_factor": 1.7}
_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": _COMPRESSED | _BESIDE | _GROUPS | {"first_k_dense_replace": 1},
    # its queries have no latent, as in V2-Lite
    "deepseek_v2": _COMPRESSED | _BESIDE | {"q_lora_rank": None, "first_k_dense_replace": 1},
    "glm4_moe_lite": _COMPRESSED | _BESIDE | _GROUPS,
    "youtu": _COMPRESSED,
}
"""Latent attention: heads of 16 for queries and keys, 14 for values, and 6 of the 16 are rotated."""
_BY_LAYER: dict[str, dict[str, Any]] = {
    "gemma4": _WIDE_HEAD
    | _WINDOWED
    | {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "global_head_dim": 24,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 5.0,
    }
}
"""Heads of 16 over 2 in layers with a window, of 24 over 1 in the others; layers 2 and 3 attend to keys of 0 and 1."""
_FOUR = _LLAMA | {"num_hidden_layers": 4}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
# a linear head may give nearly nothing, and its norm would make rounding large
_QWEN = _FOUR | _LINEAR | {"head_dim": 16, "rms_norm_eps": 1e-2, "linear_num_key_heads": 2}
_MAMBA = {"mamba_d_state": 8, "num_experts": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
_HEADS = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_chunk_size": 8}
_CONVOLUTIONS = _FOUR | {"layer_types": ["conv", "full_attention"] * 2}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN | _SHARED,
    "qwen3_next": _QWEN | _SHARED,
    "lfm2": _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVOLUTIONS | _FEW_OF | {"moe_intermediate_size": 40, "num_dense_layers": 1},
    "jamba": _FOUR | {"attn_layer_period": 2, "attn_layer_offset": 1} | _MAMBA,
    "bamba": _FOUR | {"attn_layer_indices": [1, 3]} | _HEADS,
    "granitemoehybrid": _FOUR
    | _HEADS
    | _GRANITE
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 80}
    | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "olmo_hybrid": _FOUR | _LINEAR | {"linear_num_key_heads": 4},
    "falcon_h1": _WIDE_HEAD
    | _HEADS
    | {
        "mamba_d_ssm": 96,
        "mamba_rms_norm": True,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.8,
        "mlp_multipliers": [0.9, 0.4],
        "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
    },
}
"""Hybrids: layers 1 and 3 have attention, layers 0 and 2 a mixer; Falcon-H1's three have both."""
_TYPES: dict[str, str] = dict.fromkeys(
    ("headnorm", "headnorm_sigmoid", "headnorm_gate", "headnorm_sink"), HeadNormConfig.model_type
)
_TYPES |= {name: f"{name}_text" for name in ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")}
_TYPES |= {"hunyuan": "hunyuan_v1_dense"}
"""Family -> its model type in transformers, where that has another name."""
HYBRID_FAMILIES: tuple[str, ...] = tuple(_HYBRIDS)
"""The hybrids that `tiny` builds beside them."""
LATENT_FAMILIES: tuple[str, ...] = tuple(_LATENT)
"""The families with latent attention that `tiny` builds beside them."""
BY_LAYER_FAMILIES: tuple[str, ...] = tuple(_BY_LAYER)
"""The family whose layers differ in their sizes."""
TINY_FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
"""The families that every test goes through."""
MORE_FAMILIES: tuple[str, ...] = tuple(_MORE)
"""The families that `tiny` builds beside them."""
_CONFIGS |= _MORE | _BY_LAYER | _LATENT | _HYBRIDS


def tiny(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a random Hugging Face model of one family, float32, in eval mode, on the CPU.

    It has 3 layers of width 48, 4 heads (over 2 key-value heads if the family groups heads), a vocabulary of 300, 256
    positions and windows of 8. Weights are drawn with standard deviation 0.2, so that attention is far from
    uniform. Biases and norm gains, which Hugging Face initialises to a constant, get normal noise of standard
    deviation 0.1. The kernel is the family's default: SDPA, or eager on gemma2 and gpt_oss. The caller's random state
    does not change.

    Args:
        family: One of `TINY_FAMILIES`, `MORE_FAMILIES`, `BY_LAYER_FAMILIES`, `LATENT_FAMILIES` or `HYBRID_FAMILIES`.
        seed: Seed of the weights.
        **overrides: Fields of the family's Hugging Face configuration, by their Hugging Face names, such as
            `num_hidden_layers=2` or `attn_implementation="eager"`.

    Raises:
        ModelError: The family is not in the list.
        InputError: The config has no such field.
    """
    return build_random_model(config_of(family, **overrides), seed=seed, noise=0.1)


def config_of(family: str, **overrides: Any) -> Any:
    """Make the Hugging Face configuration of a tiny model; see `tiny`.

    Raises:
        ModelError: The family is not in the list.
        InputError: The config has no such field.
    """
    if family not in _CONFIGS:
        raise ModelError(
            f"no tiny model of the family {family!r}; need one of {', '.join(_CONFIGS)}"
        )
    defaults, config_class = _CONFIGS[family], CONFIG_MAPPING[_TYPES.get(family, family)]
    known = {*vars(config_class()), *config_class.attribute_map, "attn_implementation"}
    if unknown := sorted(set(overrides) - known):
        raise InputError(
            f"{', '.join(unknown)}: no field of {config_class.__name__}; "
            f"use the names of Hugging Face, as in num_hidden_layers=2"
        )
    names = config_class.attribute_map  # gpt2: hidden_size -> n_embd; either may be overridden
    fields = {names.get(key, key): value for key, value in (defaults | overrides).items()}
    if family in ("gemma2", "gemma3", "vaultgemma", "gpt_oss", "olmo3", "exaone4"):
        n_layers = fields["num_hidden_layers"]
        fields.setdefault("layer_types", [_ALTERNATING[layer % 2] for layer in range(n_layers)])
    return config_class(**fields)
