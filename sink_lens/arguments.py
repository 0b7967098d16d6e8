"""Arguments of public functions: each is compared with the type in the signature before the function begins.

``lazy.exported`` puts this around every function that a namespace such as ``sink_lens.measures`` gives, so that what a
user calls is checked and what the package calls itself is not. It needs no torch: types that say a shape
(``Float[Tensor, "head query"]``) check themselves.
"""

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from .errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
_PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
_UNEXPECTED = (TypeError, AttributeError, ValueError, LookupError, OverflowError, RuntimeError)
_MOST_ITEMS = 10_000
"""Items of a longer sequence are not looked at one by one."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it refuses arguments that its signature does not allow.

    Wrong types are refused, numbers that are not whole where whole ones are needed, nan, tensors without values (on
    the device "meta") and of another type or number of axes.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        hints = _hints(function)
        try:
            bound = signature.bind(*args, **named).arguments
        except TypeError:  # the function says itself what is missing, and may take names of 0.1
            return function(*args, **named)
        for name, value in bound.items():
            hint = hints.get(name, Any)
            kind = signature.parameters[name].kind
            several = value if kind is inspect.Parameter.VAR_POSITIONAL else (value,)
            if kind is inspect.Parameter.VAR_KEYWORD:
                continue
            for one in several:
                if not fits(one, hint):
                    raise InputError(f"{name} of {function.__name__} is {shown(one)}; need {needed(hint)}")
        try:
            return function(*args, **named)
        except _UNEXPECTED as error:  # what the signature allows and the function cannot use
            ours = type(error) in (RuntimeError, NotImplementedError) and "memory" not in str(error)
            if isinstance(error, RuntimeError) and not ours:  # such as a device that is out of memory
                raise
            said = (str(error).strip() or "no reason was given").splitlines()[0]
            raise InputError(
                f"{function.__name__} cannot use what it was given ({type(error).__name__}: {said[:200]}); found "
                f"{', '.join(f'{name} = {shown(value)}' for name, value in bound.items()) or 'nothing'}; need what "
                f"help({function.__module__}.{function.__name__}) says"
            ) from error

    return call


@functools.cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name that is there only for the type checker
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; True where the type says nothing that can be checked."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in inner)
    if getattr(value, "is_meta", False):
        return False
    if hint is bool:
        return isinstance(value, bool) or type(value).__name__ == "bool"
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        return number and not (isinstance(value, float) and math.isnan(value))
    if hint is None:
        return value is None
    if origin is not None:
        return _fits_container(value, origin, inner)
    return not isinstance(hint, type) or hint is Any or isinstance(value, hint)


def _fits_container(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is Callable:
        return callable(value)
    if not isinstance(origin, type):
        return True
    if issubclass(origin, Mapping):
        items = list(value.items())[:_MOST_ITEMS] if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in items)
    if not issubclass(origin, Iterable):
        return isinstance(value, origin)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return False
    if isinstance(value, Mapping) and issubclass(origin, Sequence | Set):
        return False
    if not isinstance(value, Sequence | Set) or not inner:
        kind = getattr(getattr(value, "dtype", None), "kind", "" if hasattr(value, "dtype") else "U")
        return (
            not inner or inner[0] is not str or kind in ("U", "O", "T")
        )  # an array, or what can be gone over once only
    if origin is tuple and inner[-1] is not ...:
        return len(value) == len(inner) and all(fits(one, of) for one, of in zip(value, inner, strict=True))
    return len(value) > _MOST_ITEMS or all(fits(one, inner[0]) for one in value)


def shown(value: Any) -> str:
    """A value in an error: a tensor by its type and shape, anything else as Python writes it, cut."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        where = " on the device meta, which holds no values" if getattr(value, "is_meta", False) else ""
        return f"a {type(value).__name__} of {value.dtype} with the shape {tuple(value.shape)}{where}"
    if callable(value) and hasattr(value, "__name__"):
        return f"{value.__name__!r}, a {type(value).__name__}"
    text = " ".join(repr(value).split())
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def needed(hint: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(needed(one) for one in inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if hint in _PLAIN:
        return _PLAIN[hint]
    if (axes := getattr(hint, "dim_str", None)) is not None:
        return f"a tensor {hint.__name__.partition('[')[0]} with the axes ({axes})"
    if origin is Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a table of {needed(inner[0])} to {needed(inner[1])}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list, each {needed(inner[0])}" if inner else "a list"
    return f"a {hint.__name__}" if isinstance(hint, type) else str(hint).replace("typing.", "")
