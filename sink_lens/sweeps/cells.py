"""The cells of a sweep: each is known by its number from the grid to the table, and in the blocks of a run folder.

The number of a cell of the table is its row; controls that are no such cell follow.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.named_edits import EditSpec
from ..engine.cells import Cell
from ..engine.cells import cell_of as engine_cell
from ..errors import InputError
from ..models.sized import Sized
from ..schema import table_of
from .grid import Grid, control_axis, control_group


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCell:
    """One cell of a sweep that is made from your own edits instead of by a grid."""

    cell: Cell
    columns: Mapping[str, Any]
    """The name, and more columns of the cell's row."""
    identity: str
    """The name, columns and places as text, for ``run.json``."""


def cell_of(edits: Sequence[Edit] | Edit, *, name: str, **columns: Any) -> OwnCell:
    """Make one cell from your own edits, for ``sweep(lens, [cell, ...])``. Such a cell has no random controls.

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
    table = table_of("sweep", "cells")
    assert table is not None  # it is in the schema
    if taken := sorted(columns.keys() & {one.name for one in table.columns if not one.optional}):
        raise InputError(f"columns of a cell are called {', '.join(taken)}, as those of numbers are; need other names")
    places = [{part.name: getattr(one, part.name) for part in fields(one) if part.name != "change"} for one in given]
    identity = json.dumps({"name": name, "columns": columns, "edits": places}, sort_keys=True, default=str)
    return OwnCell(cell=engine_cell(given), columns={"name": name} | columns, identity=identity)


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
    """The numbers of the controls, by group: the rows of the table ``controls``."""
    controls: Sequence[Sequence[int]] = ()
    """The numbers of the controls of each cell of the table: of its group, with none of its own units."""


What = Grid | Sequence[OwnCell]


def cells_of(what: What, lens: Sized, tokens: TokenBatch) -> Cells:
    """Return the numbered cells of a sweep over ``tokens``: those of a grid and its random controls, or your own.

    Raises:
        InputError: a grid that cannot be used; no cells, or two cells with the same name and place.
    """
    if isinstance(what, Grid):
        return grid_cells(what, lens, n_positions=tokens.n_positions, shortest=int(tokens.lengths.min()))
    if not what or len({cell.identity for cell in what}) < len(what):
        raise InputError("there are no cells, or two cells have the same name and place; need different ones")
    return Cells(
        every=[one.cell for one in what],
        columns=[one.columns for one in what],
        n=len(what),
        controls=[()] * len(what),
    )


def grid_cells(grid: Grid, lens: Sized, *, n_positions: int, shortest: int | None = None) -> Cells:
    """Return the numbered cells of a grid and its random controls, for sequences of ``shortest`` to ``n_positions``."""
    specs, drawn = grid.specs_and_controls(lens, n_positions=n_positions, shortest=shortest)
    numbers = {spec.identity: number for number, spec in enumerate(specs)}
    every = list(specs)
    of_group: dict[tuple[Any, ...], list[int]] = {}
    for group, controls in drawn.items():
        for spec in controls:
            if spec.identity not in numbers:
                numbers[spec.identity] = len(every)
                every.append(spec)
        of_group[group] = [numbers[spec.identity] for spec in controls]
    own = [_control_numbers(spec, of_group, every=every, most=grid.controls) for spec in specs]
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


def _control_numbers(
    spec: EditSpec, of_group: Mapping[tuple[Any, ...], list[int]], *, every: Sequence[EditSpec], most: int
) -> list[int]:
    """Return the numbers of at most ``most`` random controls for the cell ``spec``; they edit none of its indices.

    ``of_group`` maps a group of cells to the numbers of its controls, which are indices in ``every``.
    """
    axis = control_axis(spec)
    if axis is None or not most:
        return []
    own = set(spec.part.indices_on(axis) or ())
    drawn = of_group[control_group(spec, axis=axis)]
    return [number for number in drawn if not own & set(every[number].part.indices_on(axis) or ())][:most]
