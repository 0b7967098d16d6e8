"""Configurations by the names of their fields: what a file, the command line and a Python call have in common.

A configuration is a frozen dataclass with a docstring under each field; a text with choices is a ``Literal``. Its
``metadata`` says what the type cannot:

- ``option``: the name on the command line, where it differs from the field's;
- ``metavar``: what stands for the value in ``--help``;
- ``written``: ``ranges`` (``0-3,7``) or ``commas`` (``1,2.5``), where several values are written as one text; ``pairs``
  (``NAME=VALUE``), where a table gives such texts too;
- ``positional``: the field is an argument of the command;
- ``off``: the option that sets a truth to false, where it is not ``--no-NAME``;
- ``flag``: the other names, such as ``-v``, of an option that only sets a truth to true;
- ``file_only``: the field is a table of the file, or an argument of the Python call, and has no option;
- ``objects``: Python may give something else than a text, such as a function; it is taken as it is;
- ``python``: the type that Python may give, with ``{}`` for the field's own; ``module:Name`` says from where a name is;
- ``imports``: a text with a colon names code of the user's; a file cannot, the command line can;
- ``table``: the field may be a table of the file: key -> field.
"""

import json
import math
import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from .arguments import check_seeds
from .errors import InputError
from .files import check_file_name, check_regular_file
from .text import parse_ranges, safe_line

C = TypeVar("C")
_MOST_DOTS = 1_000
"""Dots of a value that is read as TOML: the parser needs their square."""
_MOST_FILE_BYTES, _MOST_FILE_DOTS = 10_000_000, 5_000
"""Size of a file of settings; dots in a TOML file."""
_NEEDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def make_config(
    kind: type[C], given: C | None, changes: Mapping[str, Any], *, where: str = ""
) -> C:
    """Return a configuration: ``given``, or the defaults if None, with the fields in ``changes``.

    An unknown field or a value of another type is refused; ``where`` is the place that the error names, by default the
    class.
    """
    if given is not None and not isinstance(given, kind):
        raise InputError(f"config is a {type(given).__name__}; need a {kind.__name__}")
    known = {field.name: field for field in fields(cast("Any", kind))}
    changes = flatten_tables(kind, changes, where=where)
    renamed = {
        field.metadata["option"]: name
        for name, field in known.items()
        if "option" in field.metadata
    }
    refuse_unknown_names(changes, known, where=where or kind.__name__, options=renamed)
    made = {
        name: convert_field_value(known[name], known[name].type, value)
        for name, value in changes.items()
    }
    return kind(**made) if given is None else cast("C", replace(cast("Any", given), **made))


def flatten_tables(kind: type, settings: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """Return a TOML file's settings, with the entries of tables such as ``[tokens]`` moved to the top level."""
    found = dict(settings)
    for field in fields(kind):
        keys, table = field.metadata.get("table"), found.get(field.name)
        if keys is not None and isinstance(table, Mapping):
            refuse_unknown_names(table, keys, where=f"[{field.name}] of {where or kind.__name__}")
            del found[field.name]
            found |= {keys[name]: value for name, value in table.items()}
    return found


def refuse_unknown_names(
    given: Iterable[str],
    known: Iterable[str],
    *,
    where: str,
    options: Mapping[str, str] | None = None,
) -> None:
    """Refuse an unknown name; the error gives the nearest known one.

    ``where`` is what has the names. ``options`` is wrong name that users try -> right name.
    """
    known, options = list(known), options or {}
    for name in given:
        if name not in known:
            near = get_close_matches(name, [*known, *options], n=1, cutoff=0.5)
            meant = f"did you mean {options.get(near[0], near[0])}? Need" if near else "need"
            raise InputError(
                f"{where} has {name!r}, which is not known; {meant} some of {', '.join(known)}"
            )


def read_settings(path: str | Path, *, what: str) -> dict[str, Any]:
    """Read the top-level table of a TOML or JSON file; errors say that the file holds ``what``."""
    check_file_name(path, what="the name of the file")
    check_regular_file(path, what=f"the file of {what}")
    path = Path(path)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise ValueError(
                f"it has {path.stat().st_size:,} bytes, and settings have at most {_MOST_FILE_BYTES:,}"
            )
        text = path.read_text(encoding="utf-8")
        # parsing them would take minutes
        if path.suffix != ".json" and text.count(".") > _MOST_FILE_DOTS:
            raise ValueError(f"it has more than {_MOST_FILE_DOTS:,} dots")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read as {what}: {error}. Need a TOML or JSON file"
        ) from error
    if not isinstance(found, dict):
        raise InputError(
            f"{path} cannot be read as {what}: it holds no table. Need one at the top of the file"
        )
    return found


