"""Lanes: cells that run side by side on the cores of a CPU, each lane on a copy of the modules that shares the weights.

Two cores share a matrix product of a few hundred rows badly: one cell a core is faster than one cell on both. The
modules are copied because the edits are hooks on them.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from itertools import chain, islice
from threading import Event, Lock
from typing import TypeVar, cast

import torch

from ..models.delegation import inner_model
from ..models.lens import LensModel
from ..models.pass_lock import PassLock
from ..models.running import prepare_passes

log = logging.getLogger(__name__)

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


class Lanes:
    """Threads that share the CPU cores, each with its own copy of the model's modules."""

    def __init__(self, lens: LensModel, *, count: int) -> None:
        self.count = count
        each = max(1, torch.get_num_threads() // count)
        self._lenses = [copy_for_thread(lens) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(each,))

    def map(
        self, run: Callable[[LensModel, _Given, Event], _Found], given: Iterable[_Given]
    ) -> list[_Found]:
        """Call ``run`` for each item of ``given``, in the lane that is free next; return results in no order.

        ``run`` gets a lane's copy of the model, the item, and an event that is set once a call has failed.
        """
        work, lock, stop = iter(given), Lock(), Event()

        def in_lane(lens: LensModel) -> list[_Found]:
            found: list[_Found] = []
            try:
                while not stop.is_set():
                    with lock:
                        some = list(islice(work, 1))
                    if not some:
                        break
                    found.append(run(lens, some[0], stop))
            except BaseException:
                stop.set()
                raise
            return found

        futures = [self._pool.submit(copy_context().run, in_lane, lens) for lens in self._lenses]
        try:
            return list(chain.from_iterable(future.result() for future in futures))
        finally:
            stop.set()


def copy_for_thread(lens: LensModel) -> LensModel:
    """Make new modules with the same weights, for passes of the bridge only."""
    bridge, inner = lens.bridge, inner_model(lens)
    tensors = chain(bridge.parameters(), bridge.buffers(), inner.parameters(), inner.buffers())
    shared: dict[int, object] = {id(tensor): tensor for tensor in tensors}
    shared[id(bridge.tokenizer)] = bridge.tokenizer
    with prepare_passes(lens):  # nobody's hooks are copied, and no mode of training
        copied = copy.deepcopy(bridge, shared)
        return replace(lens, bridge=copied, state=replace(lens.state, alone=PassLock(), kept={}))


def lanes_of(lens: LensModel, *, count: int) -> Lanes:
    """Return ``count`` lanes of a model, made once; anew where hooks stand on the bridge, which copies would keep."""
    if any(point.fwd_hooks or point.bwd_hooks for point in lens.bridge.hook_dict.values()):
        return Lanes(lens, count=count)
    kept, key = lens.state.kept, (count, torch.get_num_threads(), os.getpid())
    if key not in kept:
        kept[key] = Lanes(lens, count=count)
    return cast(Lanes, kept[key])


def choose_lanes(lens: LensModel, *, count: int) -> int:
    """Return ``count``, or 1 if something in the modules cannot be copied."""
    if count == 1:
        return 1
    try:
        return lanes_of(lens, count=count).count
    except Exception as error:  # noqa: BLE001  # a module of one's own may raise anything
        log.info(
            "forwards run one at a time: the modules of %s cannot be copied (%s)", lens.name, error
        )
        return 1
