"""The metric that a configuration names."""

from ..data.bos import single_id
from ..edits import metrics
from ..edits.metrics import Metric
from ..engine.forward import run_with
from ..errors import InputError
from ..models.lens import LensModel
from .config import PatchConfig
from .pairs import PromptPair


def named_metric(lens: LensModel, pair: PromptPair, *, config: PatchConfig) -> Metric:
    """The metric that ``config.metric`` names, on the tokens of a pair.

    Raises:
        InputError: a layer or token that the metric needs was not given.
    """
    position, layers = config.sink_position, config.metric_layers
    match config.metric:
        case "sink_mass":
            return metrics.sink_mass(position, layers=layers)
        case "loss":
            return metrics.loss()
        case "kl":
            logits = run_with(lens, pair.clean, layers=(0,), loss=False, logits=True).logits
            assert logits is not None
            return metrics.kl_to(logits)
        case "logit_difference":
            return metrics.logit_difference(
                _token(lens, config.correct, option="correct"), _token(lens, config.incorrect, option="incorrect")
            )
    if layers is None or len(layers) != 1:
        raise InputError(f"{config.metric} is read at one layer; give it with --metric-layers N")
    read = metrics.norm if config.metric == "norm" else metrics.dominance
    return read(position, layer=layers[0])


def _token(lens: LensModel, text: str | None, *, option: str) -> int:
    if text is None:
        raise InputError(f'logit_difference compares two tokens; give --{option} TEXT, such as --{option} " Paris"')
    if lens.tokenizer is None:
        raise InputError(f"{lens.name} has no tokenizer; need one for --{option}, or metrics.logit_difference(7, 8)")
    return single_id(text, lens.tokenizer, what=f"--{option}")
