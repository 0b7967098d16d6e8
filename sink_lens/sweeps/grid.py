"""A grid: edits x layers x positions x neurons or heads x factors x seeds; each combination is a *cell*.

Its *controls* are the same edit of as many units, heads or positions, drawn at random in the same layers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from typing import Any

from ..edits.index_notation import axis_values
from ..edits.named_edits import KINDS, OPTIONS, EditSpec, OptionLists, hash_vector, look_up_kind
from ..edits.part import AXES, SPARE_DRAWS, Part, draw_index_sets
from ..errors import InputError
from ..models.header import axis_sizes
from ..models.sites import differing_sizes_error, site_of
from ..models.sized import Sized
from ..text import safe_line

Group = tuple[Any, ...]
_MOST_CELLS = 1_000_000
_MOST_CONTROLS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EditGrid(OptionLists):
    """One kind of edit and its values on each axis (layers, heads, ...), in ``engine.index_notation``'s notation."""

    kind: str = "zero"
    """Kind of edit, a name from ``edits.named_edits.KINDS``."""
    site: str | None = None
    """Site to edit, a name from ``sink_lens.SITES``; isolate and amplify have a fixed site."""
    layers: Any = "each"
    positions: Any = "all"
    """Positions to edit (query positions for scores and pattern)."""
    heads: Any = "all"
    """Heads to edit (key-value heads for k and v)."""
    units: Any = "all"
    """Indices of the last axis to edit, such as neurons or dimensions."""
    keys: Any = "all"
    """Key positions to edit, for scores and pattern only."""

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            given = getattr(self, f"{name}s")
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise InputError(f"{name}s of {self.kind} is {given!r}; need a list")
            for one in given:
                if not option.accepts(one):
                    raise InputError(f"a {name} of {self.kind} is {one!r}; need {option.needs}")
        object.__setattr__(self, "factors", [float(one) for one in self.factors])

    def specs(self, model: Sized, *, n_positions: int) -> Iterator[EditSpec]:
        """Yield an edit for each combination of the values on the axes, in sequences of ``n_positions`` tokens.

        Raises:
            InputError: an unknown kind, an axis that the site lacks, values that do not exist, or options that the
                kind does not take or lacks.
            SiteError: the family lacks the site.
        """
        axes, _ = self.values_and_sizes(model, n_positions=n_positions)
        for values in product(*axes):
            chosen = dict(zip([*AXES, *OPTIONS], values, strict=True))
            part = Part(site=self._edited_site(), **{f"{axis}s": chosen[axis] for axis in AXES})
            yield EditSpec(
                kind=self.kind, part=part, options={name: chosen[name] for name in OPTIONS}
            )

    def n_edits(self, model: Sized, *, n_positions: int) -> int:
        """Return the number of edits on ``n_positions``: the product of the numbers of values on the axes."""
        axes, _ = self.values_and_sizes(model, n_positions=n_positions)
        return prod(map(len, axes))

    def _edited_site(self) -> str:
        return self.site or (KINDS[self.kind].site if self.kind in KINDS else None) or "neurons"

    def values_and_sizes(
        self, model: Sized, *, n_positions: int
    ) -> tuple[list[list[Any]], dict[str, int]]:
        """Return the values on each axis and of each option, and axis -> its size, such as {"layer": 24}."""
        kind = look_up_kind(self.kind, site=self._edited_site())
        site = site_of(self._edited_site(), family=model.family)
        of_axes = axis_sizes(model, site.axes, n_positions=n_positions)
        sizes = dict(zip(site.axis_names, of_axes, strict=True))
        if site.per_layer:
            sizes["layer"] = model.n_layers
        elif self.layers not in ("each", "all"):
            raise InputError(
                f"{site.name!r} is computed once, after the last layer; leave layers out"
            )
        axes: list[list[Any]] = []
        words = dict(zip(site.axis_names, site.axes.split()[1:], strict=True))
        for name in AXES:
            given = getattr(self, f"{name}s")
            is_each = given == "each" and name in words
            if is_each and model.has_differing_sizes(f"batch {words[name]}"):
                raise differing_sizes_error(site.name, axis=name)
            if name not in sizes:
                if name != "layer" and given != "all":
                    raise InputError(
                        f"{site.name!r} has the axes {site.axes!r}, no {name}s; leave {name}s out"
                    )
                axes.append([None])
                continue
            first = kind.first_position if name == "position" else None
            if first is not None and given == "all":
                raise InputError(f"{self.kind} needs positions, each from {first} on; found all")
            if name == "layer" and given == "each":
                given = list(model.layers_with(site.name))
            elif name in ("layer", "position", "key"):
                given = _from_start(given, sizes[name])
            label = f"{name}s of {self.kind} {site.name}"
            axes.append(axis_values(given, name=label, size=sizes[name], first=first or 0))
        return [*axes, *self._option_values()], sizes

    def _option_values(self) -> list[list[Any]]:
        takes = KINDS[self.kind].takes
        found: list[list[Any]] = []
        for name, option in OPTIONS.items():
            given = getattr(self, f"{name}s")
            if given and name not in takes:
                raise InputError(f"{self.kind} takes no {name}s; leave them out")
            chosen = list(given or option.defaults) if name in takes else [None]
            if not chosen or len(set(chosen)) < len(chosen):
                raise InputError(f"{self.kind} needs {name}s, each once; found {list(given)}")
            found.append(chosen)
        return found


