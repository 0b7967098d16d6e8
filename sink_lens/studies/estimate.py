"""Estimate what a study costs before it begins: its passes, their time and memory.

On the CPU time comes from the headers of the models' files and from the speed of one product of matrices, so that no
weights are loaded; on a GPU, where the headers do not say it all, ``timed_estimate`` loads it and times a pass.
"""

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from ..engine.cost import BACKWARD, about, conversion, peak_by_header, runs_on_gpu, seconds_a_token, size
from ..models.bundled import files_of
from ..models.header import check_fits, read_header
from ..patching.config import PatchConfig
from ..patching.estimate import passes_of_patches
from .config import (
    MOST_IN_SET,
    AblateConfig,
    AmplifyConfig,
    CardConfig,
    IsolateConfig,
    QuantiseConfig,
)
from .tokens_config import TokensConfig

Estimable = AblateConfig | AmplifyConfig | CardConfig | IsolateConfig | QuantiseConfig | TokensConfig
"""Configurations of the studies whose cost is estimated from one pass."""
_LAYERS_OF_STEPS = 2
"""Layers of growth steps that are read one by one; a model may have more."""
_WITHOUT_OUTLIERS = 3
"""Passes of a card of a model without growth steps and outlier dimensions."""
_CLEAN = 4
"""Passes that read the neurons which ``ablate`` ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCost:
    """Estimated cost of a study."""

    passes: float
    """Most passes over all sequences."""
    tokens: int
    """Tokens of them all."""
    seconds: float
    bytes_peak: int
    """Peak memory of the process."""
    is_timed: bool = True
    """True if a pass was timed, False if the time is reckoned from the headers."""
    before: str = ""
    """Sentence on the conversion of GGUF files, which comes before the first pass; empty if there is none."""


def most_passes(config: Estimable) -> float:
    """The most passes over all its sequences that a study makes; studies that decide judge on half of them."""
    if isinstance(config, TokensConfig):
        return 1 + BACKWARD * min(config.gradient_sequences, config.sequences) / config.sequences
    if isinstance(config, QuantiseConfig):
        sets = 1 + 2 * len(config.channels)
        return 4 + sets + 0.5 + config.controls / 2  # sinks, clean, weights, all rounded; the channels, on half
    if isinstance(config, CardConfig) and config.compares:
        return 2 * (1 + _LAYERS_OF_STEPS)  # each model: read
    if isinstance(config, CardConfig):
        return 4 + _LAYERS_OF_STEPS  # read, BOS, two edits; another position than the first takes one more
    if isinstance(config, AblateConfig):
        ways = 6 + 2 * MOST_IN_SET + 2 * config.controls  # the set in every way, alone and left out, random sets
        return 3 + _CLEAN + MOST_IN_SET + ways
    edited = 1 if isinstance(config, IsolateConfig) else len(config.factors) * len(config.centres)
    return 3 + edited  # two to find the sink, the baseline run


def estimate(config: Estimable | PatchConfig) -> RenderableType:
    """The cost of a study in words.

    Raises:
        ModelError, InputError: what the study would refuse before it measures, as far as it is known.
    """
    cost = _cost_by_header(config)
    if cost is None:
        from .timed_estimate import timed_cost

        cost = timed_cost(config)
    sequences = len(config.clean) if isinstance(config, PatchConfig) else config.sequences
    most = "at most"
    if isinstance(config, AblateConfig | CardConfig | PatchConfig):
        most = "about"
    less = ""
    if isinstance(config, CardConfig) and not config.compares:
        less = f" ({_WITHOUT_OUTLIERS} without outlier dimensions)"
    source = "one timed pass" if cost.is_timed else "the model's size and the speed of a product of matrices"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("passes", f"{most} {cost.passes:.4g} over all {sequences} sequences, {cost.tokens:,} tokens{less}"),
        ("time", f"{about(cost.seconds)}, from {source}; loading, tables and the page apart"),
        ("memory", f"about {size(cost.bytes_peak)} at its peak, with libraries and one pass"),
        ("before", cost.before),
    ):
        if value:
            table.add_row(name, value)
    return table


def _cost_by_header(config: Estimable | PatchConfig) -> StudyCost | None:
    """The cost of a study on the CPU, by the headers of its models' files; None where it takes the model itself."""
    if getattr(config, "device_map", None) or runs_on_gpu(config.device):
        return None
    if isinstance(config, PatchConfig):
        return _cost_of_patches(config)
    names = [config.model]
    if isinstance(config, CardConfig):
        names += config.others or ([config.model] if config.by == "dtype" else [])
    paths = [files_of(name) for name in names]
    read = {path: header for path in paths if path is not None and (header := read_header(path)) is not None}
    if not set(paths) <= read.keys():
        return None
    found = [read[path] for path in paths if path is not None]
    check_fits(found[0], config)
    passes, of_a_pass = most_passes(config), (len(config.prompts) or config.sequences) * config.length
    tokens = round(passes * of_a_pass)
    return StudyCost(
        passes=passes,
        tokens=tokens,
        seconds=tokens * sum(map(seconds_a_token, found)) / len(found),
        bytes_peak=peak_by_header(found[0], weights=sum(one.bytes_as(config.dtype) for one in found), tokens=of_a_pass),
        is_timed=False,
        before="; ".join(filter(None, (conversion(header, path=path) for path, header in read.items()))),
    )


def _cost_of_patches(config: PatchConfig) -> StudyCost | None:
    """The cost of ``patch`` on the CPU; None where it takes the model itself."""
    path = files_of(config.model)
    header = path and read_header(path)
    if path is None or header is None:
        return None
    found = passes_of_patches(config, header, path=path)
    if found is None:
        return None
    passes, tokens = found
    return StudyCost(
        passes=passes,
        tokens=round(passes * tokens),
        seconds=passes * tokens * seconds_a_token(header),
        bytes_peak=peak_by_header(header, weights=header.bytes_as(config.dtype), tokens=round(passes * tokens)),
        before=conversion(header, path=path),
        is_timed=False,
    )
