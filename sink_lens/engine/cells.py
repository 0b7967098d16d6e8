"""Cells: each a set of edits that are made together in one run, and the cone of what they can change.

The cone begins at the first layer and the first position that an edit touches. A causal model cannot change what comes
before either, so nothing before them is computed again.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..edits.constructors import Edit
from ..edits.references import References
from ..errors import InputError
from ..models.sites import SITES

Touches = tuple[tuple[str, tuple[int, ...] | None], ...]
"""(site, layers) of edits; None is every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A set of edits that are made together, with the descriptive columns of its row in a table."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    identity: str
    """Identity of the cell: two cells with the same identity are the same computation."""
    touches: Touches
    """(site, layers) of its edits, and of what they read."""
    begin: int = 0
    """The first position that its edits touch; 0 if they touch or read all of them."""
    make: Callable[[References], tuple[Edit, ...]] = field(repr=False)
    group: str | None = None
    """Group of the cell: cells of a group share their controls. None means no controls."""
    drawn: tuple[int, ...] = ()
    """The cell's indices on the axis on which controls are drawn."""
    tokens: int = 0
    """Tokens that a sequence must have for the edits to be made in it; shorter ones have no effect of the cell."""


def cell_of(edits: Sequence[Edit] | Edit, *, name: str, **columns: Any) -> Cell:
    """Make a cell from your own edits, for ``sweep(lens, cells=...)``; it has no controls.

    Args:
        edits: made together.
        name: what tells it from the others.
        **columns: more columns of the table.

    Raises:
        InputError: no edits, or no name.
    """
    given = (edits,) if isinstance(edits, Edit) else tuple(edits)
    if not given or not name:
        raise InputError("a cell needs at least one edit, and a name")
    places = [{part.name: getattr(one, part.name) for part in fields(one) if part.name != "change"} for one in given]
    identity = json.dumps({"name": name, "columns": columns, "edits": places}, sort_keys=True, default=str)
    touches, begin = cone(given)
    columns = {"name": name} | columns
    return Cell(
        columns=columns,
        identity=identity,
        touches=touches,
        begin=begin,
        make=lambda references: given,
        tokens=max(one.part.tokens for one in given),
    )


def cone(edits: Sequence[Edit]) -> tuple[Touches, int]:
    """(site, layers) of what edits touch, and the first position.

    An edit that reads another site may read any position of it, so that the run needs all of them.
    """
    touches = tuple((site, one.layers) for one in edits for site in (one.site, one.reads) if site is not None)
    firsts = [0 if one.positions is None or one.reads is not None else min(one.positions) for one in edits]
    return touches, min(firsts, default=0)


def from_layer(edits: Iterable[Edit], *, first: int, n_layers: int) -> list[Edit]:
    """The edits, restricted to layers from ``first`` on."""
    kept = []
    for one in edits:
        if not SITES[one.site].per_layer:
            kept.append(one)
        elif layers := tuple(layer for layer in one.over(n_layers) if layer >= first):
            kept.append(replace(one, layers=layers))
    return kept


def ends_before(one: Edit, position: int) -> bool:
    """Check whether an edit touches no position from this one on."""
    return one.positions is not None and max(one.positions) < position
