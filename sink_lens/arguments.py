"""Arguments of public functions: each is compared with the type in the signature before the function begins.

``lazy.lazy_exports`` puts this around every function that a namespace such as ``sink_lens.measures`` gives. beartype
does the comparing; what it is told besides is that a number may be numpy's and is not nan, that a tensor has values,
and that every item counts. What a function raises while it runs passes as it is.
"""

import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from .errors import CallError, InputError
from .modes import plain_mode

P = ParamSpec("P")
R = TypeVar("R")
_PLAIN = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    type(None): "None",
}
_MOST_ITEMS = 10_000
"""The items of a longer sequence are not looked at."""


def check_calls(function: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Decorate a function so that it refuses arguments that its signature does not allow.

    It refuses wrong types, nan, fractions for whole numbers, tensors without values (on the device "meta"), tensors of
    another dtype or number of axes, and two sizes for one axis name. The function receives numpy's numbers as Python's.
    """
    from .signatures import refuse_left_out_options

    signature, unchecked = inspect.signature(function), cast("Callable[..., R]", function)
    name = name or _public_name(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **named).arguments
        except TypeError as error:
            plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
            call_of = signature.replace(parameters=plain, return_annotation=signature.empty)
            raise CallError(f"{name}: {error}; need {name}{call_of}") from None
        refuse_left_out_options(function, named, name_of=name)
        check_arguments(function, bound, name_of=name)
        with plain_mode():
            return unchecked(
                *map(_python_number, args),
                **{name: _python_number(value) for name, value in named.items()},
            )

    vars(call)["checked"] = True
    return call


def _public_name(function: Callable[..., Any]) -> str:
    return re.sub(r"\.__\w+__$", "", function.__qualname__).rpartition(".")[2]


def _python_number(value: Any) -> Any:
    item = getattr(value, "item", None) if isinstance(value, Real) else None
    return value if item is None else item()


def check_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], *, name_of: str = ""
) -> None:
    """Refuse arguments of other types than a function's signature names, and tensors that differ in a named axis."""
    hints, parameters = _type_hints(function), inspect.signature(function).parameters
    name_of = name_of or _public_name(function)
    for name, value in given.items():
        kind = parameters[name].kind if name in parameters else inspect.Parameter.VAR_KEYWORD
        if name not in hints or kind is inspect.Parameter.VAR_KEYWORD:
            continue
        for one in value if kind is inspect.Parameter.VAR_POSITIONAL else (value,):
            if not is_of_type(one, hints[name]):
                raise InputError(
                    f"{name} of {name_of} is {value_in_words(one)}; need {_type_in_words(hints[name])}"
                )
    known: dict[str, tuple[int, str]] = {}
    for name in [name for name in given if name in hints]:
        for axis, size in _axis_sizes(given[name], hints[name]):
            first, of = known.setdefault(axis, (size, name))
            if size != first:
                raise InputError(
                    f"the axis {axis!r} of {name_of} has {first:,} in {of} and {size:,} in {name}; need the same size"
                )
    check_seeds(given)


def _axis_sizes(value: Any, hint: Any) -> Iterator[tuple[str, int]]:
    for one in get_args(hint) or (hint,):
        if (text := getattr(one, "dim_str", None)) is None or not is_of_type(value, one):
            continue
        names, shape = text.split(), value.shape
        ends_at = (at for at, name in enumerate(names) if name == "..." or name.startswith("*"))
        open_at = next(ends_at, len(names))
        behind = len(names) - open_at - 1
        ends = [*zip(names[:open_at], shape, strict=False)]
        ends += zip(names[-behind:], shape[-behind:], strict=True) if behind > 0 else ()
        yield from ((name, size) for name, size in ends if name.isidentifier())
        return


def check_seeds(given: Mapping[str, Any]) -> None:
    """Refuse a seed below 0 or of more than 63 bits, which not every random generator takes."""
    for name in ("seed", "seeds", "data_seed"):
        value = given.get(name)
        for seed in value if isinstance(value, Sequence) else (value,):
            if isinstance(seed, Integral) and not 0 <= int(seed) < 2**63:
                raise InputError(f"{name} is {seed}; need a whole number from 0 on, below 2**63")


@functools.cache
def _type_hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name that is there only for the type checker
        return {}


def is_of_type(value: Any, hint: Any) -> bool:
    """Check whether a value is of a type; True if that cannot be checked."""
    from beartype.door import is_bearable
    from beartype.roar import BeartypeException

    try:
        return is_bearable(value, _strict_hint(hint))
    except BeartypeException:  # a type that cannot be checked
        return True


@functools.cache
def _strict_hint(hint: Any) -> Any:
    """Rewrite a type hint so that beartype checks every item, takes numpy's numbers, and refuses bool and nan."""
    from beartype.vale import Is

    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_strict_hint(one) for one in inner)]  # noqa: UP007  # made at run time
    if hint is bool:
        fits = Is[lambda value: isinstance(value, bool) or type(value).__name__ == "bool"]
        return Annotated[object, fits]
    if hint is int:
        fits = Is[lambda value: not isinstance(value, bool) and not _exceeds_64_bits(value)]
        return Annotated[Integral, fits]
    if hint is float:
        fits = Is[
            lambda value: (
                not (isinstance(value, bool) or _exceeds_64_bits(value) or math.isnan(value))
            )
        ]
        return Annotated[Real, fits]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        fits = Is[
            lambda value: _all_of_type(value, inner[:1]) and _all_of_type(value.values(), inner[1:])
        ]
        return Annotated[Mapping, fits]
    if origin is tuple and inner[-1] is not ...:
        fits = Is[lambda value: len(value) == len(inner) and all(map(is_of_type, value, inner))]
        return Annotated[Sequence, fits]
    if isinstance(origin, type) and issubclass(origin, Iterable) and origin not in (type, Callable):
        ordered = issubclass(origin, Sequence | Set)
        fits = Is[lambda value: _is_list_of_type(value, inner[:1], ordered=ordered)]
        return Annotated[Iterable, fits]
    if hasattr(hint, "dim_str"):
        return Annotated[hint, Is[lambda value: not _reason_without_values(value)]]
    return hint


