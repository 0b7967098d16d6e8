"""Estimate what a study costs before it begins: its passes, their time (from one timed pass) and memory."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from ..activations.forward import check_tokens
from ..engine.cost import duration, operations_a_second, peak_bytes, seconds_of, size
from ..engine.forward import run_with
from ..models.bundled import unconverted_file
from ..models.conversion import read_header
from ..models.inputs import model_of, tokens_of
from ..models.load import load
from ..patching.activation import measured_run, swept
from ..patching.config import PatchConfig
from .comparison import second_of
from .config import (
    AblateConfig,
    AmplifyConfig,
    CardConfig,
    DiffConfig,
    IsolateConfig,
    QuantiseConfig,
    StreamingConfig,
    VerifyConfig,
)
from .neuron_sets import MOST
from .tokens_config import TokensConfig
from .verification import facts_about

Estimable = (
    AblateConfig
    | AmplifyConfig
    | CardConfig
    | DiffConfig
    | IsolateConfig
    | QuantiseConfig
    | StreamingConfig
    | TokensConfig
    | VerifyConfig
)
"""Configurations of the studies whose cost is estimated from one pass."""
_LIBRARIES = 650_000_000
"""Bytes that the imported libraries take."""
_TIMED = 8
"""Most sequences of the timed pass."""
_INPUT_SETS = 6
"""Sets of whole linear inputs that ``quantise`` tries."""
_BACKWARD = 3
"""Passes that a forward and a backward count as."""
_LAYERS_OF_STEPS = 2
"""Layers of growth steps that are read one by one; a model may have more."""
_CLEAN = 4
"""Passes that read the neurons which ``ablate`` ranks."""
_COMPARED = 30
"""Forwards that compare a plan of patches with the bridge, where several plans are tried."""


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
    is_timed: bool = True
    """Whether a pass was timed; a GGUF file that is not converted yet has its header alone."""


def most_passes(config: Estimable) -> float:
    """The most passes over all its sequences that a study makes; studies that decide judge on half of them.

    For ``verify`` it counts the passes for each fact that is measured.
    """
    if isinstance(config, TokensConfig):
        return 1 + _BACKWARD * min(config.gradient_sequences, config.sequences) / config.sequences
    if isinstance(config, QuantiseConfig):
        sets = 1 + 2 * len(config.channels) + _INPUT_SETS
        return 4 + sets + 0.5 + config.controls / 2  # sinks, clean, weights, all rounded; the noise, on half
    if isinstance(config, StreamingConfig):
        return 3 + len(config.keep) + config.controls / 2  # sinks, no limit, the sink tokens kept
    if isinstance(config, CardConfig):
        return 5 + _LAYERS_OF_STEPS  # read, another position, BOS, two edits
    if isinstance(config, DiffConfig):
        return 2 * (1 + _LAYERS_OF_STEPS)  # each model: read
    if isinstance(config, AblateConfig):
        ways = 6 + 2 * MOST + 2 * config.controls  # the set in every way, alone and left out, random sets
        return 3 + _CLEAN + MOST + ways
    if isinstance(config, VerifyConfig):
        return 2  # the sequences of its condition, and an edit or a site of its own
    edited = 1 if isinstance(config, IsolateConfig) else len(config.factors) * len(config.centres)
    return 3 + edited  # two to find the sink, the clean run


def cost_of(config: Estimable) -> StudyCost:
    """The cost of a study; loads the model and times one pass over a few sequences.

    Raises:
        ModelError, InputError: what the study would refuse before it measures.
    """
    gguf = unconverted_file(config.model)
    if gguf is not None and not isinstance(config, VerifyConfig | DiffConfig):  # these read the models themselves
        return _of_header(gguf, config)
    lens = model_of(config)
    batch = tokens_of(lens, config=config, bos=config.bos)
    check_tokens(lens, batch)
    few = batch[:_TIMED]
    other = None  # held beside the first, for the peak of memory
    if isinstance(config, DiffConfig) and not (config.by == "bos" and config.other is None):
        other = second_of(lens, config, None)
    seconds = seconds_of(lambda: run_with(other or lens, few, layers=[0], quiet=True), device=lens.device, warm_up=1)
    passes = most_passes(config)
    if isinstance(config, VerifyConfig):
        passes *= sum(fact.quantity is not None for fact in facts_about(lens, config)[0])
    return StudyCost(
        passes=passes,
        tokens=round(passes * batch.tokens.numel()),
        seconds=passes * seconds * batch.n_sequences / few.n_sequences,
        bytes_peak=peak_bytes(lens.device),
    )


def _of_header(gguf: Path, config: Estimable) -> StudyCost:
    """The cost on a GGUF file that was not converted yet, by its header: operations, not a timed pass."""
    header, passes = read_header(gguf), most_passes(config)
    tokens = round(passes * (len(config.prompts) or config.sequences) * config.length)
    return StudyCost(
        passes=passes,
        tokens=tokens,
        seconds=tokens * 2 * (header.n_body + header.n_vocab) / operations_a_second(),
        bytes_peak=_LIBRARIES + header.weight_bytes + 3 * 4 * header.d_vocab * config.length,
        is_timed=False,
    )


def cost_of_patches(config: PatchConfig) -> StudyCost:
    """The cost of ``patch``; runs both sequences, so that cells with equal values are not counted.

    Several patches share a forward and begin at their own layer, so that the time is too much for
    many patches.

    Raises:
        ModelError, SiteError, InputError: what ``patch`` would refuse before it measures.
    """
    lens = load(config.model, device=config.device, dtype=config.dtype)
    sweep, grid, _ = swept(lens, None, None, metric=None, config=config)
    patches = sum(sweep.changes(cell) for cell in grid)
    passes = 4 + _COMPARED  # the site and the metric, of both runs
    if config.approximate or config.screen:
        passes += _BACKWARD * config.steps
        patches = min(patches, config.check if config.approximate else config.screen)
    passes += patches
    seconds = seconds_of(lambda: measured_run(lens, sweep.run, metric=sweep.metric), device=lens.device, warm_up=1)
    return StudyCost(
        passes=passes,
        tokens=passes * sweep.run.tokens.numel(),
        seconds=passes * seconds,
        bytes_peak=peak_bytes(lens.device),
    )


def estimate(config: Estimable | PatchConfig) -> RenderableType:
    """The cost of a study in words.

    Raises:
        ModelError, InputError: what the study would refuse before it measures.
    """
    if isinstance(config, PatchConfig):
        cost, sequences = cost_of_patches(config), len(config.clean)
    else:
        cost, sequences = cost_of(config), config.sequences
    most = "at most"
    if isinstance(config, AblateConfig | CardConfig | DiffConfig | PatchConfig | VerifyConfig):
        most = "about"
    source = "one timed pass" if cost.is_timed else "the operations that the GGUF file's header tells"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("passes", f"{most} {cost.passes:.4g} over all {sequences} sequences, {cost.tokens:,} tokens"),
        ("time", f"about {duration(cost.seconds)}, from {source}; loading, tables and the page apart"),
        ("memory", f"about {size(cost.bytes_peak)} at its peak, with libraries and one pass"),
    ):
        table.add_row(name, value)
    return table
