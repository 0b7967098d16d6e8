"""Estimate what a study costs before it begins: its passes, their time (from one timed pass) and memory."""

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from ..activations.forward import check_tokens
from ..engine.cost import duration, peak_bytes, seconds_of, size
from ..engine.forward import run_with
from ..models.inputs import model_of, tokens_of
from .config import AmplifyConfig, IsolateConfig, QuantiseConfig, StreamingConfig
from .decision import rows_of
from .tokens_config import TokensConfig

Estimable = AmplifyConfig | IsolateConfig | QuantiseConfig | StreamingConfig | TokensConfig
"""Configurations of the studies whose passes are known before they begin."""
_TIMED = 8
"""Most sequences of the timed pass."""
_INPUT_SETS = 6
"""Sets of whole linear inputs that ``quantise`` tries."""
_BACKWARD = 3
"""Passes that a forward and a backward count as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCost:
    """Estimated cost of a study."""

    passes: float
    """Most passes over all sequences."""
    tokens: int
    """Tokens of them all."""
    seconds: float
    bytes_peak: int
    """Peak memory of this process, which held the weights and the timed pass."""


def most_passes(config: Estimable) -> float:
    """The most passes over all its sequences that a study makes; studies that decide judge on half of them."""
    if isinstance(config, TokensConfig):
        return 1 + _BACKWARD * min(config.gradient_sequences, config.sequences) / config.sequences
    if isinstance(config, QuantiseConfig):
        sets = 1 + 2 * len(config.channels) + _INPUT_SETS
        return 4 + sets + 0.5 + config.controls / 2  # sinks, clean, weights, all rounded; the noise, on half
    if isinstance(config, StreamingConfig):
        return 3 + len(config.keep) + config.controls / 2  # sinks, no limit, the sink tokens kept
    edited = 1 if isinstance(config, IsolateConfig) else len(config.factors) * len(config.centres)
    return 3 + edited  # two to find the sink, the clean run


def cost_of(config: Estimable) -> StudyCost:
    """The cost of a study; loads the model and times one pass over a few sequences.

    Raises:
        ModelError, InputError: what the study would refuse before it measures.
    """
    lens = model_of(config)
    batch = tokens_of(lens, config=config, bos=config.bos)
    check_tokens(lens, batch)
    few = rows_of(batch, slice(0, _TIMED))
    seconds = seconds_of(lambda: run_with(lens, few, layers=[0], quiet=True), device=lens.device, warm_up=1)
    passes = most_passes(config)
    return StudyCost(
        passes=passes,
        tokens=round(passes * batch.tokens.numel()),
        seconds=passes * seconds * batch.n_sequences / few.n_sequences,
        bytes_peak=peak_bytes(lens.device),
    )


def estimate(config: Estimable) -> RenderableType:
    """The cost of a study in words.

    Raises:
        ModelError, InputError: what the study would refuse before it measures.
    """
    cost = cost_of(config)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("passes", f"at most {cost.passes:.3g} over all {config.sequences} sequences, {cost.tokens:,} tokens"),
        ("time", f"about {duration(cost.seconds)}, from one timed pass; loading, tables and the page apart"),
        ("memory", f"about {size(cost.bytes_peak)} at its peak, with libraries and one pass"),
    ):
        table.add_row(name, value)
    return table
