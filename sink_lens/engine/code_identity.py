"""Identity of a function in a resumed run: not its name but what it does, as a hash that other processes get too.

A notebook redefines a metric, or a helper that it calls, under the same name; the numbers that a run folder holds are
then another function's. ``hash_code`` hashes

- the code of a function and of the functions within it, its defaults, and what its closure holds;
- what it reads by global name, the same way: functions, classes, numbers, arrays, and attributes of your own modules;
- of callable objects, bound methods and ``functools.partial`` the class and what they hold;
- tensors and arrays by their values, a model by its weights, a tokenizer by its vocabulary and rules.

Python, installed packages and this one are trusted by their version. Comments, names of files, places in them and
docstrings do not count. Nothing hangs on where an object lies in memory, on its ``repr``, or on Python's hash seed.

Some things cannot be known: what a function reads from an open file or a generator, evaluates from text, or takes from
a module of yours by a name that is computed. ``hash_code`` then says so, and a run with it is not resumed.
"""

import builtins
import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.metadata
import itertools
import json
import platform
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..models.lens import LensModel
from ..models.load import weights_hash
from ..models.private_apis import OF_ABSTRACT_CLASSES, uncompiled_function
from ..records import UNKNOWN

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...), type(NotImplemented))
_OPEN_ENDED = frozenset({"eval", "exec", "compile", "globals", "locals", "vars", "open", "input", "__import__"})
"""Built-in functions whose result is not in the code."""
_CHECKERS = frozenset({"jaxtyping", "typeguard", "beartype"})
"""Packages whose wrappers only check types."""
_OF_CLASSES = frozenset({OF_ABSTRACT_CLASSES, "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__"})
_OF_CLASSES |= {"__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__slotnames__"}
_OF_CLASSES |= {"__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__"}
_OF_CLASSES |= {"__abstractmethods__"}
"""Attributes of every class, which its body does not define."""
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, *_SLOTS)
_C_FUNCTIONS += (types.MethodWrapperType, types.ClassMethodDescriptorType)


def hash_code(thing: Any) -> str:
    """Return the SHA-256 (hex) of an object's code and values; if it has no such hash, ``UNKNOWN`` and the reason."""
    try:
        return _Hasher().digest(thing).hex()
    except _UnknownError as error:
        return f"{UNKNOWN}{error}"
    except RecursionError:
        return f"{UNKNOWN}it holds itself many times over"


class _UnknownError(Exception):
    """Something whose effect on the numbers cannot be told from its code and values."""


