"""Many cells a forward pass: the numbers of each, and of the unedited run, by sequence and metric.

What is skipped. The cells are sorted by the first layer that they touch, and begin there, from the unedited stream,
which is computed once for each batch of prompts. Of that layer, what no edit changes is not computed again
(``plain.Known``). No pass goes further than the metrics read. Several cells share a forward along the batch axis, and
on a CPU several forwards run side by side (``lanes``). A cell that can change nothing that is read is not run at all.

*Exact* mode gives, in float32 on the CPU, to the last bit what ``run_with`` gives for one cell at a time: the passes
run on the plain module with eager attention, or on the bridge where the family's two modules call other matrix
products, and the runner compares some cells with single passes of the bridge before it goes on. *Fast* mode takes the
fused attention kernel for long sequences, adds the change of a few neurons to the stream as a product of low rank
(``W_down`` is not applied again), and unembeds only the positions that the metrics read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from threading import Event, Lock
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric, evaluate
from ..engine.hooks import check_edits
from ..errors import SinkLensError
from ..models.lens import LensModel
from ..models.sites import SITES
from .edits import References
from .grid import Cell, Touches
from .needs import Needs
from .passes import Clean, Passes
from .plan import CELLS_A_BLOCK, Path, Plan
from .threads import Lanes

VALUES = ("cell", "sequence", "metric", "value", "changed", "error")
"""Columns of a block's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells that begin at one layer, on one batch of prompts: what is computed, written and lost at once."""

    number: int
    prompts: slice
    first: int
    """The layer that they begin at; over the number of layers, where they change nothing that is read."""
    cells: tuple[int, ...]
    """Their numbers."""


