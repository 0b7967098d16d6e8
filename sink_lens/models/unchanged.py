"""The model as it was when it was wrapped: a lens is frozen, and refuses a model that was changed since.

A lens has two paths that share one set of parameters, and facts about them that were found once. Whoever exchanges a
part of the model (an adapter, ``load_state_dict(assign=True)``, a resized embedding, another module, a hook) exchanges
it on one path, so that the two are two models from then on. To take the change in would be to wrap again, which drops
the hooks that the user has put on the bridge. So it is refused.

**What may change.** Values in place: both paths hold the same tensors. A parameter, for one of the same values. Train
and eval mode, gradients on and off, ``compile`` (passes run uncompiled), one exact attention kernel for another,
settings that no number hangs on, gradient checkpointing. Hooks at the bridge's hook points, and those that libraries
put on a module by themselves (``_LIBRARIES``).

**What is watched**, on the plain model, inside the bridge, and on the user's own model where it has adapters, is one
list of facts. Each is read again before a pass, in C: walking the modules takes a hundred times as long. Weights that
accelerate keeps elsewhere are exchanged at each forward, and so is the table of a rotary embedding that grows with the
length: those are left out.
"""

import contextlib
import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat, starmap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from ..errors import ModelError
from .own_attention import inner_function
from .private_apis import PROCESSED, n_in_place_changes, name_in_plain_model

_LIBRARIES = ("accelerate", "sink_lens", "transformer_lens", "transformers")
_GROWING = ("dynamic", "longrope")
"""Kinds of rotary embedding whose table is made anew for another length."""
_WITHOUT_SETTINGS = (nn.Linear, nn.Dropout, nn.ModuleList, nn.SiLU)
"""Most modules of a model; what they compute is in their parameters alone."""
_FREE = frozenset(
    {"training", "gradient_checkpointing", "p", "inplace", "name_or_path", "use_cache", "forward"}
)
"""Settings that change no number in eval mode, and ``forward``, which is watched whether a module has one or not."""
_FREE_PARTS = (
    "dropout",
    "_token_id",
    "output_",
    "return_",
    "problem_type",
    "label",
    "architectures",
    "dtype",
)
_COLUMNS = 1040
"""Words of 8 bytes in a row of sums. With a power of 2 the columns share cache lines, twice as slow."""
_FORM = operator.attrgetter("__class__", "dtype", "shape", "device")
_COPIED = "what was copied"
_READS: dict[str, Callable[[list[Any]], Iterable[Any]]] = {
    # of (tables, keys): parameters, modules, settings
    "object": lambda facts: map(dict.get, *facts),
    "forward": lambda tables: map(dict.get, tables, repeat("forward")),  # of a module's attributes
    "class": functools.partial(map, type),
    "code": functools.partial(starmap, getattr),  # of (class, name of a function, None)
    "list": functools.partial(map, repr),  # in a configuration or a module
    "size": functools.partial(map, len),  # of a table of modules
    "hooks": lambda tables: [tuple(one.values()) if one else () for one in tables],
    "form": functools.partial(map, _FORM),  # of a tensor
    # of a tensor whose memory another one uses too
    "address": functools.partial(map, Tensor.data_ptr),
    # of a function: adapters, the attention function, copied values
    "state": functools.partial(map, operator.call),
}
"""Kind of fact -> the function that reads such facts, from a list of what each is about."""


