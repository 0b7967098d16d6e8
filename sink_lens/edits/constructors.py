"""Edits: an edit names a site, the part of it to change, and the function that computes the new values.

Edits compose: within a layer in the order in which the layer computes their sites, and at one site in the given order,
each on the result of the previous one. No edit changes a tensor in place.

The arguments ``layers``, ``positions``, ``heads``, ``units`` and ``keys`` choose the part, as ``edits.Part`` says.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..data.given import Given, laid_by_text
from ..errors import InputError, SiteError
from ..models.lens import layers_from_zero
from ..models.load import ModelLike, as_lens
from ..models.memory import copy_to_device
from ..models.sites import SITES, unknown_site_error
from ..models.weights import mlp_weights
from .part import AXES, Indices, Part, SweptWhere, Where, check_index, indices_of_argument

ORDER = {name: place for place, name in enumerate(SITES)}


class EditError(InputError):
    """An edit whose result cannot be used because it is not finite or has another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Facts that an edit's function gets beside the values."""

    layer: int
    part: Part
    sequences: slice
    """Those of the whole batch that this pass runs."""
    n_sequences: int
    positions: Int[Tensor, " value"]
    valid: Bool[Tensor, "batch position"]
    """True at real tokens, of all positions."""
    read: Tensor | None
    """All values of the site that the edit ``reads``, after the edits of that site."""


