"""Signatures of public functions whose options are the fields of a configuration.

``takes`` marks such a function, whose own definition passes the options on as ``**fields``. What a user calls has each
option as a keyword-only parameter with its type and default, and each field's docstring in its own. ``tools/stubs.py``
writes the same into the stubs beside the packages. An edit's ``**where`` is spelled out likewise.
"""

import ast
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
LOADING = ("device", "dtype", "device_map", "max_memory", "revision")
"""Options that in Python only ``load`` takes."""
_LINE = 100


class Taken(NamedTuple):
    """The options that a function takes: the fields of a class, less those that are not for Python."""

    of: type
    """A configuration, or a typed dictionary."""
    leave_out: frozenset[str] = frozenset()
    returns: str = ""
    """The class of the result, if the definition names another."""
    table: Callable[[], Any] | None = None
    """Describes the result's ``frame``, whose columns the docstring then says."""


def takes(
    config: type,
    *,
    leave_out: Collection[str] = (),
    loads: bool = False,
    returns: str = "",
    table: Callable[[], Any] | None = None,
) -> Callable[[F], F]:
    """Mark a function whose ``**fields`` are those of ``config``, less those in ``leave_out`` and its own parameters.

    The model and the options of loading it are left out too, unless the function ``loads`` models itself. ``returns``
    and ``table`` are as in ``Taken``.
    """
    hidden = frozenset(leave_out) | (frozenset() if loads else {"model", *LOADING})

    def mark(function: F) -> F:
        setattr(function, _MARK, Taken(of=config, leave_out=hidden, returns=returns, table=table))
        return function

    return mark


_MARK = "__takes__"


class TypeText(str):
    """A type as an editor shows it; ``help`` writes it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def show_options(shown: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Give ``shown``, which calls ``function``, the signature and docstring with all options."""
    if (taken := taken_options(function)) is not None:
        shown.__signature__ = full_signature(function, taken)  # type: ignore[attr-defined]
        shown.__doc__ = full_docstring(function, taken)


def refuse_left_out_options(
    function: Callable[..., Any], given: Collection[str], *, name_of: str
) -> None:
    """Refuse an option that the function leaves out, such as those of ``load``."""
    if (taken := taken_options(function)) is None:
        return
    own = inspect.signature(function).parameters
    for name in given:
        if name in taken.leave_out and name in LOADING:
            raise InputError(
                f"{name_of} was given {name}, which is an option of load; need the loaded model: "
                f"{name_of}(load(model, {name}=...))"
            )
        if name in taken.leave_out.difference(own, {"model"}):
            raise InputError(f"{name_of} was given {name}, which it does not read; leave it out")


def taken_options(function: Callable[..., Any]) -> Taken | None:
    """Return the options that a function takes as ``**fields`` or ``**where``; None if it takes none."""
    if (taken := getattr(function, _MARK, None)) is not None:
        return taken
    for hint in getattr(function, "__annotations__", {}).values():
        if get_origin(hint) is Unpack:
            return Taken(of=get_args(hint)[0])
    return None


def full_signature(function: Callable[..., Any], taken: Taken) -> inspect.Signature:
    """Return a function's signature with each option as a keyword-only parameter; the types are ``TypeText``."""
    plain = inspect.signature(function)
    texts = _annotation_texts(function)
    texts |= {name: text.replace("C |", f"{taken.of.__name__} |") for name, text in texts.items()}
    own = [
        one.replace(annotation=TypeText(texts.get(one.name, "Any")))
        for one in plain.parameters.values()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text)
        for name, (text, default) in _option_types(taken, plain.parameters).items()
    ]
    return plain.replace(
        parameters=own + options,
        return_annotation=TypeText(taken.returns or texts.get("return", "Any")),
    )


def _option_types(taken: Taken, own: Collection[str]) -> dict[str, tuple[TypeText, Any]]:
    # late, like textwrap: `import sink_lens` is quick
    from dataclasses import MISSING, fields, is_dataclass

    hidden = taken.leave_out.union(own)
    if not is_dataclass(taken.of):
        hints = get_type_hints(taken.of)
        defaults = {name: "" if hint is str else None for name, hint in hints.items()}
        return {
            name: (TypeText(_type_text(hints[name])), one)
            for name, one in defaults.items()
            if name not in hidden
        }
    found = {}
    for field in fields(taken.of):
        if field.name not in hidden:
            made = field.default
            if field.default_factory is not MISSING:
                made = field.default_factory()
            text = _field_type_text(field.type, field.metadata, optional=made is None)
            found[field.name] = (TypeText(text), made)
    return found


