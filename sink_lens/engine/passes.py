"""The forward passes of cells: the baseline run, several cells at once, and one cell alone on the bridge."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.hooks import Applied
from ..edits.outcome import Outcome, fill_in_early_layers
from ..models.lens import LensModel
from ..models.sites import SITES, bridge_hook_name
from .forward import Early, RunCollector, copy_to_cpu, not_finite_error, run_checked_edits
from .layout import Layout
from .mixers import Kept
from .needs import Needs
from .partial_pass import (
    Known,
    Pass,
    Tap,
    Visit,
    partial_pass,
    run_unedited_layer,
    skippable_computations,
)


@dataclass(slots=True, kw_only=True)
class BaselineBatch:
    """The run that cells continue, on one batch of prompts: the baseline, or one under edits of its own."""

    part: TokenBatch
    prompts: slice
    """The indices of these sequences among all."""
    early: Early
    keys: Kept
    """Layer -> its keys and values; and the inputs of mixers."""
    edits: Sequence[Edit] = ()
    """The edits of the run."""
    streams: Mapping[int, Tensor] = field(default_factory=dict)
    """Layer -> the stream before it on the CPU, of the layers whose stream was kept."""
    known: Known | None = None
    """Activations inside the layer at which the last cells began."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the run on this batch."""
        return self.early.outcome

    def narrow_to(self, needs: Needs) -> "BaselineBatch":
        """Return a copy of the batch whose outcome has only the layers, sites and loss in ``needs``."""
        found, rows = self.outcome, [self.outcome.layers.index(layer) for layer in needs.layers]
        places = [
            (site, at)
            for site in needs.sites
            for at in (needs.layers if SITES[site].per_layer else (0,))
        ]
        sites = {
            place: found.tensors[place] for place in places if place in found.tensors
        }  # some layers lack it
        outcome = replace(
            found,
            mass=found.mass[rows],
            state=found.state[rows],
            layers=needs.layers,
            tensors=sites,
            loss=found.loss if needs.loss else None,
        )
        return replace(self, early=replace(self.early, outcome=outcome))


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A model together with what is read from its passes."""

    lens: LensModel
    needs: Needs
    n_sequences: int
    """The sequences of all batches of prompts."""

    def run_baseline(
        self,
        part: TokenBatch,
        *,
        prompts: slice,
        edits: Sequence[Edit] = (),
        streams: Iterable[int] = (),
    ) -> BaselineBatch:
        """Run the batch ``part``, and keep the keys, values and streams from which cells continue.

        Streams are kept before the layers ``streams`` and after those whose ``resid_post`` is read.
        """
        keys: Kept = {}
        before: dict[int, Tensor] = {}
        pack = _Pack(
            passes=self,
            part=part,
            prompts=prompts,
            edits=[edits],
            begins=[0],
            firsts=[0],
            baseline=None,
        )

        def keep_stream(x: Tensor, *, layer: int) -> None:
            before[layer] = pack.layout.view_cell(x.detach().cpu(), 0)

        taps = [  # before any edit of resid_pre, which cells make again
            (pack.hook_name("resid_post", layer - 1), partial(keep_stream, layer=layer))
            for layer in streams
            if layer
        ]
        (outcome,) = pack.run(keep=keys, taps=taps)
        before |= {
            layer + 1: x for (site, layer), x in outcome.tensors.items() if site == "resid_post"
        }
        (made,) = pack.collectors
        early = Early(outcome=outcome, columns=made.columns, losses=made.token_losses)
        return BaselineBatch(
            part=part, prompts=prompts, early=early, keys=keys, edits=edits, streams=before
        )

    def run_on_bridge(
        self, part: TokenBatch, edits: Sequence[Sequence[Edit]], *, prompts: slice
    ) -> tuple[list[Outcome], list[list[bool]]]:
        """Run the batch ``part`` on the bridge under each list of edits in one forward; returns as ``run_pack``."""
        runs = [
            (part, Applied(edits=tuple(some), lens=self.lens, n_sequences=self.n_sequences))
            for some in edits
        ]
        found = run_checked_edits(
            self.lens, runs, self.needs, prompts=prompts, batch_size=part.n_sequences
        )
        changed = [[number in one.changed for number in range(len(one.edits))] for _, one in runs]
        return [replace(outcome, sequences=prompts) for outcome in found], changed

    def run_pack(
        self,
        edits: Sequence[Sequence[Edit]],
        *,
        baseline: BaselineBatch,
        firsts: Sequence[int],
        begins: Sequence[int],
    ) -> tuple[list[Outcome], list[list[bool]]]:
        """Run cells in one forward pass; return the outcome of each cell, and which of its edits changed anything.

        ``firsts`` are the first layers that the cells' edits touch, ascending; ``begins`` their first positions.
        """
        pack = _Pack(
            passes=self,
            edits=edits,
            begins=begins,
            firsts=firsts,
            part=baseline.part,
            prompts=baseline.prompts,
            baseline=baseline,
        )
        outcomes = pack.run()
        return outcomes, [
            [number in one.changed for number in range(len(one.edits))] for one in pack.applied
        ]

    def compute_known_layer(self, baseline: BaselineBatch, layer: int) -> Known:
        """Compute the activations of ``baseline`` in a layer without the edits there, or return those that it keeps."""
        known = baseline.known
        if known is None or known.layer != layer:
            begin = (
                (known.layer, known.stream) if known is not None and known.layer < layer else None
            )
            streams = baseline.streams
            if baseline.edits and layer and layer not in streams:
                at = {"prompts": baseline.prompts, "edits": baseline.edits}
                streams = self.run_baseline(baseline.part, streams=[layer], **at).streams
            if layer in streams:
                begin = layer, streams[layer].to(self.lens.device)
            known = run_unedited_layer(
                self.lens, baseline.part.tokens, layer=layer, begin=begin, held=baseline.keys
            )
            baseline.known = known
        return known


class _Pack:
    """Some cells that are run in one forward pass, with the batch of the baseline run that they continue."""

    def __init__(
        self,
        *,
        passes: Passes,
        part: TokenBatch,
        prompts: slice,
        edits: Sequence[Sequence[Edit]],
        begins: Sequence[int],
        firsts: Sequence[int],
        baseline: BaselineBatch | None,
    ) -> None:
        self.passes, self.lens, self.needs = passes, passes.lens, passes.needs
        self.part = part
        self.prompts = prompts
        self.edits = edits
        self.baseline = baseline
        self.firsts = firsts
        n_sequences, n_positions = part.tokens.shape
        self._layout = partial(Layout, n_sequences=n_sequences, n_positions=n_positions)
        self.layout = self._layout(begins=tuple(begins))
        self.read = [[layer for layer in self.needs.layers if layer >= first] for first in firsts]
        self.applied = [
            Applied(edits=tuple(some), begin=begin, lens=self.lens, n_sequences=passes.n_sequences)
            for some, begin in zip(edits, begins, strict=True)
        ]
        self.collectors = [
            RunCollector(
                begin=begin,
                keep=baseline is None,
                lens=self.lens,
                keys=self.needs.keys,
                early=baseline and baseline.early,
            )
            for begin in begins
        ]
        self.valid = part.valid.to(self.lens.device)

    def run(self, *, keep: Kept | None = None, taps: Sequence[Tap] = ()) -> list[Outcome]:
        """Run all cells, each from its first layer on; return their outcomes."""
        begins, needs, baseline = self.layout.begins, self.needs, self.baseline
        last = self.lens.n_layers + 1 if needs.whole else needs.n_layers_needed
        known, skip = self._known_first_layer()
        visits = self._visits(last, skip=skip)
        scored, kept = self._scored_positions_and_rows()
        starts, out = sorted(set(self.firsts)), None
        streams = [] if known is None else [known.stream]
        for start, end in zip(starts, [*starts[1:], last], strict=True):
            n, ends = bisect_right(self.firsts, start), end == last
            if start > 0 and not (known is not None and start == starts[0]):
                assert baseline is not None
                joining = self._layout(begins=begins[bisect_left(self.firsts, start) : n])
                streams.append(joining.values_by_row(baseline.streams[start].to(self.lens.device)))
            stream = torch.cat(streams, dim=1) if streams else None
            streams = []  # of these cells where the next join
            asked = Pass(
                layout=self._layout(begins=begins[:n]),
                first=start,
                last=end,
                visits={
                    (site, layer): visit
                    for (site, layer), visit in visits.items()
                    if (start <= layer < end if SITES[site].per_layer else ends)
                },
                stream=stream,
                held={} if baseline is None else baseline.keys,
                keep=keep,
                known=known,
                skip=skip if start == starts[0] else frozenset(),
                attention_only=needs.attention_only and ends,
                logits_at=kept,
                unembed=needs.makes_logits,
                taps=taps if ends else [(self.hook_name("resid_post", end - 1), streams.append)],
            )
            out = partial_pass(self.lens, self.part.tokens, asked)
        return self._collect_outcomes(out=out, scored=scored)

    def hook_name(self, site: str, layer: int) -> str:
        return bridge_hook_name(SITES[site], family=self.lens.family, layer=layer)

    def _known_first_layer(self) -> tuple[Known | None, frozenset[str]]:
        """Return the baseline's activations in the first layer for its cells, and what they need not compute there."""
        if self.baseline is None:
            return None, frozenset()
        first, n, skip = self.firsts[0], bisect_right(self.firsts, self.firsts[0]), frozenset[str]()
        every = [*self.edits[:n], self.baseline.edits]  # the run's, also those before these cells
        inner = [one for some in every for one in some if SITES[one.site].per_layer]
        here = [one for one in inner if first in one.edited_layers(self.lens.n_layers)]
        if first not in self.lens.mixer_layers:
            sites = frozenset(
                site for one in here for site in (one.site, one.reads) if site is not None
            )
            skip = skippable_computations(sites, family=self.lens.family)
        if not skip and (first == 0 or first in self.baseline.streams):
            return None, skip
        layout = self._layout(begins=self.layout.begins[:n])
        return self.passes.compute_known_layer(self.baseline, first).repeat_in_rows(layout), skip

    def _visits(self, last: int, *, skip: frozenset[str]) -> dict[tuple[str, int], Visit]:
        """Return (site, layer) -> edits made and readers called there, each with its cell's number."""
        visits: dict[tuple[str, int], Visit] = {}
        for cell, (applied, collector, first) in enumerate(
            zip(self.applied, self.collectors, self.firsts, strict=True)
        ):
            layers = range(first, min(last, self.lens.n_layers))
            for step in applied.steps(sequences=self.prompts, valid=self.part.valid, layers=layers):
                if SITES[step.site].per_layer or self.needs.whole:
                    visits.setdefault((step.site, step.layer), Visit()).edits.append(
                        (cell, step.act)
                    )
            for site, layer, take in collector.make_site_callbacks(
                read=self.read[cell], sites=self.needs.sites, valid=self.valid
            ):
                if (
                    SITES[site].observed
                    and skip
                    and layer == self.firsts[0]
                    and self.baseline is not None
                ):
                    early = self.baseline.outcome  # whose attention no edit of these cells changes
                    collector.mass[layer] = [early.mass[early.layers.index(layer)]]
                elif SITES[site].observed or not (self.needs.attention_only and layer == last - 1):
                    visits.setdefault((site, layer), Visit()).readers.append((cell, take))
        return visits

    def _scored_positions_and_rows(self) -> tuple[list[tuple[int, ...]] | None, Tensor | None]:
        """Return the positions of each cell whose logits are read, and their rows in the pass; (None, None) is all."""
        asked = self.needs.scored_positions(self.part) if self.needs.logits else None
        if asked is None:
            return None, None
        n, length = self.part.n_sequences, self.part.n_positions
        scored = [
            tuple(position for position in asked if position >= begin)
            for begin in self.layout.begins
        ]
        rows = []
        for some, begin, own in zip(
            scored, self.layout.begins, self.layout.rows_by_cell, strict=True
        ):
            starts = own.start + torch.arange(n) * (length - begin)
            rows.append((starts[:, None] + torch.tensor(some, dtype=torch.int64) - begin).flatten())
        return scored, torch.cat(rows)

    def _collect_outcomes(
        self, *, out: Tensor | None, scored: list[tuple[int, ...]] | None
    ) -> list[Outcome]:
        """Make each cell's outcome from the pass's result ``out``; layers before its first are the baseline's."""
        n, done, valid = self.part.n_sequences, 0, self.part.valid.cpu()
        ends: list[tuple[int, ...] | None] = (
            [None] * len(self.collectors) if scored is None else [*scored]
        )
        for cell, collector in enumerate(self.collectors):
            if out is not None:
                at = ends[cell]
                if at is None:
                    own = self.layout.view_cell(out, cell)
                else:
                    own = out[0, done : done + n * len(at)].reshape(n, len(at), out.shape[-1])
                    done += n * len(at)
                ends[cell] = collector.store_results(
                    own,
                    part=self.part,
                    unembedded=self.needs.makes_logits,
                    loss=self.needs.loss,
                    logits=self.needs.logits,
                    scored=at,
                )
            for layer in self.read[
                cell
            ]:  # the pass may have ended with the attention of its last layer
                nothing = torch.full(
                    (n, len(self.needs.keys), self.lens.d_model), torch.nan, dtype=torch.float32
                )
                collector.state.setdefault(layer, [nothing])
        copy_to_cpu(self.collectors)
        found = []
        for collector, read, edits, at in zip(
            self.collectors, self.read, self.edits, ends, strict=True
        ):
            outcome = collector.outcome(tuple(read), valid=valid, edits=edits, scored=at)
            if self.baseline is not None:
                early = self.baseline.outcome
                outcome = fill_in_early_layers(outcome, rows=slice(0, n), early=early)
                if bool((outcome.mass.isnan() & ~early.mass.isnan()).any()):
                    raise not_finite_error(edits)
            found.append(replace(outcome, sequences=self.prompts))
        return found
