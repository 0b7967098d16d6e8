"""A pass of the bridge's blocks under edits, over some layers and positions: what many cells repeat thousands of times.

1. Lay the rows of several cells side by side, each from its own first position on (``layout``).
2. Begin at the first layer, with the stream that was kept there, or, if there is none, with the tokens.
3. Of this layer, take what no edit of a cell changes (z, attention, neurons) as it is without edits (``Known``).
4. At each site's hook point, hand every cell its own ``[batch, position, ...]`` (of scores and pattern its queries):
   its edits, then its readers.
5. Attend cell by cell: Hugging Face's module runs (``models.delegation``), with an eager attention of our own in it
   (``layout``). A mixer (``mixers``) runs over whole sequences.
6. End behind the last attention where nothing else is read, else behind the last layer, or unembed the rows that are
   asked for.

The numbers are those of the bridge within rounding, which ``trust`` checks before the other cells run.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..edits.constructors import ORDER
from ..edits.hooks import Act
from ..models.delegation import (
    Masks,
    attention_component,
    delegate_attention,
    replace_forward,
    start_passes_at,
    stop_pass_after,
)
from ..models.families import layer_of_keys
from ..models.family import Family
from ..models.lens import LensModel
from ..models.points import register_hooks
from ..models.running import forbid_nested_passes
from ..models.sites import SITES, bridge_hook_name
from .layout import Attending, Layout, attend_by_cell
from .mixers import Held, Kept, mix_whole_sequences

Take = Callable[[Tensor], None]
Tap = tuple[str, Take]
"""A hook point, and what takes its tensor as it is, the rows of all cells."""


@dataclass(slots=True, kw_only=True)
class Visit:
    """Work at one site of one layer: apply each cell's edits in order, then call its readers."""

    edits: list[tuple[int, Act]] = field(default_factory=list)
    readers: list[tuple[int, Take]] = field(default_factory=list)

    def apply_edits(self, raw: Tensor, *, view: Callable[[Tensor, int], Tensor]) -> Tensor | None:
        """Return the edited tensor after the readers saw it; None if unchanged. ``view`` picks a cell's rows."""
        found = None
        for cell, act in self.edits:
            if (new := act(view(raw if found is None else found, cell))) is not None:
                found = raw.clone() if found is None else found
                view(found, cell).copy_(new)
        for cell, take in self.readers:
            take(view(raw if found is None else found, cell))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Unedited activations of a pass's first layer, computed once for all cells that begin there."""

    layer: int
    stream: Float[Tensor, "batch position d_model"]
    """Before the layer."""
    attention: Float[Tensor, "batch position d_model"] | None = None
    """Output of the attention module, before any norm that follows it; None in a layer that has a mixer."""
    z: Float[Tensor, "batch position value"] | None = None
    """Input of W_O, the heads side by side; None likewise."""
    neurons: Float[Tensor, "batch position d_mlp"] | None = None
    """Input of the down-projection; None in a mixture of experts and where a layer has no MLP module."""

    def repeat_in_rows(self, layout: Layout) -> "Known":
        held = {name: getattr(self, name) for name in ("stream", "attention", "z", "neurons")}
        rows = {name: layout.values_by_row(one) for name, one in held.items() if one is not None}
        return replace(self, **rows)


_BEFORE_Z = frozenset(
    {"resid_pre", "attn_in", "q_latent", "kv_latent", "q", "k", "v", "scores", "pattern"}
)
_Z = frozenset({"z_raw", "z"})
_BEFORE_NEURONS = frozenset({"attn_out", "mlp_in", "gate", "up"})