@dataclass(slots=True)
class _Hasher:
    """Computes the hash of an object from the hashes of all that the object holds."""

    done: dict[int, bytes] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The functions and names that led here."""
    kept: list[Any] = field(default_factory=list)
    """Objects that have a hash; they stay alive, so that no other object gets their address."""

    def digest(self, value: Any) -> bytes:
        """Return the SHA-256 of any value, from the hashes of all that it holds; refuse a value without a hash."""
        if type(value) in _PLAIN:
            return _sha256(type(value).__name__, repr(value))
        key = id(value)
        if key in self.done:
            return self.done[key]
        if key in self.begun:
            return _sha256("itself", len(self.begun) - self.begun.index(key))
        self.begun.append(key)
        self.kept.append(value)
        self.done[key] = _sha256(type(value).__qualname__, *self.parts_to_hash(value))
        self.begun.pop()
        return self.done[key]

    def parts_to_hash(self, value: Any) -> Iterator[Any]:
        """Yield the texts, numbers and hashes that are hashed for ``value``, which is neither a number nor a text."""
        if isinstance(value, types.FunctionType):
            yield from self.function_parts(value)
        elif isinstance(value, types.MethodType):
            yield from (self.digest(value.__func__), self.digest(value.__self__))
        elif isinstance(value, _C_FUNCTIONS):
            yield from self.builtin_parts(value)
        elif isinstance(value, type):
            yield from self.class_parts(value)
        elif isinstance(value, types.ModuleType):
            yield self.attribute_digest(value)
        elif isinstance(value, types.CodeType):
            yield from self.code_parts(value, {}, doc=None)
        elif type(value) in (tuple, list):
            yield from map(self.digest, value)
        elif type(value) is dict or isinstance(value, types.MappingProxyType):
            yield from self.pair_digests(value.items())
        elif type(value) in (set, frozenset):
            yield from sorted(_Hasher().digest(one) for one in value)
        elif isinstance(value, functools.partial):
            yield from map(self.digest, (value.func, value.args, dict(value.keywords)))
        elif isinstance(value, staticmethod | classmethod):
            yield self.digest(value.__func__)
        elif isinstance(value, property):
            yield from map(self.digest, (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            yield self.digest(value.func)
        elif hasattr(value, "cache_parameters") and hasattr(value, "__wrapped__"):  # of functools.cache
            yield self.digest(value.__wrapped__)
        else:
            yield from self.data_parts(value)

    def data_parts(self, value: Any) -> Iterator[Any]:
        """Yield the parts to hash of a tensor, array, model or tokenizer, or of any other object that holds data."""
        if isinstance(value, Tensor):
            yield from _tensor_parts(value)
        elif isinstance(value, np.ndarray | np.generic):
            yield from (value.dtype.str, str(value.dtype.descr), str(value.shape))
            yield self.digest(value.tolist()) if value.dtype.hasobject else value.tobytes()
        elif isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is value:
            yield from (value.__name__, _module_version("numpy"))
        elif isinstance(value, torch.Generator):
            yield from _tensor_parts(value.get_state())
        elif isinstance(value, LensModel):
            yield from (weights_hash(value), str(value.dtype))
        elif isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            yield from self.module_parts(value)
        elif isinstance(value, PreTrainedTokenizerBase) and value.is_fast:
            rules = json.loads(value.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # of fast tokenizers
            kept = {name: entry for name, entry in rules.items() if name not in ("truncation", "padding")}
            yield from (json.dumps(kept, sort_keys=True), json.dumps(value.special_tokens_map, default=str))
        else:
            yield from self.pickled_parts(value)

    def function_parts(self, function: types.FunctionType) -> Iterator[Any]:
        """Yield the parts to hash of a Python function: code, defaults, closure, and the globals that it reads."""
        names, owner = function.__globals__, str(function.__globals__.get("__name__", ""))
        wrapped = getattr(function, "__wrapped__", None)
        compiled = uncompiled_function(function)
        if compiled is not None or (wrapped is not None and owner.partition(".")[0] in _CHECKERS):
            yield self.digest(compiled or wrapped)
            return
        with _appended(self.names, function.__name__):
            yield from map(self.digest, (function.__defaults__, function.__kwdefaults__))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with _appended(self.names, name):
                    yield from (name, self.closure_digest(cell))
            if _is_installed(owner):
                yield from (owner, _module_version(owner), function.__code__.co_qualname, function.__code__.co_code)
            else:
                yield from self.code_parts(function.__code__, names, doc=function.__doc__)
                yield from self.pair_digests(sorted(function.__dict__.items()))

    def closure_digest(self, cell: types.CellType) -> bytes:
        """Hash a variable that a function's closure holds; it may have no value yet."""
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return _sha256("empty")
        return self.digest(value)

    def code_parts(self, code: types.CodeType, names: Mapping[str, Any], *, doc: str | None) -> Iterator[Any]:
        """Yield the parts to hash of ``code`` without its docstring ``doc``; ``names`` holds its globals' values."""
        yield from (code.co_code, code.co_exceptiontable, code.co_flags)
        yield from (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        yield from (" ".join(part) for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        for at, constant in enumerate(code.co_consts):
            if isinstance(constant, types.CodeType):
                yield from self.code_parts(constant, names, doc=None)
            elif at or doc is None or constant != doc:
                yield self.digest(constant)
        for chain in _global_names_read(code):
            with _appended(self.names, chain[0]):
                yield from (chain[0], self.global_digest(chain, names))
        package = str(names.get("__package__") or "").split(".")
        steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG")]
        for at, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level, taken = steps[at - 2].argval, steps[at - 1].argval
                above = package[: len(package) - level + 1] if level else []
                module = ".".join([*above, *filter(None, [str(step.argval)])])
                with _appended(self.names, module):
                    yield self.imports_digest(module, taken)

    def global_digest(self, chain: tuple[str, ...], names: Mapping[str, Any]) -> bytes:
        """Hash the global ``chain[0]`` of ``names``; if it is a module, hash only its attribute ``chain[1:]``."""
        name, *rest = chain
        if name in names:
            value = names[name]
            return self.attribute_digest(value, *rest) if isinstance(value, types.ModuleType) else self.digest(value)
        if not hasattr(builtins, name):
            return _sha256("undefined")
        if name in _OPEN_ENDED:
            raise self.unknown_error(f"calls {name}()")
        return _sha256("built-in", name)

    def attribute_digest(self, value: Any, *rest: str) -> bytes:
        """Hash the object ``value.a.b`` for ``rest`` = ("a", "b"); for an installed module, its name and version."""
        if not isinstance(value, types.ModuleType):
            return self.digest(value)
        if _is_installed(value.__name__):
            return _sha256("module", value.__name__, _module_version(value.__name__))
        if not rest:
            raise self.unknown_error(f"takes the module {value.__name__} whole")
        if not hasattr(value, rest[0]):
            return _sha256("undefined")
        with _appended(self.names, rest[0]):
            return self.attribute_digest(getattr(value, rest[0]), *rest[1:])

    def imports_digest(self, name: str, taken: tuple[str, ...] | None) -> bytes:
        """Hash the objects that an import takes from the module ``name``; for an installed module, its version."""
        if _is_installed(name):
            return _sha256("module", name, _module_version(name))
        value = sys.modules.get(name)
        if value is None or not taken or not all(hasattr(value, one) for one in taken):
            raise self.unknown_error(f"imports the module {name} itself")
        return _sha256(*(self.attribute_digest(value, one) for one in taken))

    def builtin_parts(self, value: Any) -> Iterator[Any]:
        """Yield the parts to hash of a function not written in Python: name, version, and the object it is bound to."""
        yield from (str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", value.__name__)))
        yield _module_version(str(getattr(value, "__module__", None) or "builtins"))
        owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            yield self.digest(owner)

    def class_parts(self, value: type) -> Iterator[Any]:
        """Yield the parts to hash of a class: name and version if it is installed, else its bases and attributes."""
        yield value.__name__
        if _is_installed(value.__module__):
            yield from (value.__module__, value.__qualname__, _module_version(value.__module__))
            return
        with _appended(self.names, value.__name__):
            yield from map(self.digest, (type(value), value.__bases__))
            body = {name: entry for name, entry in vars(value).items() if name not in _OF_CLASSES}
            yield from self.pair_digests((name, entry) for name, entry in body.items() if not isinstance(entry, _SLOTS))

    def module_parts(self, value: nn.Module) -> Iterator[Any]:
        """Yield the parts to hash of a torch module and all in it: class, parameters, buffers, hooks and settings."""
        for path, part in value.named_modules():
            own = {name: entry for name, entry in vars(part).items() if name not in ("_modules", "_parameters")}
            hooks = {name: list(own.pop(name).values()) for name in list(own) if name.endswith("_hooks") and own[name]}
            if _is_installed(type(part).__module__):
                own = {name: entry for name, entry in own.items() if type(entry) in _PLAIN}
            yield from (path, self.digest(type(part)))
            yield from self.pair_digests(sorted((own | hooks).items()))
            yield from self.pair_digests([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])

    def pickled_parts(self, value: Any) -> Iterator[Any]:
        """Yield the parts to hash of an object of any other type: the parts that ``pickle`` would store."""
        try:
            taken_apart = copyreg.dispatch_table.get(type(value))
            made = value.__reduce_ex__(4) if taken_apart is None else taken_apart(value)
        except Exception as error:  # whatever a class raises that cannot be sent elsewhere
            raise self.unknown_error(f"holds a {type(value).__qualname__}") from error
        self.kept.append(made)
        if isinstance(made, str):
            yield from (type(value).__module__, made)
            return
        function, arguments, state, items, pairs = [*made, None, None, None][:5]
        states: tuple[Any, ...] = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        with _appended(self.names, type(value).__name__):
            yield from map(self.digest, (type(value), function, arguments))
            for one in states:
                if isinstance(one, dict) and all(isinstance(name, str) for name in one):
                    yield from self.pair_digests(sorted(one.items()))  # the order of attributes means nothing
                else:
                    yield self.digest(one)
            yield from map(self.digest, items or ())
            yield from self.pair_digests(pairs or ())

    def pair_digests(self, items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
        """Yield the hash of each name and of its value in ``items``, one after the other."""
        for name, entry in items:
            with _appended(self.names, name if isinstance(name, str) else None):
                yield from (self.digest(name), self.digest(entry))

    def unknown_error(self, what: str) -> _UnknownError:
        """Make the error that an object has no hash: the names that lead to it, then the reason ``what``."""
        names = [name for at, name in enumerate(self.names) if name not in self.names[:at]]
        return _UnknownError(f"{'.'.join(names) or 'it'} {what}")


@contextlib.contextmanager
def _appended(names: list[str], name: str | None) -> Iterator[None]:
    """Within the block, ``names`` ends with ``name`` (unless None), so that an error can tell what was being hashed."""
    if name is not None:
        names.append(name)
    yield
    if name is not None:
        names.pop()


def _sha256(*parts: Any) -> bytes:
    """Return the SHA-256 of texts, numbers and bytes in their order, each with its length."""
    found = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.digest()


def _tensor_parts(tensor: Tensor) -> Iterator[Any]:
    """Yield the texts and bytes that decide a tensor's hash: type, shape and values."""
    try:
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise _UnknownError(f"holds a tensor without values here ({tensor.layout}, {tensor.device})") from error
    yield from (str(tensor.dtype), str(tuple(tensor.shape)), values)


def _global_names_read(code: types.CodeType) -> list[tuple[str, ...]]:
    """Return the global names that code reads, each with the attributes read of it, as ``("np", "random", "rand")``."""
    found: dict[tuple[str, ...], None] = {}
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL")]
    for at, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            attributes = itertools.takewhile(lambda one: one.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[at + 1 :])
            found[tuple(str(one.argval) for one in (step, *attributes))] = None
    return list(found)


@functools.cache
def _stdlib_folders() -> list[Path]:
    return [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]


def _is_installed(name: str) -> bool:
    """Check whether a module belongs to Python or an installed package, so that its version says what its code is."""
    top = name.partition(".")[0]
    if top in ("builtins", "sink_lens", "__main__"):
        return top != "__main__"  # a notebook, even where the program that runs it is installed
    if (file := getattr(sys.modules.get(name) or sys.modules.get(top), "__file__", None)) is None:
        return top in sys.stdlib_module_names
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or any(path.resolve().is_relative_to(place) for place in _stdlib_folders())


@functools.cache
def _module_version(name: str) -> str:
    """Return the version of the package (or of Python) to which an installed module belongs; empty if it has none."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "builtins":
        return platform.python_version()
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(top), "__version__", ""))
