"""The metrics by name with options, as in a file, which is read without the libraries of models."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration import refuse_unread_fields
from ..errors import InputError
from ..models.sized import Sized
from .index_notation import axis_values

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.lens import LensModel
    from .metrics import Metric

Predictions = Callable[[], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric by its name and options, so that it can be written in a file."""

    name: str
    """A name of ``METRICS``, or MODULE:FUNCTION, which a sweep imports if it is asked to."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.options, Mapping):
            raise InputError(
                f"a metric is {self.name!r:.100} with the options {self.options!r:.100}; need a name and a mapping"
            )

    def make_metric(self, model: "LensModel", predictions: "Predictions | None" = None) -> "Metric":
        """Make the metric; ``predictions`` gives the baseline logits, with which ``kl`` compares."""
        from . import metrics

        self._known_options()
        given = {name: _READ[name](model, name, value) for name, value in self.options.items()}
        if self.name == "kl":
            if predictions is None:
                raise InputError(
                    "kl compares with the predictions of a baseline run; need what computes them"
                )
            return metrics.kl_to(predictions())
        return getattr(metrics, self.name)(**given)

    def last_layer(self, model: Sized) -> int | None:
        """Return the last layer that is read; None if anything after the layers is."""
        if ":" in self.name:
            return None
        known = self._known_options()
        if "layer" in known:
            return _read_layer(model, "layer", self.options["layer"])
        if "layers" not in known:
            return None
        return max(
            _read_layers(model, "layers", self.options.get("layers")) or range(model.n_layers)
        )

    def _known_options(self) -> tuple[str, ...]:
        if self.name not in METRICS:
            raise InputError(f"there is no metric {self.name!r}; need one of {', '.join(METRICS)}")
        known, needed = METRICS[self.name]
        unknown, missing = set(self.options) - set(known), set(needed) - set(self.options)
        if unknown or missing:
            raise InputError(
                f"the metric {self.name} takes {', '.join(known) or 'no options'} and needs "
                f"{', '.join(needed) or 'none'}; found {', '.join(self.options) or 'none'}"
            )
        return known


def _read_layers(model: Sized, name: str, given: Any) -> list[int] | None:
    values = axis_values(
        "all" if given is None else given, name=f"{name} of a metric", size=model.n_layers
    )
    return [layer for value in values if value is not None for layer in value] or None


def _read_layer(model: Sized, name: str, given: Any) -> int:
    found = _read_layers(model, f"{name}s", given)
    if found is None or len(found) != 1:
        raise InputError(f"the {name} of a metric is {given!r}; need one number")
    return found[0]


def _option_reader(kinds: Any, needs: str) -> Callable[[Sized, str, Any], Any]:
    """Make a function that returns an option's value if its type is one of ``kinds``; its error says ``needs``."""

    def read(model: Sized, name: str, given: Any) -> Any:
        if isinstance(given, bool) or not isinstance(given, kinds):
            raise InputError(f"{name} of a metric is {given!r}; need {needs}")
        return given

    return read


_WHOLE_NUMBER = _option_reader(int, "a whole number")
_ANSWER = _option_reader(
    str | int | Sequence, "an id, or the text of one token, or a list of these"
)
_READ: Mapping[str, Callable[[Any, str, Any], Any]] = {
    "sink_position": _WHOLE_NUMBER,
    "position": _WHOLE_NUMBER,
    "layers": _read_layers,
    "layer": _read_layer,
    "site": _option_reader(str, "a text"),
    "correct": _ANSWER,
    "incorrect": _ANSWER,
}
"""Option of a metric -> how it is read, on a model."""
METRICS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sink_mass": (("sink_position", "layers"), ()),
    "loss": ((), ()),
    "logit_difference": (("correct", "incorrect", "position"), ("correct", "incorrect")),
    "norm": (("sink_position", "layer", "site"), ("layer",)),
    "dominance": (("sink_position", "layer"), ("layer",)),
    "kl": ((), ()),
}
"""Function of ``metrics`` -> its options, and those that it needs; with a layer or layers it reads nothing after it."""


FIELDS: Mapping[str, frozenset[str]] = {
    "sink_position": frozenset({"sink_position"}),
    "metric_layers": frozenset({"layers", "layer"}),
    "correct": frozenset({"correct"}),
    "incorrect": frozenset({"incorrect"}),
}
"""Field of a configuration -> the options of a metric that it gives."""


def refuse_unread_metric_fields(config: Any, name: str) -> None:
    """Refuse fields that are set although the metric, ``name`` or an object (""), does not read them."""
    for one, options in FIELDS.items():
        readers = [other for other, (known, _) in METRICS.items() if options & set(known)]
        if name not in readers:
            refuse_unread_fields(
                config, one, reader=f"the metric by the name {' or '.join(readers)}"
            )


def metric_spec(config: Any, name: str) -> MetricSpec:
    """Make the specification of a metric from the fields of a configuration; refuse one that lacks what it needs."""
    layers, known = config.metric_layers, METRICS[name][0]
    if "layer" in known and (layers is None or len(layers) != 1):
        raise InputError(f"{name} is read at one layer; give it with metric_layers=...")
    given: dict[str, Any] = {
        "sink_position": config.sink_position,
        "layers": None if layers is None else list(layers),
        "layer": None if layers is None else layers[0],
    }
    for option in ("correct", "incorrect"):
        if option in known:
            if (answer := getattr(config, option)) is None:
                raise InputError(
                    f'{name} compares two tokens; need {option} (--{option}), such as " Paris"'
                )
            given[option] = answer
    return MetricSpec(
        name=name, options={one: given[one] for one in known if given.get(one) is not None}
    )


def import_metric(reference: str) -> Any:
    """Import the user's metric MODULE:FUNCTION; the current folder is searched last."""
    module, _, name = reference.partition(":")
    here = str(Path.cwd())
    added = [] if here in sys.path else [here]
    sys.path.extend(added)
    try:
        found = getattr(import_module(module), name, None)
    except (ImportError, ValueError, SyntaxError) as error:
        raise InputError(
            f"the metric {reference} cannot be imported ({type(error).__name__}: {error}); need MODULE:FUNCTION, with "
            "a module of this folder or an installed one"
        ) from None
    finally:
        for one in added:
            sys.path.remove(one)
    if found is None:
        raise InputError(
            f"{module} has no function {name!r}; need MODULE:FUNCTION, such as my_metrics:margin"
        )
    return found
