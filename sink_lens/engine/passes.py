"""The forward passes of cells: the baseline run, several cells at once, and one cell alone on the bridge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.hooks import Applied
from ..edits.outcome import Outcome, fill_in_early_layers
from ..models.lens import LensModel
from ..models.sites import SITES
from .forward import Early, RunCollector, copy_to_cpu, not_finite_error, run_checked_edits
from .layout import Layout
from .mixers import Kept
from .needs import Needs
from .partial_pass import Known, Pass, Visit, partial_pass, run_unedited_layer, skippable_computations


@dataclass(slots=True, kw_only=True)
class BaselineBatch:
    """The run that cells continue, on one batch of prompts: the baseline, or one under edits of its own."""

    part: TokenBatch
    prompts: slice
    """The indices of these sequences among all."""
    early: Early
    keys: Kept
    """Layer -> its keys and values; and the inputs of mixers."""
    streams: Mapping[int, Tensor] = field(default_factory=dict)
    """Layer -> the stream before it, of the layers whose stream was kept."""
    known: Known | None = None
    """Activations inside the layer at which the last cells began."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the run on this batch."""
        return self.early.outcome

    def narrow_to(self, needs: Needs) -> "BaselineBatch":
        """Return a copy of the batch whose outcome has only the layers, sites and loss in ``needs``."""
        found, rows = self.outcome, [self.outcome.layers.index(layer) for layer in needs.layers]
        places = [(site, at) for site in needs.sites for at in (needs.layers if SITES[site].per_layer else (0,))]
        sites = {place: found.tensors[place] for place in places if place in found.tensors}  # some layers lack it
        kept = {"mass": found.mass[rows], "state": found.state[rows], "layers": needs.layers, "tensors": sites}
        outcome = replace(found, **kept, loss=found.loss if needs.loss else None)
        return replace(self, early=replace(self.early, outcome=outcome))


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A model together with what is read from its passes."""

    lens: LensModel
    needs: Needs
    n_sequences: int
    """The sequences of all batches of prompts."""

    def run_baseline(self, part: TokenBatch, *, prompts: slice, edits: Sequence[Edit] = ()) -> BaselineBatch:
        """Run the batch ``part``, and keep the keys, values and streams from which cells continue.

        ``prompts`` are the indices of the batch among all prompts; ``edits`` are made in this run, too.
        """
        keys: Kept = {}
        pack = _Pack(passes=self, part=part, prompts=prompts, edits=[edits], begins=[0], baseline=None)
        (outcome,) = pack.run(0, keep=keys)
        streams = {layer + 1: x for (site, layer), x in outcome.tensors.items() if site == "resid_post"}
        (made,) = pack.collectors
        early = Early(outcome=outcome, columns=made.columns, losses=made.token_losses)
        return BaselineBatch(part=part, prompts=prompts, early=early, keys=keys, streams=streams)

    def run_on_bridge(self, part: TokenBatch, edits: Sequence[Edit], *, prompts: slice) -> tuple[Outcome, list[bool]]:
        """Run the batch ``part`` under edits on the bridge; return its outcome, and which edits changed anything."""
        applied = Applied(lens=self.lens, edits=tuple(edits), n_sequences=self.n_sequences)
        outcome = run_checked_edits(self.lens, part, applied, self.needs, prompts=prompts, batch_size=part.n_sequences)
        return replace(outcome, sequences=prompts), [number in applied.changed for number in range(len(edits))]

    def run_pack(
        self, edits: Sequence[Sequence[Edit]], *, baseline: BaselineBatch, first: int, begins: Sequence[int]
    ) -> tuple[list[Outcome], list[list[bool]]]:
        """Run cells in one forward pass; return the outcome of each cell, and which of its edits changed anything.

        ``edits`` and ``begins`` (first positions) have an entry for each cell; ``first`` is the first layer that the
        edits touch; ``baseline`` is the run, on one batch of prompts, that the cells continue.
        """
        prompts = {"part": baseline.part, "prompts": baseline.prompts, "baseline": baseline}
        pack = _Pack(passes=self, edits=edits, begins=begins, **prompts)
        outcomes = pack.run(first)
        return outcomes, [[number in one.changed for number in range(len(one.edits))] for one in pack.applied]

    def compute_known_layer(self, baseline: BaselineBatch, layer: int) -> Known:
        """Compute a layer's unedited activations on the prompts of ``baseline``, or return those that it keeps."""
        known = baseline.known
        if known is None or known.layer != layer:
            begin = (known.layer, known.stream) if known is not None and known.layer < layer else None
            if layer in baseline.streams:
                begin = layer, baseline.streams[layer].to(self.lens.device)
            known = run_unedited_layer(self.lens, baseline.part.tokens, layer=layer, begin=begin, held=baseline.keys)
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
        baseline: BaselineBatch | None,
    ) -> None:
        self.passes, self.lens, self.needs = passes, passes.lens, passes.needs
        self.part, self.prompts, self.edits, self.baseline = part, prompts, edits, baseline
        n_sequences, n_positions = part.tokens.shape
        self.layout = Layout(n_sequences=n_sequences, n_positions=n_positions, begins=tuple(begins))
        of_run = {"lens": self.lens, "n_sequences": passes.n_sequences}
        self.applied = [
            Applied(edits=tuple(some), begin=begin, **of_run) for some, begin in zip(edits, begins, strict=True)
        ]
        read = {"lens": self.lens, "keys": self.needs.keys, "early": baseline and baseline.early}
        self.collectors = [RunCollector(begin=begin, keep=baseline is None, **read) for begin in begins]
        self.valid = part.valid.to(self.lens.device)

    def run(self, first: int, *, keep: Kept | None = None) -> list[Outcome]:
        """Run all cells from layer ``first`` on; return their outcomes. ``keep``, if given, gets keys and values."""
        read = [layer for layer in self.needs.layers if layer >= first]
        known, stream, skip = None, None, frozenset[str]()
        if self.baseline is not None:
            inner = [one for some in self.edits for one in some if SITES[one.site].per_layer]
            here = [one for one in inner if first in one.edited_layers(self.lens.n_layers)]
            sites = frozenset(site for one in here for site in (one.site, one.reads) if site is not None)
            if first not in self.lens.mixer_layers:
                skip = skippable_computations(sites, family=self.lens.family)
            if skip or (first > 0 and first not in self.baseline.streams):
                known = self.passes.compute_known_layer(self.baseline, first).repeat_in_rows(self.layout)
                stream = known.stream
            elif first > 0:
                stream = self.layout.values_by_row(self.baseline.streams[first].to(self.lens.device))
        last = self.lens.n_layers + 1 if self.needs.whole else self.needs.n_layers_needed
        visits = self._edits_by_site(first)
        for cell, collector in enumerate(self.collectors):
            for site, layer, take in collector.make_site_callbacks(read=read, sites=self.needs.sites, valid=self.valid):
                if SITES[site].observed and skip and layer == first and self.baseline is not None:
                    early = self.baseline.outcome  # whose attention no edit of this pack changes
                    collector.mass[layer] = [early.mass[early.layers.index(layer)]]
                elif SITES[site].observed or not (self.needs.attention_only and layer == last - 1):
                    visits.setdefault((site, layer), Visit()).readers.append((cell, take))
        scored, kept = self._scored_positions_and_rows()
        asked = Pass(
            layout=self.layout,
            first=first,
            last=last,
            visits=visits,
            stream=stream,
            held={} if self.baseline is None else self.baseline.keys,
            keep=keep,
            known=known,
            skip=skip,
            attention_only=self.needs.attention_only,
            logits_at=kept,
            unembed=self.needs.makes_logits,
        )
        return self._collect_outcomes(read, out=partial_pass(self.lens, self.part.tokens, asked), scored=scored)

    def _scored_positions_and_rows(self) -> tuple[list[tuple[int, ...]] | None, Tensor | None]:
        """Return the positions of each cell whose logits are read, and their rows in the pass; (None, None) is all."""
        asked = self.needs.scored_positions(self.part) if self.needs.logits else None
        if asked is None:
            return None, None
        n, length = self.part.n_sequences, self.part.n_positions
        scored = [tuple(position for position in asked if position >= begin) for begin in self.layout.begins]
        rows = []
        for some, begin, own in zip(scored, self.layout.begins, self.layout.rows_by_cell, strict=True):
            starts = own.start + torch.arange(n) * (length - begin)
            rows.append((starts[:, None] + torch.tensor(some, dtype=torch.int64) - begin).flatten())
        return scored, torch.cat(rows)

    def _edits_by_site(self, first: int) -> dict[tuple[str, int], Visit]:
        """Return (site, layer) -> edits made there, each with its cell's number, for layers from ``first`` on."""
        visits: dict[tuple[str, int], Visit] = {}
        layers = range(first, self.lens.n_layers if self.needs.whole else self.needs.n_layers_needed)
        for cell, applied in enumerate(self.applied):
            for step in applied.steps(sequences=self.prompts, valid=self.part.valid, layers=layers):
                if SITES[step.site].per_layer or self.needs.whole:
                    visits.setdefault((step.site, step.layer), Visit()).edits.append((cell, step.act))
        return visits

    def _collect_outcomes(
        self, read: list[int], *, out: Tensor | None, scored: list[tuple[int, ...]] | None
    ) -> list[Outcome]:
        """Make each cell's outcome from the pass's result ``out``; layers before the pass are the baseline's.

        ``read`` are the layers that the pass read, ``scored`` the positions of logits for each cell (None: all).
        """
        n, done, valid = self.part.n_sequences, 0, self.part.valid.cpu()
        ends: list[tuple[int, ...] | None] = [None] * len(self.collectors) if scored is None else [*scored]
        for cell, collector in enumerate(self.collectors):
            if out is not None:
                at = ends[cell]
                if at is None:
                    own = self.layout.view_cell(out, cell)
                else:
                    own = out[0, done : done + n * len(at)].reshape(n, len(at), out.shape[-1])
                    done += n * len(at)
                wanted = {"loss": self.needs.loss, "logits": self.needs.logits, "scored": at}
                ends[cell] = collector.store_results(own, part=self.part, unembedded=self.needs.makes_logits, **wanted)
            for layer in read:  # the pass may have ended with the attention of its last layer
                nothing = torch.full((n, len(self.needs.keys), self.lens.d_model), torch.nan, dtype=torch.float32)
                collector.state.setdefault(layer, [nothing])
        copy_to_cpu(self.collectors)
        found = []
        for collector, edits, at in zip(self.collectors, self.edits, ends, strict=True):
            outcome = collector.outcome(tuple(read), valid=valid, edits=edits, scored=at)
            if self.baseline is not None:
                early = self.baseline.outcome
                outcome = fill_in_early_layers(outcome, rows=slice(0, n), early=early)
                if bool((outcome.mass.isnan() & ~early.mass.isnan()).any()):
                    raise not_finite_error(edits)
            found.append(replace(outcome, sequences=self.prompts))
        return found
