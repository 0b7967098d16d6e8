"""The lock that all lenses on one model share, and what each of them noted when it was made."""

from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from .unchanged import Unchanged


class Turns:
    """One model's lock, and whose turn it is."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.noted: WeakSet[Unchanged] = WeakSet()
        """What each lens on the model has noted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """State that all lenses on a model share, and that one lens noted when it was made."""

    turns: Turns
    unchanged: Unchanged
    alone: Lock = field(default_factory=Lock)
    """Held by each pass over these modules; a copy for a thread of the engine has its own."""


_TURNS: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_NEW = Lock()


def state_of(unchanged: Unchanged, *modules: nn.Module) -> State:
    """The state shared by all lenses on one model, found by any of the model's modules: decoder, bridge or wrapper."""
    turns = lock_of(*modules)
    turns.noted.add(unchanged)
    return State(turns=turns, unchanged=unchanged)


def lock_of(*modules: nn.Module) -> Turns:
    """The lock shared by all lenses on one model, found by any of its modules."""
    with _NEW:
        found = next((_TURNS[one] for one in modules if one in _TURNS), None) or Turns()
        for one in modules:
            _TURNS[one] = found
    return found
