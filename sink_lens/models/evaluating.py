"""Eval mode for the duration of a forward pass, since the caller may be in the middle of training the model."""

import contextlib
from collections.abc import Iterator

from torch import nn
from transformer_lens.model_bridge import TransformerBridge


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of a model or bridge in eval mode within the block; afterwards restore each module's mode."""
    modules = list(model.modules())
    if isinstance(model, TransformerBridge):  # a bridge also runs modules that are not its own submodules
        modules += model.original_model.modules()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