Change = Callable[[Tensor, At], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one site in a forward pass."""

    site: str
    change: Change
    layers: Indices = None
    positions: Indices = None
    heads: Indices = None
    units: Indices = None
    keys: Indices = None
    reads: str | None = None
    """A site of the same layer, computed before this one."""
    label: str = ""
    whole_batch: bool = False
    """True if the new values of a sequence hang on other sequences, so that a pass must have all of them."""
    hides: bool = False
    """True if it is of the scores, and only hides keys from queries: an attention function of the user's own has no
    scores, and is given a mask that hides them.
    """
    holds_values: bool = False
    """True if its new values belong to the chosen indices alone: a random control of other indices has none."""
    kind: str = ""
    """The name by which a grid has this edit, a key of ``named_edits.KINDS``."""
    factor: float | None = None
    """The factor, or the number, of a grid's edit."""
    each: tuple[str, ...] = ()
    """The axes, such as ``heads``, of which ``sweep`` edits one index after another; no other call takes the edit."""
    laid: Callable[[Given], Change] | None = None
    """Makes the change for texts that were given elsewhere, if it has values or marks of their tokens."""

    @property
    def part(self) -> Part:
        return Part(**{field.name: getattr(self, field.name) for field in fields(Part)})

    def edited_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the layers that the edit changes in a model with ``n_layers``."""
        return tuple(range(n_layers)) if self.layers is None else self.layers

    def with_layers_from_start(self, n_layers: int) -> "Edit":
        """Return the edit with layers counted from 0; refuse a repeated one."""
        if all(layer >= 0 for layer in self.layers or ()):
            return self
        layers = layers_from_zero(self.layers or (), n_layers if SITES[self.site].per_layer else 1)
        if len(set(layers)) < len(layers):
            raise InputError(
                f"the edit {self.label!r} names layers twice: {list(self.layers or ())} of {n_layers}; need each once"
            )
        return replace(self, layers=layers)


def edit(
    site: str,
    change: Change,
    *,
    reads: str | None = None,
    whole_batch: bool = False,
    **where: Unpack[Where],
) -> Edit:
    """Make an edit from your own function: ``change(values, at)`` returns new values of the same shape.

    ``values`` is the part that ``where`` chooses (layers, positions, heads, units, keys), with the axes of the site; do
    not change it in place. ``at`` tells the layer, the positions and the part (a random control's has other indices),
    and has the values of the site ``reads``.

    A pass has some of the sequences. An edit whose new values of a sequence hang on other sequences, such as a mean
    over them, is refused when it is made, unless ``whole_batch`` says so: then each pass has all.

    However the texts were given, padded on the left or packed, the function sees a text a row, from position 0 on, with
    padding behind it: ``values[:, -1]`` is the end of the longest text alone. ``at.valid`` is False at padding.

    Raises:
        InputError: a chosen set of indices is empty or has an index twice.
        SiteError: there is no such site.
    """
    for name in (site,) if reads is None else (site, reads):
        if name not in SITES:
            raise unknown_site_error(name)
    if reads is not None and ORDER[reads] >= ORDER[site]:
        raise SiteError(
            f"{site!r} is computed before {reads!r}; need a site to read that comes before the edited one"
        )
    label = where.pop("label", "") or site
    if unknown := sorted(where.keys() - Where.__annotations__.keys()):
        raise InputError(
            f"the edit {label!r} was given {', '.join(unknown)}; need some of {', '.join(Where.__annotations__)}"
        )
    try:
        inspect.signature(change).bind(None, None)
    except TypeError as error:
        raise InputError(
            f"the function of the edit {label!r} cannot be called with two arguments ({error}); need change(values, at)"
        ) from error
    except ValueError:  # a function in C that has no signature
        pass
    chosen: dict[str, Any] = {}
    for name, given in where.items():
        indices = chosen[name] = indices_of_argument(name, given)
        if indices == ():
            raise InputError(
                f"the edit {label!r} chooses no {name}; need at least one, or None for all"
            )
        if indices and len(set(indices)) < len(indices):
            raise InputError(
                f"the edit {label!r} names {name} twice: {list(indices)}; need each once"
            )
    return Edit(
        site=site, change=change, reads=reads, label=label, whole_batch=whole_batch, **chosen
    )


def zero(site: str, **where: Unpack[SweptWhere]) -> Edit:
    """Make an edit that sets the chosen values of a site to 0.

    ``where`` chooses layers, positions, heads, units and keys. A zeroed neuron loses its whole down-projection column.
    For ``sweep``, ``heads="each"`` is one head after another, in one layer after another unless ``layers`` are given.
    """
    where.setdefault("label", f"zero {site}")
    return _named_edit("zero", site, lambda x, at: torch.zeros_like(x), **where)


def set_value(site: str, value: float, **where: Unpack[SweptWhere]) -> Edit:
    """Make an edit that sets the values of a site that ``where`` chooses, as for ``zero``, to a number."""
    where.setdefault("label", f"{site} = {value:g}")
    return _named_edit("set", site, lambda x, at: torch.full_like(x, value), factor=value, **where)


def _named_edit(
    kind: str,
    site: str,
    change: Change,
    *,
    factor: float | None = None,
    **where: Unpack[SweptWhere],
) -> Edit:
    given: dict[str, Any] = dict(where)
    each = tuple(
        name
        for axis in AXES
        if isinstance(own := given.get(name := f"{axis}s"), str) and own == "each"
    )
    chosen: Any = {name: own for name, own in given.items() if name not in each}
    return replace(edit(site, change, **chosen), kind=kind, factor=factor, each=each)


def add(site: str, vector: Tensor | float, *, factor: float = 1.0, **where: Unpack[Where]) -> Edit:
    """Make an edit that adds a vector, or a number, as steering does: ``values + factor * vector``.

    The vector fits the last axes of the chosen part, such as one of ``d_model`` numbers. If it has all axes and the
    first has the size of the whole batch, each sequence gets its own. ``factor`` multiplies the vector, or the number.

    Raises:
        EditError: when run, if the vector does not fit the part.
    """
    added = torch.as_tensor(vector).detach() * factor
    what = f"{factor:g} x vector" if added.dim() else f"{float(added):g}"
    where.setdefault("label", f"{site} + {what}")

    def change(x: Tensor, at: At) -> Tensor:
        whole = (at.n_sequences, *x.shape[1:])
        if any(
            own not in (1, size)
            for own, size in zip(reversed(added.shape), reversed(whole), strict=False)
        ) or (added.dim() > x.dim()):
            raise EditError(
                f"the vector for {site!r} has the shape {tuple(added.shape)}, the chosen part {whole}; need "
                f"its last axes, such as ({x.shape[-1]},)"
            )
        own = added[at.sequences] if added.dim() == x.dim() and len(added) > 1 else added
        return x + copy_to_device(own, x.device, x.dtype)

    return edit(site, change, **where)


def scale(site: str, factor: float, **where: Unpack[SweptWhere]) -> Edit:
    """Make an edit that multiplies the values of a site that ``where`` chooses, as for ``zero``."""
    where.setdefault("label", f"{site} x {factor:g}")
    return _named_edit("scale", site, lambda x, at: x * factor, factor=factor, **where)


def clamp(
    site: str, *, low: float | None = None, high: float | None = None, **where: Unpack[Where]
) -> Edit:
    """Make an edit that limits the chosen values of a site to at least ``low`` and at most ``high``; None is no limit.

    Raises:
        InputError: no bound is given, or the lower bound is above the upper bound.
    """
    if low is None and high is None:
        raise InputError("clamp was given neither low nor high; need at least one bound")
    if low is not None and high is not None and low > high:
        raise InputError(f"clamp was given low {low} over high {high}; need low at most high")
    where.setdefault("label", f"clamp {site}")
    return edit(site, lambda x, at: x.clamp(min=low, max=high), **where)


def freeze(site: str, values: Mapping[int, Tensor], **where: Unpack[Where]) -> Edit:
    """Make an edit that replaces values by given ones, such as a mean or the values of another run.

    ``values`` is layer -> the new values of the chosen part, with the site's axes; ``layers`` defaults to theirs. An
    axis of size 1 is repeated. If the first axis has the size of the whole batch, each sequence gets its own values.
    Those that ``capture`` gives of what a tokenizer returns lie as its tokens do; where they are nan at padding,
    nothing is replaced.
    """
    if any(layer < 0 for layer in values):
        raise InputError(
            f"the values of {site!r} are for layers {list(values)}; need layers counted from 0 on"
        )
    if where.get("layers") is None:
        where["layers"] = tuple(values)
    if missing := sorted(set(where.get("layers") or ()) - set(values)):
        raise InputError(
            f"there are no values of {site!r} for layers {missing}; need one tensor per layer"
        )
    where.setdefault("label", f"freeze {site}")

    def change(x: Tensor, at: At) -> Tensor:
        new = copy_to_device(values[at.layer], x.device, x.dtype)
        whole = (at.n_sequences, *x.shape[1:])
        if new.dim() != x.dim() or any(
            found not in (1, size) for found, size in zip(new.shape, whole, strict=True)
        ):
            raise EditError(
                f"the new values for {site!r} of layer {at.layer} have the shape {tuple(new.shape)}; "
                f"the chosen part has {whole}; need that shape, or size 1 where a value is repeated"
            )
        new = (new[at.sequences] if new.shape[0] > 1 else new).expand(x.shape)
        if bool(at.valid.all()):
            return new
        padding = copy_to_device(_padding_of(site, at, keys=where.get("keys")), x.device)
        return torch.where(new.isnan() & padding, x, new)

    def laid(given: Given) -> Change:
        axes = SITES[site].axis_names
        own = {layer: laid_by_text(one, given, axes=axes) for layer, one in values.items()}
        return freeze(site, own, **where).change

    whole = where.get("positions") is None and where.get("keys") is None
    return replace(edit(site, change, **where), holds_values=True, laid=laid if whole else None)


def _padding_of(site: str, at: At, *, keys: Sequence[int] | None) -> Bool[Tensor, "..."]:
    """Return True at the values of padding in the input of an edit, with axes that broadcast to it."""
    queries = ~at.valid[:, at.positions]
    if SITES[site].by_token:
        return queries.view(*queries.shape, *[1] * (len(SITES[site].axis_names) - 1))
    of_keys = ~(at.valid if keys is None else at.valid[:, list(keys)])
    return queries[:, None, :, None] | of_keys[:, None, None, :]


def kept_of_pass(kept: Bool[Tensor, "given position"], at: At) -> Bool[Tensor, "batch position"]:
    """Return the marks of the sequences of a pass; refuse those of other sequences."""
    n, length = at.n_sequences, at.valid.shape[1]
    if kept.shape != (n, length):
        raise EditError(
            f"the kept tokens have the shape {tuple(kept.shape)} and the run has {n} sequences of {length} tokens; "
            "need one row for each sequence"
        )
    return kept[at.sequences]


def resample(
    site: str, values: Mapping[int, Tensor], *, generator: torch.Generator, **where: Unpack[Where]
) -> Edit:
    """Make an edit that gives each sequence the values of another sequence, drawn without replacement.

    ``values`` is layer -> the current values of the chosen part, with the sequences as first axis. They must be of real
    tokens: padding would be put under real tokens of a longer sequence. ``generator`` draws the random order.

    Raises:
        InputError: there are fewer than two sequences.
    """
    n = next(iter(values.values())).shape[0] if values else 0
    if n < 2:
        raise InputError(f"resampling needs the values of at least 2 sequences; found {n}")
    shift = int(torch.randint(1, n, (), generator=generator))
    order = torch.randperm(n, generator=generator)
    source = torch.empty_like(order)
    source[order] = order.roll(shift)  # no sequence keeps its own values
    where.setdefault("label", f"resample {site}")
    drawn = {layer: tensor[source.to(tensor.device)] for layer, tensor in values.items()}
    return replace(freeze(site, drawn, **where), laid=None)  # values of other texts lie as those do


def scalar(
    model: ModelLike,
    *,
    layer: int,
    neurons: Sequence[int],
    dimensions: Sequence[int],
    factor: float = 0.0,
    positions: Sequence[int] | None = None,
    label: str = "",
) -> Edit:
    """Make an edit that scales what each of the neurons writes to each of the dimensions: entries of ``w_down``.

    The weights do not change. Instead, ``(1 - factor) * activation * w_down[dimension, neuron]`` is subtracted from the
    MLP's output at ``positions`` (None: all), before the norm that some families apply to it.

    Raises:
        InputError: no neuron or dimension is given, one is given twice, or an index does not exist.
    """
    lens = as_lens(model)
    layer = check_index("layer", layers_from_zero([layer], lens.n_layers)[0], lens.n_layers)
    weights = mlp_weights(lens, layer=layer)
    for name, indices, size in (
        ("neuron", neurons, lens.d_mlp),
        ("dimension", dimensions, lens.d_model),
    ):
        if not indices or len(set(indices)) < len(indices):
            raise InputError(
                f"scalar was given the {name}s {list(indices)}; need at least one, and each once"
            )
        for index in indices:
            check_index(name, index, size)
    columns = weights.w_down[:, list(neurons)] * (1 - factor)

    def change(x: Tensor, at: At) -> Tensor:
        assert at.read is not None
        active = at.read[:, at.positions.to(at.read.device)][..., list(neurons)]
        return x - active @ columns[list(at.part.units or ())].T.to(x.dtype)

    return edit(
        "down_out",
        change,
        reads="neurons",
        layers=[layer],
        positions=positions,
        units=dimensions,
        label=label or f"{len(neurons) * len(dimensions)} entries of down_proj x {factor:g}",
    )
