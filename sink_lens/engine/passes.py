"""The forward passes of cells: the clean run, and several cells at once, on the plain module or on the bridge."""

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
from ..models.lens import LensModel
from ..models.sites import SITES, bridge_hook
from .forward import Desk, Early, bridge_pass, not_a_number
from .hooks import Applied
from .needs import Needs
from .partial_pass import Keys, Known, Take, Visit, eager, know, plain_pass, skipped
from .plan import LEAST_ROWS, Path


@dataclass(slots=True, kw_only=True)
class Clean:
    """The unedited run of one batch of prompts."""

    part: TokenBatch
    prompts: slice
    """The indices of these sequences among all."""
    path: Path
    early: Early
    keys: Keys | None = None
    """Keys and values of every layer; None on the bridge."""
    known: Known | None = None
    """Unedited values inside the layer that was needed last."""
    stream: tuple[int, Float[Tensor, "batch position d_model"]] | None = None
    """The layer that was needed last, and the bridge's stream before it."""

    @property
    def outcome(self) -> Outcome:
        """What is read of it."""
        return self.early.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A model together with what is read from its passes."""

    lens: LensModel
    needs: Needs
    n_sequences: int
    """The sequences of all batches of prompts."""

    def clean(self, part: TokenBatch, *, prompts: slice, path: Path) -> Clean:
        """The unedited run, on the path of the cells that are compared with it."""
        pack = _Pack(passes=self, part=part, prompts=prompts, edits=[()], clean=None)
        keys = None
        if path == "bridge":
            outcome = pack.bridge(0)[0]
        else:
            keys = Keys(self.lens.n_layers, keep=True)
            with eager(self.lens):
                outcome = pack.plain(0, keys=keys)[0]
        return Clean(part=part, prompts=prompts, path=path, early=pack.desks[0].early_of(outcome), keys=keys)

    def slow(self, part: TokenBatch, edits: Sequence[Edit], *, prompts: slice) -> Outcome:
        """Run one cell alone on the bridge, over all layers: the reference for every faster way."""
        pack = _Pack(passes=self, part=part, prompts=prompts, edits=[tuple(edits)], clean=None)
        return pack.bridge(0)[0]

    def pack(
        self, edits: Sequence[Sequence[Edit]], *, clean: Clean, first: int, begin: int = 0
    ) -> tuple[list[Outcome], list[list[bool]]]:
        """Run cells that share a forward pass; return the outcome of each, and which of its edits changed anything.

        Args:
            edits: the edits of each cell.
            clean: the unedited run of the same prompts.
            first: the first layer that any of them touches.
            begin: the first position to compute; no cell touches one before it. 0 on the bridge.
        """
        pack = _Pack(passes=self, part=clean.part, prompts=clean.prompts, edits=edits, clean=clean, begin=begin)
        if clean.path == "bridge":
            outcomes = pack.bridge(first)
        else:
            keys = Keys(self.lens.n_layers, begin=begin, held=clean.keys) if begin else None
            with eager(self.lens):
                outcomes = pack.plain(first, keys=keys)
        return outcomes, [[number in one.changed for number in range(len(one.edits))] for one in pack.applied]

    def streams(
        self, part: TokenBatch, *, path: Path, copies: int, keys: Keys | None = None, begin: int = 0
    ) -> list[Tensor]:
        """The unedited stream of several copies after every layer that is needed, and the logits where they are.

        Where they begin at a later position, these are the positions from there on; ``keys`` has what comes before.
        Where they begin at the first, ``keys`` takes it.
        """
        found: list[Tensor] = []
        last = self.needs.end(self.lens.n_layers)
        visit = Visit(readers=[(slice(None), found.append)])
        places = {("resid_post", layer): visit for layer in range(min(last, self.lens.n_layers))}
        if path == "plain":
            run = partial(plain_pass, self.lens, first=0, last=last)
            with eager(self.lens):
                given = Keys(self.lens.n_layers, begin=begin, held=keys) if begin else keys if copies == 1 else None
                out = run(part.tokens[:, begin:].repeat(copies, 1), visits=places, keys=given)
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
            with eager(self.lens):
                known = know(self.lens, clean.part.tokens, layer=layer, begin=begin)
            clean.known = known
        return known

    def stream(self, clean: Clean, layer: int) -> Float[Tensor, "batch position d_model"]:
        """The unedited stream of the bridge before a layer, which need not be the plain one to the last bit."""
        if clean.stream is None or clean.stream[0] != layer:
            first, stream = (0, None) if clean.stream is None or clean.stream[0] > layer else clean.stream
            stream = bridge_pass(self.lens, clean.part, hooks=[], first=first, last=layer, stream=stream)
            clean.stream = (layer, stream)
        return clean.stream[1]


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
        begin: int = 0,
    ) -> None:
        self.passes, self.lens, self.needs = passes, passes.lens, passes.needs
        self.part, self.prompts, self.edits, self.clean, self.begin = part, prompts, edits, clean, begin
        self.applied = [
            Applied(lens=self.lens, edits=tuple(some), n_sequences=passes.n_sequences, begin=begin) for some in edits
        ]
        early = None if clean is None else clean.early
        self.desks = [
            Desk(lens=self.lens, keys=self.needs.keys, begin=begin, early=early, keep=clean is None) for _ in edits
        ]
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

    def plain(self, first: int, *, keys: Keys | None) -> list[Outcome]:
        """Run the cells on the plain module, starting inside the first layer if possible."""
        read = [layer for layer in self.needs.layers if layer >= first]
        known, skip = None, frozenset[str]()
        if self.clean is not None:
            before = self.passes.known(self.clean, first)
            here = [one for some in self.edits for one in some if _is_at(one, first, n_layers=self.lens.n_layers)]
            sites = {site for one in here for site in (one.site, one.reads) if site is not None}
            skip = skipped(frozenset(sites), known=before, family=self.lens.family)
            known = before.repeated(len(self.rows), begin=self.begin)
        last = self.needs.end(self.lens.n_layers)
        attention_only = not (self.needs.whole or self.needs.state or self.needs.sites)
        visits = self._visits(first)
        patterns: dict[int, list[tuple[slice, Take]]] = {}
        for rows, desk in zip(self.rows, self.desks, strict=True):
            for site, layer, take in desk.places(read=read, sites=self.needs.sites, valid=self.valid):
                if site == "pattern" and skip and layer == first:
                    desk.mass[layer] = [self._early_mass(layer)]
                elif site == "pattern":
                    patterns.setdefault(layer, []).append((rows, take))
                elif not (attention_only and layer == last - 1):
                    visits.setdefault((site, layer), Visit()).readers.append((rows, take))
        scored = self._scored()
        out = plain_pass(
            self.lens,
            self.part.tokens[:, self.begin :].repeat(len(self.rows), 1),
            first=first,
            last=last,
            visits=visits,
            stream=None if known is None else known.stream,
            keys=keys,
            known=known,
            skip=skip,
            patterns={layer: partial(_each, takes=some) for layer, some in patterns.items()},
            attention_only=attention_only,
            logits_at=None if scored is None else [position - self.begin for position in scored],
        )
        return self._outcomes(read, out=out, scored=scored)

    def _scored(self) -> tuple[int, ...] | None:
        """The positions to unembed, with more of them where the product would have too few rows; None is all."""
        asked = self.needs.scored(self.part) if self.needs.logits else None
        if asked is None:
            return None
        late = {position for position in asked if position >= self.begin}
        rows = len(self.rows) * self.part.n_sequences
        for position in reversed(range(self.begin, self.part.n_positions)):
            if len(late) * rows >= LEAST_ROWS:
                break
            late.add(position)
        return tuple(sorted(late))

    def _visits(self, first: int) -> dict[tuple[str, int], Visit]:
        """The edits of every cell, by site and layer."""
        visits: dict[tuple[str, int], Visit] = {}
        layers = range(first, self.lens.n_layers if self.needs.whole else self.needs.last)
        for rows, applied in zip(self.rows, self.applied, strict=True):
            for step in applied.steps(sequences=self.prompts, valid=self.part.valid, layers=layers):
                if SITES[step.site].per_layer or self.needs.whole:
                    visits.setdefault((step.site, step.layer), Visit()).edits.append((rows, step.act))
        return visits

    def _early_mass(self, layer: int) -> Tensor:
        """The attention of a layer that no edit of this pack changes."""
        assert self.clean is not None
        return self.clean.outcome.mass[self.clean.outcome.layers.index(layer)]

    def _outcomes(self, read: list[int], *, out: Tensor | None, scored: tuple[int, ...] | None) -> list[Outcome]:
        """Split the pass into one outcome per cell; layers before the first come from the unedited run."""
        found = []
        n = self.part.n_sequences
        for rows, desk, edits in zip(self.rows, self.desks, self.edits, strict=True):
            at = scored
            if out is not None:
                wanted = {"loss": self.needs.loss, "logits": self.needs.logits, "scored": scored}
                at = desk.finish(out[rows], part=self.part, edits=edits, **wanted)
            for layer in read:
                if layer not in desk.state:  # the pass ended with the attention of its last layer
                    desk.state[layer] = [torch.full((n, len(self.needs.keys), self.lens.d_model), torch.nan)]
            outcome = desk.outcome(tuple(read), valid=self.part.valid.cpu(), scored=at)
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


def _is_at(one: Edit, layer: int, *, n_layers: int) -> bool:
    return SITES[one.site].per_layer and layer in one.over(n_layers)
