"""Identity of a function of the user's in ``run.json``: its source text, the values that it holds, and its version.

It is the quick first refusal of a run that goes on with another function. What a function reads elsewhere (a helper, a
file) is not in it: finished cells are computed again and compared, see ``records.recomputed``. Without source text it
is the function's name, and its attribute ``version`` if it has one.
"""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..models.lens import LensModel

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def function_hash(thing: Any) -> str:
    """Return the SHA-256 of a function, or of edits, lists and other objects with functions in them."""
    digest = hashlib.sha256()
    for part in _parts(thing, ()):
        content = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _parts(value: Any, within: tuple[int, ...]) -> Iterator[Any]:
    """Yield the texts and bytes to hash for ``value``, which lies within the objects with these ids."""
    yield type(value).__qualname__
    if id(value) in within:
        return
    inner = functools.partial(_parts, within=(*within, id(value)))
    yield getattr(value, "version", "") if callable(value) else ""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield from inner(value.detach().cpu().float().numpy())
    elif isinstance(value, np.ndarray | np.generic):
        yield from (str(value.dtype), str(value.shape))
        yield repr(value.tolist()) if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, functools.partial):
        for one in (value.func, value.args, value.keywords):
            yield from inner(one)
    elif isinstance(value, types.MethodType):
        yield from inner(value.__func__)
        yield from inner(value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__qualname__, _source_text(value))
        for one in (value.__defaults__, value.__kwdefaults__, _captured(value)):
            yield from inner(one)
    elif isinstance(value, dict) and type(value) is dict:
        for name, one in value.items():
            yield str(name)
            yield from inner(one)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(str, value))
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for one in value:
            yield from inner(one)
    elif isinstance(value, type):
        yield from (value.__qualname__, _source_text(value))
    elif isinstance(value, LensModel | nn.Module | types.ModuleType):
        return
    elif dataclasses.is_dataclass(value):
        yield from inner({one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    elif hasattr(value, "__dict__") and callable(value):
        yield _source_text(type(value))
        yield from inner(vars(value))


def _captured(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), (*_PLAIN, np.ndarray, Tensor)):
            found[name] = value
    return found


def _source_text(thing: Any) -> str:
    if str(thing.__module__).partition(".")[0] == __name__.partition(".")[0]:
        return ""  # of this library, whose version the run has
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""