class ModelRecord:
    """Facts about a model, as they are now; ``check`` raises an error if one of them is another one."""

    def __init__(
        self,
        plain: nn.Module,
        *,
        bridge: TransformerBridge | None,
        source: nn.Module | None = None,
        copied: Sequence[tuple[str, Tensor]] = (),
        states: Sequence[tuple[str, Callable[[], object]]] = (),
    ) -> None:
        """Record the present state.

        Args:
            plain: the plain model.
            bridge: the bridge, if there is one.
            source: the user's own model, if ``plain`` is a copy of it.
            copied: name and tensor of what a path holds as copies, whose values must not change.
            states: name and function of what must stay equal too.
        """
        self._subjects: dict[str, list[Any]] = {kind: [] for kind in _READS}
        self._names: dict[str, list[str]] = {kind: [] for kind in _READS}
        self._before: dict[str, list[Any]] = {}
        self._known: set[int] = set()
        self.modules = list(self._record_modules(plain))
        """The modules that a pass may run, on both paths."""
        self._plain = list(zip(self._names["form"], self._subjects["form"], strict=True))
        if bridge is not None:
            for key in ("compatibility_mode", PROCESSED):
                self._add("object", (vars(bridge), key), f"{key} of the bridge")
            for root in (bridge, bridge.original_model):
                self.modules += self._record_modules(root, where="of the bridge, ")
        _ = source is None or list(self._record_modules(source))
        places = Counter(one.untyped_storage().data_ptr() for one in self._subjects["form"])
        for one, name in zip(self._subjects["form"], self._names["form"], strict=True):
            if places[one.untyped_storage().data_ptr()] > 1:
                self._add("address", one, name)
        for name, state in states:
            self._add("state", state, name)
        if copied:
            self._watch_values(copied)
        self.settings = list(map(vars, self.modules))
        self._subjects["object"] = list(map(list, zip(*self._subjects["object"], strict=True)))
        self._before |= {
            kind: list(_READS[kind](subjects)) for kind, subjects in self._subjects.items()
        }

    def check(self) -> None:
        """Raise ModelError if the model was changed; call it only while no pass runs."""
        for kind, subjects in self._subjects.items():
            before, now = self._before[kind], list(_READS[kind](subjects))
            same = all(map(operator.is_, now, before)) if kind == "object" else now == before
            if same:  # found without asking a tensor
                continue
            for at in compress(range(len(now)), map(operator.is_not, now, before)):
                if not _is_same(kind, now[at], before[at]):
                    raise _change_error(kind, self._names[kind][at], now=now[at], before=before[at])
                if isinstance(now[at], Tensor) and now[at].data_ptr() != before[at].data_ptr():
                    # each path has its own from now on
                    name = self._names[kind][at]
                    self._watch_values([(name, before[at]), (name, now[at])])
            self._before[kind] = now  # equal numbers may be two objects

    def record_values(self) -> "TensorValues":
        return TensorValues(self._plain)

    def versions(self) -> list[int]:
        return list(map(n_in_place_changes, self._subjects["form"]))

    def has_shared_views(self) -> bool:
        """Check whether tensors share their memory, such as parts of a fused parameter."""
        return bool(self._subjects["address"])

    def _add(self, kind: str, subject: object, name: str) -> None:
        self._subjects[kind].append(subject)
        self._names[kind].append(name)

    def _watch_values(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Watch the values of tensors of which a path holds copies, which follow no change in place."""
        values = TensorValues(named)
        self._add("state", lambda: tuple(values.names_of_changed()), _COPIED)
        self._before.setdefault("state", []).append(())

    def _record_modules(self, root: Any, *, where: str = "") -> Iterator[nn.Module]:
        waiting: list[tuple[str, Any]] = [("", root)]
        while waiting:
            path, module = waiting.pop()
            if module is None or id(module) in self._known or isinstance(module, HookPoint):
                continue
            self._known.add(id(module))
            self._record_module(module, name=where + name_in_plain_model(path), own=not where)
            yield module
            waiting += [
                (f"{path}.{key}" if path else key, one)
                for key, one in reversed(module._modules.items())
            ]

    def _record_module(self, module: nn.Module, *, name: str, own: bool) -> None:
        growing = any(kind in str(getattr(module, "rope_type", "")) for kind in _GROWING)
        buffers = {} if growing else module._buffers
        tables: tuple[dict[str, Any], ...] = (module._parameters, buffers, module._modules)
        for table in tables:
            for key, one in table.items():
                if isinstance(one, HookPoint) or (isinstance(one, Tensor) and one.is_meta):
                    continue
                whole = f"{name}.{key}" if name and not name.endswith(", ") else name + key
                self._add("object", (table, key), whole)
                if isinstance(one, Tensor) and id(one) not in self._known:
                    # some packed tensors have no address
                    with contextlib.suppress(RuntimeError, NotImplementedError):
                        one.untyped_storage().data_ptr()
                        self._known.add(id(one))
                        self._add("form", one, whole)
        name = name or "the model"
        if module._modules:
            self._add("size", module._modules, name)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self._add("hooks", hooks, name)
        self._add("class", module, name)
        self._add("forward", vars(module), f"the forward of {name}")
        if not own:
            return
        self._record_code(type(module))
        if not growing and type(module) not in _WITHOUT_SETTINGS:
            self._record_settings(vars(module), name=name)
        config = vars(module).get("config")
        if config is not None and id(config) not in self._known and hasattr(config, "to_dict"):
            self._known.add(id(config))
            self._record_settings(vars(config), name="the configuration")

    def _record_code(self, kind: type) -> None:
        for one in kind.__mro__[:-1]:
            if id(one) in self._known or one is nn.Module:
                continue
            self._known.add(id(one))
            for key, value in vars(one).items():
                if isinstance(value, FunctionType):
                    self._add("code", (one, key, None), f"{one.__qualname__}.{key}")
            file = sys.modules.get(one.__module__)
            of_model = one.__module__.startswith("transformers.models.")
            if file is not None and id(file) not in self._known and of_model:
                self._known.add(id(file))
                for key, value in vars(file).items():
                    if isinstance(value, FunctionType):
                        self._add("object", (vars(file), key), f"{one.__module__}.{key}")

    def _record_settings(self, own: dict[str, Any], *, name: str) -> None:
        for key, value in own.items():
            if key.startswith("_") or key in _FREE or any(part in key for part in _FREE_PARTS):
                continue
            listed = isinstance(value, list | tuple | dict)
            if listed or value is None or isinstance(value, int | float | str | FunctionType):
                self._add("object", (own, key), f"{key} of {name}")
            if listed:
                self._add("list", value, f"{key} of {name}")


class TensorValues:
    """Record of tensors' values, as hashes: a version counter changes with equal values too."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = list(named)
        self._before = self._hashes()

    def names_of_changed(self) -> list[str]:
        pairs = zip(self._named, self._before, self._hashes(), strict=True)
        return [name for (name, _), before, now in pairs if before != now]

    def check(self, what: str) -> None:
        """Raise ModelError if a value has changed since the record was made.

        A result that was made then, called ``what``, would otherwise run passes with other weights.
        """
        if changed := self.names_of_changed():
            raise ModelError(
                f"the weights were changed in place after the {what} were made ({changed[0]} has other values, one of "
                f"{len(changed)}): old numbers would be compared with those of another model. Need {what} of the "
                "weights as they are now; make them again"
            )

    def _hashes(self) -> list[int]:
        return [_hash_of_bits(one) for _, one in self._named]


def _is_same(kind: str, now: Any, before: Any) -> bool:
    if kind == "hooks":
        return _user_hooks(now) == _user_hooks(before)
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return _FORM(now) == _FORM(before) and (
            now.data_ptr() == before.data_ptr() or torch.equal(now, before)
        )
    return not isinstance(now, Tensor) and not isinstance(before, Tensor) and bool(now == before)


def _change_error(kind: str, name: str, *, now: Any, before: Any) -> ModelError:
    if name.startswith(("compatibility_mode", PROCESSED)):
        return ModelError(
            "the bridge went into compatibility mode after it was wrapped, where weights are folded or centred, partly "
            "in the user's own model; need the weights as they were loaded. Load the model again and wrap it, and give "
            "TransformerLens's tools a bridge of their own (TransformerBridge.boot_transformers)"
        )
    also = ""
    if kind == "hooks":
        found = f"a forward hook of {name} was removed"
        if new := [one for one in _user_hooks(now) if one not in before]:
            found = f"{name} has a forward hook more ({getattr(new[0], '__qualname__', type(new[0]).__name__)})"
            also = ". Or remove it, and give its function as an edit (sink_lens.edits.from_hook), or to lens.bridge"
    elif kind == "size":
        found = f"{name} has {now} modules in the place of {before}"
    elif kind == "address":
        found = f"{name} has other memory, and parts of the old one are in use"
    elif name == _COPIED:
        found = f"{now[0]} has other values, and what is measured is a copy that was made of it"
    elif isinstance(before, Tensor):
        found = f"{name} is {'gone' if now is None else 'another tensor'}"
    elif isinstance(now, nn.Module):
        found = f"{name} is another module, a {type(now).__module__}.{type(now).__qualname__}"
    else:
        found = f"{name} is {now!s:.90} and was {before!s:.90}"
    return ModelError(
        f"the model was changed after it was wrapped: {found}; need the model as it was. Wrap it again{also}"
    )


def _user_hooks(hooks: tuple[Any, ...]) -> list[Any]:
    return [
        one
        for one in hooks
        if str(getattr(inner_function(one), "__module__", "")).split(".")[0] not in _LIBRARIES
    ]


def _hash_of_bits(tensor: Tensor) -> int:
    """Return a hash of a tensor's bits, which changes when entries change or exchange places."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        flat = flat.clone() if flat.storage_offset() % 8 else flat
        whole = flat[: len(flat) // 8 * 8].view(torch.int64)
        grid = whole[: len(whole) // _COLUMNS * _COLUMNS].view(len(whole) // _COLUMNS, _COLUMNS)
        rest = whole[grid.numel() :], flat[len(whole) * 8 :].long()
        return hash(torch.cat([grid.sum(0), grid.sum(1), *rest]).cpu().numpy().tobytes())
