"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from ..edits.named_metrics import MetricSpec as MetricSpec
from .cells import cell_of as cell_of
from .config import SweepConfig as SweepConfig
from .config import read_sweep as read_sweep
from .grid import EditGrid as EditGrid
from .grid import Grid as Grid
from .sweep import sweep as sweep
