"""Names that a package reads from its modules when they are first used, so that importing the package loads nothing."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any

from .arguments import checked
from .gone import check_public_name


def exported(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        package: the package, ``__name__``.
        names: public name -> module of the package that defines it; ``module:name`` where it has another name there,
            ``module:`` for the module itself. A module that begins with a dot is looked for beside the package.
    """

    def get(name: str) -> Any:
        """Import a name when it is first used."""
        if name not in names:
            check_public_name(package, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(names))}")
        where, colon, own = names[name].partition(":")
        module = import_module(f".{where}", package)
        value = module if colon and not own else getattr(module, own or name)
        if isinstance(value, FunctionType):
            value = checked(value)
        return vars(sys.modules[package]).setdefault(name, value)

    def known() -> list[str]:
        """The names of the package."""
        return sorted({*vars(sys.modules[package]), *names})

    return get, known
