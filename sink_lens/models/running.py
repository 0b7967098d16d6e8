"""Every pass over a model runs alone, in eval mode, on the model as it was wrapped (``prepare_pass``).

A pass puts hooks on modules, and for its time gives them another attention function and eval mode, so two passes at
once would read each other's edits. A model therefore has one lock, which all lenses on it share, and a pass holds it.

If an edit, a reading or a hook asked for another pass of the same model, a lock that belongs to a thread would wait for
itself: cells run on threads of a pool, whose caller holds the lock. So who is inside a pass is kept in a context
variable, which the pool's threads inherit (``engine.threads``), and such a pass is refused. Between the passes of a
block the same caller may run another one; ``alone`` keeps those of the pool's threads apart.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from threading import Lock
from weakref import WeakKeyDictionary

from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from ..errors import InputError
from ..modes import disable_settings, plain_mode
from .lens import LensModel
from .pass_lock import LensState, ModelLock
from .private_apis import COMPILED
from .unchanged import ModelRecord

_HELD: ContextVar[tuple[ModelLock, ...]] = ContextVar("sink_lens_held", default=())
_INSIDE: ContextVar[tuple[ModelLock, ...]] = ContextVar("sink_lens_inside", default=())
_TURNS: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_NEW = Lock()


def _renew_in_child() -> None:
    global _NEW
    _NEW = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)


@contextlib.contextmanager
def exclusive_use(lens: LensModel) -> Iterator[None]:
    """Within the block, only this caller may use the model, which is checked to be unchanged since it was wrapped.

    Raises:
        ModelError: the model was changed.
        InputError: the caller is called by a pass of the same model.
    """
    with _hold_lock(lens.state.turns, name=lens.name) as begins:
        if begins:
            lens.state.unchanged.check()
        yield


def new_lens_state(record: ModelRecord, *modules: nn.Module) -> LensState:
    turns = _shared_lock(*modules)
    turns.noted.add(record)
    return LensState(turns=turns, unchanged=record)


def _shared_lock(*modules: nn.Module) -> ModelLock:
    """Return the lock that all lenses on one model share; one of its modules is enough to find it."""
    with _NEW:
        found = next((_TURNS[one] for one in modules if one in _TURNS), None) or ModelLock()
        for one in modules:
            _TURNS[one] = found
    return found


def take_turn_to_wrap(*modules: nn.Module, name: str) -> contextlib.AbstractContextManager[object]:
    """Within the block, only this caller may use a model with any of ``modules``."""
    return _hold_lock(_shared_lock(*modules), name=name)


@contextlib.contextmanager
def _hold_lock(turns: ModelLock, *, name: str) -> Iterator[bool]:
    if turns in _INSIDE.get():
        raise InputError(
            f"a pass of {name} was asked for inside another one, by an edit, a reading or a hook; need what it "
            "computes before the run. Run the model first, and let the function use the result"
        )
    held = _HELD.get()
    with plain_mode(), contextlib.nullcontext() if turns in held else turns.lock:
        token = _HELD.set((*held, turns))
        try:
            yield turns not in held
        finally:
            _HELD.reset(token)


def check_unchanged(lens: LensModel) -> None:
    """Raise ModelError if a model was changed since it was wrapped; do nothing while a pass of it runs."""
    turns = lens.state.turns
    if turns not in _HELD.get() and turns.lock.acquire(blocking=False):
        try:
            lens.state.unchanged.check()
        finally:
            turns.lock.release()


@contextlib.contextmanager
def forbid_nested_passes(lens: LensModel) -> Iterator[None]:
    """Within the block, which runs one forward pass, raise InputError if a hook or edit starts another."""
    state = lens.state
    with state.alone:
        token = _INSIDE.set((*_INSIDE.get(), state.turns))
        try:
            yield
        finally:
            _INSIDE.reset(token)


def _in_eval_mode(lens: LensModel) -> contextlib.AbstractContextManager[None]:
    return disable_settings(lens.state.unchanged.settings, "training", COMPILED)


@contextlib.contextmanager
def prepare_pass(lens: LensModel) -> Iterator[None]:
    """Within the block, only this caller may use the model, for one forward in eval mode."""
    with exclusive_use(lens), forbid_nested_passes(lens), _in_eval_mode(lens):
        yield


@contextlib.contextmanager
def prepare_passes(lens: LensModel) -> Iterator[None]:
    """Within the block, only this caller may use the model, in eval mode.

    Each of its passes is in a block of ``forbid_nested_passes``.
    """
    with exclusive_use(lens), _in_eval_mode(lens):
        yield


@contextlib.contextmanager
def switch_to_eval_mode(model: nn.Module) -> Iterator[None]:
    waiting: list[nn.Module | None] = [model]
    if isinstance(model, TransformerBridge):  # it also runs modules that are not its submodules
        waiting.append(model.original_model)
    seen: dict[int, nn.Module] = {}
    while waiting:  # ``modules`` does the same, and a bridge's thousands of hook points take it ten times as long
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen[id(module)] = module
            waiting.extend(module._modules.values())
    with disable_settings(list(map(vars, seen.values())), "training"):
        yield


def without_compiled_forwards(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return disable_settings(list(map(vars, model.modules())), COMPILED)


@contextlib.contextmanager
def freeze_parameters(model: nn.Module) -> Iterator[None]:
    """Within the block, no parameter needs a gradient, so that a pass stores nothing for a backward pass."""
    taken = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in taken:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in taken:
            parameter.requires_grad = True
