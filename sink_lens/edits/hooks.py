"""Edits as hooks of TransformerLens, hooks of TransformerLens as edits, and edits that do not fit are refused."""

import operator
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from ..data.tokens import TokenBatch, positions_in_all
from ..errors import InputError, ModelError, SiteError, note_whose_function_failed
from ..models.lens import LensModel, check_layers_have_site
from ..models.load import ModelLike, as_lens
from ..models.own_attention import MASK_HOOK
from ..models.private_apis import n_in_place_changes
from ..models.running import check_unchanged
from ..models.sites import SITES, bridge_hook_name, site_of, site_of_hook
from .constructors import ORDER, At, Edit, EditError, edit
from .part import check_index

_OF_HEAD = "dimension of the head"
_SPOKEN = {
    "d_model": "dimension",
    "d_head": _OF_HEAD,
    "d_value": _OF_HEAD,
    "d_mlp": "neuron",
    "query": "position",
}
OPEN = -1e4
"""Scores above it are not masked; the mask adds the lowest number of the type."""


HookFunction = Callable[..., Tensor | None]
"""A hook of TransformerLens: ``function(tensor, hook)`` gives a new tensor, or None; it may change the tensor."""
Act = Callable[[Tensor], Tensor | None]
"""From a site's whole tensor to the edited one; None if nothing was changed."""


def fwd_hooks(
    model: ModelLike, edits: Sequence[Edit] | Edit, *, tokens: TokenBatch | None = None
) -> list[tuple[str, HookFunction]]:
    """Make hooks of the bridge from edits, for ``lens.bridge.run_with_hooks(..., fwd_hooks=...)`` and ``bridge.hooks``.

    The bridge then computes what ``run_with`` does, but does not warn about edits that change nothing.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        edits: applied in this order. Those that need positions need whole passes:
            ``bridge.generate(..., use_past_kv_cache=False)``.
        tokens: all sequences of the run, which tell where padding is; None takes every token for a real one.

    Raises:
        ModelError: the model can only be measured.
        SiteError: the family lacks a site, or edits of a site have no effect on this bridge.
        InputError: layers, heads, units, positions or keys do not exist.
    """
    lens = as_lens(model)
    if lens.why_measured_only is not None:
        raise ModelError(lens.why_measured_only)
    check_unchanged(lens)
    if tokens is None:
        n_positions, n_sequences, valid = sys.maxsize, 0, None
    else:
        n_positions, n_sequences, valid = tokens.n_positions, tokens.n_sequences, tokens.valid
    given = edits_for_model(lens, edits, n_positions=n_positions)
    return Applied(lens=lens, edits=given, n_sequences=n_sequences).fwd_hooks(
        sequences=slice(0, n_sequences), valid=valid, layers=range(lens.n_layers)
    )


