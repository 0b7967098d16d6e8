"""The lock of a model's passes, which no forked child inherits in the hands of a thread that it lacks; a lens state."""

import os
from dataclasses import dataclass, field
from threading import Lock, get_ident
from weakref import WeakSet

from ..errors import ModelError
from .unchanged import ModelRecord


class PassLock:
    """A lock. In a child that was forked while another thread held it, taking it is an error and no endless wait.

    The other thread's hooks may be on the model there, and nobody takes them off.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: int | None = None
        self._lost = False
        _LOCKS.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        if self._lost:
            raise ModelError(
                "this process was forked while another thread of its parent was in a pass of the model, whose hooks "
                "may be on it; need a fork between passes. Load the model again here, or fork before the thread begins"
            )
        if not self._lock.acquire(blocking):
            return False
        self._holder = get_ident()
        return True

    def release(self) -> None:
        self._holder = None
        self._lock.release()

    def __enter__(self) -> "PassLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def renew_in_child(self) -> None:
        """Make the lock one of this process, which was forked: free, held by this thread as before, or lost."""
        taken, self._lock = self._lock.locked(), Lock()
        if taken and self._holder == get_ident():
            self._lock.acquire()
        else:
            self._lost = taken


_LOCKS: WeakSet[PassLock] = WeakSet()


def _renew_locks() -> None:
    for lock in list(_LOCKS):
        lock.renew_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


class ModelLock:
    """The lock that all lenses on one model share, and the records of the model that they made."""

    def __init__(self) -> None:
        self.lock = PassLock()
        self.noted: WeakSet[ModelRecord] = WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LensState:
    """The model's lock, which all lenses on it share, and the record of the model."""

    turns: ModelLock
    unchanged: ModelRecord
    alone: PassLock = field(default_factory=PassLock)
    """Held by each pass over these modules; a copy for a thread of the engine has its own."""
    kept: dict[object, object] = field(default_factory=dict)
    """Copies of these modules that the engine uses again (``threads.lanes_of``)."""