def _field_type_text(kind: Any, metadata: Mapping[str, Any], *, optional: bool) -> str:
    """Return the type of a field as Python may give it: a list for a tuple, a path for a file's name, an object."""
    text = re.sub(r"[\w.]+:(?=\w)", "", metadata.get("python", "{}")).format(_type_text(kind))
    written = metadata.get("written", "")
    if "Iterable[" in text and written:
        text = f"Mapping[str, Any] | {text}" if written == "pairs" else f"{text} | str"
    if metadata.get("metavar", "") in ("FILE", "FOLDER", "PATH", "DIR"):
        text = f"{text} | Path"
    kinds = [one for one in dict.fromkeys(text.split(" | ")) if one != "None"]
    return " | ".join([*kinds, "None"] if optional or "None" in text.split(" | ") else kinds)


def _type_text(hint: Any) -> str:
    """Return a type hint as text, such as ``Iterable[int] | None``; a tuple of any length is any iterable."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type_text, inner))
    if origin is Literal:
        inner = [f'"{one}"' if isinstance(one, str) else repr(one) for one in inner]
        return f"Literal[{', '.join(inner)}]"
    if origin is tuple and inner[-1] is ...:
        return f"Iterable[{_type_text(inner[0])}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_text, inner))}]"
    if hint in (None, type(None)):
        return "None"
    return "Any" if hint is Any else getattr(hint, "__name__", str(hint))


def full_docstring(function: Callable[..., Any], taken: Taken) -> str:
    """Return a function's docstring with each option and its field's docstring among the arguments."""
    lines = inspect.cleandoc(function.__doc__ or "").split("\n")
    names = _option_types(taken, inspect.signature(function).parameters)
    docs = field_docs(taken.of)
    added = []
    for name in [name for name in names if name in docs]:
        added += _wrapped(f"{name}: {docs[name]}", first="    ", rest=" " * 8)
    at = next((number for number, line in enumerate(lines) if line.startswith("    **")), None)
    if at is not None:
        end = next(
            (n for n in range(at + 1, len(lines)) if not lines[n].startswith(" " * 8)), len(lines)
        )
        lines[at:end] = added
    elif added:
        end = next(
            (n for n, line in enumerate(lines) if line in ("Raises:", "Returns:")), len(lines)
        )
        before = [] if "Args:" in lines else ["Args:"]
        tail = ["", *lines[end:]] if end < len(lines) else []
        lines[end:] = [*([] if lines[end - 1] == "" else [""]), *before, *added, *tail]
    if taken.table is not None:
        lines += ["", "Columns of the result's ``frame``:", ""]
        for one in taken.table().columns:
            lines += _wrapped(f"- ``{one.name}``: {one.meaning}", first="", rest="  ")
    return "\n".join(lines)


def _wrapped(text: str, *, first: str, rest: str) -> list[str]:
    import textwrap

    # options, as Python names them
    text = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)
    return textwrap.wrap(text, _LINE, initial_indent=first, subsequent_indent=rest)


def _annotation_texts(function: Callable[..., Any]) -> dict[str, str]:
    code = function.__code__
    for node in ast.walk(_parse_file(code.co_filename)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno and node.name in (function.__name__, "function"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                nodes = {one.arg: one.annotation for one in arguments} | {"return": node.returns}
                return {
                    name: ast.unparse(one).strip("'")
                    for name, one in nodes.items()
                    if one is not None
                }
    return {}


@functools.cache
def _parse_file(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def field_docs(kind: type) -> dict[str, str]:
    """Return field name -> the docstring under the field, with those of base classes."""
    docs: dict[str, str] = {}
    for node in _class_nodes(kind):
        for at, under in itertools.pairwise(node.body):
            match at, under:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def _class_nodes(kind: type) -> Iterator[ast.ClassDef]:
    for one in reversed(kind.__mro__):
        if one.__module__.partition(".")[0] not in sys.stdlib_module_names:
            body = _parse_file(str(sys.modules[one.__module__].__file__)).body
            yield from (
                node
                for node in body
                if isinstance(node, ast.ClassDef) and node.name == one.__name__
            )
