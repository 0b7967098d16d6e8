"""The parts of a site that a sweep patches, random parts of the same size, and what is put into a part.

``by`` names the swept axes: ``layer``, ``position`` (query position in ``scores`` and ``pattern``), ``head`` (key-value
heads in ``k`` and ``v``), ``key`` (key position in ``scores`` and ``pattern``) and ``unit`` (neuron or dimension). All
indices of an axis that is not swept are patched together.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Unpack

from ..configuration import refuse_unread_fields
from ..edits.named_edits import KINDS, OPTIONS, EditSpec
from ..edits.part import SPARE_DRAWS, Indices, Part, Where, draw_index_sets
from ..errors import InputError
from ..models.family import ADDED
from ..models.header import axis_sizes
from ..models.sites import SITES, differing_sizes_error, site_of, sites_of
from ..models.sized import Sized
from ..text import as_ranges
from .config import EVERY, PatchConfig

if TYPE_CHECKING:  # a dry run counts parts without torch
    from jaxtyping import Shaped
    from torch import Tensor


def parts_to_patch(
    model: Sized,
    site: str,
    *,
    by: Sequence[str],
    n_positions: int,
    shortest: int = 0,
    **at: Unpack[Where],
) -> list[Part]:
    """Return the parts of a site that a sweep patches, one for each combination of indices on the axes in ``by``.

    The last axis changes fastest. ``at`` chooses layers, positions (below ``n_positions``), heads, keys or units; by
    default all. Positions and keys may count back from the end, at most ``shortest``.

    Raises:
        SiteError: the family lacks the site.
        InputError: ``by`` has an axis twice, or an axis or index was chosen that does not exist.
    """
    chosen = indices_by_axis(model, site, by=by, n_positions=n_positions, shortest=shortest, **at)
    parts = []
    for indices in product(*(chosen[name] or () for name in by)):
        fixed = chosen | {name: (index,) for name, index in zip(by, indices, strict=True)}
        parts.append(Part(site=site, **{f"{name}s": of_axis for name, of_axis in fixed.items()}))
    return parts


def indices_by_axis(
    model: Sized,
    site: str,
    *,
    by: Sequence[str],
    n_positions: int,
    shortest: int = 0,
    **at: Unpack[Where],
) -> dict[str, Indices]:
    """Return axis (layer, position, ...) -> the site's indices that ``at`` chooses there, all by default.

    Arguments and errors are those of ``parts_to_patch``. None stands for all indices of an axis whose size differs
    between layers.
    """
    known = site_of(site, family=model.family)
    names = known.axis_names
    able = ("layer", *names)
    if unknown := [name for name in by if name not in able]:
        raise InputError(
            f"a sweep of {site!r} by {', '.join(unknown)} is not possible; need some of {', '.join(able)}"
        )
    if len(set(by)) < len(by):
        raise InputError(f"by names something twice: {', '.join(by)}; need each once")
    given = {axis: at.get(f"{axis}s") for axis in ("position", "head", "key", "unit")}
    for name, indices in given.items():
        if indices is not None and name not in names:
            raise InputError(
                f"{name}s were chosen and {site!r} has the axes {known.axes!r}; leave them out, or choose a site that "
                f"has {name}s"
            )
    sizes = axis_sizes(model, known.axes, n_positions=n_positions)
    chosen: dict[str, Indices] = {}
    for name, axis, size in zip(names, known.axes.split()[1:], sizes, strict=True):
        whole = given[name] is None and model.has_differing_sizes(f"batch {axis}")
        if whole and name in by:
            raise differing_sizes_error(site, axis=name)
        back = shortest if name in ("position", "key") else 0
        chosen[name] = (
            None if whole else _checked_indices(f"{name}s", given[name], size=size, back=back)
        )
    having = model.layers_with(site)
    layers = at.get("layers")
    asked = having if layers is None else _checked_indices("layers", layers, size=model.n_layers)
    if not {*asked} <= {*having}:
        raise InputError(
            f"not all of the layers {as_ranges(asked)} have {site!r}; need some of {as_ranges(having)}"
        )
    return chosen | {"layer": asked if SITES[site].per_layer else (model.n_layers - 1,)}


def configs_by_site(model: Sized, config: PatchConfig) -> dict[str, PatchConfig]:
    """Return site -> what is asked of it; for "every" the stream and all that layers add to it."""
    if config.site != EVERY:
        return {config.site: config}
    found = {"resid_pre": replace(config, site="resid_pre")}
    for site in ADDED:
        having = model.layers_with(site) if site in sites_of(model.family) else ()
        layers = config.layers and tuple(
            one for one in config.layers if one % model.n_layers in having
        )
        if having and layers != ():
            found[site] = replace(config, site=site, layers=layers)
    return found


def part_identity(part: Part) -> str:
    """Return a text by which patches of one site are told apart."""
    return json.dumps([part.layers, part.indices_by_axis])


def draw_random_parts(
    part: Part, *, sizes: Sequence[int], shortest: int, draws: int, seed: int
) -> list[Part]:
    """Draw by ``seed`` up to ``draws`` random parts like ``part``, with other indices on one axis.

    The axis is the first of units, heads, positions and keys on which the part is not whole; a part that is whole has
    no draws. Draws have as many indices as the part, none of its own, and no position past the ``shortest`` sequence;
    they count back from the end if the part does. There are fewer draws if the axes have too few other indices.
    """
    names = SITES[part.site].axis_names
    size_of = dict(zip(names, sizes, strict=True))
    for axis in ("unit", "head", "position", "key"):
        own = set(part.indices_on(axis) or ())
        if axis in size_of and own and len(own) < size_of[axis]:
            break
    else:
        return []
    size = min(size_of[axis], shortest) if axis in ("position", "key") else size_of[axis]
    back = size if min(own) < 0 else 0
    rest: list[Any] = [part.indices_on(name) for name in names if name != axis]
    group = json.dumps([part.layers, names.index(axis), len(own), rest])
    sets = draw_index_sets(group, n=len(own), size=size, most=draws + SPARE_DRAWS, seed=seed)
    sets = [tuple(one - back for one in indices) for indices in sets]
    fit: list[Any] = [indices for indices in sets if not own & set(indices)][:draws]
    return [replace(part, **{f"{axis}s": indices}) for indices in fit]


def part_in_text(part: Part, length: int) -> Part:
    """Count negative positions and keys back from the end of a text of ``length`` tokens."""
    chosen = {
        name: own and tuple(one + length * (one < 0) for one in own)
        for name, own in (("positions", part.positions), ("keys", part.keys))
    }
    return replace(part, **chosen)


def counts_back(part: Part) -> bool:
    return min((*(part.positions or ()), *(part.keys or ())), default=0) < 0


def select_part(
    part: Part, values: "Shaped[Tensor, 'batch ...']", lengths: Sequence[int]
) -> "Shaped[Tensor, 'batch ...']":
    if not counts_back(part):
        return part.select(values)
    import torch

    of_texts = zip(values.split(1), lengths, strict=True)
    return torch.cat([part_in_text(part, length).select(one) for one, length in of_texts])


def _checked_indices(
    what: str, given: Sequence[int] | None, *, size: int, back: int = 0
) -> tuple[int, ...]:
    """Return ``given``, or all indices if None; InputError unless each exists, from -``back`` to ``size`` - 1."""
    if given is None:
        return tuple(range(size))
    if not given:
        raise InputError(f"no {what} were chosen; need at least one, or None for all")
    if what == "layers":  # -1 is the last
        given = [index + size if -size <= index < 0 else index for index in given]
    if len(set(given)) < len(given):
        raise InputError(f"{what} are named twice: {list(given)}; need each once")
    for index in given:
        if not -back <= index < size:
            ends = f", or from -1 for the last token to {-back}" if back else ""
            raise InputError(f"{what}: {index} does not exist; need 0 to {size - 1}{ends}")
    return tuple(int(index) for index in given)


def check_put_edit(config: PatchConfig) -> None:
    if callable(config.put):
        refuse_unread_fields(config, "factor", reader="put by a name, such as scale")
    elif config.put != "source":
        make_put_spec(config, Part(site="resid_pre" if config.site == EVERY else config.site))
    elif config.factor is not None:
        raise InputError("source takes no factor; leave it out")


def make_put_spec(config: PatchConfig, part: Part) -> EditSpec:
    options = {name: getattr(config, name, None) for name in OPTIONS}
    if config.put in KINDS and "seed" not in KINDS[config.put].takes:
        options["seed"] = None  # it is the seed of the controls then
    return EditSpec(kind=config.put, part=part, options=options)
