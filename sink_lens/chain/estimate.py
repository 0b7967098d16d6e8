"""Estimate what a trace costs: forward passes, their time, memory and disk.

On the CPU everything comes from the headers of the model's files and from the speed of one product of matrices, so
that no weights are loaded; on a GPU, or where the headers do not say it all, ``timed_estimate`` loads the model and
times a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..engine.cost import duration, peak_by_header, runs_on_gpu, seconds_a_token, size
from ..models.bundled import files_of
from ..models.header import Header, check_fits, read_header
from .config import LOSS_CHUNK, PATH_CONTROLS, PATH_LENGTH, TraceConfig

_PASSES_OF_LINKS, _PASSES_A_STEP = 30, 4
"""Whole passes over the interventions' sequences: for links, curve and placement, and for a step's mediation."""
_PASSES_OF_SETS, _PASSES_A_CONTROL, _CONTROLS_A_STEP = 20, 5, 15
"""The same over the controls' sequences: for random sets, for each draw of all links, and for a step's mediation."""
_PASSES_OF_MAKERS = 45
"""The same over the sequences on which makers are chosen."""
_PATHS, _PATHS_A_STEP, _CONTROLLED = 4, 16, 0.5
"""Paths, those that each step brings, and the share of them that has controls."""
_STREAMED, _STEPS = 2.0, 2
"""The measuring pass over a plain one, and growth steps, for what the headers do not tell."""
_NOT_INCLUDED = (
    "Not included: loading, converting a GGUF file on first use, a second measuring pass where the first was aimed "
    "wrong, the bootstrap, the tables and the report (seconds)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over tokens."""

    name: str
    tokens: int
    seconds: float


def estimate(config: TraceConfig) -> RenderableType:
    """Estimate the cost of ``trace`` with this configuration, in words.

    Raises:
        ModelError, InputError, KernelError: what ``trace`` would refuse before it measures, as far as it is known.
    """
    path = None if config.device_map or runs_on_gpu(config.device) else files_of(config.model)
    header = path and read_header(path)
    if path is None or header is None:
        from .timed_estimate import timed_estimate

        return timed_estimate(config)
    check_fits(header, config)
    return _of_header(header, gguf=path if path.suffix == ".gguf" else None, config=config)


def _of_header(header: Header, *, gguf: Path | None, config: TraceConfig) -> RenderableType:
    sequences, length = len(config.prompts) or config.sequences, config.length
    tokens, scouted = sequences * length, 2 * min(sequences, 8) * min(length, 64)
    one = seconds_a_token(header)
    passes = [("scout", scouted, 1.0), ("measure", tokens, _STREAMED)]
    if header.has_tokenizer:
        passes.append(("the other BOS condition", scouted + tokens, 1.0))
    if config.random_init:
        passes.append(("random-init baseline", tokens, _STREAMED))
    if config.interventions:
        few, short = min(config.intervention_sequences, sequences), min(config.intervention_length, length)
        number = whole_passes(config, few=few, sequences=sequences, positions=short, steps=_STEPS)
        passes.append(("interventions", number * short, 1.0))
    made = [Pass(name=name, tokens=count, seconds=count * factor * one) for name, count, factor in passes]
    models = header.bytes_as(config.dtype) * (2 if config.random_init else 1)
    peak = peak_by_header(header, weights=models, tokens=tokens if config.interventions else min(LOSS_CHUNK, tokens))
    patterns = header.n_layers * header.n_heads * min(64, length) ** 2
    disk = f"disk: about {size(patterns + 8 * tokens + 2_000_000)}"
    if gguf is not None:
        disk += f", and {size(header.weight_bytes)} in the cache once, for the file that the first command converts"
    return in_words(
        f"{gguf.name if gguf else config.model}: {sequences} sequences of up to {length} tokens, on the CPU",
        made,
        f"memory: about {size(peak)} at its peak, of which {size(models)} are weights"
        f"{' with the random-init baseline' if config.random_init else ''}",
        disk,
        f"Times come from the model's size, in the header of its files, and from the speed of a product of matrices "
        f"here and now, with {_STEPS} growth steps; expect a factor of 2. {_NOT_INCLUDED}",
    )


def in_words(title: str, passes: Sequence[Pass], *lines: str) -> RenderableType:
    """Passes as a table, with lines under it."""
    table = Table(title="Passes", title_justify="left")
    table.add_column("pass")
    table.add_column("tokens", justify="right")
    table.add_column("time", justify="right")
    for one in passes:
        table.add_row(one.name, f"{one.tokens:,}", duration(one.seconds))
    seconds = sum(one.seconds for one in passes)
    table.add_row("in all", f"{sum(one.tokens for one in passes):,}", duration(seconds), style="bold")
    return Group(Text(title, style="bold"), table, *(Text(line) for line in lines))


def whole_passes(
    config: TraceConfig, *, few: int, sequences: int, positions: int, steps: int, sink_position: int = 0
) -> int:
    """Count whole passes of the interventions, over one sequence each."""
    number = few * (_PASSES_OF_LINKS + _PASSES_A_STEP * steps)
    of_controls = _PASSES_OF_SETS + _PASSES_A_CONTROL * config.controls + _CONTROLS_A_STEP * steps
    number += min(config.control_sequences, few) * of_controls
    number += min(config.choosing_sequences, sequences) * _PASSES_OF_MAKERS
    several = few + _CONTROLLED * PATH_CONTROLS * min(config.control_sequences, few)
    shorter = min(1.0, (sink_position + PATH_LENGTH) / positions)
    return number + round(shorter * several * (_PATHS + _PATHS_A_STEP * steps))
