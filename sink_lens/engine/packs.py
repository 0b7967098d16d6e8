"""Packs of cells, each for one forward: run one after the other, or side by side on the lanes of a CPU.

A pack that does not fit into memory is halved, and so are those that follow it. If a cell fails, the cells of its pack
are run one by one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Event, Lock
from typing import Generic, TypeVar

import torch

from ..edits.outcome import Outcome
from ..models.lens import LensModel
from .threads import Lanes

_Found = TypeVar("_Found")
Pack = tuple[int, ...]
"""Numbers of the cells that share a forward."""
Runs = list[tuple[Outcome, list[bool]]]
"""Each cell's outcome, and whether each of its edits changed anything."""
Take = Callable[[int, Outcome, list[bool]], _Found]
"""Called with a cell's number, and its run as in ``Runs``."""
Failed = Callable[[int, Exception], _Found]
"""Called with the number of a cell that fails, and its error."""
Advance = Callable[[int], object]
"""Called with the number of cells that were finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs(Generic[_Found]):
    """Packs to run, what each costs (in any unit), and the functions that run one on a model and take outcomes."""

    packs: Sequence[Pack]
    cost: Callable[[Pack], float]
    run: Callable[[Pack, LensModel], Runs]
    take: Take[_Found]


def fill_packs(cells: Iterable[int], *, size: Callable[[int], int], most: int) -> list[Pack]:
    """Divide cells, in order, into packs of at most ``most``; a larger cell gets a pack of its own."""
    packs: list[list[int]] = []
    held = 0
    for cell in cells:
        if not packs or held + size(cell) > most:
            packs.append([])
            held = 0
        packs[-1].append(cell)
        held += size(cell)
    return [tuple(pack) for pack in packs]


def run_packs(
    several: Sequence[Packs[_Found]],
    *,
    lens: LensModel,
    lanes: Lanes | None,
    failed: Failed[_Found] | None = None,
    advance: Advance = lambda cells: None,
) -> list[_Found]:
    """Run the packs of ``several``; return what their ``take`` gives for each cell, in no particular order.

    With ``lanes``, each pack runs in the lane (thread) that is free next, the dearest first, so that no lane waits long
    for the last one. ``failed`` gets the error of a cell.
    """
    if lanes is None:
        turns = (
            _run_in_turn(one, one.packs, lens, Event(), failed=failed, advance=advance)
            for one in several
        )
        return list(chain.from_iterable(turns))
    lock = Lock()

    def finished(done: int) -> None:
        with lock:
            advance(done)

    def in_lane(lens: LensModel, given: tuple[Packs[_Found], Pack], stop: Event) -> list[_Found]:
        return _run_in_turn(given[0], [given[1]], lens, stop, failed=failed, advance=finished)

    every = [(one, pack) for one in several for pack in one.packs]
    found = lanes.map(in_lane, sorted(every, key=lambda some: -some[0].cost(some[1])))
    return list(chain.from_iterable(found))


def _run_in_turn(
    work: Packs[_Found],
    packs: Sequence[Pack],
    lens: LensModel,
    stop: Event,
    *,
    failed: Failed[_Found] | None,
    advance: Advance,
) -> list[_Found]:
    every: list[_Found] = []
    waiting, most = deque(packs), max(map(len, packs))
    while waiting and not stop.is_set():
        pack = waiting.popleft()
        if len(pack) > most:
            waiting.appendleft(pack[most:])
            pack = pack[:most]
        try:
            found = [
                work.take(number, *one)
                for number, one in zip(pack, work.run(pack, lens), strict=True)
            ]
        except (
            Exception
        ) as error:  # an edit of one's own may raise anything: recorded with its cell
            if isinstance(error, torch.OutOfMemoryError) and len(pack) > 1:
                most = len(pack) // 2
                waiting.appendleft(pack)
                continue
            if failed is None:
                raise
            if len(pack) > 1:
                waiting.extendleft((number,) for number in reversed(pack))
                continue
            found = [failed(next(iter(pack)), error)]
        advance(len(pack))
        every += found
    return every
