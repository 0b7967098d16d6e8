"""Run many cells per forward pass; return the metrics of each cell and of the clean run, by sequence.

Nothing outside a cell's cone is computed (``cells``). Cells are sorted by the first layer and position that they
touch. They begin at this layer, from the clean stream, and at this position, with the clean keys and values of the
positions before; both come from the clean run of their prompts, which is computed once. The parts of the first layer
that no edit changes are not computed again either. No pass goes further than what is read, and only scored positions
are unembedded. Several cells share a forward along the batch axis, and on a CPU several forwards run side by side
(``threads``). A cell that can change nothing that is read is not run at all.

The numbers are those of ``run_with`` for one cell at a time: in float32 on the CPU to the last bit, where the products
of both sum in the same order, else within 1e-5. The passes run on the plain module with eager attention, or on the
bridge where scores or patterns are edited or read. ``trust`` compares some cells with the bridge on the user's machine
before the others run, and says which of the two was found.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from threading import Event, Lock
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.metrics import Metric, evaluate
from ..edits.outcome import Outcome
from ..errors import SinkLensError
from ..models.lens import LensModel
from ..models.sites import SITES
from .cells import Cell, Touches
from .hooks import check_edits
from .needs import Needs
from .partial_pass import Keys
from .passes import Clean, Passes
from .plan import CELLS_A_BLOCK, Path, Plan, begin_of, packs_of
from .references import References
from .threads import Lanes

VALUES = ("cell", "sequence", "metric", "value", "changed", "error")
"""Columns of a block's numbers."""


