"""Each patch of a part of a site, and any other edit of it, as a cell of the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..edits.constructors import At, Edit, edit
from ..edits.part import Part, replace_full_axes_by_none
from ..engine.cells import Cell, cell_of_edits, touched_places
from ..errors import InputError
from ..models.memory import copy_to_device
from ..models.sites import SITES, site_key

MakesEdit = Callable[..., Edit]
"""Makes an edit from a site and the arguments that choose a part of it, such as ``edits.zero``."""


def cell_of_patch(
    part: Part,
    *,
    run: Mapping[tuple[str, int], Tensor],
    source: Mapping[tuple[str, int], Tensor],
    edits: tuple[Edit, ...] = (),
) -> Cell:
    """Make the cell of ``edits`` and of the patch that puts the source run's values into a part of a site.

    ``run`` and ``source``: (site, layer) -> tensor in the baseline run and in the source run. Positions before the
    first at which these differ are left as they are.
    """
    site, begin = part.site, 0
    keys = [site_key(site, layer) for layer in part.layers or ()]
    if SITES[site].by_token and part.positions is not None:
        differing = torch.stack(
            [
                (part.select(run[key]) != part.select(source[key]))
                .transpose(0, 1)
                .flatten(1)
                .any(1)
                for key in keys
            ]
        )
        if part.positions == tuple(sorted(part.positions)):
            first = int(differing.any(0).int().argmax())
            part = replace(part, positions=part.positions[first:])
        begin = min(part.positions or (0,))
    own = replace_full_axes_by_none(part, sizes=run[keys[0]].shape[1:])

    def source_values(values: Tensor, at: At) -> Tensor:
        return copy_to_device(
            own.select(source[site, at.layer][at.sequences]), values.device, values.dtype
        )

    patch = edit(site, source_values, **{**own.where, "label": f"patch {site}"})
    touched, first = touched_places(edits)
    if edits:
        begin = min(begin, first)
    whole = any(one.whole_batch for one in edits)
    touches = ((site, own.layers), *touched)
    return Cell(
        touches=touches, begin=begin, make=lambda references: (*edits, patch), whole_batch=whole
    )


def cell_of_edit(
    part: Part, *, sizes: Sequence[int], make: MakesEdit, edits: tuple[Edit, ...] = ()
) -> Cell:
    """Make the cell of ``edits`` and of the edit that ``make`` returns for a part of a site with axes of ``sizes``.

    Raises:
        InputError: ``make`` returned no edit of this site.
    """
    made = make(part.site, **replace_full_axes_by_none(part, sizes=sizes).where)
    if not isinstance(made, Edit) or made.site != part.site:
        kind = f"an edit of {made.site!r}" if isinstance(made, Edit) else type(made).__name__
        raise InputError(
            f"what was to be put into a part of {part.site!r} is {kind}; need an edit of that site"
        )
    return cell_of_edits((*edits, made))
