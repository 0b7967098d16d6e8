"""Write the stubs beside the packages: each public function with all of its options.

    python -m tools.stubs            # writes them
    python -m tools.stubs --check    # says which would change; exit code 1 if any does

A stub's import lines say which names are public and where they are; they are written by hand. For a function whose
options are the fields of a configuration (``sink_lens.signatures.takes``), the line becomes ``patch as _patch`` and a
definition follows, with the types and defaults that ``help`` shows.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from sink_lens.lazy import read_stub
from sink_lens.signatures import full_signature, taken_options

PACKAGE = Path(__file__).parent.parent / "sink_lens"
_BUILT_IN = {"int", "float", "str", "bool", "tuple", "list", "dict", "type", "object", "None"}
_ALWAYS = {
    "Any": "typing",
    "Callable": "collections.abc",
    "Literal": "typing",
    "Iterable": "collections.abc",
    "Mapping": "collections.abc",
    "Sequence": "collections.abc",
    "Path": "pathlib",
}

_WHOLE = {"np": "numpy as np", "pd": "pandas as pd", "os": "os", "torch": "torch"}
"""Modules that annotations name as a whole -> the import."""


def main(*, check: bool) -> int:
    """Write all stubs, or only compare them; return the exit code."""
    changed = []
    for path in sorted(PACKAGE.rglob("__init__.pyi")):
        text = stub_text(path)
        if text != path.read_text(encoding="utf-8"):
            changed.append(str(path.relative_to(PACKAGE.parent)))
            if not check:
                path.write_text(text, encoding="utf-8")
    print("\n".join(changed) or "all stubs are as they should be")
    return int(check and bool(changed))


def stub_text(path: Path) -> str:
    """Return the text of a package's stub: its docstring, its imports, and the functions with options."""
    package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    lines, needed, definitions = [], {}, []
    public = read_stub(str(path.with_suffix(".py")))
    for name, place in public.items():
        module, _, own = place.partition(":")
        if not own:
            folder, _, last = module.rpartition(".")
            lines.append(f"from .{folder} import {last} as {name}")
            continue
        function = getattr(import_module(resolve_name(f".{module}", package)), own, None)
        taken = (
            None
            if not inspect.isfunction(function) or hasattr(function, "checked")
            else taken_options(function)
        )
        if function is None or taken is None:
            lines.append(f"from .{module} import {own} as {name}")
            continue
        lines.append(f"from .{module} import {own} as _{name}")
        signature = full_signature(function, taken)
        definitions.append(_definition(name, signature))
        known = (
            _ALWAYS
            | _names_of_file(sys.modules[taken.of.__module__])
            | _names_of_file(inspect.getmodule(function))
        )
        known |= _names_of_code(function) | _names_of_fields(taken.of)
        for used in _used_names(signature):
            if used in public:
                continue
            if used not in known | _WHOLE:
                raise SystemExit(
                    f"{package}.{name}: {used} is not imported where the function or its options are"
                )
            needed |= {_WHOLE[used]: ""} if used in _WHOLE else {used: known[used]}
    imports = [
        f"from {place} import {used}" if place else f"import {used}"
        for used, place in needed.items()
    ]
    variables = [] if package != "sink_lens" else ["__version__: str"]
    text = "\n".join([f'"""{doc}"""', "", *imports, *lines, "", *definitions, *variables]) + "\n"
    return _formatted(text, path)


def _definition(name: str, signature: inspect.Signature) -> str:
    """Return ``def name(...) -> ...: ...``; a default that is no plain value is written as ``...``."""
    parts, starred = [], False
    for one in signature.parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts, starred = [*parts, "*"], True
        default = "" if one.default is inspect.Parameter.empty else f" = {_default(one.default)}"
        parts.append(f"{one.name}: {one.annotation}{default}")
    return f"def {name}({', '.join(parts)},) -> {signature.return_annotation}: ..."


def _default(value: Any) -> str:
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return "..."
    return text


def _used_names(signature: inspect.Signature) -> Iterator[str]:
    """Yield each name of a type in a signature, once, without Python's own."""
    texts = [str(one.annotation) for one in signature.parameters.values()] + [
        str(signature.return_annotation)
    ]
    seen: set[str] = set()
    for text in texts:
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Name) and node.id not in _BUILT_IN | seen:
                seen.add(node.id)
                yield node.id


def _names_of_file(module: Any) -> dict[str, str]:
    """Return name -> module for all that a module imports by name or defines at its top."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            place = resolve_name("." * node.level + (node.module or ""), module.__package__)
            found |= {
                one.asname or one.name: place
                for one in node.names
                if one.asname in (None, one.name)
            }
        elif isinstance(node, ast.ClassDef):
            found[node.name] = module.__name__
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, module.__name__)
    return found


def _names_of_fields(config: type) -> dict[str, str]:
    """Return the names that the fields of a configuration give with their modules, as ``module:Name``."""
    texts = (
        field.metadata.get("python", "")
        for field in getattr(config, "__dataclass_fields__", {}).values()
    )
    return {name: module for text in texts for module, name in re.findall(r"([\w.]+):(\w+)", text)}


def _names_of_code(function: Callable[..., Any]) -> dict[str, str]:
    """Return the names of the file in which a function is written, such as a decorator's."""
    path = Path(function.__code__.co_filename)
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return _names_of_file(sys.modules[name])


def _formatted(text: str, path: Path) -> str:
    """Return a stub as ruff sorts and formats it."""
    for how in (["check", "--fix", "-q", "--select", "I"], ["format", "-q"]):
        command = [sys.executable, "-m", "ruff", *how, "--stdin-filename", str(path), "-"]
        text = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True
        ).stdout
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    raise SystemExit(main(check="--check" in sys.argv))