_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
Take = Callable[[int, Outcome, list[bool]], _Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells that begin at one layer, on one batch of prompts; a block is computed, written and lost as a whole."""

    number: int
    prompts: slice
    first: int
    """The layer at which they begin; above the number of layers if they change nothing that is read."""
    cells: tuple[int, ...]
    """Their numbers."""


class Engine:
    """Cells on a model, ready to be run block by block."""

    def __init__(
        self,
        lens: LensModel,
        tokens: TokenBatch,
        cells: Sequence[Cell],
        metrics: Sequence[Metric],
        *,
        plan: Plan,
        needs: Needs | None = None,
    ) -> None:
        self.lens = lens
        self.tokens = tokens
        self.cells = tuple(cells)
        self.metrics = tuple(metrics)
        self.plan = plan
        self.needs = Needs.of(metrics, lens=lens) if needs is None else needs
        self._clean_path: Path = "bridge" if self.needs.observed else plan.path
        self.blocks = self._blocks()
        self._references = References(lens, tokens)
        self._passes = Passes(lens=lens, needs=self.needs, n_sequences=tokens.n_sequences)
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
        take = partial(self._rows_of, prompts=block.prompts)
        rows = chain.from_iterable(self._taken(block, take, failed=lambda *one: [_failed(*one)], advance=advance))
        return pd.DataFrame(rows, columns=list(VALUES)).astype({"error": "string"})

    def map(
        self, block: Block, take: Take[_Found], *, advance: Callable[[int], None] = lambda cells: None
    ) -> list[_Found]:
        """What a function makes of each run of a block, in no order.

        Args:
            block: one of ``blocks``.
            take: called with a cell's number, what was read of its run, and whether each of its edits changed anything.
            advance: called with the number of cells that were finished.

        Raises:
            Exception: whatever an edit or the function raises.
        """
        return self._taken(block, take, failed=None, advance=advance)

    def _taken(
        self,
        block: Block,
        take: Take[_Found],
        *,
        failed: Callable[[int, Exception], _Found] | None,
        advance: Callable[[int], None],
    ) -> list[_Found]:
        packs = self._packs(block)
        if len(packs) == 1 or not self._has_lanes(block):
            share = self._share(packs, Event(), block=block, passes=self._passes, take=take, failed=failed)
            found = []
            for done, some in share:
                advance(done)
                found += some
            return found
        each = -(-len(packs) // self.plan.lanes)
        shares = [packs[start : start + each] for start in range(0, len(packs), each)]

        def of_share(passes: Passes, packs: Sequence[tuple[int, ...]], stop: Event) -> list[_Found]:
            found = []
            for done, some in self._share(packs, stop, block=block, passes=passes, take=take, failed=failed):
                with self._one_at_a_time:
                    advance(done)
                found += some
            return found

        return list(chain.from_iterable(self._in_lanes(block, of_share, shares)))

    def clean(self, prompts: slice) -> Outcome:
        """What is read of the clean run of a batch of prompts."""
        return self._clean(prompts.start, self._clean_path).outcome

    def deviation(self, number: int) -> float:
        """The largest difference between a cell's numbers here and those of one pass of the bridge for it alone."""
        block = next(block for block in self.blocks if number in block.cells)
        pack = next(pack for pack in self._packs(block) if number in pack)
        run = partial(self._run, block=block)
        if self._has_lanes(block):
            (found,) = self._in_lanes(block, lambda passes, pack, stop: run(pack, passes=passes), [pack])
        else:
            found = run(pack, passes=self._passes)
        outcome, _ = found[pack.index(number)]
        edits = self.cells[number].make(self._references)
        slow = self._passes.slow(self._part(block.prompts), edits, prompts=block.prompts)
        return max([0.0, *(_gap(evaluate(metric, outcome), evaluate(metric, slow)) for metric in self.metrics)])

    def clean_deviation(self) -> float:
        """The largest difference for the unedited run of the first prompts."""
        prompts = self._prompts()[0]
        clean = self._clean(prompts.start, self._clean_path).outcome
        slow = self._passes.slow(self._part(prompts), (), prompts=prompts)
        return max(_gap(evaluate(metric, clean), evaluate(metric, slow)) for metric in self.metrics)

    def pack_deviation(self) -> float:
        """The largest difference that sharing a forward, or beginning at a later position, makes to unedited streams.

        A matrix product may sum in another order where it has more rows, and that shows in the streams of any input.
        Every number of cells that share a forward over all positions is compared, and two of the later beginnings.
        """
        whole, late = {1}, set[tuple[int, int]]()
        for block in self.blocks:
            if block.first <= self.lens.n_layers:
                for pack in self._packs(block):
                    begin = self._begin(pack, block)
                    whole |= set() if begin else {len(pack)}
                    late |= {(len(pack), begin)} if begin else set()
        some = sorted(late, key=lambda one: one[0] * (self.tokens.n_positions - one[1]))
        shapes = [(size, 0) for size in sorted(whole)] + list(dict.fromkeys([*some[:1], *some[-1:]]))
        # The last batch of prompts may be smaller than the others.
        parts = {part.n_sequences: part for part in map(self._part, self._prompts())}.values()
        paths: set[Path] = {self.path_of(block) for block in self.blocks}
        found = 0.0
        for part in parts:
            for path in paths:
                keys = Keys(self.lens.n_layers, keep=True) if path == "plain" else None
                alone = self._passes.streams(part, path=path, copies=1, keys=keys)
                for size, begin in shapes:
                    if (size, begin) == (1, 0) or (begin and path == "bridge"):
                        continue
                    streams = partial(Passes.streams, part=part, path=path, copies=size, keys=keys, begin=begin)
                    if self.plan.lanes > 1 and path == "plain":
                        (packed,) = self._lanes.map(lambda passes, given, stop: given(passes), [streams])
                    else:
                        packed = streams(self._passes)
                    found = max(found, _pack_gap(alone, packed, copies=size, begin=begin))
        return found

    def layers_of(self, block: Block) -> int:
        """Number of layers that a block runs for each of its cells."""
        return max(0, min(self.needs.last, self.lens.n_layers) - block.first)

    def path_of(self, block: Block) -> Path:
        """The module that a block runs on."""
        return self._path(self.cells[block.cells[0]].touches)

    def forwards_of(self, block: Block) -> int:
        """Number of forwards that a block takes."""
        return len(self._packs(block))

    def tokens_of(self, block: Block) -> int:
        """Number of positions that a block computes for each of its sequences, over its cells."""
        n = self.tokens.n_positions
        return sum(len(pack) * (n - self._begin(pack, block)) for pack in self._packs(block))

    def _blocks(self) -> tuple[Block, ...]:
        n = self.tokens.n_positions
        most = max(CELLS_A_BLOCK, self.plan.pack) * n
        groups: dict[tuple[int, str], list[int]] = {}
        begins = lru_cache(lambda touches: (self._first(touches), self._path(touches)))
        for number, cell in enumerate(self.cells):
            groups.setdefault(begins(cell.touches), []).append(number)
        found: list[Block] = []
        for prompts in self._prompts():
            for (first, _), numbers in sorted(groups.items()):
                cells: list[int] = []
                held = 0
                for number in sorted(numbers, key=self._earliest):
                    length = n - self._earliest(number)
                    if cells and held + length > most:
                        found.append(Block(number=len(found), prompts=prompts, first=first, cells=tuple(cells)))
                        cells, held = [], 0
                    cells.append(number)
                    held += length
                found.append(Block(number=len(found), prompts=prompts, first=first, cells=tuple(cells)))
        return tuple(found)

    def _earliest(self, number: int) -> int:
        """The first position that a cell needs; 0 on the bridge."""
        cell = self.cells[number]
        return cell.begin if self.plan.cut and self._path(cell.touches) == "plain" else 0

    def _packs(self, block: Block) -> list[tuple[int, ...]]:
        """The cells that share each forward."""
        n, begins = self.tokens.n_positions, [self._earliest(number) for number in block.cells]
        n_sequences = block.prompts.stop - block.prompts.start
        sizes = packs_of(begins, n_positions=n, n_sequences=n_sequences, most=self.plan.pack)
        ends = list(accumulate(sizes))
        return [block.cells[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _begin(self, pack: Sequence[int], block: Block) -> int:
        """The position at which a forward begins."""
        return begin_of(
            min(self._earliest(number) for number in pack),
            cells=len(pack),
            n_positions=self.tokens.n_positions,
            n_sequences=block.prompts.stop - block.prompts.start,
        )

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
        self, block: Block, run: Callable[[Passes, _Given, Event], _Found], given: Sequence[_Given]
    ) -> list[_Found]:
        """Parts of a block, side by side."""
        self._passes.known(self._clean(block.prompts.start, "plain"), block.first)  # computed once for all lanes
        return self._lanes.map(run, given)

    def _share(
        self,
        packs: Sequence[tuple[int, ...]],
        stop: Event,
        *,
        block: Block,
        passes: Passes,
        take: Take[_Found],
        failed: Callable[[int, Exception], _Found] | None,
    ) -> Iterator[tuple[int, list[_Found]]]:
        """One pack after the other: how many cells were finished, and what was made of them."""
        waiting = deque(packs)
        while waiting and not stop.is_set():
            pack = waiting.popleft()
            try:
                runs = self._run(pack, block=block, passes=passes)
                found = [take(number, *one) for number, one in zip(pack, runs, strict=True)]
            except Exception as error:  # an edit of one's own may raise anything: recorded with its cell
                fits = not isinstance(error, torch.OutOfMemoryError)
                if (failed is None and fits) or (failed is None and len(pack) == 1):
                    raise
                if len(pack) > 1:  # too many for the memory, or one of them fails: the others must not fail with it
                    size = 1 if fits else -(-len(pack) // 2)
                    waiting.extendleft(reversed([pack[at : at + size] for at in range(0, len(pack), size)]))
                    continue
                assert failed is not None
                found = [failed(pack[0], error)]
            yield len(pack), found

    def _run(self, pack: Sequence[int], *, block: Block, passes: Passes) -> list[tuple[Outcome, list[bool]]]:
        """Run cells that share a forward."""
        with self._one_at_a_time:  # an edit may measure its values on the model, and there is one unedited run
            edits = [self.cells[number].make(self._references) for number in pack]
            clean = self._clean(block.prompts.start, self.path_of(block))
        for some in edits:
            check_edits(some, lens=self.lens, n_positions=self.tokens.n_positions)
        if block.first > self.lens.n_layers:
            return [(clean.outcome, [False] * len(some)) for some in edits]
        outcomes, changed = passes.pack(edits, clean=clean, first=block.first, begin=self._begin(pack, block))
        return list(zip(outcomes, changed, strict=True))

    def _rows_of(self, number: int, outcome: Outcome, changed: list[bool], *, prompts: slice) -> list[dict[str, Any]]:
        more = {"cell": number, "changed": any(changed), "error": None}
        return [
            row | more
            for metric in self.metrics
            for row in _rows(evaluate(metric, outcome), prompts=prompts, metric=metric.name)
        ]


def _gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference; infinite where only one of them is defined."""
    found, wanted = found.double(), wanted.double()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    return float((found - wanted).nan_to_num(0.0).abs().max())


def _pack_gap(alone: Sequence[Tensor], packed: Sequence[Tensor], *, copies: int, begin: int) -> float:
    """The largest difference between the streams, and logits, of several copies and those of one."""
    pairs = zip(alone, packed, strict=True)
    return max(float((both.unflatten(0, (copies, -1)) - one[:, begin:]).abs().max()) for one, both in pairs)


def _rows(values: Tensor, *, prompts: slice, metric: str) -> Iterator[dict[str, Any]]:
    """One row a sequence; where the metric gives one number in all, it stands at the first sequence of its batch."""
    for index, value in enumerate(values.tolist()):
        yield {"sequence": prompts.start + index, "metric": metric, "value": value}


def _failed(number: int, error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, SinkLensError) else f"{type(error).__name__}: {error}"
    return {"cell": number, "sequence": -1, "metric": "", "value": float("nan"), "changed": False, "error": text}
