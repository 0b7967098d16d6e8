"""Training a model, watching what its checkpoints become, and comparing variants."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .comparison import Comparison as Comparison
    from .comparison import compare as compare
    from .config import CompareConfig as CompareConfig
    from .config import TrainConfig as TrainConfig
    from .config import WatchConfig as WatchConfig
    from .monitor import SinkMonitor as SinkMonitor
    from .monitor_callback import SinkMonitorCallback as SinkMonitorCallback
    from .prefix import PrefixConfig as PrefixConfig
    from .prefix import PrefixModel as PrefixModel
    from .prefix import get_prefix_model as get_prefix_model
    from .trainer import train as train
    from .watching import watch as watch

_NAMES = {
    "CompareConfig": "config",
    "Comparison": "comparison",
    "PrefixConfig": "prefix",
    "PrefixModel": "prefix",
    "SinkMonitor": "monitor",
    "SinkMonitorCallback": "monitor_callback",
    "TrainConfig": "config",
    "WatchConfig": "config",
    "compare": "comparison",
    "get_prefix_model": "prefix",
    "train": "trainer",
    "watch": "watching",
}
"""Public name -> the module that defines it."""

__all__ = [
    "CompareConfig",
    "Comparison",
    "PrefixConfig",
    "PrefixModel",
    "SinkMonitor",
    "SinkMonitorCallback",
    "TrainConfig",
    "WatchConfig",
    "compare",
    "get_prefix_model",
    "train",
    "watch",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
