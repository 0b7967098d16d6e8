"""Eval mode for the length of a forward pass, since a model may be somebody's in the middle of its training."""

import contextlib
from collections.abc import Iterator

from torch import nn
from transformer_lens.model_bridge import TransformerBridge


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, no module of a model or of a bridge trains; afterwards each is as it was."""
    modules = list(model.modules())
    if isinstance(model, TransformerBridge):  # which runs modules that are none of its own
        modules += model.original_model.modules()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
