"""Circuits: the edges between heads and MLPs that carry what a metric measures, with scores and real patches."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .circuit import Circuit as Circuit
    from .circuit import find as find
    from .config import CircuitConfig as CircuitConfig
    from .curve import Curve as Curve
    from .files import SavedCircuit as SavedCircuit
    from .files import read as read
    from .graph import Graph as Graph
    from .record import run as run
    from .record import run_shard as run_shard
    from .tasks import Task as Task
    from .tasks import task_of as task

_NAMES = {
    "Circuit": "circuit",
    "CircuitConfig": "config",
    "Curve": "curve",
    "Graph": "graph",
    "SavedCircuit": "files",
    "Task": "tasks",
    "find": "circuit",
    "read": "files",
    "run": "record",
    "run_shard": "record",
    "task": "tasks:task_of",
}
"""Public name -> the module that defines it."""

__all__ = [
    "Circuit",
    "CircuitConfig",
    "Curve",
    "Graph",
    "SavedCircuit",
    "Task",
    "find",
    "read",
    "run",
    "run_shard",
    "task",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
