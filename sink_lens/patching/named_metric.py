"""The metric that a configuration names, of the registry that sweeps read too."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from ..configuration import check_unread
from ..edits.named_metrics import METRICS, MetricSpec
from ..errors import InputError
from .config import MetricName, PatchConfig

if TYPE_CHECKING:
    from ..edits.metrics import Metric
    from ..models.lens import LensModel
    from .pairs import PromptPair

_OPTIONS = {
    "sink_position": {"sink_position"},
    "metric_layers": {"layers", "layer"},
    "correct": {"correct"},
    "incorrect": {"incorrect"},
}
"""Field -> the options of a metric that it gives."""


def named_metric(lens: "LensModel", pair: "PromptPair", *, config: PatchConfig) -> "Metric":
    """The metric that ``config.metric`` names, on the tokens of a pair.

    Raises:
        InputError: a layer or token that the metric needs was not given.
    """
    from ..engine.forward import predictions

    return spec_of(config, token=partial(_token, lens)).metric(lens, partial(predictions, lens, pair.clean))


def spec_of(config: PatchConfig, *, token: Callable[..., int | str] = lambda text, *, option: 0) -> MetricSpec:
    """The metric that ``config.metric`` names, with its options.

    Args:
        config: what is patched.
        token: gives the text or id of an option's text; without it every text has the id 0.

    Raises:
        InputError: a layer or token that the metric needs was not given.
    """
    name, layers = config.metric, config.metric_layers
    if "layer" in METRICS[name][1] and (layers is None or len(layers) != 1):
        raise InputError(f"{name} is read at one layer; give it with --metric-layers N")
    given: dict[str, Any] = {
        "sink_position": config.sink_position,
        "layers": None if layers is None else list(layers),
        "layer": None if layers is None else layers[0],
    }
    for option in ("correct", "incorrect"):
        if option in METRICS[name][1]:
            if (text := getattr(config, option)) is None:
                raise InputError(f'{name} compares two tokens; give --{option} TEXT, such as --{option} " Paris"')
            given[option] = token(text, option=option)
    _check_unread(config)
    options = {option: given[option] for option in METRICS[name][1] if given.get(option) is not None}
    return MetricSpec(name=name, options=options)


def _check_unread(config: PatchConfig) -> None:
    for name, options in _OPTIONS.items():
        readers = [one for one in get_args(MetricName) if options & set(METRICS[one][1])]
        if config.metric not in readers:
            check_unread(config, name, reader=f"metric {' and '.join(readers)}")


def _token(lens: "LensModel", text: str, *, option: str) -> str:
    """The text that an option gives, which is a token behind the prompts."""
    if lens.tokenizer is None:
        raise InputError(f"{lens.name} has no tokenizer; need one for --{option}, or metrics.logit_difference(7, 8)")
    return text
