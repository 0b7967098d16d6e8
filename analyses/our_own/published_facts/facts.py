"""Published facts about models, as data: what a paper or repository says of a quantity, and under which conditions.

A file is JSON: ``schema``, ``about``, and ``facts``, a list of objects with ``id``, ``model`` (the names under which
the model is published), ``quantity`` (a name of ``quantities.QUANTITIES``, or nothing), ``value``, ``tolerance``
(``relative``, ``absolute``, or ``exact`` for sets), ``condition``, ``source``, ``note`` and ``not_comparable`` (the
reason, where there is no quantity of ours).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyses.our_own.published_facts.quantities import QUANTITIES, Value
from sink_lens.configuration import refuse_unknown_names
from sink_lens.errors import InputError
from sink_lens.files import check_regular_file

FACTS_SCHEMA = "sink_lens.facts/1"
"""Version of the files; the number grows where a field goes or changes its meaning."""
REFERENCES = Path(__file__).parent / "references"
"""The facts of papers and repositories."""
_FIELDS = ("id", "model", "quantity", "value", "tolerance", "condition", "source", "note", "not_comparable")
_CIRCUMSTANCES = ("bos", "dtype", "text", "length", "tokens")
_DEFAULT_TOLERANCE = 0.1
_LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One published number or set of indices."""

    id: str
    model: tuple[str, ...]
    quantity: str | None = None
    value: Any = None
    tolerance: Mapping[str, Any] = field(default_factory=dict)
    condition: Mapping[str, Any] = field(default_factory=dict)
    """Circumstances (bos, dtype, text, length, tokens) and the quantity's terms."""
    source: str = ""
    note: str = ""
    not_comparable: str = ""

    @property
    def terms(self) -> dict[str, Any]:
        """Arguments of the quantity: the fact's condition without its circumstances."""
        return {name: value for name, value in self.condition.items() if name not in _CIRCUMSTANCES}

    @property
    def room(self) -> float:
        """Return the allowed distance of a measured number from a published one; for numbers only."""
        return max(
            float(self.tolerance.get("absolute", 0.0)),
            float(self.tolerance.get("relative", 0.0 if self.tolerance else _DEFAULT_TOLERANCE)) * abs(self.value),
        )

    def agrees(self, found: Value) -> bool:
        """Check if a measured value is the published one, within the tolerance and the interval of the measurement.

        A number agrees where its interval meets the tolerated range; a set where it has all published members, and has
        none where none was published; a range of layers where both ends are within the tolerance (1 if none is named).
        """
        assert self.quantity is not None  # only such facts are measured
        if QUANTITIES[self.quantity].kind == "number":
            low = found.number if math.isnan(found.low) else found.low
            high = found.number if math.isnan(found.high) else found.high
            return low <= self.value + self.room and high >= self.value - self.room
        published = [tuple(one) if isinstance(one, list) else one for one in self.value]
        if QUANTITIES[self.quantity].kind == "range":
            room = float(self.tolerance.get("absolute", 1))
            return all(abs(one - other) <= room for one, other in zip(found.indices, published, strict=True))
        if not published or self.tolerance.get("exact"):
            return set(found.indices) == set(published)
        return set(published) <= set(found.indices)


def read_facts(paths: Iterable[str | Path] = ()) -> list[Fact]:
    """The facts of ``REFERENCES``, and those of more files after them.

    Raises:
        InputError: a file cannot be read, has another schema, or a fact in it cannot be used.
    """
    facts = [fact for path in [*sorted(REFERENCES.glob("*.json")), *map(Path, paths)] for fact in facts_of(path)]
    seen: set[str] = set()
    for fact in facts:
        if fact.id in seen:
            raise InputError(f"two facts have the id {fact.id!r}; need another name for one of them")
        seen.add(fact.id)
    return facts


def facts_of(path: str | Path) -> list[Fact]:
    """The facts of one file; the errors are those of ``read_facts``."""
    check_regular_file(path, what="the file of facts")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as facts: {error}. Need a JSON file") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != FACTS_SCHEMA or not isinstance(found.get("facts"), list):
        raise InputError(f'{path} has the schema {schema!r}; need "schema": "{FACTS_SCHEMA}" and a list under "facts"')
    return [_fact(row, where=f"fact {at} of {path}") for at, row in enumerate(found["facts"])]


def _fact(row: Any, *, where: str) -> Fact:
    """A row of a file as a fact; refuses what is not one."""
    if not isinstance(row, dict):
        raise InputError(f"{where} is {row!r}; need an object with id, model, quantity and value")
    refuse_unknown_names(row, _FIELDS, where=where)
    models = row.get("model")
    models = [models] if isinstance(models, str) else models
    named = isinstance(models, list) and models and all(isinstance(one, str) for one in models)
    if not isinstance(row.get("id"), str) or not isinstance(models, list) or not named:
        raise InputError(f"{where} has no id or no model; need a text, and a name or a list of names")
    where, name = f"{where} ({row['id']})", row.get("quantity")
    condition, tolerance = row.get("condition") or {}, row.get("tolerance") or {}
    if not isinstance(condition, dict) or not isinstance(tolerance, dict):
        raise InputError(f"{where} has a condition or tolerance that is no object; need one, as {{}}")
    refuse_unknown_names(tolerance, ("relative", "absolute", "exact"), where=f"the tolerance of {where}")
    for term in ("relative", "absolute"):
        if term in tolerance:
            _check_number(tolerance[term], what=f"the {term} tolerance", where=where)
    for term in ("source", "note", "not_comparable"):
        if not isinstance(row.get(term) or "", str):
            raise InputError(f"{where} has the {term} {row[term]!r:.60}; need a text")
    if name is None:
        if not row.get("not_comparable"):
            raise InputError(f"{where} names no quantity; need one, or the reason under not_comparable")
    elif not isinstance(name, str):
        raise InputError(f"{where} has the quantity {name!r:.60}; need the name of one")
    else:
        refuse_unknown_names([name], QUANTITIES, where=where)
        _check_value(row.get("value"), name, where=where)
        lacking = [term for term in QUANTITIES[name].terms if condition.get(term) is None]
        if lacking:
            raise InputError(f"the condition of {where} lacks {', '.join(lacking)}, which {name} needs; name it")
    given: dict[str, Any] = {key: row[key] for key in _FIELDS if row.get(key) is not None}
    given |= {"model": tuple(models), "condition": condition, "tolerance": tolerance}
    return Fact(**given)


def _check_number(value: Any, *, what: str, where: str) -> None:
    """Refuse what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        raise InputError(f"{where} has the value {value!r:.60}; {what} is a number")


def _check_value(value: Any, name: str, *, where: str) -> None:
    """Refuse a value that is not of the quantity's kind."""
    kind = QUANTITIES[name].kind
    if kind == "number":
        _check_number(value, what=name, where=where)
    elif not isinstance(value, list) or (kind == "range" and len(value) != 2):
        what = "a list of two layers" if kind == "range" else "a list of indices"
        raise InputError(f"{where} has the value {value!r}; {name} is {what}")


def is_about(fact: Fact, names: Sequence[str]) -> bool:
    """Check whether a fact is about a model of one of these names; owners, ``-hf`` and capitals do not count."""
    return not {_bare(name) for name in fact.model}.isdisjoint(map(_bare, names))


def _bare(name: str) -> str:
    """A model's name without its owner, in lower case."""
    return name.rstrip("/").replace("\\", "/").rpartition("/")[2].lower().removesuffix("-hf")