def skippable_computations(sites: frozenset[str], *, family: Family) -> frozenset[str]:
    """Return what need not be computed in a layer if only ``sites`` are edited."""
    if family.adds_inside:  # what attention and MLP give depends on the stream
        return frozenset()
    if sites & _BEFORE_Z or ("z_raw" in sites and family.head_out is not None):
        return frozenset()
    if sites & _Z:
        return frozenset({"pattern"})
    if sites & _BEFORE_NEURONS or family.mlp is None or family.down is None:
        return frozenset({"pattern", "attention"})
    return frozenset({"pattern", "attention", "neurons"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The inputs of a pass over some layers, and the parts that it computes."""

    layout: Layout
    first: int
    """The layer to begin at; the number of layers is the last norm."""
    last: int
    """The layer to end before; the number of layers + 1 goes to the logits."""
    visits: Mapping[tuple[str, int], Visit] = field(default_factory=dict)
    stream: Float[Tensor, "1 row d_model"] | None = None
    """Before the first layer; None computes it from the tokens, and then ``first`` is 0."""
    held: Held = field(default_factory=dict)
    """Those of the baseline run; needed where a cell begins later than the first position."""
    keep: Kept | None = None
    """Takes those of every layer."""
    queries: dict[int, Tensor] | None = None
    """The baseline run's, where one position is computed alone; with ``keep``, takes those of every layer."""
    known: Known | None = None
    """The layer ``first`` at the rows; needed for ``skip``."""
    skip: frozenset[str] = frozenset()
    """What ``skippable_computations`` gives."""
    columns: dict[int, Tensor] | None = None
    """Takes each layer's attention to a position that is computed alone."""
    own_masks: Masks = field(default_factory=dict)
    """Those of an attention function of the user's own, over whole sequences."""
    attention_only: bool = False
    """Run no more of the last layer than its attention."""
    logits_at: Int[Tensor, " sample"] | None = None
    """Rows to unembed; None is all."""
    unembed: bool = True
    """Go through the unembedding; else the states that it reads are the result."""
    taps: Sequence[Tap] = ()
    gradients: bool = False


def partial_pass(
    lens: LensModel, tokens: Int[Tensor, "batch position"], asked: Pass
) -> Tensor | None:
    """Run layers ``asked.first`` to ``asked.last`` - 1 of the bridge, or to the logits if it is ``n_layers`` + 1.

    Returns the logits, or the states that the unembedding reads if ``asked.unembed`` is False; None if the pass ends
    before them. It runs within ``running.prepare_passes``.
    """
    layout, first, last = asked.layout, asked.first, asked.last
    hooks: list[tuple[str, Any]] = []
    in_order = sorted(asked.visits.items(), key=lambda item: ORDER[item[0][0]])
    for (site, layer), visit in in_order:
        view = layout.view_cell_queries if SITES[site].observed else layout.view_cell
        name = bridge_hook_name(SITES[site], family=lens.family, layer=layer)
        act = partial(visit.apply_edits, view=view)
        hooks.append((name, lambda x, hook, act=act: act(x)))
    hooks += [(name, lambda x, hook, take=take: take(x)) for name, take in asked.taps]
    with contextlib.ExitStack() as stack:
        stack.enter_context(forbid_nested_passes(lens))
        model = stack.enter_context(delegate_attention(lens, layers=range(first, last)))
        if asked.stream is not None:
            stack.enter_context(start_passes_at(lens, first, asked.stream))
        if asked.known is not None and asked.skip:
            _skip_computations(lens, asked.known, skip=asked.skip, stack=stack)
        for layer in lens.mixer_layers:
            if first <= layer < last:
                mixing = mix_whole_sequences(
                    lens, layer, layout=layout, held=asked.held, keep=asked.keep
                )
                stack.enter_context(mixing)
        stack.enter_context(register_hooks(lens, hooks))
        attending = Attending(
            lens=lens,
            layout=layout,
            held=asked.held,
            keep=asked.keep,
            queries=asked.queries,
            columns=asked.columns,
            own_masks=asked.own_masks,
        )
        stack.enter_context(attend_by_cell(attending))
        stack.enter_context(torch.set_grad_enabled(asked.gradients))
        if last <= lens.n_layers:
            module = lens.bridge.blocks[last - 1]
            if asked.attention_only and last - 1 in lens.attention_layers:
                module = attention_component(lens, last - 1)
            stack.enter_context(stop_pass_after(module))
        inputs: dict[str, Any] = {
            "input_ids": layout.values_by_row(tokens).to(lens.device),
            "position_ids": layout.row_places(lens.device)[1][None],
        }
        if lens.family.shared_keys:
            inputs["shared_kv_states"] = _baseline_keys_and_values(lens, asked)
        if last <= lens.n_layers or not asked.unembed:
            states: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
            return states
        if asked.logits_at is not None:
            inputs["logits_to_keep"] = asked.logits_at.to(lens.device)
        out: Tensor = model(**inputs, use_cache=False).logits
        return out
    return None


def _baseline_keys_and_values(lens: LensModel, asked: Pass) -> dict[str, tuple[Tensor, ...]]:
    """Return layer type -> the baseline's keys and values, for layers that use those of an earlier layer."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for layer in range(asked.first, min(asked.last, lens.n_layers)):
        source = layer_of_keys(lens.config, layer=layer)
        if source < asked.first or (source == asked.first and asked.skip):
            rows = (
                asked.layout.values_by_row(one.transpose(1, 2)).transpose(1, 2)
                for one in asked.held[source]
            )
            found[lens.config.layer_types[layer]] = tuple(rows)
    return found


def run_unedited_layer(
    lens: LensModel,
    tokens: Tensor,
    *,
    layer: int,
    begin: tuple[int, Tensor] | None,
    held: Held,
) -> Known:
    """Compute a layer's activations without edits, from ``begin`` (a layer and its stream) or the tokens."""
    family = lens.family
    found: dict[str, Tensor] = {}

    def tap(name: str, site: str) -> Tap:
        point = bridge_hook_name(SITES[site], family=family, layer=layer)
        return point, partial(found.__setitem__, name)

    taps = [tap("stream", "resid_pre")]
    if layer not in lens.mixer_layers:
        keep = partial(found.__setitem__, "attention")
        taps += [(f"blocks.{layer}.attn.hook_out", keep), tap("z", "z")]
    if family.mlp is not None and family.down is not None:
        taps.append(tap("neurons", "neurons"))
    first, stream = (0, None) if begin is None else begin
    layout = Layout(n_sequences=tokens.shape[0], n_positions=tokens.shape[1], begins=(0,))
    given = None if stream is None else layout.values_by_row(stream)
    asked = Pass(layout=layout, first=first, last=layer + 1, stream=given, taps=taps, held=held)
    partial_pass(lens, tokens, asked)
    whole = {name: tensor.reshape(*tokens.shape, -1) for name, tensor in found.items()}
    return Known(layer=layer, neurons=whole.pop("neurons", None), **whole)


def _skip_computations(
    lens: LensModel, known: Known, *, skip: frozenset[str], stack: contextlib.ExitStack
) -> None:
    """Until ``stack`` closes, the modules ``skip`` return what is ``known``."""
    block = lens.bridge.blocks[known.layer]
    attention = block._modules.get("attn")
    if "attention" in skip:
        stack.enter_context(
            replace_forward(attention, lambda *a, **k: (attention.hook_out(known.attention), None))
        )
    elif "pattern" in skip:
        output = attention.original_component.get_submodule(lens.family.o)
        stack.enter_context(
            replace_forward(attention, lambda *a, **k: (attention.hook_out(output(known.z)), None))
        )
    if "neurons" in skip:
        mlp = block.get_submodule(lens.family.bridge_mlp)
        stack.enter_context(
            replace_forward(mlp, lambda *a, **k: mlp.hook_out(mlp.out(known.neurons)))
        )
