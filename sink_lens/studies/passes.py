"""Count the passes that a study makes of its models, without torch."""

from ..estimate import Pass, Passes, Sizes, bytes_of_forward
from ..models.header import check_fits
from .config import MOST_IN_SET, AblateConfig, AmplifyConfig, CardConfig, IsolateConfig, QuantiseConfig
from .tokens_config import TokensConfig

_LAYERS_OF_STEPS = 2
"""Layers of growth steps that are read one by one; a model may have more."""
_WITHOUT_OUTLIERS = 3
"""Passes of a card of a model without growth steps and outlier dimensions."""
_CLEAN = 4
"""Passes that read the neurons which ``ablate`` ranks."""

StudyConfig = AblateConfig | AmplifyConfig | CardConfig | IsolateConfig | QuantiseConfig | TokensConfig


def passes(config: StudyConfig, sizes: Sizes) -> Passes:
    """Count the most passes over all its sequences that a study makes; studies that decide judge on half of them.

    Raises:
        InputError: sequences that the model cannot take.
    """
    check_fits(sizes.header, config)
    tokens = (len(config.prompts) or config.sequences) * config.length
    is_card = isinstance(config, CardConfig)
    return Passes(
        parts=(Pass(forwards=_forwards(config), backwards=_backwards(config), tokens=tokens),),
        sequences=len(config.prompts) or config.sequences,
        positions=config.length,
        bytes=bytes_of_forward(sizes.header, tokens=tokens),
        bound="about" if isinstance(config, AblateConfig | CardConfig) else "at most",
        facts={"fewest passes": f"{_WITHOUT_OUTLIERS} without outlier dimensions"}
        if is_card and not config.compares
        else {},
        others=(config.others or (config.model,) * (config.by == "dtype")) if is_card else (),
    )


def _forwards(config: StudyConfig) -> float:
    """Count the forward passes of a study over all its sequences."""
    match config:
        case TokensConfig():
            return 1
        case QuantiseConfig():  # sinks, clean, weights, all rounded; the channels, on half
            return 4 + 1 + 2 * len(config.channels) + 0.5 + config.controls / 2
        case CardConfig():  # each of two: read; one: read, BOS, two edits, and one more if its sink is not at 0
            return 2 * (1 + _LAYERS_OF_STEPS) if config.compares else 4 + _LAYERS_OF_STEPS
        case AblateConfig():  # the set in every way, alone and left out, random sets
            return 3 + _CLEAN + MOST_IN_SET + 6 + 2 * MOST_IN_SET + 2 * config.controls
        case AmplifyConfig():
            return 3 + len(config.factors) * len(config.centres)
        case IsolateConfig():
            return 3 + 1  # two to find the sink, the baseline run


def _backwards(config: StudyConfig) -> float:
    """Count the backward passes of a study, as shares of all its sequences."""
    return (
        min(config.gradient_sequences, config.sequences) / config.sequences if isinstance(config, TokensConfig) else 0
    )
