"""The parts of a site that the patches of a sweep replace, and random parts of the same size.

``by`` names the swept axes: ``layer``, ``position`` (query position in ``scores`` and ``pattern``), ``head`` (key-value
heads in ``k`` and ``v``), ``key`` (key position in ``scores`` and ``pattern``) and ``unit`` (neuron or dimension). All
indices of an axis that is not swept are patched together. The words of ``transformer_lens.patching`` (``pos``,
``head_index``, ``src_pos``, ``dest_pos``) are taken too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from ..errors import InputError
from ..models.header import Sized, sizes_of
from ..models.sites import SITES, site_of

_SPARE = 3
"""More draws than controls, since a draw that holds the part's own indices is no control of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a site, in one or several layers, that one patch replaces."""

    place: tuple[int, ...]
    """The cell's index on each axis in ``by``."""
    layers: tuple[int, ...]
    index: tuple[tuple[int, ...], ...]
    """The chosen indices on each axis of the site after the sequence axis."""

    @property
    def identity(self) -> str:
        """Text that tells the part from others, whatever the sweep's axes."""
        return json.dumps([self.layers, self.index])

    def of(self, tensor: Shaped[Tensor, "batch ..."]) -> Shaped[Tensor, "batch ..."]:
        """A copy of this part of the site's tensor."""
        return tensor[self.mesh(tensor)]

    def mesh(self, tensor: Shaped[Tensor, "batch ..."]) -> tuple[slice | Tensor, ...]:
        """The index that selects this part of the site's tensor."""
        found = []
        for axis, indices in enumerate(self.index):
            shape = [-1 if axis == other else 1 for other in range(len(self.index))]
            found.append(torch.tensor(indices, device=tensor.device).view(shape))
        return (slice(None), *found)


def cells(
    model: Sized,
    site: str,
    *,
    by: Sequence[str],
    n_positions: int,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
) -> list[Part]:
    """Make every cell of a sweep; the last axis in ``by`` varies fastest.

    Raises:
        SiteError: the family lacks the site.
        InputError: ``by`` has an axis twice; ``by`` or a choice names an axis that the site lacks; or layers,
            positions, heads, keys or units do not exist.
    """
    known = site_of(site, family=model.family)
    names = known.parts
    able = ("layer", *names)
    if unknown := [name for name in by if name not in able]:
        raise InputError(f"a sweep of {site!r} by {', '.join(unknown)} is not possible; need some of {', '.join(able)}")
    if len(set(by)) < len(by):
        raise InputError(f"by names something twice: {', '.join(by)}; need each once")
    given = {"position": positions, "head": heads, "key": keys, "unit": units}
    for name, indices in given.items():
        if indices is not None and name not in names:
            raise InputError(
                f"{name}s were chosen and {site!r} has the axes {known.axes!r}; leave them out, or choose a site that "
                f"has {name}s"
            )
    sizes = sizes_of(model, known.axes, n_positions=n_positions)
    chosen = {name: _indices(f"{name}s", given[name], size=size) for name, size in zip(names, sizes, strict=True)}
    chosen["layer"] = _indices("layers", layers, size=model.n_layers)
    if not SITES[site].per_layer:
        chosen["layer"] = (model.n_layers - 1,)
    swept = [chosen[name] for name in by]
    found = []
    for place in product(*swept):
        fixed = {name: (index,) for name, index in zip(by, place, strict=True)}
        part = chosen | fixed
        found.append(Part(place=place, layers=part["layer"], index=tuple(part[name] for name in names)))
    return found


def place(site: str, layer: int) -> tuple[str, int]:
    """The key of a site's tensor in the result of ``run_with``."""
    return (site, layer if SITES[site].per_layer else 0)


def drawn_parts(part: Part, *, site: str, sizes: Sequence[int], shortest: int, draws: int, seed: int) -> list[Part]:
    """Random parts of the same size in the same layers: other units, else other heads, positions or keys.

    None if the part is everything that its layers have.

    Args:
        part: the part that they are controls of; none of its own indices is drawn.
        site: the site.
        sizes: of the site's axes after the sequence axis.
        shortest: tokens of the shortest sequence; only positions that every sequence has are drawn.
        draws: most of them; fewer where there are not so many.
        seed: of the draws; parts that differ only in the drawn axis share theirs.
    """
    names = SITES[site].parts
    axis = next(
        (
            names.index(name)
            for name in ("unit", "head", "position", "key")
            if name in names and len(part.index[names.index(name)]) < sizes[names.index(name)]
        ),
        None,
    )
    if axis is None:
        return []
    own, size = set(part.index[axis]), min(sizes[axis], shortest) if names[axis] in ("position", "key") else sizes[axis]
    rest: list[Any] = [indices for other, indices in enumerate(part.index) if other != axis]
    group = json.dumps([part.layers, axis, len(own), rest])
    found = _draws(group, n=len(own), size=size, most=draws + _SPARE, seed=seed)
    fit = [drawn for drawn in found if not own & set(drawn)][:draws]
    return [replace(part, index=(*part.index[:axis], drawn, *part.index[axis + 1 :])) for drawn in fit]


@lru_cache
def _draws(group: str, *, n: int, size: int, most: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Distinct random sets of n indices, the same for every part of a group."""
    generator = np.random.default_rng([seed, crc32(group.encode())])
    found: dict[tuple[int, ...], None] = {}
    for _ in range(20 * most):
        if len(found) >= most or size < n:
            break
        found[tuple(sorted(generator.choice(size, size=n, replace=False).tolist()))] = None
    return tuple(found)


def _indices(what: str, given: Sequence[int] | None, *, size: int) -> tuple[int, ...]:
    if given is None:
        return tuple(range(size))
    if not given:
        raise InputError(f"no {what} were chosen; need at least one, or None for all")
    if len(set(given)) < len(given):
        raise InputError(f"{what} are named twice: {list(given)}; need each once")
    for index in given:
        if not 0 <= index < size:
            raise InputError(f"{what}: {index} does not exist; need 0 to {size - 1}")
    return tuple(int(index) for index in given)
