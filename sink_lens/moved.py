"""Modules under the names that they had in 0.1: they are imported from where they are now, with a warning.

For one version; CHANGELOG.md has the table.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "identity.contrasts": "identity.switches",
    "identity.estimate": "identity.surveys",
    "identity.measured_models": "identity.models_to_measure",
    "identity.measurements": "identity.surveys",
    "identity.survey": "identity.survey_folder",
    "interventions": "edits",
    "interventions.amplification": "edits.amplification",
    "interventions.applied": "engine.hooks",
    "interventions.attribution": "patching.attribution",
    "interventions.edits": "edits.constructors",
    "interventions.effects": "edits.effects",
    "interventions.generation": "engine.generation",
    "interventions.isolation": "edits.isolation",
    "interventions.metrics": "edits.metrics",
    "interventions.normalisation": "edits.normalisation",
    "interventions.patching": "patching.activation",
    "interventions.paths": "patching.path",
    "interventions.run": "engine.forward",
    "ranges": "text",
    "training.birth": "training.sink_birth",
    "training.checkpoints": "training.watching",
    "training.compare": "training.comparison",
    "training.comparison_tables": "training.comparison",
    "training.course": "training.watching",
    "training.curves": "training.loss_curves",
    "training.differences": "stats",
    "training.evaluation": "training.watching",
    "training.saving": "training.checkpoint_files",
    "training.schedule": "training.loop",
}
"""Module of 0.1 -> module now, both without the package's name."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        if package != __package__ or not MOVED.get(old):
            return None
        return ModuleSpec(fullname, self, is_package=old == "interventions")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"{__package__}.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is now {new}; the old name goes in the next version", FutureWarning, stacklevel=2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # of the module itself, which the import has just replaced


def install() -> None:
    """Let old names be imported; once is enough."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # first: the path of `edits` would find its modules a second time
