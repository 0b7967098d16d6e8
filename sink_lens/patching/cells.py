"""Each patch of a part of a site, and any other edit of it, as a cell of the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..edits.constructors import At, Edit, edit
from ..engine.cells import Cell, cone
from ..errors import InputError
from ..models.sites import SITES
from .parts import Part, place

MakesEdit = Callable[..., Edit]
"""Makes an edit from a site and the arguments that choose a part of it, such as ``edits.zero``."""


def differs(
    cell: Part, *, site: str, run: Mapping[tuple[str, int], Tensor], source: Mapping[tuple[str, int], Tensor]
) -> bool:
    """Check whether the source values of the cell differ from the run's own; otherwise the patch changes nothing."""
    keys = {place(site, layer) for layer in cell.layers}
    return any(not torch.equal(cell.of(run[key]), cell.of(source[key])) for key in keys)


def cell_of_patch(
    part: Part,
    *,
    site: str,
    run: Mapping[tuple[str, int], Tensor],
    source: Mapping[tuple[str, int], Tensor],
    edits: tuple[Edit, ...] = (),
) -> Cell:
    """The patch of a part as a cell: it begins at the first of its positions at which the two runs differ.

    Args:
        part: the part to patch.
        site: the site.
        run: values of the run that is patched, by site and layer.
        source: values of the other run.
        edits: what else is changed in both runs.
    """
    begin, index = 0, list(part.index)
    keys = [place(site, layer) for layer in part.layers]
    if SITES[site].axes.startswith("batch position"):
        differing = torch.stack(
            [(part.of(run[key]) != part.of(source[key])).transpose(0, 1).flatten(1).any(1) for key in keys]
        )
        first = int(differing.any(0).int().argmax())
        index[0] = part.index[0][first:] if part.index[0] == tuple(sorted(part.index[0])) else part.index[0]
        begin = min(index[0])
    sizes = run[keys[0]].shape[1:]
    chosen: dict[str, Any] = {
        f"{name}s": None if indices == tuple(range(size)) else indices
        for name, indices, size in zip(SITES[site].parts, index, sizes, strict=True)
    }
    mesh = replace(part, index=tuple(index))

    def change(values: Tensor, at: At) -> Tensor:
        return mesh.of(source[site, at.layer][at.sequences]).to(values.device, values.dtype)

    layers = part.layers if SITES[site].per_layer else None
    one = edit(site, change, layers=layers, label=f"patch {site}", **chosen)
    touched, first = cone(edits)
    touches = ((site, layers), *touched)
    if edits:
        begin = min(begin, first)
    return Cell(identity=part.identity, touches=touches, begin=begin, make=lambda references: (*edits, one))


def cell_of_edit(part: Part, *, site: str, sizes: Sequence[int], make: MakesEdit, edits: tuple[Edit, ...] = ()) -> Cell:
    """Any edit of a part as a cell.

    Args:
        part: the part to edit.
        site: the site.
        sizes: of the site's axes after the sequence axis.
        make: called with the site and the arguments that choose the part.
        edits: what else is changed.

    Raises:
        InputError: what was made is no edit of this site.
    """
    chosen: dict[str, Any] = {
        f"{name}s": indices
        for name, indices, size in zip(SITES[site].parts, part.index, sizes, strict=True)
        if indices != tuple(range(size))
    }
    layers = {"layers": part.layers} if SITES[site].per_layer else {}
    one = make(site, **layers, **chosen)
    if not isinstance(one, Edit) or one.site != site:
        made = f"an edit of {one.site!r}" if isinstance(one, Edit) else type(one).__name__
        raise InputError(f"what is put into a part of {site!r} made {made}; need an edit of that site")
    touches, begin = cone((*edits, one))
    return Cell(identity=part.identity, touches=touches, begin=begin, make=lambda references: (*edits, one))
