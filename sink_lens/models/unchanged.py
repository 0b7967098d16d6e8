"""The model as it was when it was wrapped: a lens is frozen, and refuses a model that was changed since.

A lens has two paths that share one set of parameters, and facts about them that were found once. Whoever exchanges a
part of the model (an adapter, ``load_state_dict(assign=True)``, a resized embedding, another module, a hook) exchanges
it on one path, so that the two paths are two models from then on, and each gives numbers without a word. To take the
change in would be to wrap again, which drops the hooks that the user has put on the bridge. So it is refused.

**What may change.** Values in place: both paths hold the same tensors. Train and eval mode, gradients on and off,
``compile`` (passes run uncompiled), the attention kernel, settings that no number hangs on, gradient checkpointing.
Hooks at the bridge's hook points, and those of the libraries that put them on a module by themselves (``_LIBRARIES``).

**What is watched**, on the plain model, inside the bridge, and on the user's own model where it has adapters:

- the object under each name of ``_parameters``, ``_buffers`` and ``_modules``, whether a module has a ``forward`` of
  its own, and the settings (numbers and names) of modules and of the configuration;
- the address of each parameter's and buffer's memory, since ``parameter.data = ...`` keeps the object;
- forward hooks and forward pre-hooks;
- whether the bridge is in compatibility mode, which folds and centres its weights;
- the values of tensors of which a path has copies (``copied``): a merged adapter, and the projections that a stock
  bridge splits. They cannot follow a change in place. Version counters are compared and, since ``data`` goes round the
  counter, a hash of their bits. A result that is checked by more passes later notes the values of all weights likewise.

It is a list of (container, key, object) that is made once and compared by identity in C: walking the modules takes a
hundred times as long. Weights that accelerate keeps on disk or elsewhere are exchanged at each forward, and so is the
table of a rotary embedding that grows with the length: those modules are left out.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from ..errors import ModelError
from .private_apis import PROCESSED, name_in_plain_model

_LIBRARIES = ("accelerate", "sink_lens", "transformer_lens", "transformers")
_GROWING = ("dynamic", "longrope")
"""Kinds of rotary embedding whose table is made anew for another length."""
_WITHOUT_SETTINGS = (nn.Linear, nn.Dropout, nn.ModuleList, nn.SiLU)
"""Most modules of a model; what they compute is in their parameters alone."""
_FREE = frozenset({"training", "gradient_checkpointing", "p", "inplace", "name_or_path", "use_cache"})
"""Settings that change no number in eval mode."""
_FREE_PARTS = ("dropout", "_token_id", "output_", "return_", "problem_type", "label", "architectures", "dtype")
_COLUMNS = 1040
"""Words of 8 bytes in a row of sums. With a power of 2 the columns share cache lines, which takes twice as long."""
_WORD = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}


class ModelRecord:
    """Record of a model's parameters, modules and settings; ``check`` raises an error if one has changed."""

    def __init__(
        self,
        plain: nn.Module,
        *,
        bridge: TransformerBridge | None,
        source: nn.Module | None = None,
        copied: Sequence[tuple[str, Tensor]] = (),
        states: Callable[[], object] | None = None,
    ) -> None:
        """Record the present state.

        Args:
            plain: the plain model.
            bridge: the bridge; None if the model has no bridge.
            source: the user's own model, if ``plain`` is a copy of it.
            copied: name and tensor of what a forward path holds as copies, whose values must not change.
            states: function whose result must stay equal too.
        """
        self._containers: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._objects: list[object] = []
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._tensor_names: list[str] = []
        self._full: list[dict[str, Any]] = []
        self._full_names: list[str] = []
        self._hooks: list[dict[int, Any]] = []
        self._users: list[list[Any]] = []
        self._hook_names: list[str] = []
        self._known: set[int] = set()
        self.modules: list[nn.Module] = []
        """The modules that a pass may run, on both paths."""
        roots: list[tuple[str, nn.Module]] = [("", plain)]
        if bridge is not None:
            roots += [("of the bridge, ", bridge), ("of the bridge, ", bridge.original_model)]
            for key in ("compatibility_mode", PROCESSED):
                self._record_entry(vars(bridge), key, f"{key} of the bridge")
        seen: set[int] = set()
        n_plain = 0
        for where, root in roots:
            self.modules += self._record_modules(root, where=where, seen=seen)
            n_plain = n_plain or len(self._tensors)
        if source is not None:
            for _ in self._record_modules(source, where="", seen=seen):
                pass
        self._n_plain = n_plain
        self.settings = list(map(vars, self.modules))
        """Their attributes."""
        self._sizes = list(map(len, self._full))
        self._hook_ids = list(map(tuple, self._hooks))
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        self._copied = TensorValues(copied)
        self._states = states
        self._state = None if states is None else states()

    def check(self) -> None:
        """Raise ModelError if the model was changed, and say what was changed; call it only while no pass runs."""
        if not all(map(is_, map(dict.get, self._containers, self._keys), self._objects)):
            for at, (container, key, name) in enumerate(zip(self._containers, self._keys, self._names, strict=True)):
                _refuse_change(container.get(key), self._objects[at], name=name)
                self._objects[at] = container.get(key)  # equal numbers may be two objects
        if list(map(Tensor.data_ptr, self._tensors)) != self._pointers:
            for tensor, pointer, name in zip(self._tensors, self._pointers, self._tensor_names, strict=True):
                if tensor.data_ptr() != pointer:
                    raise _changed_error(f"{name} has other memory, with the shape {tuple(tensor.shape)}")
        if list(map(len, self._full)) != self._sizes:
            for container, size, name in zip(self._full, self._sizes, self._full_names, strict=True):
                if len(container) != size:
                    raise _changed_error(f"{name or 'the model'} has {len(container)} modules in the place of {size}")
        if changed := self._copied.names_of_changed():
            raise _changed_error(f"{changed[0]} has other values, and what is measured is a copy that was made of it")
        if self._states is not None and self._states() != self._state:
            raise _changed_error("other adapters are active, or with other scales")
        if list(map(tuple, self._hooks)) != self._hook_ids:
            for hooks, before, name in zip(self._hooks, self._users, self._hook_names, strict=True):
                now = _user_hooks(hooks)
                if len(now) != len(before) or not all(map(is_, now, before)):
                    _raise_hook_change(next((one for one in now if one not in before), None), name=name)
            self._hook_ids = list(map(tuple, self._hooks))

    def record_values(self) -> "TensorValues":
        """Record the present values of the plain model's parameters and buffers; return the record."""
        return TensorValues(list(zip(self._tensor_names, self._tensors, strict=True))[: self._n_plain])

    def record_addresses(self) -> None:
        """Record the present memory addresses of the parameters, after they were stored on disk and read back."""
        self._pointers = list(map(Tensor.data_ptr, self._tensors))

    def has_shared_views(self) -> bool:
        """Check whether some of the bridge's parameters are views of parameters of the plain model."""
        plain = {one.untyped_storage().data_ptr() for one in self._tensors[: self._n_plain]}
        return any(one.untyped_storage().data_ptr() in plain for one in self._tensors[self._n_plain :])

    def _record_modules(self, root: nn.Module, *, where: str, seen: set[int]) -> Iterator[nn.Module]:
        """Record and yield ``root`` and every module in it, except hook points and modules whose ids are in ``seen``.

        The ids are added to ``seen``. Errors call each module by its path after ``where``. Settings are recorded too if
        ``where`` is empty.
        """
        waiting: list[tuple[str, Any]] = [("", root)]
        while waiting:
            path, module = waiting.pop()
            if module is None or id(module) in seen or isinstance(module, HookPoint):
                continue
            seen.add(id(module))
            self._record_module(module, name=where + name_in_plain_model(path), settings=not where)
            yield module
            waiting += [(f"{path}.{key}" if path else key, one) for key, one in reversed(module._modules.items())]

    def _record_module(self, module: nn.Module, *, name: str, settings: bool) -> None:
        """Record tensors, submodules, forward and hooks of the module ``name`` and, if ``settings``, its settings."""
        growing = any(kind in str(getattr(module, "rope_type", "")) for kind in _GROWING)
        for kind in ("_parameters", "_modules") if growing else _WORD:
            container: dict[str, Any] = getattr(module, kind)
            for key, one in container.items():
                if isinstance(one, HookPoint) or (isinstance(one, Tensor) and one.device.type == "meta"):
                    continue
                whole = f"{name}.{key}" if name and not name.endswith(", ") else name + key
                self._record_entry(container, key, whole)
                if isinstance(one, Tensor) and id(one) not in self._known and _has_address(one):
                    self._known.add(id(one))
                    self._tensors.append(one)
                    self._tensor_names.append(whole)
        if module._modules:
            self._full.append(module._modules)
            self._full_names.append(name)
        own = vars(module)
        self._record_entry(own, "forward", f"the forward of {name or 'the model'}")
        if settings and not growing and type(module) not in _WITHOUT_SETTINGS:
            self._record_settings(own, name=name)
        config = own.get("config") if settings else None
        if config is not None and id(config) not in self._known and hasattr(config, "to_dict"):
            self._known.add(id(config))
            self._record_settings(vars(config), name="the configuration")
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self._hooks.append(hooks)
            self._users.append(_user_hooks(hooks))
            self._hook_names.append(name or "the model")

    def _record_settings(self, own: dict[str, Any], *, name: str) -> None:
        """Record the settings of a module or configuration ``name``: attributes that are a number, text or None."""
        for key, value in own.items():
            free = key.startswith("_") or key in _FREE or any(part in key for part in _FREE_PARTS)
            if not free and (value is None or isinstance(value, int | float | str)):
                self._record_entry(own, key, f"{key} of {name or 'the model'}")

    def _record_entry(self, container: dict[str, Any], key: str, name: str) -> None:
        """Record which object a container has under ``key`` (None if it has none); errors call it ``name``."""
        self._containers.append(container)
        self._keys.append(key)
        self._objects.append(container.get(key))
        self._names.append(name)


