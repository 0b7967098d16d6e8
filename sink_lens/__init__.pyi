"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from . import circuits as circuits
from . import edits as edits
from . import identity as identity
from . import measures as measures
from . import patching as patching
from . import report as views
from . import studies as studies
from . import sweeps as sweeps
from . import training as training
from .activations.record import Reading as Reading
from .activations.record import capture as capture
from .activations.record import stream as stream
from .activations.sink_mask import sink_mask as sink_mask
from .chain.config import TraceConfig as TraceConfig
from .chain.trace import trace as trace
from .circuits.logit_attribution import direct_logit_attribution as direct_logit_attribution
from .data.tokens import TokenBatch as TokenBatch
from .engine.answers import answers as answers
from .engine.forward import run_with as run_with
from .engine.generation import generate as generate
from .errors import SinkLensError as SinkLensError
from .models.headnorm.adapter import HeadNormForCausalLM as HeadNormForCausalLM
from .models.lens import LensModel as LensModel
from .models.load import load as load
from .models.load import wrap as wrap
from .models.sites import SITES as SITES
from .records import read_run as read_run
from .sweeps.sweep import sweep as sweep
from .training.train import train as train

__version__: str
