"""An edit: a site, where in it, and the function that changes what stands there.

Edits compose: they are applied in the order in which they are given, each on what the one before left. None
changes a tensor in place, so that nothing that was read before is changed behind the reader's back.

Everywhere, ``layers``, ``positions``, ``heads``, ``units`` and ``keys`` are indices, and None is all of them:
``positions`` are token positions (the queries, in ``scores`` and ``pattern``), ``heads`` the heads of that site
(key-value heads in ``k`` and ``v``), ``units`` the last axis of an activation (neurons, dimensions of the stream,
dimensions of a head), ``keys`` the keys of ``scores`` and ``pattern``.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import InputError, SiteError
from ..models.lens import LensModel
from ..models.sites import SITES, bridge_hook, site_of
from ..models.weights import mlp_weights

_AXIS_OF = {"position": "positions", "query": "positions", "head": "heads", "kv_head": "heads", "key": "keys"}
_SPOKEN = {"d_model": "dimension", "d_head": "dimension of the head", "d_mlp": "neuron", "query": "position"}
_READ_BEFORE = tuple(SITES)
"""The order in which a layer computes its sites."""


class EditError(InputError):
    """An edit whose result cannot be used: not a number, or of another shape."""


class Where(TypedDict, total=False):
    """The part of a site that an edit changes; what is left out is all of it."""

    layers: Sequence[int] | None
    positions: Sequence[int] | None
    heads: Sequence[int] | None
    units: Sequence[int] | None
    keys: Sequence[int] | None
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where a change is made: what it may need to know beside the values that it changes."""

    layer: int
    sequences: slice
    """Which sequences of the whole batch this pass runs."""
    positions: Int[Tensor, " position"]
    """The positions of the values that are changed."""
    valid: Bool[Tensor, "batch position"]
    """True at real tokens, at all positions."""
    read: Tensor | None
    """All values of the edit's ``reads`` in this layer and pass."""


Change = Callable[[Tensor, At], Tensor]
"""From the values of the chosen part to new ones of the same shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one site in a forward pass."""

    site: str
    change: Change
    layers: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    reads: str | None = None
    """A site of the same layer, computed before this one, whose values the change needs."""
    label: str = ""
    """What the edit is called in tables and messages."""

    def over(self, n_layers: int) -> tuple[int, ...]:
        """The layers that it changes."""
        return tuple(range(n_layers)) if self.layers is None else self.layers


def edit(site: str, change: Change, *, reads: str | None = None, **where: Unpack[Where]) -> Edit:
    """An edit with a function of one's own: ``change(values, at)`` gives new values of the same shape.

    ``values`` is the chosen part, its axes those of the site. It must not be changed in place.

    Raises:
        InputError: a chosen set is empty or names something twice.
        SiteError: there is no such site.
    """
    for name in (site, *([] if reads is None else [reads])):
        if name not in SITES:
            raise SiteError(f"there is no site {name!r}; need one of {', '.join(SITES)}")
    if reads is not None and _READ_BEFORE.index(reads) >= _READ_BEFORE.index(site):
        raise SiteError(f"{site!r} is computed before {reads!r}; need a site to read that comes before the edited one")
    label = where.pop("label", "") or site
    chosen: dict[str, tuple[int, ...] | None] = {}
    for name, given in where.items():
        indices = None if given is None else tuple(int(one) for one in given)  # type: ignore[attr-defined]  # a sequence
        if indices is not None and not indices:
            raise InputError(f"the edit {label!r} chooses no {name}; need at least one, or None for all")
        if indices is not None and len(set(indices)) < len(indices):
            raise InputError(f"the edit {label!r} names {name} twice: {list(indices)}; need each once")
        chosen[name] = indices
    return Edit(site=site, change=change, reads=reads, label=label, **chosen)


def zero(site: str, **where: Unpack[Where]) -> Edit:
    """Set to 0. Of ``neurons``, this removes the whole column of the down-projection; see ``scalar`` for one entry."""
    where.setdefault("label", f"zero {site}")
    return edit(site, lambda x, at: torch.zeros_like(x), **where)


def set_value(site: str, value: float, **where: Unpack[Where]) -> Edit:
    """Set to a number."""
    where.setdefault("label", f"{site} = {value:g}")
    return edit(site, lambda x, at: torch.full_like(x, value), **where)


def scale(site: str, factor: float, **where: Unpack[Where]) -> Edit:
    """Multiply by a factor."""
    where.setdefault("label", f"{site} x {factor:g}")
    return edit(site, lambda x, at: x * factor, **where)


def clamp(site: str, *, low: float | None = None, high: float | None = None, **where: Unpack[Where]) -> Edit:
    """Cut values at bounds.

    Raises:
        InputError: neither bound is given, or the lower is over the upper one.
    """
    if low is None and high is None:
        raise InputError("clamp was given neither low nor high; need at least one bound")
    if low is not None and high is not None and low > high:
        raise InputError(f"clamp was given low {low} over high {high}; need low at most high")
    where.setdefault("label", f"clamp {site}")
    return edit(site, lambda x, at: x.clamp(min=low, max=high), **where)


