"""The forward passes of a sweep: the unedited run, and several cells at once, on the plain module or on the bridge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.constructors import ORDER, Edit
from ..edits.outcome import Outcome, spliced
from ..engine.forward import Desk, bridge_pass, not_a_number
from ..engine.hooks import Applied
from ..models.lens import LensModel
from ..models.sites import SITES, bridge_hook
from ..models.weights import mlp_weights
from .needs import Needs
from .partial_pass import Known, Take, Visit, eager, fused_columns, know, plain_pass, skipped
from .plan import Mode, Path

_FUSED_FROM = 256
"""Length from which fast mode uses the fused kernel; for shorter sequences computing the pattern is cheaper."""
_LOW_RANK = 4
"""Fast mode adds a change of at most d_model / this many neurons as a product of low rank."""


@dataclass(slots=True, kw_only=True)
class Clean:
    """The unedited run of one batch of prompts."""

    part: TokenBatch
    prompts: slice
    """The indices of these sequences in the sweep."""
    path: Path
    outcome: Outcome
    known: Known | None = None
    """Unedited values inside the layer that was needed last."""
    stream: tuple[int, Float[Tensor, "batch position d_model"]] | None = None
    """The layer that was needed last, and the bridge's stream before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A model together with the metrics that are read from its passes."""

    lens: LensModel
    needs: Needs
    mode: Mode
    n_sequences: int
    """The sequences of the whole sweep."""

    def clean(self, part: TokenBatch, *, prompts: slice, path: Path) -> Clean:
        """The unedited run, on the path of the cells that are compared with it."""
        if path == "bridge":
            return Clean(part=part, prompts=prompts, path=path, outcome=self.slow(part, (), prompts=prompts))
        pack = _Pack(passes=self, part=part, prompts=prompts, edits=[()], clean=None)
        with eager(self.lens):
            return Clean(part=part, prompts=prompts, path=path, outcome=pack.plain(0)[0])

    def slow(self, part: TokenBatch, edits: Sequence[Edit], *, prompts: slice) -> Outcome:
        """Run one cell alone on the bridge, over all layers: the reference for every faster way."""
        pack = _Pack(passes=self, part=part, prompts=prompts, edits=[tuple(edits)], clean=None)
        return pack.bridge(0)[0]

    def pack(self, edits: Sequence[Sequence[Edit]], *, clean: Clean, first: int) -> tuple[list[Outcome], list[bool]]:
        """Run cells that share a forward pass; return the outcome of each and whether its edits changed anything.

        Args:
            edits: the edits of each cell.
            clean: the unedited run of the same prompts.
            first: the first layer that any of them touches.
        """
        pack = _Pack(passes=self, part=clean.part, prompts=clean.prompts, edits=edits, clean=clean)
        if clean.path == "bridge":
            outcomes = pack.bridge(first)
        else:
            with eager(self.lens):
                outcomes = pack.plain(first)
        return outcomes, [bool(one.changed) for one in pack.applied]

    def streams(self, part: TokenBatch, *, path: Path, copies: int) -> list[Tensor]:
        """The unedited stream of several copies after every layer that is needed, and the logits where they are."""
        found: list[Tensor] = []
        last = self.needs.end(self.lens.n_layers)
        visit = Visit(readers=[(slice(None), found.append)])
        places = {("resid_post", layer): visit for layer in range(min(last, self.lens.n_layers))}
        if path == "plain":
            with eager(self.lens):
                out = plain_pass(self.lens, part.tokens.repeat(copies, 1), first=0, last=last, visits=places)
        else:
            whole = replace(part, tokens=part.tokens.repeat(copies, 1), lengths=part.lengths.repeat(copies))
            out = bridge_pass(
                self.lens,
                whole,
                hooks=_hooks(places, self.lens),
                first=0,
                last=min(last, self.lens.n_layers),
                stream=None,
            )
        return found if out is None else [*found, out]

    def known(self, clean: Clean, layer: int) -> Known:
        """The values that the unedited run computes in a layer; kept until another layer is requested."""
        known = clean.known
        if known is None or known.layer != layer:
            begin = (known.layer, known.stream) if known is not None and known.layer < layer else None
            columns = fused_columns(self.lens, keys=self.needs.keys, take={}) if self.fused(clean.part) else None
            with eager(self.lens):
                known = know(self.lens, clean.part.tokens, layer=layer, begin=begin, columns=columns)
            clean.known = known
        return known

    def stream(self, clean: Clean, layer: int) -> Float[Tensor, "batch position d_model"]:
        """The unedited stream of the bridge before a layer, which need not be the plain one to the last bit."""
        if clean.stream is None or clean.stream[0] != layer:
            first, stream = (0, None) if clean.stream is None or clean.stream[0] > layer else clean.stream
            stream = bridge_pass(self.lens, clean.part, hooks=[], first=first, last=layer, stream=stream)
            clean.stream = (layer, stream)
        return clean.stream[1]

    def fused(self, part: TokenBatch) -> bool:
        """Whether attention is read from the fused kernel."""
        return self.mode == "fast" and part.n_positions >= _FUSED_FROM


