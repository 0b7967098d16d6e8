"""The gradient of the loss with respect to each token's residual stream, from one backward pass."""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..data.tokens import TokenBatch
from ..models.evaluating import evaluating
from ..models.lens import LensModel

_TOKENS_OF_LOGITS = 256
"""Tokens whose logits are held at a time."""


def position_gradients(
    lens: LensModel, batch: TokenBatch, *, progress: bool = False
) -> Float[Tensor, "layer batch position"]:
    """Norm of the gradient of each sequence's mean next-token loss with respect to the stream after each layer.

    0 or more, in nats per unit of the stream; nan at padding. The gradient at a token has two sources: the token's own
    prediction, and all later tokens that read it. One forward and one backward pass of the plain model, a sequence at a
    time; parameters get no gradient. A sequence of a single token has no loss, and is nan.

    Args:
        lens: the model; dropout is off during the pass.
        batch: the sequences.
        progress: show a progress bar.

    Reference: arXiv 2603.17771 (gradient sinks; the definition is ours).
    """
    found = torch.full((lens.n_layers, batch.n_sequences, batch.n_positions), math.nan)
    rows = tqdm(range(batch.n_sequences), desc="gradients", unit="seq", disable=not progress, leave=False)
    for row in rows:
        length = int(batch.lengths[row])
        if length < 2:
            continue
        one = replace(batch, tokens=batch.tokens[row : row + 1, :length], lengths=batch.lengths[row : row + 1])
        for layer, gradient in enumerate(_gradients(lens, one)):
            found[layer, row, :length] = gradient[0].float().norm(dim=-1).cpu()
    return found


def _gradients(lens: LensModel, one: TokenBatch) -> tuple[Tensor, ...]:
    """The gradient at the output of each layer, for one sequence without padding."""
    states: list[Tensor] = []

    def begin(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output if output.requires_grad else output.requires_grad_()

    def keep(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [lens.plain.get_input_embeddings().register_forward_hook(begin)]
    handles += [layer.register_forward_hook(keep) for layer in lens.layers]
    try:
        with evaluating(lens.plain), torch.enable_grad():
            tokens = one.tokens.to(lens.device)
            final = lens.plain.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            return torch.autograd.grad(final, states, grad_outputs=_loss_gradient(lens, final.detach(), tokens))
    finally:
        for handle in handles:
            handle.remove()


def _loss_gradient(lens: LensModel, final: Tensor, tokens: Tensor) -> Tensor:
    """Gradient of the mean loss with respect to the last norm's output, with the logits of a few tokens at a time."""
    head = lens.plain.get_output_embeddings()
    assert head is not None
    cap = getattr(lens.config, "final_logit_softcapping", None)
    gradient = torch.zeros_like(final)
    predicted = tokens.shape[1] - 1
    for places in torch.arange(predicted, device=final.device).split(_TOKENS_OF_LOGITS):
        states = final[:, places].requires_grad_()
        logits = head(states).float()
        if cap is not None:
            logits = (logits / cap).tanh() * cap
        targets = tokens[:, places + 1].to(logits.device)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / predicted
        gradient[:, places] = torch.autograd.grad(loss, states)[0]
    return gradient
