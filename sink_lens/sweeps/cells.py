"""The cells of a sweep, known by their numbers: the rows of the table, and controls that are not among them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..data.tokens import TokenBatch, positions_in_all, refuse_integer_positions
from ..edits.constructors import Edit
from ..edits.hooks import edits_in_texts
from ..edits.part import AXES, SPARE_DRAWS, draw_index_sets
from ..engine.cells import Cell, cell_of_edits
from ..errors import InputError
from ..models.lens import LensModel, layers_from_zero
from ..models.sites import SITES
from ..models.sized import Sized
from ..schema import table_of
from ..text import parse_ranges
from .grid import EditGrid, Grid, Group, control_axis, control_group


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCell:
    """One cell of a sweep that is made from your own edits instead of by a grid."""

    edits: tuple[Edit, ...]
    columns: Mapping[str, Any]
    """The name, and more columns of the cell's row."""
    identity: str
    """The name, columns and places as text, for ``run.json``."""


_UNNAMED = ("change", "holds_values", "kind", "factor", "each", "laid")
"""Fields of an edit that do not name a cell."""


def cell_of(edits: Sequence[Edit] | Edit, *, name: str, **columns: Any) -> OwnCell:
    """Make one cell from your own edits, for ``sweep(lens, [cell, ...])``.

    Its random controls are the same edits of as many other units, heads or positions, the first of these that an edit
    names; a cell whose edits name none has no controls, nor has one that gives values to what it names (``freeze``).

    Args:
        edits: the edits, all made in the same forward pass.
        name: name of the cell, which no other cell of the sweep may have.
        **columns: more columns, with this cell's values, for the sweep's table.

    Raises:
        InputError: no edits, or no name.
    """
    given = (edits,) if isinstance(edits, Edit) else tuple(edits)
    if not given or not name:
        raise InputError("a cell needs at least one edit, and a name")
    if swept := [one.label for one in given if one.each]:
        raise InputError(
            f"the edit {swept[0]!r} goes over each index of an axis; give it to sweep, which makes the cells"
        )
    table = table_of("sweep", "cells")
    assert table is not None  # it is in the schema
    if taken := sorted(columns.keys() & {one.name for one in table.columns if not one.optional}):
        raise InputError(
            f"columns of a cell are called {', '.join(taken)}, as those of numbers are; need other names"
        )
    places = [
        {part.name: getattr(one, part.name) for part in fields(one) if part.name not in _UNNAMED}
        for one in given
    ]
    said = {"name": name, "columns": columns, "edits": places}
    identity = json.dumps(said, sort_keys=True, default=str)
    return OwnCell(edits=given, columns={"name": name} | columns, identity=identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """All cells of a sweep, controls included: a cell's number is its index in ``every``."""

    every: Sequence[Cell]
    """Those of the table, and the controls that are not among them."""
    columns: Sequence[Mapping[str, Any]]
    """The descriptive columns of each."""
    n: int
    """Cells of the table."""
    drawn: Sequence[int] = ()
    """The controls, by group: the rows of the table ``controls``."""
    controls: Sequence[Sequence[int]] = ()
    """The controls of each cell of the table: of its group, with none of its own units."""


What = Grid | Sequence[OwnCell]
Swept = Grid | Edit | Sequence[OwnCell | Edit]
"""What a sweep is given: edits that go over an axis are a grid, and any other edit is a cell."""


def grid_or_cells(given: Swept) -> What:
    """Return the grid, or the cells, that a sweep is given; edits over an axis and other cells do not go together."""
    if isinstance(given, Grid):
        return given
    some = [given] if isinstance(given, Edit) else list(given)
    grids = [_grid_of_edit(one) for one in some if isinstance(one, Edit) and one.each]
    if not grids:
        return [
            cell_of(one, name=", ".join(filter(None, (one.label, one.part.words))))
            if isinstance(one, Edit)
            else one
            for one in some
        ]
    if len(grids) < len(some):
        raise InputError(
            f"{len(grids)} of {len(some)} edits go over each index of an axis, and the others do not; need two sweeps"
        )
    return Grid.of(*grids)


def _grid_of_edit(one: Edit) -> EditGrid:
    """Return the grid of an edit that goes over an axis: indices that it names are edited together."""
    axes = {
        f"{axis}s": "each" if f"{axis}s" in one.each else one.part.indices_on(axis) for axis in AXES
    }
    axes["layers"] = axes["layers"] or ("each" if SITES[one.site].per_layer else "all")
    chosen: dict[str, Any] = {
        name: "all" if given is None else given if isinstance(given, str) else [list(given)]
        for name, given in axes.items()
    }
    factors = [] if one.factor is None else [one.factor]
    return EditGrid(kind=one.kind, site=one.site, factors=factors, **chosen)


def in_texts(what: What, tokens: TokenBatch) -> What:
    """Return a grid, or cells, whose positions and keys are those of every text (`positions_in_all`)."""
    if not isinstance(what, Grid):
        return [replace(one, edits=edits_in_texts(one.edits, tokens)) for one in what]

    def places(given: Any, *, of: str) -> Any:
        if isinstance(given, list | tuple):
            return [places(one, of=of) for one in given]
        if isinstance(given, str) and given not in ("each", "all"):
            refuse_integer_positions(tokens, parse_ranges(given, name=of), of=of)
        return positions_in_all([given], tokens, of=of)[0] if type(given) is int else given

    grids = [
        replace(
            one,
            positions=places(one.positions, of=f"positions of {one.kind}"),
            keys=places(one.keys, of=f"keys of {one.kind}"),
        )
        for one in what.edits
    ]
    return replace(what, edits=tuple(grids))


def cells_of(
    what: What, lens: LensModel, tokens: TokenBatch, *, controls: int = 0, seed: int = 0
) -> Cells:
    """Return the numbered cells of a sweep over ``tokens``, and their random controls.

    A grid says its controls itself; each cell of your own has as many as ``controls``, drawn by ``seed``.
    """
    if isinstance(what, Grid):
        return grid_cells(
            what, lens, n_positions=tokens.n_positions, shortest=int(tokens.lengths.min())
        )
    if not what or len({cell.identity for cell in what}) < len(what):
        raise InputError(
            "there are no cells, or two cells have the same name and place; need different ones"
        )
    every = [cell_of_edits(one.edits) for one in what]
    columns = [{**_columns_of_edits(one.edits, lens), **one.columns} for one in what]
    of_cell = []
    for one in what:
        drawn = _random_edits(one.edits, lens, tokens, most=controls, seed=seed)
        of_cell.append(range(len(every), len(every) + len(drawn)))
        every += [cell_of_edits(edits) for edits in drawn]
        for number, edits in enumerate(drawn, 1):
            name = {"name": f"{one.columns['name']}, control {number}"}
            columns.append({**one.columns, **_columns_of_edits(edits, lens), **name})
    drawn = range(len(what), len(every))
    return Cells(every=every, columns=columns, n=len(what), drawn=drawn, controls=of_cell)


def _columns_of_edits(edits: Sequence[Edit], lens: LensModel) -> dict[str, Any]:
    """Return the columns of a grid's cells; missing unless all edits have one value."""
    edits = [one.with_layers_from_start(lens.n_layers) for one in edits]
    values: dict[str, set[Any]] = {
        name: {getattr(one, name) or None for one in edits} for name in ("kind", "site")
    }
    for axis in AXES:
        indices = {one.part.indices_on(axis) or () for one in edits}
        values[axis] = {one[0] if len(one) == 1 else None for one in indices}
    values["factor"] = {one.factor for one in edits}
    found = {name: next(iter(some)) if len(some) == 1 else None for name, some in values.items()}
    found["where"] = "; ".join(filter(None, (one.part.words for one in edits)))
    order = ("name", "kind", "site", "where", *AXES, "factor", "seed", "centre")
    return {name: found.get(name) for name in order}


def _random_edits(
    edits: Sequence[Edit], lens: LensModel, tokens: TokenBatch, *, most: int, seed: int
) -> list[tuple[Edit, ...]]:
    """Return up to ``most`` copies of a cell's edits at random indices of the axis that each names, none of its own.

    Edits of one axis move together: if two share an index, their copies do.
    """
    places: dict[int, tuple[str, int]] = {}
    own: dict[tuple[str, int], set[int]] = {}
    for number, one in enumerate(edits):
        axis, site = control_axis(one.part), SITES[one.site]
        if axis is not None:
            at = site.axis_names.index(axis)
            layers = layers_from_zero(one.layers or lens.layers_with(one.site), lens.n_layers)
            sizes = [
                lens.axis_sizes(site.axes, n_positions=tokens.n_positions, layer=layer)[at]
                for layer in layers
            ]
            shortest = int(tokens.lengths.min())
            places[number] = (axis, min(*sizes, shortest) if axis == "position" else min(sizes))
            own.setdefault(places[number], set()).update(one.part.indices_on(axis) or ())
    if any(edits[number].holds_values for number in places):
        return []
    moves: list[list[dict[int, int]]] = []
    for (axis, size), indices in own.items():
        hides = any(edits[number].hides for number, at in places.items() if at == (axis, size))
        drawn = draw_index_sets(
            f"{axis} {size}",
            n=len(indices),
            size=size,
            most=most + SPARE_DRAWS,
            seed=seed,
            lowest=int(hides and axis == "position"),  # the first token sees only itself
        )
        kept = [some for some in drawn if not indices & set(some)][:most]
        moves.append([dict(zip(sorted(indices), some, strict=True)) for some in kept])
    found = []
    for some in zip(*moves, strict=False):
        move, copies = dict(zip(own, some, strict=True)), list(edits)
        for number, (axis, size) in places.items():
            indices = tuple(
                move[axis, size][index] for index in edits[number].part.indices_on(axis) or ()
            )
            copies[number] = replace(edits[number], **{f"{axis}s": indices})
        found.append(tuple(copies))
    return found


def grid_cells(grid: Grid, lens: Sized, *, n_positions: int, shortest: int | None = None) -> Cells:
    specs, drawn = grid.specs_and_controls(lens, n_positions=n_positions, shortest=shortest)
    numbers = {spec.identity: number for number, spec in enumerate(specs)}
    every = list(specs)
    of_group: dict[Group, list[int]] = {}
    for group, controls in drawn.items():
        for spec in controls:
            if spec.identity not in numbers:
                numbers[spec.identity] = len(every)
                every.append(spec)
        of_group[group] = [numbers[spec.identity] for spec in controls]
    own = []
    for spec in specs:  # none of its controls edits its own indices
        axis, able = control_axis(spec.part), []
        if axis is not None and grid.controls:
            indices = set(spec.part.indices_on(axis) or ())
            able = [
                number
                for number in of_group[control_group(spec, axis=axis)]
                if indices.isdisjoint(every[number].part.indices_on(axis) or ())
            ]
        own.append(able[: grid.controls])
    return Cells(
        every=[
            Cell(
                touches=((spec.part.site, spec.part.layers),),
                begin=min(spec.part.positions or (0,)),
                make=lambda references, spec=spec: (spec.make_edit(references),),
                tokens=spec.part.n_tokens_needed,
            )
            for spec in every
        ],
        columns=[spec.columns for spec in every],
        n=len(specs),
        drawn=[number for numbers in of_group.values() for number in numbers],
        controls=own,
    )
