"""Cells: each a set of edits that are made together in one run, and the cone of what they can change.

The cone begins at the first layer and the first position that an edit touches: a causal model changes nothing before.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..edits.constructors import Edit
from ..edits.references import References
from ..errors import InputError
from ..models.lens import layers_from_zero
from ..models.sites import SITES

Touches = tuple[tuple[str, tuple[int, ...] | None], ...]
"""(site, layers) of edits; None is every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A set of edits that are made together."""

    touches: Touches
    """Those of its edits, and of what they read."""
    begin: int = 0
    """The first position that its edits touch; 0 if they touch or read all of them."""
    make: Callable[[References], tuple[Edit, ...]] = field(repr=False)
    tokens: int = 0
    """Tokens of a sequence for which the edits can be made; shorter ones have no effect of the cell."""
    whole_batch: bool = False
    """True if an edit of the cell mixes sequences."""

    def with_layers_from_start(self, n_layers: int) -> "Cell":
        """Return the cell with layers counted from the first: -1 becomes ``n_layers`` - 1."""
        if all(layer >= 0 for _, layers in self.touches for layer in layers or ()):
            return self
        counted = tuple(
            (site, None if own is None else layers_from_zero(own, n_layers))
            for site, own in self.touches
        )
        return replace(self, touches=counted)


def cell_of_edits(edits: Sequence[Edit] | Edit) -> Cell:
    """Make one cell of edits that are made together; refuse ()."""
    given = (edits,) if isinstance(edits, Edit) else tuple(edits)
    if not given:
        raise InputError("a cell needs at least one edit")
    touches, begin = touched_places(given)
    return Cell(
        touches=touches,
        begin=begin,
        make=lambda references: given,
        tokens=max(one.part.n_tokens_needed for one in given),
        whole_batch=any(one.whole_batch for one in given),
    )


def touched_places(edits: Sequence[Edit]) -> tuple[Touches, int]:
    """Return the sites that edits change or read, each with its layers, and the first position that is touched.

    The position is 0 if an edit is made at all positions, or reads another site.
    """
    touches = tuple(
        (site, one.layers) for one in edits for site in (one.site, one.reads) if site is not None
    )
    firsts = [
        0 if one.positions is None or one.reads is not None else min(one.positions) for one in edits
    ]
    return touches, min(firsts, default=0)


def edits_from_layer(edits: Iterable[Edit], *, first: int, n_layers: int) -> list[Edit]:
    """Return edits with only their layers from ``first`` on, and none that has no such layer."""
    kept = []
    for one in edits:
        if not SITES[one.site].per_layer:
            kept.append(one)
        elif layers := tuple(layer for layer in one.edited_layers(n_layers) if layer >= first):
            kept.append(replace(one, layers=layers))
    return kept


def edit_ends_before(one: Edit, position: int) -> bool:
    return one.positions is not None and max(one.positions) < position
