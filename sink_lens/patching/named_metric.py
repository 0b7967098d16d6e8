"""The metric that a configuration names, of the registry that sweeps read too."""

from typing import Any

from ..edits.metrics import Metric, single_token
from ..engine.named_metrics import METRICS, MetricSpec
from ..errors import InputError
from ..models.lens import LensModel
from .config import PatchConfig
from .pairs import PromptPair


def named_metric(lens: LensModel, pair: PromptPair, *, config: PatchConfig) -> Metric:
    """The metric that ``config.metric`` names, on the tokens of a pair.

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
            given[option] = _token(lens, getattr(config, option), option=option)
    options = {option: given[option] for option in METRICS[name][1] if given.get(option) is not None}
    return MetricSpec(name=name, options=options).metric(lens, pair.clean)


def _token(lens: LensModel, text: str | None, *, option: str) -> int:
    if text is None:
        raise InputError(f'logit_difference compares two tokens; give --{option} TEXT, such as --{option} " Paris"')
    if lens.tokenizer is None:
        raise InputError(f"{lens.name} has no tokenizer; need one for --{option}, or metrics.logit_difference(7, 8)")
    return single_token(text, lens.tokenizer, what=f"--{option}")
