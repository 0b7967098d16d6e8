"""Tiny random models of every family, a tokenizer built in memory, and a model with a hand-written sink.

The tests use these models, which need no download. A tiny random model runs the code path of its family, with sliding
windows shorter than a test sequence, soft caps, and biases and gains that are not trivial. A dropped bias or a misread
head size therefore changes its output.

The planted model has a known answer. In a Llama of a few layers, the BOS token drives one gate/up neuron, which
writes one residual dimension. After the norm, hardly anything else is left of the token. W_K reads this dimension and
W_Q reads a component that every token shares. The head's slowest rotary pair carries their product nearly unrotated,
so every later head attends to BOS. Without the planted neuron the same weights have no sink.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import InputError, ModelError
from .headnorm import HeadNormConfig

VOCAB_SIZE = 300
"""Token ids of every tiny model and of `tiny_tokenizer`."""
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
"""Ids of the special tokens, in the configurations of the models and in `tiny_tokenizer`."""
WINDOW = 8
"""Sliding window of the families that have a window: a query sees itself and the 7 positions before it."""
N_LAYERS = 3
"""Default number of layers of a tiny model."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
_LLAMA = _SIZES | {"num_key_value_heads": 2, "intermediate_size": 80, "initializer_range": 0.2}
_WIDE_HEAD = _LLAMA | {"head_dim": 16}  # 4 heads of 16 are 64, not d_model = 48
_ALTERNATING = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_PARTIAL = {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
_WINDOWED = {"sliding_window": WINDOW}
_GEMMA = _WIDE_HEAD | _WINDOWED | {"query_pre_attn_scalar": 20}
_CAPPED = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
_GRANITE = {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0}
_GPT = _SIZES | {"initializer_range": 0.2}
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
    "opt": _SIZES | {"ffn_dim": 80, "init_std": 0.2},
    "gpt_oss": _WIDE_HEAD | _WINDOWED | _EXPERTS | {"rope_parameters": _ROPE},
    # the variants of our own class: norm of the values, sigmoid weights, gates, sink logit
    "headnorm": _LLAMA | {"value_norm": "shared"},
    "headnorm_sigmoid": _LLAMA | {"attention": "sigmoid"},
    "headnorm_gate": _WIDE_HEAD | {"attention": "gate_elementwise", "value_norm": "per_head", "qk_norm": True},
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
    "cohere2": _LLAMA | _WINDOWED | {"logit_scale": 0.5, "layer_types": [*_ALTERNATING, "sliding_attention"]},
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
    "gpt_neo": _SIZES
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
_YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
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
    return build_random(config_of(family, **overrides), seed=seed, noise=0.1)


def config_of(family: str, **overrides: Any) -> Any:
    """Make the Hugging Face configuration of a tiny model; see `tiny`.

    Raises:
        ModelError: The family is not in the list.
        InputError: The config has no such field.
    """
    if family not in _CONFIGS:
        raise ModelError(f"no tiny model of the family {family!r}; need one of {', '.join(_CONFIGS)}")
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


def build_random(config: Any, *, seed: int, noise: float) -> PreTrainedModel:
    """Make the causal language model of a configuration: draw weights from `seed`, add noise to biases and gains."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs of the caller too
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or name.endswith("bias"):
                    parameter.add_(torch.randn(parameter.shape, dtype=torch.float32) * noise)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):  # Gemma 4's, which a checkpoint has
                    buffer.mul_(torch.rand(1, dtype=torch.float32) * 0.5 + 0.5)
    return model


_MERGES = (  # noqa: SIM905 - a list would take a page
    "Ġ t|h e|i n|a n|r e|Ġt he|e r|o n|Ġ a|a t|e n|Ġ s|o r|i s|Ġ w|Ġ o|e s|i t|o u|in g|Ġ b|Ġ h|e d|Ġ f|a r|"
    "Ġ c|an d|Ġ m|a l|Ġo f|Ġ p|l e|Ġ l|Ġ d|i c|Ġt o|Ġ n|Ġ in|s t|a s|Ġ and"
).split("|")
"""The BPE merges in order; `Ġ` is a space. 41 merges, 256 bytes and 3 special tokens make 300 ids."""


def tiny_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer of 300 ids in memory. Any text round-trips, and every id has an entry.

    The special tokens are `<pad>` 0, `<s>` 1 and `</s>` 2. There is no unknown token, since bytes cover all text.

    Args:
        adds_bos: Whether the tokenizer puts `<s>` before every encoded text, as Llama's does.
    """
    special = ["<pad>", "<s>", "</s>"]
    merges = [(left, right) for left, right in (merge.split() for merge in _MERGES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = special + alphabet + [left + right for left, right in merges]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedTruth:
    """A model together with the sink that was written into it."""

    model: PreTrainedModel
    """A Llama of 5 layers, float32, eval mode; without the sink if it was built with `sink=False`."""
    bos_id: int
    """The token that drives the planted neuron."""
    outlier_dimension: int
    """The residual dimension that the neuron writes and every later W_K reads."""
    layer: int
    """The layer of the neuron; the heads of all later layers attend to the token."""
    neuron: int
    """The neuron's index in that layer's MLP."""


def planted(*, seed: int = 0, sink: bool = True) -> PlantedTruth:
    """Make a small Llama with a hand-written sink (BOS, neuron, dimension, key, sink), or the same model without it.

    The seed decides the indices of neuron and dimension and the sign of the outlier. BOS is the sink at any position.
    With `sink=False` the neuron keeps its random weights and all other weights are bit-identical: the two models
    differ only in one row of `gate_proj`, one row of `up_proj` and one column of `down_proj`.

    Args:
        seed: Seed of the weights and of the indices.
        sink: Whether to plant the neuron.
    """
    fields = _LLAMA | {"num_hidden_layers": 5, "initializer_range": 0.1}
    fields["rope_parameters"] = _ROPE | {"rope_theta": 1e6}
    model: Any = build_random(CONFIG_MAPPING["llama"](**fields), seed=seed, noise=0.02)

    places = torch.Generator().manual_seed(seed)
    shared, trigger, outlier = torch.randperm(48, generator=places)[:3].tolist()
    layer = int(torch.randint(1, 3, (), generator=places))
    neuron = int(torch.randint(80, (), generator=places))
    sign = 1.0 if torch.rand((), generator=places) < 0.5 else -1.0

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.mul_(3.0)  # ordinary tokens: norm about 2
        embedding[:, [shared, trigger, outlier]] *= 0.03
        embedding[:, shared] += 1.0
        embedding[BOS_ID, trigger] += 2.0  # norm about 3: BOS is not large by itself
        for block in model.model.layers:
            for writer in (block.self_attn.o_proj, block.mlp.down_proj):
                writer.weight[[shared, trigger, outlier]] *= 0.03
            block.self_attn.q_proj.weight.mul_(0.3)
            block.self_attn.k_proj.weight.mul_(0.3)
            head_size = block.self_attn.head_dim
            slowest = head_size // 2 - 1  # pair (5, 11) turns by 1e-5 a position at theta 1e6
            block.self_attn.q_proj.weight[slowest::head_size, shared] = 2.5
            block.self_attn.k_proj.weight[:, trigger] = 0.0  # heads recognise BOS only by the outlier
            block.self_attn.k_proj.weight[slowest::head_size, outlier] = 2.0 * sign
            block.self_attn.v_proj.weight[:, outlier] = 0.0  # the sink's value stays small
        if sink:
            mlp = model.model.layers[layer].mlp
            for reader in (mlp.gate_proj, mlp.up_proj):
                reader.weight[neuron] = 0.0
                reader.weight[neuron, trigger] = 2.0
            mlp.down_proj.weight[:, neuron] = 0.0
            mlp.down_proj.weight[outlier, neuron] = 6.0 * sign
    return PlantedTruth(model=model, bos_id=BOS_ID, outlier_dimension=outlier, layer=layer, neuron=neuron)
