"""Families by their MLP."""

EXPERTS = (
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "minimax_m2",
    "flex_olmo",
    "granitemoe",
    "phimoe",
)
BESIDE = ("qwen2_moe", "glm4_moe", "ernie4_5_moe")
"""Families of which some layers have experts, beside a shared one or beside dense layers."""
UNGATED = (
    *("gpt2", "gpt_neox", "opt", "starcoder2", "phi", "falcon", "gptj", "gpt_neo", "bloom"),
    *("arcee", "apertus", "nemotron", "jais2", "gpt_bigcode", "nanochat"),
)
