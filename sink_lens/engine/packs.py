"""Packs of cells, each for one forward: run one after the other, or side by side on the lanes of a CPU.

A pack that does not fit into memory is halved, and so are those that follow it. If a cell fails, the cells of its pack
are run one by one, so that the others do not fail with it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Event, Lock
from typing import TypeVar

import torch

from ..edits.outcome import Outcome
from ..models.lens import LensModel
from .threads import Lanes

_Found = TypeVar("_Found")
Pack = tuple[int, ...]
"""Numbers of the cells that share a forward."""
Runs = list[tuple[Outcome, list[bool]]]
"""Outcome of each cell's run, and whether each of its edits changed anything."""
Take = Callable[[int, Outcome, list[bool]], _Found]
Failed = Callable[[int, Exception], _Found]
Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """The packs of some cells that begin at one layer, and how one is run."""

    packs: Sequence[Pack]
    run: Callable[[Pack, LensModel], Runs]
    """Runs a pack on a copy of the model."""
    lens: LensModel
    lanes: Callable[[], Lanes] | None
    """Where packs run side by side; None if they may not."""
    size: Callable[[Pack], int]
    """Positions that a pack computes."""

    def run_one(self, pack: Pack) -> Runs:
        """Run one pack, in a lane if there are any; return each cell's outcome and which edits changed anything."""
        if self.lanes is None:
            return self.run(pack, self.lens)
        (found,) = self.lanes().map(lambda lens, pack, stop: self.run(pack, lens), [pack])
        return found

    def map(self, take: Take[_Found], *, failed: Failed[_Found] | None, advance: Advance) -> list[_Found]:
        """Run all packs and apply ``take`` to each cell's outcome; return what it gives, in no particular order.

        Args:
            take: called with a cell's number, what was read of its run, and whether each of its edits changed anything.
            failed: called with the number of a cell that fails, and its error; None raises it.
            advance: called with the number of cells that were finished.
        """
        run = partial(run_in_turn, run=self.run, take=take, failed=failed)
        if self.lanes is None or len(self.packs) == 1:
            return run(self.packs, self.lens, Event(), advance=advance)
        lanes, lock = self.lanes(), Lock()

        def finished(done: int) -> None:
            with lock:
                advance(done)

        def in_lane(lens: LensModel, packs: Sequence[Pack], stop: Event) -> list[_Found]:
            return run(packs, lens, stop, advance=finished)

        return list(chain.from_iterable(lanes.map(in_lane, even_shares(self.packs, lanes.count, size=self.size))))


def run_in_turn(
    packs: Sequence[Pack],
    lens: LensModel,
    stop: Event,
    *,
    run: Callable[[Pack, LensModel], Runs],
    take: Take[_Found],
    failed: Failed[_Found] | None,
    advance: Advance,
) -> list[_Found]:
    """Run one pack after the other; the arguments are those of ``Packs.map``."""
    every: list[_Found] = []
    waiting, most = deque(packs), max(map(len, packs))
    while waiting and not stop.is_set():
        pack: Pack = waiting.popleft()
        if len(pack) > most:
            waiting.appendleft(pack[most:])
            pack = pack[:most]
        try:
            found = [take(number, *one) for number, one in zip(pack, run(pack, lens), strict=True)]
        except torch.OutOfMemoryError as error:
            if len(pack) > 1:
                most = len(pack) // 2
                waiting.appendleft(pack)
                continue
            if failed is None:
                raise
            found = [failed(next(iter(pack)), error)]
        except Exception as error:  # an edit of one's own may raise anything: recorded with its cell
            if failed is None:
                raise
            if len(pack) > 1:  # one of them fails: the others must not fail with it
                waiting.extendleft((number,) for number in reversed(pack))
                continue
            found = [failed(next(iter(pack)), error)]
        advance(len(pack))
        every += found
    return every


def even_shares(packs: Sequence[Pack], count: int, *, size: Callable[[Pack], int]) -> list[list[Pack]]:
    """Divide packs among at most ``count`` lanes so that all compute about as many positions, by ``size``."""
    shares: list[list[Pack]] = [[] for _ in range(min(count, len(packs)))]
    positions = [0] * len(shares)
    for pack in packs:
        least = positions.index(min(positions))
        shares[least].append(pack)
        positions[least] += size(pack)
    return shares


def run_side_by_side(
    lanes: Lanes, several: Sequence[tuple[Packs, Take[None]]], *, advance: Advance = lambda cells: None
) -> None:
    """Run the packs of several blocks, each with its function for outcomes, in the lane that is free next.

    Raises:
        Exception: whatever an edit raises.
    """
    work, lock = iter([(packs, pack, take) for packs, take in several for pack in packs.packs]), Lock()

    def finished(done: int) -> None:
        with lock:
            advance(done)

    def in_lane(lens: LensModel, number: int, stop: Event) -> None:
        while not stop.is_set():
            with lock:
                one = next(work, None)
            if one is None:
                return
            packs, pack, take = one
            run_in_turn([pack], lens, stop, run=packs.run, take=take, failed=None, advance=finished)

    lanes.map(in_lane, range(lanes.count))
