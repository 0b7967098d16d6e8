"""Which functions have their shapes checked while the tests run, and which of their calls."""

import ast
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any

from beartype import beartype
from jaxtyping import _import_hook, jaxtyped


class Shaped(_import_hook.JaxtypingTransformer):
    """Decorates the functions and records that name a shape, and no others.

    To decorate every function, as jaxtyping does, takes two fifths of the time of all tests: most calls are of
    functions without arrays, whose types are checked by pyright, and a function inside another one would be decorated
    anew at each call of the outer one.
    """

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """See under which names the module knows jaxtyping's types."""
        imported = [
            child
            for child in node.body
            if isinstance(child, ast.ImportFrom) and child.module == "jaxtyping"
        ]
        self._arrays = {name.asname or name.name for child in imported for name in child.names}
        return super().visit_Module(node) if self._arrays else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Decorate it last, if its signature names a shape; what stands inside is left alone."""
        if self._names_a_shape(node.args, node.returns):
            node.decorator_list.append(ast.copy_location(_decorator(), node))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Decorate it first, if a field names a shape; then its methods."""
        if self._names_a_shape(*(child for child in node.body if isinstance(child, ast.AnnAssign))):
            node.decorator_list.insert(0, ast.copy_location(_decorator(), node))
        self.generic_visit(node)
        return node

    def _names_a_shape(self, *nodes: ast.AST | None) -> bool:
        names = (
            part
            for node in nodes
            if node is not None
            for part in ast.walk(node)
            if isinstance(part, ast.Name)
        )
        return any(name.id in self._arrays for name in names)


def _decorator() -> ast.expr:
    return ast.parse(f"__import__({__name__!r}).shaped", mode="eval").body


def shaped(what: Any) -> Any:
    """Check a call of a function, or the making of a record, unless one like it was checked before.

    Calls are alike that are given, and give back, values of the same types, shapes and dtypes. To check each of them
    takes a fifth of the time of a trace.
    """
    if inspect.isclass(what):
        if dataclasses.is_dataclass(what):
            what.__init__ = shaped(what.__init__)
        return what
    checked = jaxtyped(what, typechecker=beartype)
    known: dict[Hashable, set[Hashable]] = {}
    result = threading.local()
    result_checked = functools.cache(
        lambda: _giving(result, instead_of=what)
    )  # to make it takes milliseconds

    @functools.wraps(what)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            given = _kind(args), _kind(kwargs)
            seen = known.get(given)
        except _TooLongError:
            return checked(*args, **kwargs)
        if seen is None:
            made = checked(*args, **kwargs)
            known[given] = set()
        else:
            made = what(*args, **kwargs)
        try:
            kind = _kind(made)
        except _TooLongError:
            kind = None
        if seen is not None and (kind is None or kind not in seen):
            result.made = made
            result_checked()(*args, **kwargs)
            result.made = None
        known[given].add(kind)
        return made

    return called


def _giving(result: threading.local, *, instead_of: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the same signature, checked, which gives what the other one made."""

    def give(*args: Any, **kwargs: Any) -> Any:
        return result.made

    named = types.FunctionType(give.__code__, instead_of.__globals__, closure=give.__closure__)
    return jaxtyped(functools.update_wrapper(named, instead_of), typechecker=beartype)


class _TooLongError(Exception):
    """A value has so many parts that to compare them takes as long as to check them."""


_MOST = 64


@functools.cache
def _is_array(of: type) -> bool:
    """Told by names: this module is imported before torch, whose settings come first."""
    return any(
        (one.__module__, one.__name__) in (("torch", "Tensor"), ("numpy", "ndarray"))
        for one in of.__mro__
    )


def _kind(value: Any) -> Hashable:
    """What a check of a value can hang on: its type, shape and dtype, a text itself, and that of its parts."""
    of = type(value)
    if _is_array(of):
        return of, tuple(value.shape), value.dtype
    if of is str:
        return value if len(value) < _MOST else of
    if of in (tuple, list, dict, set, frozenset):
        if len(value) > _MOST:
            raise _TooLongError
        if of is dict:
            return of, *((_kind(name), _kind(one)) for name, one in value.items())
        return of, *map(_kind, value)
    return of


_import_hook.JaxtypingTransformer = Shaped
