"""sink_lens traces where a language model's attention sinks come from, and which links of the chain hold.

The names below are read from their modules when they are first used, so `import sink_lens` loads neither
torch nor numpy.
"""

from typing import TYPE_CHECKING

from .moved import install as _install_old_names

if TYPE_CHECKING:
    from sink_lens.activations.record import Reading, capture, stream
    from sink_lens.chain.config import TraceConfig
    from sink_lens.chain.trace import Trace, trace
    from sink_lens.data.tokens import (
        TokenBatch,
        from_dataset,
        from_prompts,
        from_tensor,
        from_text,
        random_tokens,
        repeated_tokens,
    )
    from sink_lens.edits.amplification import amplify as amplification
    from sink_lens.edits.amplification import centring_means
    from sink_lens.edits.constructors import Edit
    from sink_lens.edits.effects import effect
    from sink_lens.edits.isolation import isolate as isolation
    from sink_lens.edits.normalisation import head_rms_norm, variance_calibration
    from sink_lens.engine.forward import run_with
    from sink_lens.engine.generation import generate
    from sink_lens.errors import SinkLensError
    from sink_lens.identity.fingerprints import Fingerprint, FingerprintConfig, fingerprint
    from sink_lens.identity.state_contraction import contraction
    from sink_lens.identity.token_preference import preference
    from sink_lens.identity.untrained_models import UntrainedConfig, untrained
    from sink_lens.measures.table import MEASURES
    from sink_lens.models.headnorm import HeadNormConfig, HeadNormForCausalLM
    from sink_lens.models.load import LensModel, load, wrap
    from sink_lens.models.sites import SITES, Site
    from sink_lens.patching.activation import patch
    from sink_lens.patching.attribution import attribution_patch
    from sink_lens.patching.path import path_patch
    from sink_lens.records import read_run
    from sink_lens.report.circuit import Circuit, circuit_of
    from sink_lens.report.html import render
    from sink_lens.report.views import attention_heads, attention_patterns, colored_tokens, neuron_activations
    from sink_lens.studies.ablation import ablate
    from sink_lens.studies.amplification import amplify
    from sink_lens.studies.isolation import isolate
    from sink_lens.studies.quantise import quantise
    from sink_lens.studies.streaming import streaming
    from sink_lens.studies.study import Study
    from sink_lens.sweeps.config import SweepConfig, read_sweep
    from sink_lens.sweeps.grid import EditGrid, Grid, cell_of
    from sink_lens.sweeps.reads import MetricSpec
    from sink_lens.sweeps.runner import sweep
    from sink_lens.training.comparison import compare
    from sink_lens.training.config import TrainConfig
    from sink_lens.training.monitor import SinkMonitor
    from sink_lens.training.monitor_callback import SinkMonitorCallback
    from sink_lens.training.trainer import train
    from sink_lens.training.watching import watch

    __version__: str

_MODULES = {
    "load": "models.load",
    "wrap": "models.load",
    "LensModel": "models.load",
    "HeadNormConfig": "models.headnorm",
    "HeadNormForCausalLM": "models.headnorm",
    "TokenBatch": "data.tokens",
    "from_text": "data.tokens",
    "from_prompts": "data.tokens",
    "from_dataset": "data.tokens",
    "from_tensor": "data.tokens",
    "random_tokens": "data.tokens",
    "repeated_tokens": "data.tokens",
    "capture": "activations.record",
    "Reading": "activations.record",
    "stream": "activations.record",
    "SITES": "models.sites",
    "Site": "models.sites",
    "MEASURES": "measures.table",
    "Edit": "edits.constructors",
    "run_with": "engine.forward",
    "effect": "edits.effects",
    "isolation": "edits.isolation:isolate",
    "amplification": "edits.amplification:amplify",
    "centring_means": "edits.amplification",
    "variance_calibration": "edits.normalisation",
    "head_rms_norm": "edits.normalisation",
    "patch": "patching.activation",
    "path_patch": "patching.path",
    "attribution_patch": "patching.attribution",
    "generate": "engine.generation",
    "isolate": "studies.isolation",
    "quantise": "studies.quantise",
    "streaming": "studies.streaming",
    "amplify": "studies.amplification",
    "ablate": "studies.ablation",
    "Study": "studies.study",
    "trace": "chain.trace",
    "Trace": "chain.trace",
    "TraceConfig": "chain.config",
    "sweep": "sweeps.runner",
    "Grid": "sweeps.grid",
    "EditGrid": "sweeps.grid",
    "cell_of": "sweeps.grid",
    "MetricSpec": "sweeps.reads",
    "SweepConfig": "sweeps.config",
    "read_sweep": "sweeps.config",
    "train": "training.trainer",
    "TrainConfig": "training.config",
    "watch": "training.watching",
    "compare": "training.comparison",
    "SinkMonitor": "training.monitor",
    "SinkMonitorCallback": "training.monitor_callback",
    "fingerprint": "identity.fingerprints",
    "Fingerprint": "identity.fingerprints",
    "FingerprintConfig": "identity.fingerprints",
    "untrained": "identity.untrained_models",
    "UntrainedConfig": "identity.untrained_models",
    "preference": "identity.token_preference",
    "contraction": "identity.state_contraction",
    "read_run": "records",
    "render": "report.html",
    "attention_heads": "report.views",
    "attention_patterns": "report.views",
    "colored_tokens": "report.views",
    "neuron_activations": "report.views",
    "Circuit": "report.circuit",
    "circuit_of": "report.circuit",
    "SinkLensError": "errors",
}
"""Public name -> the module of this package that defines it."""

_install_old_names()

__all__ = [
    "MEASURES",
    "SITES",
    "Circuit",
    "Edit",
    "EditGrid",
    "Fingerprint",
    "FingerprintConfig",
    "Grid",
    "HeadNormConfig",
    "HeadNormForCausalLM",
    "LensModel",
    "MetricSpec",
    "Reading",
    "SinkLensError",
    "SinkMonitor",
    "SinkMonitorCallback",
    "Site",
    "Study",
    "SweepConfig",
    "TokenBatch",
    "Trace",
    "TraceConfig",
    "TrainConfig",
    "UntrainedConfig",
    "__version__",
    "ablate",
    "amplification",
    "amplify",
    "attention_heads",
    "attention_patterns",
    "attribution_patch",
    "capture",
    "cell_of",
    "centring_means",
    "circuit_of",
    "colored_tokens",
    "compare",
    "contraction",
    "effect",
    "fingerprint",
    "from_dataset",
    "from_prompts",
    "from_tensor",
    "from_text",
    "generate",
    "head_rms_norm",
    "isolate",
    "isolation",
    "load",
    "neuron_activations",
    "patch",
    "path_patch",
    "preference",
    "quantise",
    "random_tokens",
    "read_run",
    "read_sweep",
    "render",
    "repeated_tokens",
    "run_with",
    "stream",
    "streaming",
    "sweep",
    "trace",
    "train",
    "untrained",
    "variance_calibration",
    "watch",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("sink-lens")
    if name in _MODULES:
        from importlib import import_module

        module, _, own = _MODULES[name].partition(":")
        value = getattr(import_module(f"{__name__}.{module}"), own or name)
        return globals().setdefault(name, value)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
