"""sink_lens traces where a language model's attention sinks come from, and which links of the chain hold.

The names below are read from their modules when they are first used, so `import sink_lens` loads neither torch nor
numpy. The reference in the documentation has a line for each.
"""

from typing import TYPE_CHECKING

from . import lazy as _lazy

if TYPE_CHECKING:
    from sink_lens import circuits, edits, identity, measures, patching, studies, sweeps, training
    from sink_lens import report as views
    from sink_lens.activations.record import Reading, capture, stream
    from sink_lens.activations.sink_mask import sink_mask
    from sink_lens.chain.config import TraceConfig
    from sink_lens.chain.trace import trace
    from sink_lens.data.batch import TokenBatch
    from sink_lens.edits import metrics
    from sink_lens.engine.forward import run_with
    from sink_lens.engine.generation import generate
    from sink_lens.errors import SinkLensError
    from sink_lens.models.headnorm import HeadNormConfig, HeadNormForCausalLM
    from sink_lens.models.lens import LensModel
    from sink_lens.models.load import load, wrap
    from sink_lens.models.sites import SITES
    from sink_lens.records import read_run
    from sink_lens.sweeps.runner import sweep
    from sink_lens.training.trainer import train

    __version__: str

_NAMES = {
    "HeadNormConfig": "models.headnorm",
    "HeadNormForCausalLM": "models.headnorm",
    "LensModel": "models.load",
    "Reading": "activations.record",
    "SITES": "models.sites",
    "SinkLensError": "errors",
    "TokenBatch": "data.tokens",
    "TraceConfig": "chain.config",
    "capture": "activations.record",
    "circuits": "circuits:",
    "edits": "edits:",
    "generate": "engine.generation",
    "identity": "identity:",
    "load": "models.load",
    "measures": "measures:",
    "metrics": "edits.metrics:",
    "patching": "patching:",
    "read_run": "records",
    "run_with": "engine.forward",
    "stream": "activations.record",
    "studies": "studies:",
    "sink_mask": "activations.sink_mask",
    "sweep": "sweeps.runner",
    "sweeps": "sweeps:",
    "trace": "chain.trace",
    "train": "training.trainer",
    "training": "training:",
    "views": "report:",
    "wrap": "models.load",
}
"""Public name -> the module of this package that defines it; those that end in a colon are the module itself."""

__all__ = [
    "SITES",
    "HeadNormConfig",
    "HeadNormForCausalLM",
    "LensModel",
    "Reading",
    "SinkLensError",
    "TokenBatch",
    "TraceConfig",
    "__version__",
    "capture",
    "circuits",
    "edits",
    "generate",
    "identity",
    "load",
    "measures",
    "metrics",
    "patching",
    "read_run",
    "run_with",
    "sink_mask",
    "stream",
    "studies",
    "sweep",
    "sweeps",
    "trace",
    "train",
    "training",
    "views",
    "wrap",
]

_get, _known = _lazy.exported(__name__, _NAMES)


def __getattr__(name: str) -> object:
    """A public name, imported when it is first used."""
    if name == "__version__":
        from importlib.metadata import version

        return version("sink-lens")
    return _get(name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*_known(), "__version__"})
