"""Names of 0.1 that are other names now, and what lets them work for one more version, each with a warning.

``moved.py`` has the modules, ``records/old_names.py`` the columns and values of run folders; CHANGELOG.md has the
table.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")

_EDITED = {"cut_sequences": "intervention_sequences", "cut_length": "intervention_length"}
FIELDS: Mapping[str, Mapping[str, str]] = {
    "TraceConfig": {"cuts": "interventions", "twin": "random_init", "position": "target_position", **_EDITED},
    "IsolateConfig": {"positions": "target_positions", **_EDITED},
    "AmplifyConfig": {"position": "target_position", **_EDITED},
    "AblateConfig": _EDITED,
    "PatchConfig": {"key": "sink_position"},
    "Location": {"positions": "sink_positions", "position": "sink_position"},
    "Metric": {"keys": "positions"},
    "Outcome": {"keys": "positions"},
    "TokenBatch": {"bos_arm": "bos_condition"},
    "Trace": {"frames": "tables", "finding": "location"},
    "Study": {"frames": "tables"},
    "Comparison": {"arms": "variants"},
}
"""Class -> field or attribute of 0.1 -> its name now."""
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "edits.constructors": {"hold": "freeze"},
    "edits.isolation": {"isolation": "isolate"},
    "edits.amplification": {"amplification": "amplify"},
    "identity.models_to_measure": {
        "Draws": "RandomSequences",
        "Subject": "ModelToMeasure",
        "subjects": "models_to_measure",
    },
    "identity.switches": {"arm_table": "variant_table", "contrasts": "switched_configs"},
    "models.load": {"random_twin": "random_init"},
}
"""Module -> function of 0.1 -> its name now."""
_BOTH = {"--cut-sequences": "--intervention-sequences", "--cut-length": "--intervention-length"}
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "trace": {
        "--cuts": "--interventions",
        "--no-cuts": "--no-interventions",
        "--twin": "--random-init",
        "--no-twin": "--no-random-init",
        "--position": "--target-position",
        **_BOTH,
    },
    "isolate": {"--position": "--target-position", **_BOTH},
    "amplify": {"--position": "--target-position", **_BOTH},
    "ablate": _BOTH,
    "patch": {"--key": "--sink-position"},
}
"""Command -> option of 0.1 -> its name now."""
METRIC_OPTIONS = {name: {"key": "sink_position"} for name in ("sink_mass", "norm", "dominance")}
"""Metric of a sweep -> option of 0.1 -> its name now."""
AXES = {"pos": "position", "head_index": "head", "src_pos": "key", "dest_pos": "position"}
"""Axis of a patch in 0.1 and in ``transformer_lens.patching`` -> its name now."""

ROOT: Mapping[str, str] = {
    "from_text": "TokenBatch.from_text",
    "from_prompts": "TokenBatch.from_prompts",
    "from_dataset": "TokenBatch.from_dataset",
    "from_tensor": "TokenBatch.from_tensor",
    "random_tokens": "TokenBatch.random",
    "repeated_tokens": "TokenBatch.repeated",
    "MEASURES": "measures.MEASURES",
    "Edit": "edits.Edit",
    "Site": "edits.Site",
    "isolation": "edits.isolate",
    "amplification": "edits.amplify",
    "centring_means": "edits.centring_means",
    "effect": "edits.effect",
    "variance_calibration": "edits.calibrate",
    "head_rms_norm": "edits.normalise",
    "patch": "patching.patch",
    "path_patch": "patching.path_patch",
    "attribution_patch": "patching.attribution_patch",
    "isolate": "studies.isolate",
    "amplify": "studies.amplify",
    "ablate": "studies.ablate",
    "Study": "studies.Study",
    "Trace": "studies.Trace",
    "Grid": "sweeps.Grid",
    "EditGrid": "sweeps.EditGrid",
    "cell_of": "sweeps.cell_of",
    "MetricSpec": "sweeps.MetricSpec",
    "SweepConfig": "sweeps.SweepConfig",
    "read_sweep": "sweeps.read_sweep",
    "TrainConfig": "training.TrainConfig",
    "watch": "training.watch",
    "compare": "training.compare",
    "SinkMonitor": "training.SinkMonitor",
    "SinkMonitorCallback": "training.SinkMonitorCallback",
    "fingerprint": "identity.fingerprint",
    "Fingerprint": "identity.Fingerprint",
    "FingerprintConfig": "identity.FingerprintConfig",
    "untrained": "identity.untrained",
    "UntrainedConfig": "identity.UntrainedConfig",
    "preference": "identity.preference",
    "contraction": "identity.contraction",
    "render": "views.render",
    "attention_heads": "views.attention_heads",
    "attention_patterns": "views.attention_patterns",
    "colored_tokens": "views.colored_tokens",
    "neuron_activations": "views.neuron_activations",
    "Circuit": "views.Circuit",
    "circuit_of": "views.circuit_of",
}
"""Name of `sink_lens` in 0.1 -> its name now."""


def warn(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Say that a name has changed."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in the next version", FutureWarning, stacklevel=stacklevel + 1
    )


def current_fields(kind: str, given: Mapping[str, Any], *, stacklevel: int = 2) -> dict[str, Any]:
    """Values by field, of which some may have their names of 0.1; a value under an old name wins."""
    known, found = FIELDS.get(kind, {}), dict(given)
    for old in [name for name in given if name in known]:
        warn(old, known[old], stacklevel=stacklevel + 1)
        found[known[old]] = found.pop(old)
    return found


def renamed_fields(kind: type[C]) -> type[C]:
    """Let a dataclass be made with, and read by, the fields that it had in 0.1 (``FIELDS``)."""
    made, known = kind.__init__, FIELDS[kind.__name__]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if not known.keys().isdisjoint(given):
            given = current_fields(kind.__name__, given)
        made(self, *args, **given)

    def get(self: Any, name: str) -> Any:
        if name not in known:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        warn(f"{kind.__name__}.{name}", known[name])
        return getattr(self, known[name])

    kind.__init__ = init
    kind.__getattr__ = get  # type: ignore[attr-defined]  # called for names that the class lacks
    return kind


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function be called with the names that its keyword arguments had in 0.1: ``old="new"``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **given: P.kwargs) -> R:
            for old in [name for name in names if name in given]:
                warn(f"{old}= of {function.__name__}", f"{names[old]}=")
                given[names[old]] = given.pop(old)
            return function(*args, **given)

        return run

    return decorate


def renamed_names(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for its functions that have another name now (``FUNCTIONS``)."""
    names = FUNCTIONS[module.partition(".")[2]]

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(import_module(module), names[name])

    return get


def current_options(command: str, given: list[str]) -> list[str]:
    """The words of a command line; options of 0.1 are replaced by their present names, with a warning."""
    known, found = OPTIONS.get(command, {}), []
    for index, word in enumerate(given):
        if word == "--":
            return found + given[index:]
        option, equals, value = word.partition("=")
        if option in known:
            warn(option, known[option])
            word = known[option] + equals + value
        found.append(word)
    return found


def current_axes(by: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a patch, of which some may have their names of TransformerLens."""
    for old in [name for name in by if name in AXES]:
        warn(old, AXES[old], stacklevel=1)
    return tuple(AXES.get(name, name) for name in by)


def current_metric_options(metric: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a sweep's metric, of which some may have their names of 0.1."""
    known = METRIC_OPTIONS.get(metric, {})
    for old in [name for name in options if name in known]:
        warn(f"{old} of the metric {metric}", known[old], stacklevel=1)
    return {known.get(name, name): value for name, value in options.items()}