def _is_list_of_type(value: Any, of: Sequence[Any], *, ordered: bool) -> bool:
    """Check whether a value is a list, array or other iterable of the type ``of[0]``, if there is one.

    A text never is. A dict is, by its keys, unless the iterable must be ``ordered``.
    """
    if (
        isinstance(value, str | bytes)
        or (ordered and isinstance(value, Mapping))
        or _reason_without_values(value)
    ):
        return False
    if hasattr(value, "dtype"):
        kinds = {(str,): "UOT", (int,): "iuO", (float,): "iufO"}.get(tuple(of))
        if kinds is None:
            return value.ndim > 0 and _all_of_type(value[:1], of)
        kind = getattr(value.dtype, "kind", "")  # a tensor's has none
        if not kind:
            kind = "c" if value.dtype.is_complex else "f" if value.dtype.is_floating_point else "i"
        return value.ndim == 1 and kind in kinds
    return not isinstance(value, Sequence | Set | Mapping) or _all_of_type(value, of)


def _all_of_type(values: Any, of: Sequence[Any]) -> bool:
    return not of or len(values) > _MOST_ITEMS or all(is_of_type(one, of[0]) for one in values)


def value_in_words(value: Any) -> str:
    """Describe a value in an error: a tensor by type and shape, a function by name, others by the start of the repr."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = f"{tuple(value.shape)}{_reason_without_values(value)}"
        return f"a {type(value).__name__} of {value.dtype} with the shape {shape}"
    if callable(value) and hasattr(value, "__name__"):
        return f"{value.__name__!r}, a {type(value).__name__}"
    text = " ".join(repr(value).split())
    kind = type(value).__name__ + (" of more than 64 bits" if _exceeds_64_bits(value) else "")
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kind})"


def _exceeds_64_bits(value: Any) -> bool:
    return isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63


def _reason_without_values(value: Any) -> str:
    if getattr(value, "is_meta", False):
        return " on the device meta, which holds no values"
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout == "torch.strided":
        return ""
    return f" of the layout {layout}, which holds some of its values"


def _is_list_hint(hint: Any) -> bool:
    origin = get_origin(hint)
    return (
        isinstance(origin, type)
        and issubclass(origin, Iterable)
        and not issubclass(origin, Mapping)
    )


def _type_in_words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        single = dict.fromkeys(_type_in_words(one) for one in inner if not _is_list_hint(one))
        single = " or ".join(single)
        lists = [_type_in_words(one) for one in inner if _is_list_hint(one)]
        lists = ["a list of these" if one == f"a list, each {single}" else one for one in lists]
        return " or ".join(dict.fromkeys([*([single] if single else []), *lists]))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if hint in _PLAIN:
        return _PLAIN[hint]
    if (axes := getattr(hint, "dim_str", None)) is not None:
        return f"a tensor {hint.__name__.partition('[')[0]} with the axes ({axes})"
    if origin is Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a table of {_type_in_words(inner[0])} to {_type_in_words(inner[1])}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list, each {_type_in_words(inner[0])}" if inner else "a list"
    return f"a {hint.__name__}" if isinstance(hint, type) else str(hint).replace("typing.", "")
