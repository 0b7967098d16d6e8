"""Configurations by the names of their fields: what a file, the command line and a Python call have in common.

A configuration is a frozen dataclass with a docstring under each field. Its ``metadata`` says what the type cannot:

- ``option``: the name on the command line, where it differs from the field's;
- ``choices``: the values that a text may have;
- ``metavar``: what stands for the value in ``--help``;
- ``written``: ``ranges`` (``0-3,7``) or ``commas`` (``1,2.5``), where several values are written as one text;
- ``positional``: the field is an argument of the command.
"""

import ast
import inspect
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import InputError
from .renamed import current_fields
from .text import ranges

C = TypeVar("C")
_NEEDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def with_fields(kind: type[C], given: C | None, changes: Mapping[str, Any], *, where: str = "") -> C:
    """A configuration with some of its fields changed.

    Args:
        kind: the class.
        given: the configuration to change; the defaults if None.
        changes: fields by name; lists become tuples.
        where: what the changes come from, for errors; the name of the class if empty.

    Raises:
        InputError: a name that is no field, with the nearest one, or a value that the field cannot take.
    """
    changes = current_fields(kind.__name__, changes, stacklevel=3)
    known, made = {field.name: field for field in fields(cast("Any", kind))}, {}
    hints = get_type_hints(kind)
    for name, value in changes.items():
        if name not in known:
            near = get_close_matches(name, [*known, *_old_names(known)], n=1, cutoff=0.5)
            meant = f"did you mean {_old_names(known).get(near[0], near[0])}? " if near else ""
            raise InputError(
                f"{where or kind.__name__} has {name!r}, which is not known; {meant}Need some of {', '.join(known)}"
            )
        made[name] = value_of(known[name], hints[name], value)
    return kind(**made) if given is None else cast("C", replace(cast("Any", given), **made))


def _old_names(known: Mapping[str, Field[Any]]) -> dict[str, str]:
    """Name on the command line, where it is another one -> field."""
    return {field.metadata["option"]: name for name, field in known.items() if "option" in field.metadata}


def value_of(field: Field[Any], kind: Any, value: Any, *, name: str = "") -> Any:
    """A value as a field has it: numbers where numbers are asked for, tuples for lists and for texts of several.

    Raises:
        InputError: a value of another type.
    """
    name = name or field.name
    kind, optional = bare(kind)
    if value is None and optional:
        return None
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if isinstance(value, str):
            return _written(value, item, field.metadata.get("written", ""), name=name)
        if not isinstance(value, Iterable):
            raise InputError(f"{name} is {value!r}; need a list")
        return tuple(_single(name, one, item) for one in value)
    return _single(name, value, kind)


def bare(kind: Any) -> tuple[Any, bool]:
    """A type without None, and whether it had it."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (one,) = [part for part in get_args(kind) if part is not type(None)]
    return one, True


def _written(text: str, item: Any, how: str, *, name: str) -> tuple[Any, ...]:
    if how == "ranges":
        return tuple(ranges(text, name=name))
    if how != "commas":
        raise InputError(f"{name} is {text!r}; need a list")
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    try:
        return tuple(item(piece) for piece in pieces)
    except ValueError:
        raise InputError(f"{name} is {text!r}; need numbers with commas between them, such as 1,2,5") from None


def _single(name: str, value: Any, kind: Any) -> Any:
    truth = isinstance(value, bool)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is int and isinstance(value, Integral) and not truth:
        return int(value)
    if kind is float and isinstance(value, Real) and not truth:
        return float(value)
    if kind in _NEEDS and not (kind in (bool, str) and isinstance(value, kind)):
        raise InputError(f"{name} is {value!r}; need {_NEEDS[kind]}")
    return value


def field_docs(kind: type) -> dict[str, str]:
    """Field -> the docstring under it, also of the classes that it is made from."""
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for at, under in zip(body.body, body.body[1:], strict=False):
            text = under.value.value if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant) else None
            if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name) and isinstance(text, str):
                docs[at.target.id] = " ".join(text.split())
    return docs