class TensorValues:
    """Record of tensors' values at one time, as version counters and hashes (``data`` changes no counter)."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = list(named)
        self._before = self._versions_and_hashes()

    def names_of_changed(self) -> list[str]:
        """Return the names of the tensors that have other values than when the record was made."""
        pairs = zip(self._named, self._before, self._versions_and_hashes(), strict=True)
        return [name for (name, _), before, now in pairs if before != now]

    def check(self, what: str) -> None:
        """Raise ModelError if a value has changed since the record was made.

        A result that was made then (``what`` names it in the error) would otherwise run passes with other weights.
        """
        if changed := self.names_of_changed():
            raise ModelError(
                f"the weights were changed in place after the {what} were made ({changed[0]} has other values, one of "
                f"{len(changed)}): old numbers would be compared with those of another model. Need {what} of the "
                "weights as they are now; make them again"
            )

    def _versions_and_hashes(self) -> list[tuple[int, int]]:
        return [(0 if one.is_inference() else one._version, _hash_of_bits(one)) for _, one in self._named]


def _changed_error(found: str, *, also: str = "") -> ModelError:
    """Return the error for a changed model: ``found`` says what was changed, ``also`` what can be done besides."""
    return ModelError(
        f"the model was changed after it was wrapped: {found}; need the model as it was. Wrap it again{also}"
    )


def _raise_hook_change(hook: object, *, name: str) -> None:
    """Raise ModelError for a hook that was added to the module ``name`` or, with None, for one that was removed."""
    if hook is None:
        raise _changed_error(f"a forward hook of {name} was removed")
    raise _changed_error(
        f"{name} has a forward hook more ({getattr(hook, '__qualname__', type(hook).__name__)})",
        also=". Or remove the hook, and give its function as an edit (sink_lens.edits.from_hook), or put it on a "
        "hook point of lens.bridge",
    )


def _refuse_change(now: object, before: object, *, name: str) -> None:
    """Raise ModelError if ``now``, the present object called ``name``, is another than ``before``.

    Two settings, such as numbers or texts, need only be equal.
    """
    if now is before:
        return
    if name in ("compatibility_mode of the bridge", f"{PROCESSED} of the bridge"):
        raise ModelError(
            "the bridge went into compatibility mode after it was wrapped, where weights are folded or centred, partly "
            "in the user's own model; need the weights as they were loaded. Load the model again and wrap it, and give "
            "TransformerLens's tools that ask for compatibility mode a bridge of their own "
            "(TransformerBridge.boot_transformers)"
        )
    if isinstance(before, nn.Module) or isinstance(now, nn.Module):
        kind = "gone" if now is None else f"another module, a {type(now).__module__}.{type(now).__qualname__}"
        raise _changed_error(f"{name} is {kind}")
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        kind = "buffer" if isinstance(before, Tensor) and not isinstance(before, nn.Parameter) else "parameter"
        raise _changed_error(f"{name} is {'gone' if now is None else f'another {kind}'}")
    if name.startswith("the forward of "):
        raise _changed_error(f"{name.removeprefix('the forward of ')} has another forward")
    if now != before:
        raise _changed_error(f"{name} is {now!r:.60} and was {before!r:.60}")


def _user_hooks(hooks: dict[int, Any]) -> list[Any]:
    """Return the hooks that the user put on a module: those that no library registered."""
    found = []
    for hook in hooks.values():
        function = hook
        while isinstance(function, functools.partial):
            function = function.func
        if str(getattr(function, "__module__", "")).partition(".")[0] not in _LIBRARIES:
            found.append(hook)
    return found


def _has_address(tensor: Tensor) -> bool:
    """Check whether a tensor has a memory address; some packed (quantised) tensors have none."""
    try:
        Tensor.data_ptr(tensor)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _hash_of_bits(tensor: Tensor) -> int:
    """Return a hash of a tensor's bits, which changes when entries change or exchange places."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        flat = flat.clone() if flat.storage_offset() % 8 else flat
        whole = flat[: len(flat) // 8 * 8].view(torch.int64)
        grid = whole[: len(whole) // _COLUMNS * _COLUMNS].view(len(whole) // _COLUMNS, _COLUMNS)
        rest = whole[grid.numel() :], flat[len(whole) * 8 :].long()
        return hash(torch.cat([grid.sum(0), grid.sum(1), *rest]).cpu().numpy().tobytes())


class ModelLock:
    """The lock that all lenses on one model share, and the records of the model that they made."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.noted: WeakSet[ModelRecord] = WeakSet()
        """The records of the lenses on the model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LensState:
    """State of one lens: the model's lock, which all lenses on it share, and the record of the model."""

    turns: ModelLock
    unchanged: ModelRecord
    alone: Lock = field(default_factory=Lock)
    """Held by each pass over these modules; a copy for a thread of the engine has its own."""
