"""Eval mode, no compiled modules, or no gradients, during a pass: the caller may be in the middle of training."""

import contextlib
from collections.abc import Iterator

from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from .private_apis import COMPILED


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of a model or bridge in eval mode within the block; afterwards restore each module's mode."""
    waiting: list[nn.Module | None] = [model]
    if isinstance(model, TransformerBridge):  # a bridge also runs modules that are not its own submodules
        waiting.append(model.original_model)
    seen: dict[int, nn.Module] = {}
    while waiting:  # ``modules`` does the same, and a bridge's thousands of hook points take it ten times as long
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen[id(module)] = module
            waiting.extend(module._modules.values())
    training = [module for module in seen.values() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def without_compiled_forwards(model: nn.Module) -> Iterator[None]:
    """Within the block, modules that ``compile`` was called on run their uncompiled forward."""
    compiled = [(vars(module), vars(module)[COMPILED]) for module in model.modules() if COMPILED in vars(module)]
    for own, _ in compiled:
        own[COMPILED] = None
    try:
        yield
    finally:
        for own, call in compiled:
            own[COMPILED] = call


@contextlib.contextmanager
def freeze_parameters(model: nn.Module) -> Iterator[None]:
    """Let no parameter need a gradient within the block, so that a pass keeps nothing for its gradient."""
    taken = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in taken:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in taken:
            parameter.requires_grad = True
