"""``running`` and ``exclusive_use``: every pass over a model's modules, one at a time, on the model that was wrapped.

A pass puts hooks on modules, and for its time gives them another attention function and eval mode, so two passes at
once would read each other's edits. A model therefore has one lock, which all lenses on it share, and a pass holds it.

An edit, a reading or a hook is called inside a pass. If it asked for another pass of the same model, a lock that
belongs to a thread would wait for itself: cells run on threads of a pool, and the pool's caller holds the lock. So who
is inside a pass is kept in a context variable, which the pool's threads inherit (``engine.threads``), and such a pass
is refused. Between the passes of a block the same caller may run another one (an edit is made from what a baseline
shows, a metric may look at the model), and ``alone`` keeps those of the pool's threads apart.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from ..errors import InputError
from ..modes import plain_mode
from .lens import LensModel
from .private_apis import COMPILED
from .unchanged import Turns, lock_of

_HELD: ContextVar[tuple[Turns, ...]] = ContextVar("sink_lens_held", default=())
_INSIDE: ContextVar[tuple[Turns, ...]] = ContextVar("sink_lens_inside", default=())


def holds_views(lens: LensModel) -> bool:
    """Check whether the model's bridge has parameters that are views of the model's, so that both share memory."""
    return any(one.holds_views() for one in lens.state.turns.noted)


def note_memory(lens: LensModel) -> None:
    """Record for all lenses on the model that its parameters now lie elsewhere in memory, with equal values."""
    for one in lens.state.turns.noted:
        one.note_memory()


@contextlib.contextmanager
def exclusive_use(lens: LensModel) -> Iterator[None]:
    """Within the block the model is this caller's alone, and is checked to be unchanged since it was wrapped.

    Raises:
        ModelError: the model was changed.
        InputError: the caller is called by a pass of the same model.
    """
    with _hold_lock(lens.state.turns, name=lens.name) as begins:
        if begins:
            lens.state.unchanged.check()
        yield


@contextlib.contextmanager
def take_turn_to_wrap(*modules: nn.Module, name: str) -> Iterator[None]:
    """Within the block a model is this caller's alone, although there may be no lens on it yet."""
    with _hold_lock(lock_of(*modules), name=name):
        yield


@contextlib.contextmanager
def _hold_lock(turns: Turns, *, name: str) -> Iterator[bool]:
    """Within the block the lock is this caller's; gives True if the caller did not hold it before."""
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
    """Refuse a model that was changed, if it is nobody's turn: one's own began with this, and another's is in the way.

    Raises:
        ModelError: the model was changed.
    """
    turns = lens.state.turns
    if turns not in _HELD.get() and turns.lock.acquire(blocking=False):
        try:
            lens.state.unchanged.check()
        finally:
            turns.lock.release()


@contextlib.contextmanager
def inside_pass(lens: LensModel) -> Iterator[None]:
    """Within the block a forward runs, in the caller's turn; code that it calls may run no other pass of the model."""
    state = lens.state
    with state.alone:
        token = _INSIDE.set((*_INSIDE.get(), state.turns))
        try:
            yield
        finally:
            _INSIDE.reset(token)


@contextlib.contextmanager
def _set_aside(settings: list[dict[str, Any]], *names: str) -> Iterator[None]:
    """Within the block, attributes of modules (``settings``) are False, or None where they hold no truth value."""
    changed = [(own, name, own[name]) for name in names for own in settings if own.get(name)]
    for own, name, before in changed:
        own[name] = False if before is True else None
    try:
        yield
    finally:
        for own, name, before in changed:
            own[name] = before


@contextlib.contextmanager
def in_eval_mode(lens: LensModel) -> Iterator[None]:
    """Within the block, all modules of both paths are in eval mode and uncompiled; the caller has ``exclusive_use``."""
    with _set_aside(lens.state.unchanged.settings, "training", COMPILED):
        yield


@contextlib.contextmanager
def running(lens: LensModel) -> Iterator[None]:
    """Within the block, the caller may run one forward of the model: in its turn, in eval mode, on an unchanged model.

    Raises:
        ModelError: the model was changed.
        InputError: the caller is called by a pass of the same model.
    """
    with exclusive_use(lens), inside_pass(lens), in_eval_mode(lens):
        yield


@contextlib.contextmanager
def block_of_passes(lens: LensModel) -> Iterator[None]:
    """Within the block, several forwards of the model run, each ``inside_pass``, in eval mode."""
    with exclusive_use(lens), in_eval_mode(lens):
        yield


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
    with _set_aside(list(map(vars, seen.values())), "training"):
        yield


@contextlib.contextmanager
def without_compiled_forwards(model: nn.Module) -> Iterator[None]:
    """Within the block, modules that ``compile`` was called on run their uncompiled forward."""
    with _set_aside(list(map(vars, model.modules())), COMPILED):
        yield


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
