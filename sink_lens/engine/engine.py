"""Run many cells per forward pass; return the metrics of each cell and of the baseline run, by sequence.

Nothing outside a cell's cone is computed (``cells``). Cells are sorted by the first layer and position that they
touch. They begin at this layer, from the baseline stream, and at this position, with the baseline keys and values of
the positions before. No pass goes further than what is read, and only scored positions are unembedded. Several cells
share a forward (``layout``), also of several layers: each comes in at its own. On a CPU several forwards run side by
side (``threads``). A cell that can change nothing that is read is not run at all.

The numbers are those of ``run_with`` for one cell at a time, within 1e-5 in float32. The passes run the bridge's blocks
with an eager attention of our own inside Hugging Face's module (``layout``); ``trust`` compares some cells with the
bridge on the user's machine before the others run.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby
from threading import Lock
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.constructors import Edit
from ..edits.hooks import edits_for_model
from ..edits.metrics import Metric, check_per_sequence, evaluate
from ..edits.outcome import Outcome, join_outcomes
from ..edits.references import References
from ..errors import InputError, ModelError, SinkLensError
from ..models.lens import LensModel
from ..models.running import prepare_passes
from ..models.sites import SITES
from .baseline_run import BaselineRun
from .cells import Cell, Touches, cell_of_edits, edit_ends_before, edits_from_layer, touched_places
from .needs import Needs
from .packs import Advance, Failed, Pack, Packs, Runs, Take, fill_packs, run_packs
from .passes import BaselineBatch, Passes
from .plan import CELLS_A_BLOCK, Plan
from .threads import Lanes

VALUES = ("cell", "sequence", "metric", "value", "changed", "error")
"""Columns of a block's numbers."""

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells that begin at one layer, on one batch of prompts; a block is computed and written as a whole."""

    number: int
    prompts: slice
    first: int
    """The layer at which the first cell begins; above the number of layers if no cell changes what is read."""
    cells: tuple[int, ...]
    """Indices of the block's cells."""

    @property
    def name(self) -> str:
        """Name of the block's table in a run folder."""
        return f"block-{self.number:06d}"


