"""The phrases that a kind of run can print above its figures, read from the code that makes them."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from sink_lens.kinds import all_kinds
from sink_lens.lazy import import_object

_ROW = re.compile(r"^\| `(.+?)` \| (.+?) \| .+? \| .+? \|$", flags=re.M)
NUMBER = re.compile(r"[−+]?\d+(?:[.,]\d+)*")
_TWO_WORDS = re.compile(r"[^\W\d_]{2,}[,.;:)]? \(?[^\W\d_]{2,}")
_NO_WORDS = ("sink_lens.records", "sink_lens.text", "sink_lens.report", "sink_lens.schema", "sink_lens.stats")
"""Modules whose functions word no finding."""
SENTENCES = {
    "circuit": ("sink_lens.circuits.tasks:Task.sentence", "sink_lens.circuits.given:Comparison.sentences"),
    "quantise": ("sink_lens.studies.quantise:_advice_sentence",),
    "card": ("sink_lens.studies.card:card_sentence",),
    "compare": ("sink_lens.training.compare:compare",),
    "tokens": ("sink_lens.studies.tokens.run:_threshold_rows",),
}
"""Kind -> what makes the sentences that its page reads from a table."""


def normalised(text: str) -> str:
    """A text with every number as N, in one line."""
    return " ".join(NUMBER.sub("N", text).split())


def roots(name: str) -> list[object]:
    """Return the functions that word the title and the sentences of a kind's page."""
    page = import_object(all_kinds()[name].page)
    return [page.title, page.headline, *(object_at(place) for place in SENTENCES.get(name, ()))]


def object_at(place: str) -> object:
    """The function, or property, that ``module:name`` or ``module:Class.name`` stands for."""
    module, _, names = place.partition(":")
    first, *rest = names.split(".")
    return functools.reduce(inspect.getattr_static, rest, import_object(f"{module}:{first}"))


def phrases(name: str) -> set[str]:
    """Every piece of at least two words in the code that words a kind's findings."""
    pieces: set[str] = set()
    for code in reached(roots(name)):
        if isinstance(code, dict):
            pieces |= {one for one in code.values() if isinstance(one, str)}
        else:
            pieces |= set(literals(code))
    return {normalised(one) for one in pieces if _TWO_WORDS.search(one)}


def reached(begin: list[object]) -> list[object]:
    """The functions that these call, and the texts by name that they read."""
    seen, todo = [], list(begin)
    while todo:
        one = todo.pop()
        one = one.fget if isinstance(one, property) else one
        if any(one is other for other in seen):
            continue
        seen.append(one)
        if inspect.isfunction(one):
            todo += [value for value in named_in(one) if worded(value)]
    return seen


def named_in(function) -> list[object]:
    """Return the objects that a function names, of its module and of modules that this imports."""
    known, values = function.__globals__, {}
    for node in ast.walk(tree(function)):
        if isinstance(node, ast.Name) and node.id in known:
            values[node.id] = known[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of = known.get(node.value.id)
            if inspect.ismodule(of) and hasattr(of, node.attr):
                values[f"{node.value.id}.{node.attr}"] = getattr(of, node.attr)
    return [values[name] for name in sorted(values)]


def worded(value: object) -> bool:
    """Check whether this is a function or a table of texts that words findings."""
    if isinstance(value, dict):
        return True
    of = getattr(value, "__module__", "")
    return inspect.isfunction(value) and of.startswith("sink_lens") and not of.startswith(_NO_WORDS)


def tree(function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def literals(function) -> Iterator[str]:
    """The texts that a function may put into a sentence: not those of refusals, docstrings, formats and columns."""
    if not inspect.isfunction(function):
        return
    nodes = list(ast.walk(tree(function)))
    passed = {id(node) for of in nodes if isinstance(of, ast.Raise | ast.Compare) for node in ast.walk(of)}
    formats = [of.format_spec for of in nodes if isinstance(of, ast.FormattedValue) and of.format_spec]
    passed |= {id(node) for of in formats for node in ast.walk(of)}
    passed |= {id(of.value) for of in nodes if isinstance(of, ast.Expr) and isinstance(of.value, ast.Constant)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.value


def listed(kind: str) -> dict[str, str]:
    """Key -> sentence, of the table of a kind in tests/headlines.md."""
    text = (Path(__file__).parents[1] / "headlines.md").read_text(encoding="utf-8")
    sections = {one.split("\n")[0].split()[-1].strip("`"): one for one in text.split("\n## ")[1:]}
    return {key: normalised(text) for key, text in _ROW.findall(sections[kind])}