def from_hook(
    name: str, function: HookFunction, *, model: ModelLike | None = None, label: str = ""
) -> Edit:
    """Make an edit from a hook function of TransformerLens, for ``run_with``, ``sweep`` and ``patch``.

    The function gets a copy of the whole activation, ``[batch, position, ...]``, and a ``HookPoint`` with this name; it
    gives a new tensor, or changes the tensor and gives None. A call may get some of the run's sequences only; it never
    gets those of another cell of a sweep. The model is needed for hook points in the MLP, which are other sites in
    other families.

    Raises:
        SiteError: no site stands at the hook point.
    """
    site, layer = site_of_hook(name, lens=None if model is None else as_lens(model))
    point = HookPoint()
    point.name = name

    def change(x: Tensor, at: At) -> Tensor:
        own = x.clone()
        new = function(own, hook=point)
        return own if new is None else new

    return edit(
        site, change, layers=None if layer is None else [layer], label=label or f"hook at {name}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One edit at one layer, or its reading of another site in that layer."""

    order: int
    site: str
    layer: int
    act: Act


@dataclass(slots=True, kw_only=True)
class Applied:
    """The edits of one run as hooks; it remembers which edits changed anything."""

    lens: LensModel
    edits: tuple[Edit, ...]
    n_sequences: int
    begin: int = 0
    """That of the tensors; no edit touches a position before it."""
    changed: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    longest: int = 0
    """Positions of the longest pass so far."""

    def fwd_hooks(
        self, *, sequences: slice, valid: Bool[Tensor, "batch position"] | None, layers: range
    ) -> list[tuple[str, HookFunction]]:
        """Make the hooks (name, function) for a pass of ``sequences`` through ``layers``, in the order of the edits.

        If ``valid`` is None, every token is real, and a hook takes the number of sequences from its tensor.
        """
        steps = self.steps(sequences=sequences, valid=valid, layers=layers)
        names = [
            MASK_HOOK.format(step.layer)
            if step.site == "scores" and self.lens.own_attention is not None
            else bridge_hook_name(SITES[step.site], family=self.lens.family, layer=step.layer)
            for step in steps
        ]
        return [
            (name, lambda x, hook, act=step.act: act(x))
            for name, step in zip(names, steps, strict=True)
        ]

    def steps(
        self, *, sequences: slice, valid: Bool[Tensor, "batch position"] | None, layers: range
    ) -> list[Step]:
        """Make the steps of a pass, in the order of their sites within a layer; a site is read after all its edits."""
        found = []
        for number, one in enumerate(self.edits):
            own = layers_of_edit(one, self.lens) if SITES[one.site].per_layer else (0,)
            for layer in own:
                if SITES[one.site].per_layer and layer not in layers:
                    continue
                held: dict[str, Tensor] = {}
                if one.reads is not None:
                    reads = partial(held.__setitem__, "read")
                    order = 2 * ORDER[one.reads] + 1
                    found.append(Step(order=order, site=one.reads, layer=layer, act=reads))
                act = partial(
                    self._edit_tensor,
                    number=number,
                    layer=layer,
                    sequences=sequences,
                    valid=valid,
                    held=held,
                )
                found.append(Step(order=2 * ORDER[one.site], site=one.site, layer=layer, act=act))
        return sorted(found, key=operator.attrgetter("order"))

    def refuse_edits_whose_hook_never_fired(self, layers: range) -> None:
        for number, one in enumerate(self.edits):
            own = [layer for layer in layers_of_edit(one, self.lens) if layer in layers]
            if own and number not in self.reached and SITES[one.site].per_layer:
                raise SiteError(
                    f"the edit {one.label!r} was never shown {one.site!r}, whose hook point did not fire in layer "
                    f"{own[0]} of {self.lens.name}; need a site that this model's forward goes through"
                )

    def warn_of_edits_without_effect(self) -> None:
        late = [one for number, one in enumerate(self.edits) if number not in self.reached]
        warn_of_edits_without_effect(self.edits, self.changed, late=late, stacklevel=4)

    def _edit_tensor(
        self,
        tensor: Tensor,
        *,
        number: int,
        layer: int,
        sequences: slice,
        valid: Tensor | None,
        held: Mapping[str, Tensor],
    ) -> Tensor | None:
        """Return a site's tensor after edit ``number``; None if unchanged. ``held`` has the site that it reads."""
        one, n_sequences = self.edits[number], self.n_sequences
        if valid is None:
            valid = torch.ones(
                len(tensor), tensor.shape[SITES[one.site].position_axis], dtype=torch.bool
            )
            if (one.hides or one.positions is not None) and valid.shape[1] == 1 < self.longest:
                raise EditError(
                    f"the edit {one.label!r} needs positions and was shown 1 token after {self.longest}: with a cache "
                    "of keys and values its positions are not the sequence's; need use_past_kv_cache=False, or "
                    "sink_lens.generate"
                )
            self.longest = max(self.longest, valid.shape[1])
            sequences, n_sequences = slice(0, len(tensor)), len(tensor)
        first = number not in self.reached
        self.reached.add(number)
        index = one.part.index_mesh(tensor, begin=self.begin)
        old = tensor if index is None else tensor[index]
        positions, where = torch.arange(self.begin, valid.shape[1]), "all positions"
        if one.positions is not None:
            positions = torch.tensor(one.positions)
            where = f"positions {', '.join(map(str, one.positions))}"
        at = At(
            layer=layer,
            part=one.part,
            sequences=sequences,
            n_sequences=n_sequences,
            positions=positions,
            valid=valid,
            read=held.get("read"),
        )
        version = n_in_place_changes(old)
        with note_whose_function_failed(
            f"the edit {one.label!r} of {one.site!r}, layer {layer}, {where}"
        ):
            new = one.change(old, at)
        if n_in_place_changes(old) != version:
            raise EditError(
                f"the edit {one.label!r} changed its values in place; need new values: clone them first"
            )
        if one.whole_batch and len(old) < n_sequences:
            raise EditError(
                f"the edit {one.label!r} mixes sequences, and this pass has {len(old)} of {n_sequences}; need all in "
                f"one: batch_size={n_sequences}, or leave it out"
            )
        alone = None
        if not one.whole_batch and first and n_sequences > 1:
            row = min(1, len(old) - 1)  # the second, which then stands in the first row
            alone = row, _values_beside_others(one, old, at, row=row)
        hidden = None
        if one.site == "pattern":
            hidden = _hidden_keys(tensor, reach=self.lens.reach(layer)).expand(tensor.shape)
            hidden = hidden if index is None else hidden[index]
        new, differs = _check_new_values(
            new, old=old, one=one, layer=layer, alone=alone, hidden=hidden
        )
        if not differs:
            return None
        self.changed.add(number)
        if index is None:
            return new
        edited = tensor.clone()
        edited[index] = new
        return edited


def layers_of_edit(one: Edit, lens: LensModel) -> list[int]:
    """Return the layers of this model, with the sites of the edit, that it changes."""
    having = set(lens.layers_with(one.site))
    if one.reads is not None:
        having &= set(lens.layers_with(one.reads))
    return [layer for layer in one.edited_layers(lens.n_layers) if layer in having]


def warn_of_edits_without_effect(
    edits: Sequence[Edit],
    changed: Collection[int],
    *,
    late: Collection[Edit] = (),
    stacklevel: int = 3,
) -> None:
    """Warn about edits whose index is not in ``changed``; of ``late`` ones no pass reached the layers."""
    for number, one in enumerate(edits):
        if number not in changed:
            ended = "the run ended before the layers that it edits"
            reason = ended if one in late else "the new values equal the old ones"
            warnings.warn(
                f"the edit {one.label!r} changed nothing: {reason}", stacklevel=stacklevel
            )


def edits_in_texts(edits: Sequence[Edit] | Edit, tokens: TokenBatch) -> tuple[Edit, ...]:
    """Return edits whose positions, keys and values are those of every text."""
    found = []
    for one in (edits,) if isinstance(edits, Edit) else edits:
        if one.laid is not None and tokens.given is not None:
            one = replace(one, change=one.laid(tokens.given), laid=None)
        places = {
            name: positions_in_all(own, tokens, of=f"the edit {one.label!r}")
            for name in ("positions", "keys")
            if (own := getattr(one, name)) is not None
        }
        found.append(replace(one, **places))
    return tuple(found)


def edits_for_model(
    lens: LensModel, edits: Sequence[Edit] | Edit, *, n_positions: int
) -> tuple[Edit, ...]:
    """Return edits with layers counted from 0; refuse sites and indices that a run over ``n_positions`` lacks."""
    given = [
        one.with_layers_from_start(lens.n_layers)
        for one in ((edits,) if isinstance(edits, Edit) else edits)
    ]
    for one in given:
        if one.each:
            raise InputError(
                f"the edit {one.label!r} has {one.each[0]}='each', which is for sweep; need a list of numbers"
            )
        site = site_of(one.site, family=lens.family)
        if one.reads is not None:
            site_of(one.reads, family=lens.family)
        changed = "mask" if one.hides and lens.own_attention is not None else one.site
        if changed in lens.uneditable:
            raise lens.uneditable_error(changed)
        for layer in one.layers or ():
            check_index("layer", layer, lens.n_layers if site.per_layer else 1, of=one.label)
        if site.per_layer:
            for name in filter(None, (one.site, one.reads)):
                check_layers_have_site(lens, one.layers or (), site=name)
        used = [f"{name}s" for name in site.axis_names]
        every = [
            lens.axis_sizes(site.axes, n_positions=n_positions, layer=layer)
            for layer in one.layers or lens.layers_with(one.site)
        ]
        axes = site.axes.split()[1:]
        for axis, name, sizes in zip(axes, used, zip(*every, strict=True), strict=True):
            spoken = _SPOKEN.get(axis, axis).replace("_", "-")
            for index in getattr(one, name) or ():
                check_index(spoken, index, min(sizes), of=one.label)
        for name in ("heads", "units", "keys"):
            if getattr(one, name) is not None and name not in used:
                raise InputError(
                    f"the edit {one.label!r} chooses {name} and {one.site!r} has the axes {site.axes!r}; "
                    f"need a site that has {name}"
                )
    return tuple(given)


def _values_beside_others(one: Edit, old: Tensor, at: At, *, row: int) -> Tensor:
    """Return the new values of a sequence if half of its old values stand beside it as another's.

    An edit of each sequence alone gives the same values as in the pass, in whatever row the sequence stands.
    """
    number = range(at.n_sequences)[at.sequences][row]
    # the sequence, and another of the run
    order = (0, 1) if number + 1 < at.n_sequences else (1, 0)

    def of_both(tensor: Tensor) -> Tensor:
        return torch.stack([(tensor[row], tensor[row] * 0.5)[place] for place in order])

    beside = replace(
        at,
        sequences=slice(number - order[0], number - order[0] + 2),
        valid=at.valid[[row, row]],
        read=None if at.read is None else of_both(at.read),
    )
    try:
        found = one.change(of_both(old), beside)
    except Exception as error:
        why = f"it fails with two sequences ({type(error).__name__}: {error})"
        raise _mixing_error(one, why) from error
    if isinstance(found, Tensor) and len(found) == 2:
        return found[order[0]]
    return old.new_full((1,), torch.inf)


def _hidden_keys(pattern: Tensor, *, reach: int | None) -> Bool[Tensor, "query key"]:
    """Return True at the keys that are behind each query, or beyond its window."""
    n_queries, n_keys = pattern.shape[-2:]
    keys = torch.arange(n_keys, device=pattern.device)
    back = keys[n_keys - n_queries :, None] - keys
    return (back < 0) | (back >= (n_keys if reach is None else reach))


def _mixing_error(one: Edit, why: str) -> EditError:
    return EditError(
        f"the edit {one.label!r} of {one.site!r} mixes sequences, or is random: {why}; need new values of each "
        "sequence that hang on it alone. With edit(..., whole_batch=True) each pass has all sequences"
    )


def _check_new_values(
    new: Any,
    *,
    old: Tensor,
    one: Edit,
    layer: int,
    alone: tuple[int, Tensor] | None,
    hidden: Bool[Tensor, "..."] | None,
) -> tuple[Tensor, bool]:
    """Return new values in the type of ``old``, and True if they differ; refuse those that cannot be used.

    ``alone`` are a row and the new values of its sequence beside others (None: not compared); ``hidden`` is True at the
    weights of a pattern that its mask makes 0.
    """
    if not isinstance(new, Tensor) or new.shape != old.shape:
        found = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise EditError(
            f"the edit {one.label!r} of {one.site!r} gave {found} at layer {layer}; need a tensor of the "
            f"shape that it received, {tuple(old.shape)}"
        )
    if new.is_complex():
        raise EditError(
            f"the edit {one.label!r} of {one.site!r} gave complex numbers at layer {layer}; need real ones"
        )
    new = new.to(old.device, old.dtype)
    bad = new.isnan() if one.site == "scores" else ~new.isfinite()
    opened = torch.zeros_like(bad) if hidden is None else hidden & (new != old)
    if one.site == "scores":
        opened = (old <= torch.finfo(old.dtype).min / 2) & (new > OPEN)
    mixed = torch.zeros_like(bad.any())
    if alone is not None:
        row, beside = alone[0], alone[1].to(old.device, old.dtype).float()
        own = new[row].float()
        before = old[row].float()  # what an edit takes away may be far larger than what it leaves
        size = own.abs()
        if own.dim():
            size = own.square().mean(-1, keepdim=True).sqrt() + before.norm(dim=-1, keepdim=True)
        mixed = ((own - beside).abs() > 32 * torch.finfo(old.dtype).eps * (own.abs() + size)).any()
    found = [bad.any(), (new != old).any(), opened.any(), mixed]
    # together, since each would wait for the GPU
    is_bad, differs, is_opened, is_mixed = torch.stack(found).tolist()
    if is_bad and bool(old.isfinite().all()):
        raise EditError(
            f"the edit {one.label!r} of {one.site!r} gave numbers that are not finite at layer {layer}; "
            "need finite numbers: check for divisions by 0 and for factors that overflow the type"
        )
    if is_mixed:
        raise _mixing_error(one, "a sequence has other new values beside other sequences")
    if is_opened:
        what = "scores" if hidden is None else "weights"
        raise EditError(
            f"the edit {one.label!r} changes masked {what} at layer {layer}, so that tokens would see later tokens, or "
            f"tokens beyond their window; need positions and keys whose {what} are not masked, or a function that "
            f"leaves masked {what} unchanged"
        )
    return new, differs