def hold(site: str, values: Mapping[int, Tensor], **where: Unpack[Where]) -> Edit:
    """Replace by given values, such as those of another run, or a mean.

    Args:
        site: where.
        values: layer -> the new values of the chosen part, with the site's axes; an axis of size 1 is repeated.
            Where the first axis has the size of the whole batch, each sequence gets its own.
        **where: the chosen part; ``layers`` are those of ``values`` if not given.
    """
    if where.get("layers") is None:
        where["layers"] = tuple(values)
    missing = sorted(set(where["layers"] or ()) - set(values))
    if missing:
        raise InputError(f"there are no values of {site!r} for layers {missing}; need one tensor a layer")
    where.setdefault("label", f"hold {site}")

    def change(x: Tensor, at: At) -> Tensor:
        new = values[at.layer].to(x.device, x.dtype)
        if new.shape[0] > 1:
            new = new[at.sequences]
        try:
            return new.expand(x.shape)
        except RuntimeError as error:
            raise EditError(
                f"the values held at {site!r} of layer {at.layer} have the shape {tuple(values[at.layer].shape)}; "
                f"the chosen part has {tuple(x.shape)}: need that, or 1 where a value is repeated"
            ) from error

    return edit(site, change, **where)


def resample(site: str, values: Mapping[int, Tensor], *, generator: torch.Generator, **where: Unpack[Where]) -> Edit:
    """Replace each sequence's values by those of another sequence, drawn without replacement.

    Args:
        site: where.
        values: layer -> the chosen part's own values, the sequences in front.
        generator: where the order comes from.
        **where: the chosen part.

    Raises:
        InputError: there are fewer than two sequences.
    """
    n = next(iter(values.values())).shape[0] if values else 0
    if n < 2:
        raise InputError(f"resampling needs the values of at least 2 sequences; found {n}")
    shift = int(torch.randint(1, n, (), generator=generator))
    order = torch.randperm(n, generator=generator)
    source = torch.empty_like(order)
    source[order] = order.roll(shift)  # no sequence keeps its own
    where.setdefault("label", f"resample {site}")
    return hold(site, {layer: tensor[source.to(tensor.device)] for layer, tensor in values.items()}, **where)


def scalar(
    lens: LensModel,
    *,
    layer: int,
    neurons: Sequence[int],
    dimensions: Sequence[int],
    factor: float = 0.0,
    positions: Sequence[int] | None = None,
    label: str = "",
) -> Edit:
    """Multiply single entries of the down-projection: what each neuron writes to each of the dimensions, no more.

    The weights stay as they are: the MLP's output loses ``(1 - factor) * activation * w_down[dimension, neuron]``,
    before the norm that some families put behind it.

    Raises:
        InputError: a neuron or dimension that does not exist.
        SiteError: a mixture of experts, whose neurons have no site.
    """
    site_of("neurons", family=lens.family)
    weights = mlp_weights(lens, layer=_in_range("layer", layer, lens.n_layers))
    assert weights is not None  # site_of has refused the others
    for name, indices, size in (("neuron", neurons, lens.d_mlp or 0), ("dimension", dimensions, lens.d_model)):
        for index in indices:
            _in_range(name, index, size)
    block = weights.w_down[list(dimensions)][:, list(neurons)] * (1 - factor)

    def change(x: Tensor, at: At) -> Tensor:
        assert at.read is not None
        active = at.read[:, at.positions.to(at.read.device)][..., list(neurons)]
        return x - active @ block.T.to(x.dtype)

    return edit(
        "down_out",
        change,
        reads="neurons",
        layers=[layer],
        positions=positions,
        units=dimensions,
        label=label or f"{len(neurons) * len(dimensions)} entries of down_proj x {factor:g}",
    )


