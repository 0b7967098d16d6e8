"""Names that are imported when they are first used, so that importing a package loads nothing.

A package's public names stand in the stub beside its ``__init__.py``. lazy_loader reads stubs as well, but knows no
renamed import and none from a sister package, and checks no arguments.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .arguments import check_calls


def import_object(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def read_stub(init: str) -> dict[str, str]:
    """Return public name -> ``module:name`` (``module:`` for a module) for each name that a package's stub exports.

    It exports what it imports under a name of its own, and what it defines: there an import with an underscore before
    the name, such as ``patch as _patch``, says from which module. A module that begins with a dot lies beside the
    package.
    """
    places: dict[str, str] = {}
    imports, _, _ = Path(init).with_suffix(".pyi").read_text(encoding="utf-8").partition("\ndef ")
    for node in ast.parse(imports).body:
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                outside = "." * (node.level - 1)
                place = (
                    f"{outside}{node.module}:{one.name}" if node.module else f"{outside}{one.name}:"
                )
                if one.asname is not None:
                    places[one.asname.removeprefix("_")] = place
    return places


class _Package(ModuleType):
    """A package with a function and a module of one name, such as ``training.compare``: the name means the function."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, unless it is an imported module with the name of a public function."""
        if not (
            isinstance(value, ModuleType)
            and value.__name__ == f"{self.__name__}.{name}"
            and name in self.__all__
        ):
            super().__setattr__(name, value)


def lazy_exports(
    package: str, init: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return (``__getattr__``, ``__dir__``, ``__all__``) for a package; they import a public name when it is used."""
    names = read_stub(init)

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(names))}"
            )
        where, _, own = names[name].partition(":")
        module = import_module(f".{where}", package)
        value = getattr(module, own, None) if own else module
        if value is None:  # a module of that package
            value = import_module(f".{where}.{own}", package)
        if isinstance(value, FunctionType) and not hasattr(
            value, "checked"
        ):  # else a room below has done it
            from .signatures import show_options  # late: `import sink_lens` is quick

            shown: Any = check_calls(value, name)
            shown.__name__ = shown.__qualname__ = name
            show_options(shown, value)
            value = shown
        return vars(sys.modules[package]).setdefault(name, value)

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    sys.modules[package].__class__ = _Package
    return get, known, sorted(names)
