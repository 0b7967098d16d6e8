"""Logits from the states after the last norm, as the model's own forward makes them, and losses without all of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .lens import LensModel
from .memory import LOSS_CHUNK


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


@torch.no_grad()
def losses_of(
    lens: LensModel, states: Float[Tensor, "row d_model"], targets: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Loss of each target in nats, from the state that predicts it; the logits of a few rows exist at a time.

    Without gradients.
    """
    found = [states.new_empty(0, dtype=torch.float32)]
    for own, ids in zip(states.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True):
        logits = logits_of(lens, own)
        correct, top = logits.gather(-1, ids[:, None])[:, 0], logits.amax(-1)
        found.append(logits.sub_(top[:, None]).exp_().sum(-1).log() + top - correct)  # in place: they are ours
        del logits
    return torch.cat(found)
