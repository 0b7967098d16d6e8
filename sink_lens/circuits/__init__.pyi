"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .circuit import Circuit as Circuit
from .circuit import find as find
from .config import CircuitConfig as CircuitConfig
from .curve import Curve as Curve
from .files import SavedCircuit as SavedCircuit
from .files import read as read
from .given import compare as compare
from .given import evaluate as evaluate
from .graph import Graph as Graph
from .run import run as run
from .tasks import Task as Task
from .tasks import task_of as task
