"""A part of a site (its layers, positions, heads, units and keys), checks of indices, and random draws of them."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict
from zlib import crc32

from ..errors import InputError
from ..models.sites import SITES
from ..text import as_ranges

if TYPE_CHECKING:  # a dry run counts parts without torch
    from jaxtyping import Shaped
    from torch import Tensor

Indices = tuple[int, ...] | None
"""Indices on one axis that are edited together; None is all of them."""
SPARE_DRAWS = 3
"""More draws than controls, since one that holds a part's own indices is no control of it."""
AXES = ("layer", "position", "head", "unit", "key")


class Where(TypedDict, total=False):
    """The keyword arguments that choose what an edit changes; an axis that is not given is edited completely."""

    layers: Sequence[int] | None
    positions: Sequence[int] | None
    heads: Sequence[int] | None
    units: Sequence[int] | None
    keys: Sequence[int] | None
    label: str


class SweptWhere(TypedDict, total=False):
    """The same for the edits that a grid names: ``each`` is for ``sweep``, which edits one index after another."""

    layers: Sequence[int] | Literal["each"] | None
    positions: Sequence[int] | Literal["each"] | None
    heads: Sequence[int] | Literal["each"] | None
    units: Sequence[int] | Literal["each"] | None
    keys: Sequence[int] | Literal["each"] | None
    label: str


def indices_of_argument(name: str, given: Any) -> tuple[int, ...] | None:
    """Return an argument's indices as a tuple; None is all. Refuse other things."""
    if given is None:
        return None
    if not isinstance(given, Iterable):
        how = f". Write {name}=[{given!r}]" if isinstance(given, int) else ""
        raise InputError(f"{name} is {given!r}; need a list of numbers{how}")
    if isinstance(given, str):
        raise InputError(
            f"{name} is {given!r}; need a list of numbers: each is for the edits zero, scale and set_to"
        )
    items = list(given)
    if any(isinstance(one, bool) or "bool" in str(getattr(one, "dtype", "")) for one in items):
        raise InputError(
            f"{name} is a mask of True and False; need indices. Write {name}=mask.nonzero() as a list"
        )
    try:
        return tuple(operator.index(one) for one in items)
    except TypeError as error:
        raise InputError(f"{name} is {given!r}; need a list of whole numbers") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Chosen layers, positions, heads, units and keys of a site; None on an axis is all of it."""

    site: str
    layers: Indices = None
    positions: Indices = None
    heads: Indices = None
    units: Indices = None
    keys: Indices = None

    @classmethod
    def of_site(cls, site: str, where: Where) -> "Part":
        """Make the part that an edit's keyword arguments choose."""
        names = [f"{axis}s" for axis in AXES]
        return cls(
            site=site, **{name: indices_of_argument(name, where.get(name)) for name in names}
        )

    def indices_on(self, axis: str) -> Indices:
        """Return the indices on one of ``AXES``, such as ``head``."""
        return getattr(self, f"{axis}s")

    @property
    def indices_by_axis(self) -> tuple[Indices, ...]:
        """Those on each axis of the site after the axis of sequences."""
        return tuple(self.indices_on(axis) for axis in SITES[self.site].axis_names)

    @property
    def where(self) -> Where:
        """The part as keyword arguments of an edit."""
        chosen = {
            f"{axis}s": indices for axis in AXES if (indices := self.indices_on(axis)) is not None
        }
        return Where(**chosen)  # type: ignore[typeddict-item]  # its keys are those of Where

    @property
    def n_tokens_needed(self) -> int:
        """One more than the last position or key of the part."""
        return 1 + max((*(self.positions or ()), *(self.keys or ())), default=-1)

    @property
    def words(self) -> str:
        """The chosen indices, such as ``layer 1, head 0-3``; empty for the whole site."""
        chosen = ((axis, self.indices_on(axis)) for axis in AXES)
        return ", ".join(
            f"{axis} {index_text(indices)}" for axis, indices in chosen if indices is not None
        )

    def select(self, values: "Shaped[Tensor, 'batch ...']") -> "Shaped[Tensor, 'batch ...']":
        """Select this part of one layer's values; an axis of size 1 is kept whole."""
        index = self.index_mesh(values, averaged=True)
        return values if index is None else values[index]

    def index_mesh(
        self, tensor: "Tensor", *, begin: int = 0, averaged: bool = False
    ) -> "tuple[Tensor, ...] | None":
        """Return the index (an open mesh) that selects this part of one layer's tensor; None for the whole tensor.

        The tensor has all values of the site, the sequences first, and its positions begin at ``begin``. If
        ``averaged``, an axis of size 1 stands for all its indices.
        """
        import torch

        from ..models.memory import copy_to_device

        vectors: list[Tensor | None] = [None]
        for name, indices, size in zip(
            SITES[self.site].axis_names, self.indices_by_axis, tensor.shape[1:], strict=True
        ):
            first = begin if name == "position" else 0
            if indices is None or (averaged and size == 1):
                vectors.append(None)
                continue
            for index in (min(indices), max(indices)):
                check_index(name, index - first, size)
            run = range(indices[0], indices[-1] + 1)
            if tuple(indices) == tuple(run):  # made on the device, the others are copied
                vector = torch.arange(run.start, run.stop, device=tensor.device)
            else:
                vector = copy_to_device(torch.tensor(indices), tensor.device)
            vectors.append(vector - first)
        if all(vector is None for vector in vectors):
            return None
        found = []
        for axis, (vector, size) in enumerate(zip(vectors, tensor.shape, strict=True)):
            whole = torch.arange(size, device=tensor.device) if vector is None else vector
            found.append(whole.view(-1, *[1] * (tensor.dim() - 1 - axis)))
        return tuple(found)

    def __str__(self) -> str:
        return f"{self.site} ({self.words})" if self.words else self.site


def index_text(indices: Indices) -> int | str:
    """Write indices for a table: the number, ``0-3,7``, or ``all``."""
    if indices is None:
        return "all"
    return indices[0] if len(indices) == 1 else as_ranges(indices)


def replace_full_axes_by_none(part: Part, *, sizes: Sequence[int]) -> Part:
    """Copy a part, with None on each axis of which it has all indices; ``sizes`` are those of ``indices_by_axis``."""
    whole = {
        f"{axis}s": None
        for axis, size in zip(SITES[part.site].axis_names, sizes, strict=True)
        if part.indices_on(axis) == tuple(range(size))
    }
    return replace(part, **whole, **({} if SITES[part.site].per_layer else {"layers": None}))


@lru_cache
def draw_index_sets(
    group: str, *, n: int, size: int, most: int, seed: int, lowest: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Draw up to ``most`` distinct sets of ``n`` indices from ``lowest`` to ``size`` - 1; fewer if no more exist.

    The same ``group`` (any text) and ``seed`` give the same sets.
    """
    from numpy.random import default_rng  # late: --help answers without numpy

    generator = default_rng([seed, crc32(group.encode())])
    sets: dict[tuple[int, ...], None] = {}
    for _ in range(20 * most):
        if len(sets) == most or size - lowest < n:
            break
        drawn = lowest + generator.choice(size - lowest, size=n, replace=False)
        sets[tuple(sorted(drawn.tolist()))] = None
    return tuple(sets)


def check_index(what: str, index: int, size: int, *, of: str = "") -> int:
    if not 0 <= index < size:
        whose = f" of the edit {of!r}" if of else ""
        raise InputError(f"{what} {index}{whose} does not exist; need 0 to {size - 1}")
    return index