class Engine:
    """The cells of a sweep on a model, ready to be run block by block."""

    def __init__(
        self, lens: LensModel, tokens: TokenBatch, cells: Sequence[Cell], metrics: Sequence[Metric], *, plan: Plan
    ) -> None:
        self.lens = lens
        self.tokens = tokens
        self.cells = tuple(cells)
        self.metrics = tuple(metrics)
        self.plan = plan
        self.needs = Needs.of(metrics, lens=lens)
        self._clean_path: Path = "bridge" if self.needs.observed else plan.path
        self.blocks = self._blocks()
        self._references = References(lens, tokens)
        self._passes = Passes(lens=lens, needs=self.needs, mode=plan.mode, n_sequences=tokens.n_sequences)
        self._clean = lru_cache(maxsize=2)(self._clean_run)  # of both paths
        self._one_at_a_time = Lock()

    def baseline(self) -> pd.DataFrame:
        """The unedited run: sequence, metric, value."""
        rows: list[dict[str, Any]] = []
        for prompts in self._prompts():
            clean = self._clean(prompts.start, self._clean_path)
            for metric in self.metrics:
                rows += _rows(evaluate(metric, clean.outcome), prompts=prompts, metric=metric.name)
        return pd.DataFrame(rows, columns=["sequence", "metric", "value"])

    def run(self, block: Block, *, advance: Callable[[int], None] = lambda cells: None) -> pd.DataFrame:
        """A block's numbers, with the columns ``VALUES``; a cell that fails has one row, with its error.

        Args:
            block: one of ``blocks``.
            advance: called with the number of cells that were finished.
        """
        size = self.plan.pack
        packs = -(-len(block.cells) // size)
        if packs == 1 or not self._has_lanes(block):
            rows = self._share(block.cells, Event(), block=block, passes=self._passes, advance=advance)
        else:
            each = -(-packs // self.plan.lanes) * size
            shares = [block.cells[start : start + each] for start in range(0, len(block.cells), each)]
            rows = [row for share in self._in_lanes(block, shares, advance=advance) for row in share]
        return pd.DataFrame(rows, columns=list(VALUES)).astype({"error": "string"})

    def deviation(self, number: int) -> float:
        """The largest difference between a cell's numbers here and those of one pass of the bridge for it alone."""
        block = next(block for block in self.blocks if number in block.cells)
        before = block.cells.index(number) + 1
        pack = block.cells[max(0, before - self.plan.pack) : before]
        ways = [self._pack(pack, block=block, passes=self._passes)]
        if self._has_lanes(block):
            ways += self._in_lanes(block, [pack])
        edits = self.cells[number].make(self._references)
        slow = self._passes.slow(self._part(block.prompts), edits, prompts=block.prompts)
        found = 0.0
        for way in ways:
            rows = pd.DataFrame([row for row in way if row["cell"] == number])
            for metric in self.metrics:
                values = torch.tensor(rows.loc[rows["metric"] == metric.name, "value"].to_numpy())
                found = max(found, _gap(values, evaluate(metric, slow)))
        return found

    def clean_deviation(self) -> float:
        """The same of the unedited run of the first prompts."""
        prompts = self._prompts()[0]
        clean = self._clean(prompts.start, self._clean_path).outcome
        slow = self._passes.slow(self._part(prompts), (), prompts=prompts)
        return max(_gap(evaluate(metric, clean), evaluate(metric, slow)) for metric in self.metrics)

    def pack_deviation(self) -> float:
        """The largest difference that sharing a forward makes to the unedited streams, over every size of a pack.

        A matrix product may sum in another order where it has more rows, and that shows in the streams of any input.
        """
        sizes = {1}
        for block in self.blocks:
            if block.first <= self.lens.n_layers:
                sizes |= {min(self.plan.pack, len(block.cells)), len(block.cells) % self.plan.pack}
        # The last batch of prompts may be smaller than the others.
        parts = {part.n_sequences: part for part in map(self._part, self._prompts())}.values()
        paths: set[Path] = {self.path_of(block) for block in self.blocks}
        found = 0.0
        for part in parts:
            for path in paths:
                alone = self._passes.streams(part, path=path, copies=1)
                for size in sizes - {0}:
                    streams = partial(Passes.streams, part=part, path=path, copies=size)
                    packed = [streams(self._passes)] if size > 1 else []
                    if self.plan.lanes > 1 and path == "plain":
                        packed += self._lanes.map(lambda passes, given, stop: given(passes), [streams])
                    found = max([found, *(_pack_gap(alone, one, copies=size) for one in packed)])
        return found

    def layers_of(self, block: Block) -> int:
        """How many layers a block runs for each of its cells."""
        return max(0, min(self.needs.last, self.lens.n_layers) - block.first)

    def path_of(self, block: Block) -> Path:
        """The module that a block runs on."""
        return self._path(self.cells[block.cells[0]].touches)

    def _blocks(self) -> tuple[Block, ...]:
        size = max(CELLS_A_BLOCK, self.plan.pack)
        groups: dict[tuple[int, str], list[int]] = {}
        begins = lru_cache(lambda touches: (self._first(touches), self._path(touches)))
        for number, cell in enumerate(self.cells):
            groups.setdefault(begins(cell.touches), []).append(number)
        found: list[Block] = []
        for prompts in self._prompts():
            for first, path in sorted(groups):
                numbers = groups[first, path]
                for begin in range(0, len(numbers), size):
                    cells = tuple(numbers[begin : begin + size])
                    found.append(Block(number=len(found), prompts=prompts, first=first, cells=cells))
        return tuple(found)

    def _first(self, touches: Touches) -> int:
        n = self.lens.n_layers
        if not self.needs.reaches(touches, n_layers=n):
            return n + 1
        inner = [range(n) if layers is None else layers for site, layers in touches if SITES[site].per_layer]
        return min((min(layers) for layers in inner), default=n - 1)

    def _path(self, touches: Touches) -> Path:
        return "bridge" if any(SITES[site].observed for site, _ in touches) else self._clean_path

    def _prompts(self) -> list[slice]:
        n, size = self.tokens.n_sequences, self.plan.prompts
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def _part(self, prompts: slice) -> TokenBatch:
        return replace(self.tokens, tokens=self.tokens.tokens[prompts], lengths=self.tokens.lengths[prompts])

    def _clean_run(self, start: int, path: Path) -> Clean:
        prompts = next(prompts for prompts in self._prompts() if prompts.start == start)
        return self._passes.clean(self._part(prompts), prompts=prompts, path=path)

    @cached_property
    def _lanes(self) -> Lanes:
        return Lanes(self._passes, count=self.plan.lanes)

    def _has_lanes(self, block: Block) -> bool:
        """Whether its cells may run side by side: those of the bridge do not, there is one."""
        return self.plan.lanes > 1 and self.path_of(block) == "plain" and block.first <= self.lens.n_layers

    def _in_lanes(
        self, block: Block, shares: Sequence[Sequence[int]], *, advance: Callable[[int], None] = lambda cells: None
    ) -> list[list[dict[str, Any]]]:
        """The rows of each share of a block's cells, side by side."""
        self._passes.known(self._clean(block.prompts.start, "plain"), block.first)  # once, for all of them

        def share(passes: Passes, cells: Sequence[int], stop: Event) -> list[dict[str, Any]]:
            return self._share(cells, stop, block=block, passes=passes, advance=advance)

        return self._lanes.map(share, shares)

    def _share(
        self, cells: Sequence[int], stop: Event, *, block: Block, passes: Passes, advance: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """The rows of some cells of a block, one pack after the other."""
        rows: list[dict[str, Any]] = []
        size = self.plan.pack
        alone = 0
        waiting = list(cells)
        while waiting and not stop.is_set():
            step = 1 if alone else size
            pack, waiting = waiting[:step], waiting[step:]
            try:
                rows += self._pack(pack, block=block, passes=passes)
            except Exception as error:  # noqa: BLE001  # an edit of one's own may raise anything: recorded with its cell
                if len(pack) > 1:
                    waiting = pack + waiting
                    if isinstance(error, torch.OutOfMemoryError):
                        size = len(pack) // 2
                    else:  # one of them fails: the others must not fail with it
                        alone = len(pack)
                    continue
                rows.append(_failed(pack[0], error))
            alone = max(0, alone - 1)
            with self._one_at_a_time:
                advance(len(pack))
        return rows

    def _pack(self, numbers: Sequence[int], *, block: Block, passes: Passes) -> list[dict[str, Any]]:
        """The rows of cells that share a forward."""
        with self._one_at_a_time:  # an edit may measure its values on the model, and there is one unedited run
            edits = [self.cells[number].make(self._references) for number in numbers]
            clean = self._clean(block.prompts.start, self.path_of(block))
        for some in edits:
            check_edits(some, lens=self.lens, n_positions=self.tokens.n_positions)
        if block.first > self.lens.n_layers:
            outcomes, changed = [clean.outcome] * len(numbers), [False] * len(numbers)
        else:
            outcomes, changed = passes.pack(edits, clean=clean, first=block.first)
        rows: list[dict[str, Any]] = []
        for number, outcome, differs in zip(numbers, outcomes, changed, strict=True):
            more = {"cell": number, "changed": differs, "error": None}
            for metric in self.metrics:
                values = evaluate(metric, outcome)
                rows += [row | more for row in _rows(values, prompts=block.prompts, metric=metric.name)]
        return rows


def _gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference; infinite where only one of them is defined."""
    found, wanted = found.double(), wanted.double()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    return float((found - wanted).nan_to_num(0.0).abs().max())


def _pack_gap(alone: Sequence[Tensor], packed: Sequence[Tensor], *, copies: int) -> float:
    """The largest difference between the streams, and logits, of several copies and those of one."""
    pairs = zip(alone, packed, strict=True)
    return max(float((both.unflatten(0, (copies, -1)) - one).abs().max()) for one, both in pairs)


def _rows(values: Tensor, *, prompts: slice, metric: str) -> Iterator[dict[str, Any]]:
    """One row a sequence; where the metric gives one number in all, it stands at the first sequence of its batch."""
    for index, value in enumerate(values.tolist()):
        yield {"sequence": prompts.start + index, "metric": metric, "value": value}


def _failed(number: int, error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, SinkLensError) else f"{type(error).__name__}: {error}"
    return {"cell": number, "sequence": -1, "metric": "", "value": float("nan"), "changed": False, "error": text}