class _Pack:
    """A copy of the prompts for each of some cells, one under the other in a batch."""

    def __init__(
        self,
        *,
        passes: Passes,
        part: TokenBatch,
        prompts: slice,
        edits: Sequence[Sequence[Edit]],
        clean: Clean | None,
    ) -> None:
        self.passes, self.lens, self.needs = passes, passes.lens, passes.needs
        self.part, self.prompts, self.edits, self.clean = part, prompts, edits, clean
        self.applied = [Applied(lens=self.lens, edits=tuple(some), n_sequences=passes.n_sequences) for some in edits]
        self.desks = [Desk(lens=self.lens, keys=self.needs.keys) for _ in edits]
        n = part.n_sequences
        self.rows = [slice(copy * n, (copy + 1) * n) for copy in range(len(edits))]
        self.valid = part.valid.to(self.lens.device)

    def bridge(self, first: int) -> list[Outcome]:
        """Run the cells on the bridge, where every site can be edited and read."""
        read = [layer for layer in self.needs.layers if layer >= first]
        visits = self._visits(first)
        for rows, desk in zip(self.rows, self.desks, strict=True):
            for site, layer, take in desk.places(read=read, sites=self.needs.sites, valid=self.valid):
                visits.setdefault((site, layer), Visit()).readers.append((rows, take))
        hooks = _hooks(visits, self.lens)
        last = self.lens.n_layers if self.needs.whole else self.needs.last
        copies = len(self.rows)
        whole = replace(self.part, tokens=self.part.tokens.repeat(copies, 1), lengths=self.part.lengths.repeat(copies))
        stream = None
        if first > 0:
            assert self.clean is not None
            stream = self.passes.stream(self.clean, first).repeat(copies, 1, 1)
        out = bridge_pass(self.lens, whole, hooks=hooks, first=first, last=last, stream=stream)
        return self._outcomes(read, out=out, scored=None)

    def plain(self, first: int) -> list[Outcome]:
        """Run the cells on the plain module, starting inside the first layer if possible."""
        read = [layer for layer in self.needs.layers if layer >= first]
        scored = self.needs.scored(self.part) if self.passes.mode == "fast" and self.needs.logits else None
        run = partial(self._pass, scored=scored)
        if self.clean is None:
            return self._outcomes(read, out=run(first, read=read), scored=scored)
        known = self.passes.known(self.clean, first)
        streams = self._low_rank(known)
        if streams is None:
            here = [one for some in self.edits for one in some if _is_at(one, first, n_layers=self.lens.n_layers)]
            sites = {site for one in here for site in (one.site, one.reads) if site is not None}
            many = known.repeated(len(self.rows))
            skip = skipped(frozenset(sites), known=known, family=self.lens.family)
            return self._outcomes(read, out=run(first, read=read, known=many, skip=skip), scored=scored)
        if first in self.needs.layers:
            for desk, stream in zip(self.desks, streams, strict=True):
                desk.mass[first] = [self._early_mass(first)]
                desk.take_stream(stream, layer=first)
        out = None
        if self.needs.end(self.lens.n_layers) > first + 1:
            out = run(first + 1, read=[layer for layer in read if layer > first], stream=torch.cat(streams))
        return self._outcomes(read, out=out, scored=scored)

    def _pass(
        self,
        first: int,
        *,
        read: list[int],
        scored: tuple[int, ...] | None,
        stream: Tensor | None = None,
        known: Known | None = None,
        skip: frozenset[str] = frozenset(),
    ) -> Tensor | None:
        """One forward, from what is known of the first layer, from a stream, or from the tokens."""
        last = self.needs.end(self.lens.n_layers)
        attention_only = not (self.needs.whole or self.needs.state or self.needs.sites)
        fused = self.passes.fused(self.part)
        visits = self._visits(first) if stream is None else {}
        patterns: dict[int, list[tuple[slice, Take]]] = {}
        for rows, desk in zip(self.rows, self.desks, strict=True):
            for site, layer, take in desk.places(read=read, sites=self.needs.sites, valid=self.valid):
                if site == "pattern" and skip and layer == first:
                    desk.mass[layer] = [self._early_mass(layer)]
                elif site == "pattern":
                    columns = partial(_take_columns, desk=desk, layer=layer, valid=self.valid)
                    patterns.setdefault(layer, []).append((rows, columns if fused else take))
                elif not (attention_only and layer == last - 1):
                    visits.setdefault((site, layer), Visit()).readers.append((rows, take))
        takes = {layer: partial(_each, takes=some) for layer, some in patterns.items()}
        return plain_pass(
            self.lens,
            self.part.tokens.repeat(len(self.rows), 1),
            first=first,
            last=last,
            visits=visits,
            stream=stream if known is None else known.stream,
            known=known,
            skip=skip,
            patterns={} if fused else takes,
            columns=fused_columns(self.lens, keys=self.needs.keys, take=takes) if fused else None,
            attention_only=attention_only,
            logits_at=scored,
        )

    def _visits(self, first: int) -> dict[tuple[str, int], Visit]:
        """The edits of every cell, by site and layer."""
        visits: dict[tuple[str, int], Visit] = {}
        layers = range(first, self.lens.n_layers if self.needs.whole else self.needs.last)
        for rows, applied in zip(self.rows, self.applied, strict=True):
            for step in applied.steps(sequences=self.prompts, valid=self.part.valid, layers=layers):
                if SITES[step.site].per_layer or self.needs.whole:
                    visits.setdefault((step.site, step.layer), Visit()).edits.append((rows, step.act))
        return visits

    def _low_rank(self, known: Known) -> list[Float[Tensor, "batch position d_model"]] | None:
        """The stream after the first layer if the cells edit only a few of its neurons; None in any other case."""
        lens, layer = self.lens, known.layer
        if self.passes.mode == "exact" or known.neurons is None or lens.family.mlp_post_norm or self.needs.sites:
            return None
        for some in self.edits:
            for one in some:
                few = one.units is not None and len(one.units) <= lens.d_model // _LOW_RANK
                if one.site != "neurons" or one.reads is not None or one.over(lens.n_layers) != (layer,) or not few:
                    return None
        weights = mlp_weights(lens, layer=layer)
        assert weights is not None  # it has neurons
        streams = []
        for some, applied in zip(self.edits, self.applied, strict=True):
            new = known.neurons
            for step in applied.steps(sequences=self.prompts, valid=self.part.valid, layers=range(layer, layer + 1)):
                edited = step.act(new)
                new = new if edited is None else edited
            units = sorted({unit for one in some for unit in one.units or ()})
            change = new[..., units] - known.neurons[..., units]
            streams.append(known.after + change @ weights.w_down[:, units].T)
        return streams

    def _early_mass(self, layer: int) -> Tensor:
        """The attention of a layer that no edit of this pack changes."""
        assert self.clean is not None
        return self.clean.outcome.mass[self.clean.outcome.layers.index(layer)]

    def _outcomes(self, read: list[int], *, out: Tensor | None, scored: tuple[int, ...] | None) -> list[Outcome]:
        """Split the pass into one outcome per cell; layers before the first come from the unedited run."""
        found = []
        n = self.part.n_sequences
        for rows, desk, edits in zip(self.rows, self.desks, self.edits, strict=True):
            if out is not None:
                wanted = {"loss": self.needs.loss, "logits": self.needs.logits, "scored": scored}
                desk.finish(out[rows], part=self.part, edits=edits, **wanted)
            for layer in read:
                if layer not in desk.state:  # the pass ended with the attention of its last layer
                    desk.state[layer] = [torch.full((n, len(self.needs.keys), self.lens.d_model), torch.nan)]
            outcome = desk.outcome(tuple(read), valid=self.part.valid.cpu(), scored=scored)
            if self.clean is not None:
                early = self.clean.outcome
                outcome = spliced(outcome, rows=slice(0, n), early=early)
                if bool((outcome.mass.isnan() & ~early.mass.isnan()).any()):
                    raise not_a_number(edits)
            found.append(replace(outcome, sequences=self.prompts))
        return found


def _hooks(visits: Mapping[tuple[str, int], Visit], lens: LensModel) -> list[Any]:
    """Visits as hooks of the bridge, in the order of the sites, since two of them may share a hook."""
    return [
        (bridge_hook(SITES[site], family=lens.family, layer=layer), partial(_visited, visit=visit))
        for (site, layer), visit in sorted(visits.items(), key=lambda item: ORDER[item[0][0]])
    ]


def _visited(tensor: Tensor, hook: object, *, visit: Visit) -> Tensor | None:
    return visit.edited(tensor, view=lambda raw: raw)


def _each(tensor: Tensor, *, takes: Sequence[tuple[slice, Take]]) -> None:
    for rows, take in takes:
        take(tensor[rows])


def _take_columns(columns: Tensor, *, desk: Desk, layer: int, valid: Tensor) -> None:
    desk.take_columns(list(columns.unbind(-1)), layer=layer, valid=valid)


def _is_at(one: Edit, layer: int, *, n_layers: int) -> bool:
    return SITES[one.site].per_layer and layer in one.over(n_layers)
