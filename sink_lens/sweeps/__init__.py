"""Sweeps: thousands of cells, each an edit and what it does to some metrics, with what they share computed once."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..engine.cells import cell_of as cell_of
    from ..engine.named_metrics import MetricSpec as MetricSpec
    from .config import SweepConfig as SweepConfig
    from .config import read_sweep as read_sweep
    from .grid import EditGrid as EditGrid
    from .grid import Grid as Grid
    from .runner import sweep as sweep
    from .runner import sweep_shard as sweep_shard

_NAMES = {
    "EditGrid": "grid",
    "Grid": "grid",
    "MetricSpec": ".engine.named_metrics",
    "SweepConfig": "config",
    "cell_of": ".engine.cells",
    "read_sweep": "config",
    "sweep": "runner",
    "sweep_shard": "runner",
}
"""Public name -> the module that defines it."""

__all__ = [
    "EditGrid",
    "Grid",
    "MetricSpec",
    "SweepConfig",
    "cell_of",
    "read_sweep",
    "sweep",
    "sweep_shard",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