class Engine:
    """Runs cells on a model, one block (cells that share a forward pass) at a time."""

    def __init__(
        self,
        lens: LensModel,
        tokens: TokenBatch,
        cells: Sequence[Cell],
        metrics: Sequence[Metric],
        *,
        plan: Plan,
        needs: Needs | None = None,
        baseline_run: BaselineRun | None = None,
    ) -> None:
        """Prepare the blocks; nothing is run yet. Refuses a model that can only be measured.

        ``needs`` is what the passes keep; None is what the metrics read. ``baseline_run`` is the run that the cells
        continue, of the same sequences and plan; None is the baseline.
        """
        if lens.why_measured_only is not None:
            raise ModelError(lens.why_measured_only)
        self.lens, self.tokens, self.plan, self.metrics = lens, tokens, plan, tuple(metrics)
        self.cells = tuple(cell.with_layers_from_start(lens.n_layers) for cell in cells)
        if plan.prompts < tokens.n_sequences and any(
            one.whole_batch for one in (*self.metrics, *self.cells)
        ):
            raise InputError(
                f"a metric or an edit reads all {tokens.n_sequences} sequences at once, and a pass of the plan has "
                f"{plan.prompts}; need all in one pass"
            )
        self.needs = Needs.of_metrics(metrics, lens=lens) if needs is None else needs
        self.first_layers = tuple(
            map(lru_cache(self._lowest_touched_layer), (cell.touches for cell in self.cells))
        )
        own = baseline_run
        if own is None:
            at = {
                one
                for one in self.first_layers
                if 0 < one < lens.n_layers and not lens.family.shared_keys
            }
            own = BaselineRun(
                lens,
                tokens,
                plan=plan,
                needs=self.needs,
                keeps_all=False,
                streams=at,
            )
        self._baseline_run = own
        self._references = References(lens, tokens)
        self._passes = Passes(lens=lens, needs=self.needs, n_sequences=tokens.n_sequences)
        narrowed = lru_cache(maxsize=None)(lambda start: own.batch(start).narrow_to(self.needs))
        self._baseline_batch: Callable[[int], BaselineBatch] = (
            own.batch if baseline_run is None else narrowed
        )
        self._one_at_a_time = Lock()

    def baseline_metrics(self) -> pd.DataFrame:
        """Compute the metrics of the baseline run: one row per sequence and metric, with the value."""
        rows: list[dict[str, Any]] = []
        for prompts in self._baseline_run.prompt_batches:
            rows += self._metric_rows(self.baseline_outcome(prompts), prompts=prompts)
        return pd.DataFrame(rows, columns=["sequence", "metric", "value"])

    def check_metrics(self) -> None:
        """Refuse a metric that hangs on which sequences stand beside each other; two are enough to tell."""
        few: list[Outcome] = []
        for prompts in self._baseline_run.prompt_batches[:2]:
            few.append(self.baseline_outcome(prompts))
            if len(few[0].valid) > 1:
                break
        found = join_outcomes(few)
        for metric in self.metrics:
            check_per_sequence(metric, replace(found, sequences=slice(0, len(found.valid))))

    def run(self, block: Block, *, advance: Advance = lambda cells: None) -> pd.DataFrame:
        """Run a block; return its cells' metrics in the columns ``VALUES``, and one error row for a failed cell."""
        return self._block_rows(block, advance=advance)

    def _block_rows(self, block: Block, *, advance: Advance) -> pd.DataFrame:
        def take(number: int, outcome: Outcome, changed: list[bool]) -> list[dict[str, Any]]:
            more = {"cell": number, "changed": any(changed), "error": None}
            return [row | more for row in self._metric_rows(outcome, prompts=block.prompts)]

        def failed(number: int, error: Exception) -> list[dict[str, Any]]:
            text = (
                str(error)
                if isinstance(error, SinkLensError)
                else f"{type(error).__name__}: {error}"
            )
            return [dict(zip(VALUES, (number, -1, "", float("nan"), False, text), strict=True))]

        found = self.map(block, take, failed=failed, advance=advance)
        place = {cell: number for number, cell in enumerate(block.cells)}
        rows = sorted(chain.from_iterable(found), key=lambda row: place[row["cell"]])
        return pd.DataFrame(rows, columns=list(VALUES)).astype({"error": "string"})

    def run_cell(self, block: Block, number: int, *, alone: bool = False) -> pd.DataFrame:
        """Run cell ``number`` of a block, with those that share its forward or alone; return its rows of ``run``."""
        some = replace(block, cells=(number,)) if alone else self.pack_of(block, number)
        found = self._block_rows(some, advance=lambda cells: None)
        return found.loc[found["cell"] == number]

    def pack_of(self, block: Block, number: int) -> Block:
        """Return the block with only those cells that share the forward of cell ``number``."""
        packs = self._packs_to_run(block, lambda cell, outcome, changed: None).packs
        return replace(block, cells=next(pack for pack in packs if number in pack))

    def map(
        self,
        block: Block,
        take: Take[_Found],
        *,
        failed: Failed[_Found] | None = None,
        advance: Advance = lambda cells: None,
    ) -> list[_Found]:
        """Run a block and apply ``take`` to the outcome of each cell; return the results, in no particular order.

        ``failed`` gives the result of a cell whose edit or ``take`` raises an error; None lets the error be raised.
        """
        work = self._packs_to_run(block, take)
        self._baseline_run.check_same_weights()
        with prepare_passes(self.lens):
            lanes = self._prepare_lanes(block) if len(work.packs) > 1 else None
            found = run_packs([work], lens=self.lens, lanes=lanes, failed=failed, advance=advance)
        self._baseline_run.check_same_weights()
        return found

    def begin(
        self, *, advance: Advance
    ) -> tuple[list[Packs[None]], list[tuple[dict[int, Outcome], set[int]]]]:
        """Run the blocks that have no lanes; return the packs of the others, and what all of them fill, cell by cell.

        That is the outcome by batch of prompts, and the indices of edits that had an effect: all of them for a cell
        that can change nothing that is read, and is not run.
        """
        found: list[tuple[dict[int, Outcome], set[int]]] = [({}, set()) for _ in self.cells]

        def keep(block: Block, number: int, outcome: Outcome, which: list[bool]) -> None:
            by_batch, changed = found[number]
            if (
                not self.needs.state
            ):  # it is most of what a run holds, and many runs wait for the last
                outcome = replace(outcome, state=outcome.state[..., :0].clone())
            by_batch[block.prompts.start] = outcome
            is_run = block.first <= self.lens.n_layers  # else nothing is known of its edits
            changed.update(place for place, one in enumerate(which) if one or not is_run)

        beside = []
        for block in self.blocks:
            if self._has_lanes(block):
                self.baseline_outcome(block.prompts)  # computed once, before the lanes begin
                beside.append(self._packs_to_run(block, partial(keep, block)))
            else:
                self.map(block, partial(keep, block), advance=advance)
        return beside, found

    def baseline_outcome(self, prompts: slice) -> Outcome:
        """Return the outcome of the run that the cells continue, on the batch of sequences ``prompts``."""
        return self._baseline_batch(prompts.start).outcome

    @torch.no_grad()  # a metric may have weights of its own
    def deviations(self, numbers: Sequence[int]) -> tuple[list[float], float]:
        """Compare the baseline run and some cells with the bridge, on the batch that has the longest sequence.

        Returns:
            The largest difference of each one's metrics, the baseline's first; and the largest magnitude of the
            baseline's metrics and of its logits, if a metric reads them.
        """
        lengths = self.tokens.lengths.tolist()
        prompts = max(self._baseline_run.prompt_batches, key=lambda some: max(lengths[some]))
        baseline, some = self.baseline_outcome(prompts), self._sorted_cells(numbers)
        found = {}
        if some:
            block = Block(
                number=0, prompts=prompts, first=self.first_layers[some[0]], cells=tuple(some)
            )
            work = self._packs_to_run(block, lambda cell, outcome, changed: (cell, outcome))
            with prepare_passes(self.lens):
                found = dict(run_packs([work], lens=self.lens, lanes=self._prepare_lanes(block)))
        own = self._baseline_run.edits
        edits = [own, *((*own, *self._make_edits(number)) for number in numbers)]
        slow, _ = self._passes.run_on_bridge(self.tokens[prompts], edits, prompts=prompts)
        worst = []
        for one, other in zip(
            [baseline, *(found[number] for number in numbers)], slow, strict=True
        ):
            by_metric = (
                _largest_difference(evaluate(metric, one), evaluate(metric, other))
                for metric in self.metrics
            )
            worst.append(max([0.0, *by_metric]))
        read = [evaluate(metric, baseline) for metric in self.metrics]
        read += (
            [baseline.logits]
            if baseline.logits is not None and any(one.logits for one in self.metrics)
            else []
        )
        return worst, max(float(one.abs().nan_to_num(0.0, posinf=0.0).amax()) for one in read)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks: for each batch of prompts, groups of cells that can share forwards.

        The first block is a single forward, so that a run that is stopped soon has something.
        """
        most_in_pass = self.plan.pack * self.tokens.n_positions
        most = max(CELLS_A_BLOCK * self.tokens.n_positions, most_in_pass)
        groups = [
            list(some)
            for _, some in groupby(self._sorted_cells(range(len(self.cells))), key=self._group)
        ]
        found: list[Block] = []
        for prompts in self._baseline_run.prompt_batches:
            for numbers in groups:
                packs = fill_packs(numbers, size=self._n_computed_positions, most=most)
                if not found:
                    small = fill_packs(
                        packs[0], size=self._n_computed_positions, most=most_in_pass
                    )[0]
                    packs = [
                        small,
                        *([packs[0][len(small) :]] if packs[0][len(small) :] else []),
                        *packs[1:],
                    ]
                for cells in packs:
                    first = self.first_layers[cells[0]]
                    found.append(
                        Block(number=len(found), prompts=prompts, first=first, cells=cells)
                    )
        return tuple(found)

    def _sorted_cells(self, numbers: Iterable[int]) -> list[int]:
        """Return cells by their first layer, and within it by first position, upwards and downwards in turn.

        Cells that share a forward then have near first positions where a layer ends and the next begins.
        """

        def place(number: int) -> tuple[int, int]:
            first, begin = self.first_layers[number], self._first_needed_position(number)
            return first, -begin if first % 2 else begin

        return sorted(numbers, key=place)

    def _group(self, number: int) -> int:
        """Return a number that is the same for cells which can share a forward: their first layer, -1 for any kept."""
        first, kept = self.first_layers[number], self._baseline_run.streams
        return -1 if kept and first in {0, *kept} else first

    def _first_needed_position(self, number: int) -> int:
        cut = self.plan.cut and self.plan.path == "blocks"
        return self._begin_that_cuts_no_edit(self.cells[number].begin) if cut else 0

    def _n_computed_positions(self, number: int) -> int:
        return self.tokens.n_positions - self._first_needed_position(number)

    def _begin_that_cuts_no_edit(self, begin: int) -> int:
        """Return ``begin``, or an earlier position if an edit of the baseline run touches positions on both sides."""
        reaching = [
            touched_places([one])[1]
            for one in self._baseline_run.edits
            if not edit_ends_before(one, begin)
        ]
        return (
            begin
            if min(reaching, default=begin) >= begin
            else self._begin_that_cuts_no_edit(min(reaching))
        )

    def _lowest_touched_layer(self, touches: Touches) -> int:
        """Return the lowest layer in ``touches``, which edits change; n_layers + 1 if nothing changes that is read."""
        n = self.lens.n_layers
        if not self.needs.is_changed_by(touches, n_layers=n):
            return n + 1
        inner = [
            range(n) if layers is None else layers
            for site, layers in touches
            if SITES[site].per_layer
        ]
        return min((min(layers) for layers in inner), default=n - 1)

    def _has_lanes(self, block: Block) -> bool:
        return (
            self.plan.lanes > 1 and self.plan.path == "blocks" and block.first <= self.lens.n_layers
        )

    def _prepare_lanes(self, block: Block) -> Lanes | None:
        if not self._has_lanes(block):
            return None
        self._passes.compute_known_layer(self._baseline_batch(block.prompts.start), block.first)
        return self._baseline_run.lanes

    def _packs_to_run(self, block: Block, take: Take[_Found]) -> Packs[_Found]:
        packs = [
            pack
            for _, some in groupby(block.cells, key=self._group)
            for pack in fill_packs(
                some, size=self._n_computed_positions, most=self.plan.pack * self.tokens.n_positions
            )
        ]
        n = len(range(*block.prompts.indices(self.tokens.n_sequences)))
        last = self.lens.n_layers if self.needs.whole else self.needs.n_layers_needed

        def cost(pack: Pack) -> float:
            layers = (max(0, last - self.first_layers[number]) for number in pack)
            positions = map(self._n_computed_positions, pack)
            return n * sum(map(operator.mul, layers, positions))

        return Packs(packs=packs, cost=cost, run=partial(self._run_pack, block=block), take=take)

    def _run_pack(self, pack: Pack, lens: LensModel, *, block: Block) -> Runs:
        passes = replace(self._passes, lens=lens)
        with (
            self._one_at_a_time
        ):  # making an edit may run the model, so only one lane may do it at a time
            edits = [self._make_edits(number) for number in pack]
            baseline = self._baseline_batch(block.prompts.start)
        if self.first_layers[pack[0]] > self.lens.n_layers:
            return [(baseline.outcome, [False] * len(some)) for some in edits]
        before = self._baseline_run.edits
        if self.plan.path == "bridge":
            every = [[*before, *some] for some in edits]
            runs = passes.run_on_bridge(baseline.part, every, prompts=block.prompts)
        else:
            begins = [*map(self._first_needed_position, pack)]
            firsts = [self.first_layers[number] for number in pack]
            every = []
            for some, begin, first in zip(edits, begins, firsts, strict=True):
                later = edits_from_layer(before, first=first, n_layers=self.lens.n_layers)
                every.append([*(one for one in later if not edit_ends_before(one, begin)), *some])
            runs = passes.run_pack(every, baseline=baseline, firsts=firsts, begins=begins)
        found = []
        for some, outcome, changed in zip(edits, *runs, strict=True):
            own = changed[len(changed) - len(some) :]
            found.append((outcome if any(own) else baseline.outcome, own))
        return found

    def _make_edits(self, number: int) -> tuple[Edit, ...]:
        made = self.cells[number].make(self._references)
        return edits_for_model(self.lens, made, n_positions=self.tokens.n_positions)

    def _metric_rows(self, outcome: Outcome, *, prompts: slice) -> list[dict[str, Any]]:
        """Make a row per metric and sequence of ``prompts``; a metric with one value for all sequences has one row."""
        numbers = range(prompts.start, prompts.stop, prompts.step or 1)
        return [
            {"sequence": sequence, "metric": metric.name, "value": value}
            for metric in self.metrics
            for sequence, value in zip(numbers, evaluate(metric, outcome).tolist(), strict=False)
        ]


def outcomes_under_edits(
    baseline_run: BaselineRun,
    edit_lists: Sequence[Sequence[Edit]],
    *,
    needs: Needs,
    advance: Advance = lambda cells: None,
) -> list[tuple[Outcome, set[int]]]:
    """Do as ``outcomes_in_one_queue`` for lists of edits that all continue ``baseline_run`` and read ``needs``."""
    return outcomes_in_one_queue(
        [(baseline_run, edits, needs) for edits in edit_lists], advance=advance
    )


def outcomes_in_one_queue(
    asked: Sequence[tuple[BaselineRun, Sequence[Edit], Needs]],
    *,
    advance: Advance = lambda cells: None,
) -> list[tuple[Outcome, set[int]]]:
    """Continue runs of one model under edits; return the outcomes, and for each the indices of edits that acted.

    The forwards of all of them run side by side. Without edits, a run itself is the result. Each ``Needs`` lists what
    the outcome holds, no more than its run holds. What an edit raises is raised.
    """
    BaselineRun.run_side_by_side(run for run, _, _ in asked)
    cells: dict[tuple[BaselineRun, Needs], list[Cell]] = {}
    for run, edits, needs in asked:
        cells.setdefault((run, needs), []).extend([cell_of_edits(edits)] if edits else [])
    begun: dict[tuple[BaselineRun, Needs], Iterator[tuple[dict[int, Outcome], set[int]]]] = {}
    beside: list[Packs[None]] = []
    for (run, needs), some in cells.items():
        engine = Engine(
            run.lens, run.tokens, some, (), plan=run.plan, needs=needs, baseline_run=run
        )
        packs, filled = engine.begin(advance=advance)
        beside += packs
        begun[run, needs] = iter(filled)
    if beside:
        run = asked[0][0]
        with prepare_passes(run.lens):
            run_packs(beside, lens=run.lens, lanes=run.lanes, failed=None, advance=advance)
        run.check_same_weights()
    found = []
    for run, edits, needs in asked:
        by_batch, changed = next(begun[run, needs]) if edits else ({}, set[int]())
        outcome = (
            join_outcomes([by_batch[start] for start in sorted(by_batch)])
            if edits
            else run.read_outcome(needs)
        )
        found.append((outcome, changed))
    return found


def _largest_difference(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    return float((found - wanted).nan_to_num(0.0).abs().max())