@dataclass(slots=True, kw_only=True)
class Applied:
    """The edits of one run, made into hooks; it remembers which of them changed anything."""

    lens: LensModel
    edits: tuple[Edit, ...]
    changed: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)

    def hooks(
        self, *, sequences: slice, valid: Bool[Tensor, "batch position"], layers: range
    ) -> list[tuple[str, Callable[..., Tensor | None]]]:
        """Bridge hooks of one pass over some of the sequences, in the order of the edits."""
        found: list[tuple[str, Callable[..., Tensor | None]]] = []
        for number, one in enumerate(self.edits):
            for layer in one.over(self.lens.n_layers) if SITES[one.site].per_layer else (0,):
                if SITES[one.site].per_layer and layer not in layers:
                    continue
                held: dict[str, Tensor] = {}
                if one.reads is not None:
                    found.append((self._name(one.reads, layer), _keeper(held)))
                hook = self._hook(number, one, layer=layer, sequences=sequences, valid=valid, held=held)
                found.append((self._name(one.site, layer), hook))
        return found

    def warn(self) -> None:
        """A warning for every edit that ran and changed nothing."""
        for number in sorted(self.reached - self.changed):
            warnings.warn(
                f"the edit {self.edits[number].label!r} changed nothing: what it wrote was there already",
                stacklevel=3,
            )

    def _name(self, site: str, layer: int) -> str:
        return bridge_hook(SITES[site], family=self.lens.family, layer=layer)

    def _hook(
        self, number: int, one: Edit, *, layer: int, sequences: slice, valid: Tensor, held: dict[str, Tensor]
    ) -> Callable[..., Tensor | None]:
        def apply(tensor: Tensor, hook: object) -> Tensor | None:
            self.reached.add(number)
            index = _index(one, tensor)
            old = tensor if index is None else tensor[index]
            positions = torch.arange(valid.shape[1]) if one.positions is None else torch.tensor(one.positions)
            at = At(layer=layer, sequences=sequences, positions=positions, valid=valid, read=held.get("read"))
            new = one.change(old, at)
            _check_result(new, old=old, one=one, layer=layer)
            if torch.equal(new, old):
                return None
            self.changed.add(number)
            if index is None:
                return new
            edited = tensor.clone()
            edited[index] = new.to(tensor.dtype)
            return edited

        return apply


def check_edits(edits: Sequence[Edit], *, lens: LensModel, n_positions: int) -> None:
    """Refuse edits that this model or these sequences do not have a place for.

    Raises:
        SiteError: a site that the family lacks, or whose edits have no effect on this model's bridge.
        InputError: layers, positions, heads, units or keys that do not exist.
    """
    for one in edits:
        site = site_of(one.site, family=lens.family)
        if one.reads is not None:
            site_of(one.reads, family=lens.family)
        if one.site in lens.uneditable:
            raise SiteError(
                f"the attention of this bridge is delegated to Hugging Face, so that edits of {one.site!r} change "
                "nothing; need a model from load or wrap(model) of Hugging Face, not a stock bridge"
            )
        for layer in one.layers or ():
            _in_range("layer", layer, lens.n_layers, of=one.label)
        sizes = {"position": n_positions, "query": n_positions, "key": n_positions}
        sizes |= {"head": lens.n_heads, "kv_head": lens.n_kv_heads}
        sizes |= {"d_model": lens.d_model, "d_head": lens.d_head, "d_mlp": lens.d_mlp or 0}
        used = set()
        for axis in site.axes.split()[1:]:
            name = _AXIS_OF.get(axis, "units")
            used.add(name)
            for index in getattr(one, name) or ():
                _in_range(
                    axis.replace("d_model", "dimension").replace("d_mlp", "neuron"), index, sizes[axis], one.label
                )
        for name in ("heads", "units", "keys"):
            if getattr(one, name) is not None and name not in used:
                raise InputError(
                    f"the edit {one.label!r} chooses {name} and {one.site!r} has the axes {site.axes!r}; "
                    f"need a site that has {name}"
                )


def relabelled(one: Edit, label: str) -> Edit:
    """The same edit under another label."""
    return replace(one, label=label)


def _in_range(what: str, index: int, size: int, *, of: str = "") -> int:
    if not 0 <= index < size:
        whose = f" of the edit {of!r}" if of else ""
        raise InputError(f"{what} {index}{whose} does not exist; need 0 to {size - 1}")
    return index


def _index(one: Edit, tensor: Tensor) -> tuple[Tensor, ...] | None:
    """An open mesh over the chosen indices of every axis; None where everything is chosen."""
    axes = SITES[one.site].axes.split()
    chosen = [None, *(getattr(one, _AXIS_OF.get(axis, "units")) for axis in axes[1:])]
    if all(indices is None for indices in chosen):
        return None
    vectors = [
        torch.arange(size, device=tensor.device) if indices is None else torch.tensor(indices, device=tensor.device)
        for indices, size in zip(chosen, tensor.shape, strict=True)
    ]
    return tuple(
        vector.view([-1 if place == axis else 1 for place in range(len(axes))]) for axis, vector in enumerate(vectors)
    )


def _check_result(new: Any, *, old: Tensor, one: Edit, layer: int) -> None:
    if not isinstance(new, Tensor) or new.shape != old.shape:
        found = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise EditError(
            f"the edit {one.label!r} of {one.site!r} gave {found} at layer {layer}; need a tensor of the "
            f"shape of what it was given, {tuple(old.shape)}"
        )
    bad = new.isnan() if one.site == "scores" else ~new.isfinite()
    if bool(bad.any()) and bool(old.isfinite().all()):
        raise EditError(
            f"the edit {one.label!r} of {one.site!r} gave numbers that are not finite at layer {layer}; "
            "need finite ones: look at what it divides by, and at factors that overflow the type"
        )


def _keeper(held: dict[str, Tensor]) -> Callable[..., None]:
    def keep(tensor: Tensor, hook: object) -> None:
        held["read"] = tensor

    return keep