def parse_setting(text: str) -> tuple[str, Any]:
    """Split a text such as ``lr=3e-4`` into (name, value); the value is parsed as TOML, or stays a text."""
    name, _, value = (part.strip() for part in text.partition("="))
    if value.count(".") >= _MOST_DOTS:
        return name, value
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return name, value


def convert_field_value(field: Field[Any], kind: Any, value: Any, *, name: str = "") -> Any:
    """Return a value for a field in the type ``kind``: a list, or a text such as ``0-3,7``, becomes a tuple.

    A value of another type is refused; the error calls the field ``name`` if that is given.
    """
    name = name or field.name
    kind, optional = split_off_none(kind)
    if value is None and (optional or field.default is None):
        return None
    if "objects" in field.metadata and not isinstance(value, str | None):
        return value
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if isinstance(value, Mapping) and field.metadata.get("written") == "pairs":
            value = [f"{key}={one}" for key, one in value.items()]
        if isinstance(value, str):
            return _parse_list(value, item, field.metadata.get("written", ""), name=name)
        # an array of one number is no list
        if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
            raise InputError(f"{name} is {safe_line(repr(value), limit=200)}; need a list")
        return tuple(_convert_single_value(name, one, item) for one in value)
    return _convert_single_value(name, value, kind)


def split_off_none(kind: Any) -> tuple[Any, bool]:
    """Return (the type without None, True if it allowed None), such as (int, True) for ``int | None``."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (one,) = [part for part in get_args(kind) if part is not type(None)]
    return one, True


def allowed_texts(kind: Any) -> tuple[str, ...]:
    """Return the texts that a field of this type, or each item of its list, may have; () is any text."""
    kind, _ = split_off_none(kind)
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return get_args(item) if get_origin(item) is Literal else ()


def check_field_types(config: Any) -> None:
    """Refuse a configuration with a value that its field's type does not allow; turn its lists into tuples."""
    for field in fields(config):
        if "file_only" not in field.metadata:
            value = convert_field_value(field, field.type, getattr(config, field.name))
            object.__setattr__(config, field.name, value)
    check_seeds({field.name: getattr(config, field.name) for field in fields(config)})


def check_at_most(config: Any, most: float, *names: str) -> None:
    """Refuse a number above ``most`` in one of these fields; None and unknown names pass."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None and value > most:
            raise InputError(f"{name} is {value}; need at most {most:,}")


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Refuse a number below ``least`` in one of these fields; None and unknown names pass."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None and not value >= least:
            raise InputError(f"{name} is {value}; need at least {least}")


def refuse_unread_fields(config: Any, *names: str, reader: str) -> None:
    """Refuse fields that were set but have no effect in this run; only ``reader`` would read them."""
    for field in fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            value = safe_line(repr(getattr(config, field.name)), limit=200)
            raise InputError(
                f"{field.name} is {value}, which nothing reads here: it is for {reader}. Leave it out"
            )


def _parse_list(text: str, item: Any, how: str, *, name: str) -> tuple[Any, ...]:
    """Parse a text such as ``0-3,7`` (ranges) or ``1,2.5`` (commas) into a tuple of the type ``item``."""
    if how == "ranges":
        return tuple(parse_ranges(text, name=name))
    if how != "commas":
        raise InputError(f"{name} is {text!r}; need a list")
    pieces = [piece.strip() for piece in text.split(",")]
    if item is not str or not text.strip():
        pieces = [piece for piece in pieces if piece]
    try:
        return tuple(item(piece) for piece in pieces)
    except ValueError:
        raise InputError(
            f"{name} is {text!r}; need numbers with commas between them, such as 1,2,5"
        ) from None


def _convert_single_value(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise InputError(
                f"{name} is {safe_line(repr(value), limit=200)}; need one of {', '.join(get_args(kind))}"
            )
        return str(value)
    truth = isinstance(value, bool)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is int and isinstance(value, Integral) and not truth:
        return int(value)
    if kind is float and isinstance(value, Real) and not truth and math.isfinite(value):
        return float(value)
    if kind in _NEEDS and not (kind in (bool, str) and isinstance(value, kind)):
        raise InputError(f"{name} is {safe_line(repr(value), limit=200)}; need {_NEEDS[kind]}")
    return value
