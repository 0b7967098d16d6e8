"""The metrics that sweeps and patches read: by name with options, as in a file, or your own functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from inspect import unwrap
from typing import Any

import torch

from ..data.batch import TokenBatch
from ..edits import metrics as of
from ..edits.metrics import Metric
from ..edits.outcome import Outcome
from ..errors import InputError
from ..models.lens import LensModel
from .forward import run_with
from .index_notation import values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric by its name and options, so that it can be written in a file and sent to another machine."""

    name: str
    """A name of ``METRICS``."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no name with options.

        Raises:
            InputError: the name is no text, or the options are no mapping.
        """
        if not isinstance(self.name, str) or not isinstance(self.options, Mapping):
            raise InputError(
                f"a metric is {self.name!r:.100} with the options {self.options!r:.100}; need a name and a mapping"
            )

    def metric(self, lens: LensModel, tokens: TokenBatch | None = None) -> Metric:
        """The metric on a model; ``kl`` compares with the baseline run of the tokens.

        Raises:
            InputError: there is no such metric, or an option is unknown, missing, or cannot be used.
        """
        if self.name not in METRICS:
            raise InputError(f"there is no metric {self.name!r}; need one of {', '.join(METRICS)}")
        make, known, needed = METRICS[self.name]
        unknown, missing = set(self.options) - set(known), set(needed) - set(self.options)
        if unknown or missing:
            raise InputError(
                f"the metric {self.name} takes {', '.join(known) or 'no options'} and needs "
                f"{', '.join(needed) or 'none'}; found {', '.join(self.options) or 'none'}"
            )
        return make(lens, self.options, tokens)


def _layers(lens: LensModel, given: Any) -> list[int] | None:
    values = values_of("all" if given is None else given, name="layers of a metric", size=lens.n_layers)
    found = [layer for value in values if value is not None for layer in value]
    return found or None


def _layer(lens: LensModel, options: Mapping[str, Any]) -> int:
    found = _layers(lens, options["layer"])
    if found is None or len(found) != 1:
        raise InputError(f"the layer of a metric is {options['layer']!r}; need one number")
    return found[0]


def _site(options: Mapping[str, Any]) -> str:
    texts(options, ("site",), where="a metric")
    return options.get("site", "resid_post")


def _kl(lens: LensModel, options: Mapping[str, Any], tokens: TokenBatch | None) -> Metric:
    if tokens is None:
        raise InputError("kl compares with the predictions of a baseline run; need its tokens")
    logits = run_with(lens, tokens, layers=(0,), loss=False, logits=True).logits
    assert logits is not None  # they were asked for
    return of.kl_to(logits)


_Make = Callable[[LensModel, Mapping[str, Any], TokenBatch | None], Metric]
METRICS: Mapping[str, tuple[_Make, tuple[str, ...], tuple[str, ...]]] = {
    "sink_mass": (
        lambda lens, options, tokens: of.sink_mass(
            whole(options, "sink_position", 0), layers=_layers(lens, options.get("layers"))
        ),
        ("sink_position", "layers"),
        (),
    ),
    "loss": (lambda lens, options, tokens: of.loss(), (), ()),
    "logit_difference": (
        lambda lens, options, tokens: of.logit_difference(
            of.single_token(options["correct"], lens.tokenizer),
            of.single_token(options["incorrect"], lens.tokenizer),
            position=whole(options, "position", -1),
        ),
        ("correct", "incorrect", "position"),
        ("correct", "incorrect"),
    ),
    "norm": (
        lambda lens, options, tokens: of.norm(
            whole(options, "sink_position", 0), layer=_layer(lens, options), site=_site(options)
        ),
        ("sink_position", "layer", "site"),
        ("layer",),
    ),
    "dominance": (
        lambda lens, options, tokens: of.dominance(whole(options, "sink_position", 0), layer=_layer(lens, options)),
        ("sink_position", "layer"),
        ("layer",),
    ),
    "kl": (_kl, (), ()),
}
"""Name -> how it is made, its options, and those that it needs."""


Measured = MetricSpec | Metric | Callable[[Outcome], Any]
"""What a sweep can be asked to read: a metric by name, a metric, or a function of an ``Outcome``."""


def metrics_on(given: Sequence[Measured], lens: LensModel, *, tokens: TokenBatch) -> list[Metric]:
    """The metrics on a model; where two of one kind would have one name, each is named with its options.

    Raises:
        InputError: one that cannot be used, or two that are the same.
    """
    made = [one.metric(lens, tokens) if isinstance(one, MetricSpec) else one for one in given]
    found = [of.as_metric(one, lens=lens, n_positions=tokens.n_positions) for one in made]
    names = [one.name for one in found]
    for index, one in enumerate(given):
        if isinstance(one, MetricSpec) and one.options and names.count(names[index]) > 1:
            options = ", ".join(f"{name} {value}" for name, value in one.options.items())
            found[index] = replace(found[index], name=f"{names[index]} ({options})")
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise InputError(f"two metrics have one name: {', '.join(names)}; need different ones")
    return found


def metric_config(metric: Measured) -> dict[str, Any]:
    """A metric as plain values, for ``run.json``."""
    if isinstance(metric, MetricSpec):
        return {"name": metric.name, **metric.options}
    if not isinstance(metric, Metric):
        return {"name": getattr(metric, "__name__", "metric"), "holds": _holds(metric)}
    found = {part.name: getattr(metric, part.name) for part in fields(metric) if part.name != "function"}
    return found | {"holds": _holds(metric.function)}


def _holds(function: Callable[..., Any]) -> dict[str, Any]:
    """The numbers, texts and tensors (as hashes) that a function was made with, such as the tokens of a difference."""
    found: dict[str, Any] = {}
    inner = unwrap(function)
    names = getattr(getattr(inner, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(inner, "__closure__", None) or (), strict=False):
        value = cell.cell_contents
        if isinstance(value, torch.Tensor):
            whole = value.detach().cpu().contiguous()
            found[name] = sha256(whole.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        elif _is_plain(value):
            found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, str | int | float)


def whole(options: Mapping[str, Any], name: str, default: int, *, where: str = "a metric") -> int:
    """Read a whole number by its name.

    Raises:
        InputError: the value is not a whole number.
    """
    found = options.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int):
        raise InputError(f"{name} of {where} is {found!r}; need a whole number")
    return found


def texts(given: Mapping[str, Any], names: Sequence[str], *, where: str) -> None:
    """Refuse values that are given but are not text.

    Raises:
        InputError: a value is not text; the message names it.
    """
    for name in names:
        if name in given and not isinstance(given[name], str):
            raise InputError(f"{name} of {where} is {given[name]!r}; need a text")
