"""Logits from the states after the last norm, as the model's own forward makes them, and losses without all of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .families import setting_of
from .lens import LensModel
from .memory import LOSS_CHUNK, copy_to_device
from .packed import weight_and_bias

_ROWS = 4096
"""Rows of the unembedding that are widened at once."""


def logits_from_states(lens: LensModel, states: Tensor, *, wide: bool = False) -> Tensor:
    """Compute logits [..., vocab] in float32, capped as the model's, from states after the last norm.

    With ``wide`` the product is in float32 too: in a 16-bit type the largest logits often tie.
    """
    if wide:
        head = lens.plain.get_output_embeddings()
        assert head is not None
        weight, bias = weight_and_bias(head, dtype=lens.dtype)
        states = states.to(weight.device, torch.float32)
        parts = [states @ rows.float().T for rows in weight.split(_ROWS)]
        logits = _scale_logits(lens, torch.cat(parts, dim=-1) + bias.float())
    else:
        logits = uncapped_logits(lens, states)
    cap = setting_of(lens.config, "final_logit_softcapping")
    return logits if cap is None else (logits / cap).tanh() * cap


def uncapped_logits(lens: LensModel, states: Tensor) -> Tensor:
    """Compute logits of states after the last norm, before any soft cap; they are linear in the states."""
    head = lens.plain.get_output_embeddings()
    assert head is not None
    return _scale_logits(lens, head(states).float())


def _scale_logits(lens: LensModel, product: Tensor) -> Tensor:
    config = lens.config
    if config.model_type.startswith("granite"):
        return product / config.logits_scaling
    if config.model_type.startswith("cohere"):
        return product * config.logit_scale
    return product * config.lm_head_multiplier if config.model_type == "falcon_h1" else product


def unembedding_vectors(
    lens: LensModel, ids: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch d_model"], Float[Tensor, " batch"]]:
    """Return a vector and a constant for each token id, in float64.

    The token's uncapped logit is ``state @ vector + constant``, for a state after the last norm.
    """
    head = lens.plain.get_output_embeddings()
    assert head is not None
    weight, bias = weight_and_bias(head, dtype=lens.dtype)
    vectors, constants = (one[ids.to(one.device)].double().cpu() for one in (weight, bias))
    return _scale_logits(lens, vectors), _scale_logits(lens, constants)


@torch.no_grad()
def losses_from_states(
    lens: LensModel, states: Float[Tensor, "row d_model"], targets: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Return the loss of each target token in nats, from the state after the last norm that predicts it.

    Logits are computed for a few rows at a time.
    """
    found = [states.new_empty(0, dtype=torch.float32)]
    for own, ids in zip(states.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True):
        found.append(_target_losses(logits_from_states(lens, own), ids, overwrite=True))
    return torch.cat(found)


def next_token_losses(
    logits: Float[Tensor, "batch position vocab"], tokens: Int[Tensor, "batch position"]
) -> Float[Tensor, "batch target"]:
    """Return the loss of every token but the first, in nats, from the logits at the position before it."""
    rows = zip(logits[:, :-1], copy_to_device(tokens[:, 1:], logits.device), strict=True)
    return torch.stack([_target_losses(own.float(), ids) for own, ids in rows])


def _target_losses(
    logits: Float[Tensor, "row vocab"], targets: Int[Tensor, " row"], *, overwrite: bool = False
) -> Float[Tensor, " row"]:
    """Return the loss of each target token in nats; with ``overwrite``, in the memory of the logits.

    On a CPU ``cross_entropy`` adds the terms of the vocabulary one after another: with 262,144 of them its loss is 5e-5
    nats too low. ``sum`` adds them in a tree, and is within 4e-6.
    """
    correct, top = logits.gather(-1, targets[:, None])[:, 0], logits.amax(-1)
    terms = logits if overwrite else logits.clone()
    return terms.sub_(top[:, None]).exp_().sum(-1).log() + top - correct
