"""The kinds of edit that a grid can sweep: the name, the required options and the function that makes the edit.

To add one, write its function and add its row to ``KINDS``. What makes edits is imported when one is made, so that a
grid is counted without the libraries of models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Generator, Tensor

from ..engine.index_notation import Indices, as_text
from ..models.sites import SITES
from ..schema import CENTRES, MEANS, Centre

if TYPE_CHECKING:
    from ..edits.constructors import Edit
    from ..engine.references import References

AXES = ("layer", "position", "head", "unit", "key")
"""The axes of a place, as the table's columns name them."""
_WHERE = {"position": "positions", "head": "heads", "unit": "units", "key": "keys"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One edit of a grid: its kind, location, strength and seed."""

    kind: str
    site: str
    layer: Indices
    position: Indices
    head: Indices
    unit: Indices
    key: Indices
    factor: float | None = None
    seed: int | None = None
    centre: Centre | None = None

    def columns(self) -> dict[str, Any]:
        """The descriptive columns of the edit's row; an axis has a number only if a single index is edited."""
        found: dict[str, Any] = {"kind": self.kind, "site": self.site, "where": self.words}
        for axis in AXES:
            chosen = getattr(self, axis)
            found[axis] = chosen[0] if chosen is not None and len(chosen) == 1 else None
        return found | {"factor": self.factor, "seed": self.seed, "centre": self.centre}

    def where(self) -> dict[str, Any]:
        """The arguments that select this location when the edit is made."""
        return {"layers": self.layer} | {name: getattr(self, axis) for axis, name in _WHERE.items()}

    @property
    def label(self) -> str:
        """The edit in words, for messages."""
        strength = "" if self.factor is None else f" x {self.factor:g}"
        return f"{self.kind} {self.site}{strength}" + (f" ({self.words})" if self.words else "")

    @property
    def words(self) -> str:
        """The edited location in words; empty if everything is edited."""
        parts = [f"{axis} {as_text(getattr(self, axis))}" for axis in AXES if getattr(self, axis) is not None]
        return ", ".join(parts)


Make = Callable[[Place, "References"], "Edit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of edit."""

    meaning: str
    make: Make
    takes: tuple[str, ...] = ()
    """The options that this kind needs, from ``factors``, ``seeds`` and ``centres``."""
    site: str | None = None
    """The only site that it edits; None is any."""
    by_token: bool = False
    """Whether it takes values by token position, so that the site must have an axis of positions."""
    first_position: int | None = None
    """The first position that this kind can edit, if positions must be chosen; None if it can edit all positions."""


def _zero(place: Place, refs: "References") -> "Edit":
    from ..edits.constructors import zero

    return zero(place.site, **place.where(), label=place.label)


def _scale(place: Place, refs: "References") -> "Edit":
    from ..edits.constructors import scale

    return scale(place.site, _factor(place), **place.where(), label=place.label)


def _set(place: Place, refs: "References") -> "Edit":
    from ..edits.constructors import set_value

    return set_value(place.site, _factor(place), **place.where(), label=place.label)


def _mean(place: Place, refs: "References") -> "Edit":
    from ..edits.constructors import freeze

    mean: Any = place.kind
    values = {layer: _part(refs.mean(place.site, layer, mean), place) for layer in _layers(place, refs)}
    return freeze(place.site, values, **place.where(), label=place.label)


def _resample(place: Place, refs: "References") -> "Edit":
    from ..edits.constructors import resample

    values = {layer: _part(refs.values(place.site, layer), place) for layer in _layers(place, refs)}
    generator = Generator().manual_seed(place.seed or 0)
    return resample(place.site, values, generator=generator, **place.where(), label=place.label)


def _isolate(place: Place, refs: "References") -> "Edit":
    from ..edits.isolation import isolate

    assert place.position is not None
    return isolate(place.position, layers=place.layer, label=place.label)


def _amplify(place: Place, refs: "References") -> "Edit":
    from ..edits.amplification import amplify

    assert place.position is not None
    centre: Any = place.centre
    return amplify(
        _factor(place),
        positions=place.position,
        layers=_layers(place, refs),
        heads=place.head,
        centre=centre,
        means=None if centre == "none" else refs.means(),
        label=place.label,
    )


def _part(values: Tensor, place: Place) -> Tensor:
    """The chosen part of reference values."""
    from ..edits.constructors import Where, part_of

    return part_of(values, place.site, Where(**place.where()))


def _layers(place: Place, refs: "References") -> tuple[int, ...]:
    if not SITES[place.site].per_layer:
        return (0,)
    return tuple(range(refs.lens.n_layers)) if place.layer is None else place.layer


def _factor(place: Place) -> float:
    assert place.factor is not None
    return place.factor


KINDS: Mapping[str, Kind] = {
    "zero": Kind(meaning="set to 0", make=_zero),
    **{name: Kind(meaning=f"set to {meaning}", make=_mean, by_token=True) for name, meaning in MEANS.items()},
    "resample": Kind(
        meaning="another sequence's values at the same positions", make=_resample, takes=("seeds",), by_token=True
    ),
    "scale": Kind(meaning="times a factor", make=_scale, takes=("factors",)),
    "set": Kind(meaning="set to a number", make=_set, takes=("factors",)),
    "isolate": Kind(meaning="the mask shows the token only itself", make=_isolate, site="scores", first_position=1),
    "amplify": Kind(
        meaning="variance amplification from a centre",
        make=_amplify,
        takes=("factors", "centres"),
        site="z_raw",
        first_position=0,
    ),
}
"""Name -> kind of edit."""

DEFAULT_CENTRES = CENTRES