def _from_start(given: Any, size: int) -> Any:
    """Return an axis's values with indices that count from 0; negative ones counted from the end."""
    if isinstance(given, list | tuple):
        return [_from_start(one, size) for one in given]
    return given + size if type(given) is int and -size <= given < 0 else given


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The cells of a sweep: one or more kinds of edit with their axes, and how many random controls each cell has."""

    edits: tuple[EditGrid, ...]
    """The kinds of edit with their axes; their cells follow each other in the table."""
    controls: int = 5
    """Number of random controls per cell: as many units (or heads, or positions) in the same layers; 0 for none."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        for name in ("controls", "seed"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 0:
                raise InputError(
                    f"{name} is {safe_line(repr(given))}; need a whole number from 0 on"
                )
        if self.controls > _MOST_CONTROLS:
            raise InputError(f"controls is {self.controls:,}; need at most {_MOST_CONTROLS:,}")
        if not isinstance(self.edits, tuple) or not all(
            isinstance(one, EditGrid) for one in self.edits
        ):
            raise InputError(
                f"edits is {safe_line(repr(self.edits))}; need a tuple of EditGrid. Make it with Grid.of(...)"
            )

    @classmethod
    def of(cls, *edits: EditGrid, **options: Any) -> "Grid":
        """Make a grid of these edits; ``options`` are the other fields of ``Grid``, such as ``controls=3``."""
        return cls(edits=edits, **options)

    def config(self) -> dict[str, Any]:
        """Return the grid as dicts, lists and numbers, for ``run.json``."""
        edits = [
            {key: one for key, one in asdict(grid).items() if key != "vectors" or one}
            for grid in self.edits
        ]
        hashes = {str(path): hash_vector(str(path)) for grid in self.edits for path in grid.vectors}
        found = {"edits": edits, "controls": self.controls, "seed": self.seed}
        return found | ({"vector_hashes": hashes} if hashes else {})

    def n_cells(self, model: Sized, *, n_positions: int) -> int:
        """Return the number of cells in the grid for sequences of ``n_positions``, without the controls."""
        return sum(one.n_edits(model, n_positions=n_positions) for one in self.edits)

    def specs(
        self, model: Sized, *, n_positions: int, shortest: int | None = None
    ) -> tuple[list[EditSpec], list[EditSpec]]:
        """Return the cells' edits and all controls, in two lists; the arguments are those of ``specs_and_controls``."""
        specs, controls = self.specs_and_controls(model, n_positions=n_positions, shortest=shortest)
        return specs, [spec for drawn in controls.values() for spec in drawn]

    def specs_and_controls(
        self, model: Sized, *, n_positions: int, shortest: int | None = None
    ) -> tuple[list[EditSpec], dict[Group, list[EditSpec]]]:
        """Return the cells' edits, and group -> random controls. A group is the cells that share controls.

        Sequences have ``shortest`` to ``n_positions`` tokens; no control is drawn beyond the shortest.

        Raises:
            InputError: no edits, too many cells, the same cell twice; and what ``EditGrid.specs`` raises.
        """
        if not self.edits:
            raise InputError("the grid has no edits; need at least one")
        n_cells = self.n_cells(model, n_positions=n_positions)
        if n_cells > _MOST_CELLS:
            raise InputError(
                f"the grid has {n_cells:,} cells; need at most {_MOST_CELLS:,}: split it"
            )
        specs: dict[tuple[Any, ...], EditSpec] = {}
        controls: dict[Group, list[EditSpec]] = {}
        for grid in self.edits:
            _, sizes = grid.values_and_sizes(model, n_positions=n_positions)
            for spec in grid.specs(model, n_positions=n_positions):
                if spec.identity in specs:
                    raise InputError(f"the grid has the cell {spec.label!r} twice; need each once")
                specs[spec.identity] = spec
                axis = control_axis(spec.part)
                if not self.controls or axis is None:
                    continue
                group = control_group(spec, axis=axis)
                if group not in controls:
                    size = sizes[axis]
                    if axis == "position":
                        size = min(size, shortest or n_positions)
                    controls[group] = self._random_controls(spec, axis=axis, size=size)
        return list(specs.values()), controls

    def _random_controls(self, spec: EditSpec, *, axis: str, size: int) -> list[EditSpec]:
        lowest = (KINDS[spec.kind].first_position or 0) if axis == "position" else 0
        n, most = len(spec.part.indices_on(axis) or ()), self.controls + SPARE_DRAWS
        # the draws of a group are those of its text
        named = json.dumps(spec.fields | {axis: n}, sort_keys=True)
        drawn = draw_index_sets(named, n=n, size=size, lowest=lowest, most=most, seed=self.seed)
        chosen: list[dict[str, Any]] = [{f"{axis}s": indices} for indices in drawn]
        return [replace(spec, part=replace(spec.part, **indices)) for indices in chosen]


def control_group(spec: EditSpec, *, axis: str) -> Group:
    """Return a key that cells share if they edit equally many indices of ``axis`` and are equal otherwise."""
    indices = spec.part.indices_on(axis) or ()
    left: dict[str, Any] = {f"{axis}s": None}
    return (spec.kind, replace(spec.part, **left), axis, len(indices), *spec.options.values())


def control_axis(part: Part) -> str | None:
    """Return the axis whose indices a control draws: the first of unit, head, position that ``part`` names."""
    return next(
        (axis for axis in ("unit", "head", "position") if part.indices_on(axis) is not None), None
    )
