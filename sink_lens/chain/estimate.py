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

from ..engine.cost import LIBRARIES, conversion, duration, free_bytes, runs_on_gpu, seconds_a_token, size
from ..errors import InputError
from ..models.bundled import files_of
from ..models.header import Header, Sized, check_fits, read_header
from ..models.memory import LOSS_CHUNK
from .config import PATH_CONTROLS, PATH_LENGTH, TraceConfig

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
_TOKENS_READ, _TOKENS_EDITED = 2048, 512
"""Tokens of a forward that measures, and of one under edits, on a CPU."""
_POINTS, _PATTERNS = 11, 6
"""Points of the screen, which are in one forward with gradients, and copies of their patterns in it."""
_SITES_BY_POSITION = 4
"""Sites of which sums by position are kept in double precision while a pass measures."""
_LESS = "need fewer sequences, a smaller type (--dtype bfloat16) or no interventions (--no-interventions)"
_NOT_INCLUDED = (
    "Not included: loading, a second measuring pass if the first looked at the wrong position, the bootstrap, the "
    "tables and the report (seconds)."
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
    return _of_header(header, path=path, config=config)


def _of_header(header: Header, *, path: Path, config: TraceConfig) -> RenderableType:
    """The estimate of a model whose headers were read."""
    gguf = path if path.suffix == ".gguf" else None
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
    weights, free = header.bytes_as(config.dtype), free_bytes()
    beside = bytes_beside(header, config, twin=weights * config.random_init)
    one_by_one = config.random_init and LIBRARIES + weights + beside > free
    if one_by_one:
        beside = bytes_beside(header, config)
    peak = LIBRARIES + weights + beside
    models = weights * (1 if one_by_one or not config.random_init else 2)
    memory = f"memory: about {size(peak)} at its peak, of which {size(models)} are weights"
    if config.random_init:
        memory += ", one model after the other" if one_by_one else " with the random-init baseline"
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if gguf is None and weights > 1.5 * stored:
        memory += f"; the weights take {size(stored)} in the checkpoint's own type (--dtype auto)"
    if peak > free:
        memory += f"; {size(free)} are free, so that the trace would be refused: {_LESS}"
    patterns = header.n_layers * header.n_heads * min(64, length) ** 2
    disk = f"disk: about {size(patterns + 8 * tokens + 2_000_000)}"
    return in_words(
        f"{gguf.name if gguf else config.model}: {sequences} sequences of up to {length} tokens, on the CPU",
        made,
        memory,
        disk,
        *filter(None, [conversion(header, path=path)]),
        f"Times come from the model's size, in the header of its files, and from the speed of a product of matrices "
        f"here and now, with {_STEPS} growth steps; expect a factor of 2. A model without a sink has no interventions. "
        f"{_NOT_INCLUDED}",
    )


def bytes_beside(model: Sized, config: TraceConfig, *, twin: int = 0) -> int:
    """Most memory that a trace on the CPU takes beside libraries and the model, in bytes.

    Args:
        model: the model, or its header.
        config: the question.
        twin: bytes of the weights of a random-init baseline that stands beside the model.
    """
    sequences = len(config.prompts) or config.sequences
    tokens, heads, keys = sequences * config.length, model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    a_layer = 4 * (10 * model.d_model + 4 * model.d_mlp + 6 * heads)
    logits = 4 * LOSS_CHUNK * model.d_vocab
    panel = 4 * _STEPS * tokens * (model.d_mlp + model.d_model)
    sums = 16 * _SITES_BY_POSITION * model.n_layers * min(64, config.length) * model.d_model
    measuring = sums + max(a_layer * min(tokens, _TOKENS_READ), logits) + (1 + config.random_init) * panel
    if not config.interventions:
        return twin + measuring
    few, short = min(config.intervention_sequences, sequences), min(config.intervention_length, config.length)
    chosen, a_value = min(config.choosing_sequences, sequences), 4 * short * model.n_layers
    kept = a_value * few * (6 * model.d_model + 3 * keys + 2 * heads + model.d_mlp)
    pattern = 16 * model.n_heads * min(_TOKENS_EDITED, few * short) * short
    edited = kept + max(a_layer * min(few * short, _TOKENS_EDITED) + pattern, logits)
    kept = a_value * (few * model.d_model + chosen * (3 * model.d_model + 2 * keys + heads + model.d_mlp))
    screened = kept + 4 * _PATTERNS * _POINTS * chosen * model.n_heads * short**2
    return max(twin + measuring, panel + max(screened, edited))


def check_room(model: Sized, config: TraceConfig) -> None:
    """Refuse a trace of a model in main memory that would not fit there.

    Raises:
        InputError: it would not, even with the random-init baseline in the model's place.
    """
    needed, free = bytes_beside(model, config), free_bytes()
    if needed > free:
        raise InputError(f"the trace takes about {size(needed)} beside the model and {size(free)} are free; {_LESS}")


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
