"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .compare import Comparison as Comparison
from .compare import compare as compare
from .config import CompareConfig as CompareConfig
from .config import TrainConfig as TrainConfig
from .config import WatchConfig as WatchConfig
from .monitor import SinkMonitor as SinkMonitor
from .monitor_callback import SinkMonitorCallback as SinkMonitorCallback
from .prefix import PrefixConfig as PrefixConfig
from .prefix import PrefixModel as PrefixModel
from .prefix import get_prefix_model as get_prefix_model
from .train import train as train
from .watch import watch as watch
