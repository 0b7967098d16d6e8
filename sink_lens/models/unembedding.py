"""Logits from the states after the last norm, as the model's own forward makes them."""

from torch import Tensor

from .lens import LensModel


def logits_of(lens: LensModel, states: Tensor) -> Tensor:
    """Logits in float32 of states after the last norm, shape (..., d_model) to (..., vocab).

    Granite divides its logits by `logits_scaling`, Cohere multiplies them by `logit_scale`, and Gemma 2 caps them.
    """
    head, config = lens.plain.get_output_embeddings(), lens.config
    assert head is not None
    logits = head(states).float()
    if config.model_type.startswith("granite"):
        logits = logits / config.logits_scaling
    if config.model_type.startswith("cohere"):
        logits = logits * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap
