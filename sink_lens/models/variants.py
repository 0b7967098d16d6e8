"""Variants of attention and norms in ``HeadNormForCausalLM``, by name; ``HeadNormConfig`` says what each is."""

from typing import Literal

Attention = Literal[
    "softmax",
    "sigmoid",
    "gate_elementwise",
    "gate_headwise",
    "sink_logit",
    "off_by_one",
    "key_bias",
]
"""Attention weights, or what is done to a head's output."""
ValueNorm = Literal["none", "shared", "per_head", "position"]
"""Treatment of the aggregated values: none, a norm with a shared gain or a gain per head, or a scale by position."""
StreamNorm = Literal["rms", "single_scale"]
"""Norm of the residual stream."""
ValueNormInit = Literal["first_token", "dummy_pass", "ones", "matched"]
"""Initial gain of the norm of the aggregated values."""
