"""Estimate what a trace costs: forward passes, their time (from one timed forward), memory and disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..activations.attention import choose_kernel
from ..activations.forward import check_tokens
from ..activations.record import sequences_a_forward
from ..data.tokens import TokenBatch
from ..engine.cost import duration, now, operations_a_second, peak_bytes, seconds_of, size, weight_bytes
from ..engine.forward import run_with
from ..models.bundled import unconverted_file
from ..models.conversion import read_header
from ..models.inputs import model_of, tokens_of
from ..models.lens import LensModel, check_every_layer
from .config import TraceConfig
from .inputs import other_condition
from .links import LINKS
from .locate import Location
from .measure import CONDITION_READINGS, Panel, measure, scout
from .paths import DRAWS, LENGTH
from .readings import LOSS_CHUNK, SITES_BY_POSITION
from .setting import segments, why_no_interventions

_LONGEST_SAMPLE = 2048
_BYTES_A_NEURON_ROW = 64
_PASSES_OF_LINKS, _PASSES_A_STEP = 30, 4
"""Whole passes over the interventions' sequences: for links, curve and placement, and for a step's mediation."""
_PASSES_OF_SETS, _PASSES_A_CONTROL, _CONTROLS_A_STEP = 20, 5, 15
"""The same over the controls' sequences: for random sets, for each draw of all links, and for a step's mediation."""
_PASSES_OF_MAKERS = 45
"""The same over the sequences on which makers are chosen."""
_PATHS, _PATHS_A_STEP, _CONTROLLED = 4, 16, 0.5
"""Paths, those that each step brings, and the share of them that has controls."""
_STREAMED, _STEPS, _LIBRARIES = 2.0, 2, 650_000_000
"""For a header's estimate: the measuring pass over a plain one, growth steps, and bytes that the libraries take."""
_NOT_INCLUDED = (
    "Not included: converting a GGUF file on first use, a second measuring pass where the first was aimed wrong, the "
    "bootstrap, the tables and the report (seconds). Times are scaled by tokens from one forward pass: too much where "
    "the costly measures look at a few sequences only, too little where sequences are longer than 2,048 tokens."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over tokens."""

    name: str
    tokens: int
    seconds: float
    """Estimated from the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCost:
    """Estimated cost of a trace."""

    passes: tuple[Pass, ...]
    bytes_weights: int
    """The model's parameters; with the random-init baseline twice."""
    bytes_panel: int
    """Numbers that the measuring pass keeps until the end."""
    bytes_logits: int
    """Logits of the few tokens at which the loss is computed at a time."""
    bytes_peak: int
    """The most that the trace's process holds: the peak of this one, which held the weights and one forward of the
    measuring pass, and what it did not hold of the baseline and of the readings."""
    bytes_disk: int
    """The run folder, roughly."""

    @property
    def seconds(self) -> float:
        """Time of all passes."""
        return sum(one.seconds for one in self.passes)


def estimate(config: TraceConfig) -> RenderableType:
    """Estimate the cost of ``trace`` with this configuration, in words; loads the model.

    Raises:
        ModelError, InputError, KernelError: what ``trace`` would refuse before it measures.
    """
    gguf = unconverted_file(config.model)
    if gguf is not None:
        return _of_header(gguf, config=config)
    lens = model_of(config)
    check_every_layer(lens)
    kernel = choose_kernel(lens.family, device=lens.device, asked=config.kernel)
    batch = tokens_of(lens, config=config, bos=config.bos)
    check_tokens(lens, batch)
    cost = cost_of(lens, batch, config=config, other=other_condition(lens, batch, config=config))
    title = f"{lens.name}: {batch.n_sequences} sequences of up to {batch.n_positions} tokens, {kernel} kernel"
    memory = (
        f"memory: about {size(cost.bytes_peak)} at its peak, with libraries and one forward pass: "
        f"{size(cost.bytes_weights)} of weights"
        f"{' with the random-init baseline' if config.random_init else ''}, "
        f"{size(cost.bytes_panel)} of readings, {size(cost.bytes_logits)} of logits at a time"
    )
    return _in_words(
        f"{title}, on {lens.device}", cost.passes, memory, f"disk: about {size(cost.bytes_disk)}", _NOT_INCLUDED
    )


def _in_words(title: str, passes: Sequence[Pass], *lines: str) -> RenderableType:
    table = Table(title="Passes", title_justify="left")
    table.add_column("pass")
    table.add_column("tokens", justify="right")
    table.add_column("time", justify="right")
    for one in passes:
        table.add_row(one.name, f"{one.tokens:,}", duration(one.seconds))
    seconds = sum(one.seconds for one in passes)
    table.add_row("in all", f"{sum(one.tokens for one in passes):,}", duration(seconds), style="bold")
    return Group(Text(title, style="bold"), table, *(Text(line) for line in lines))


def _of_header(gguf: Path, *, config: TraceConfig) -> RenderableType:
    """The cost of a trace of a GGUF file that was not converted yet, from its header: operations, not a timed pass."""
    header, speed = read_header(gguf), operations_a_second()
    sequences, length = len(config.prompts) or config.sequences, config.length
    tokens, scouted = sequences * length, 2 * min(sequences, 8) * min(length, 64)
    one = 2 * (header.n_body + header.n_vocab) / speed
    passes = [("scout", scouted, 1.0), ("measure", tokens, _STREAMED)]
    if header.has_tokenizer:
        passes.append(("the other BOS condition", scouted + tokens, 1.0))
    if config.random_init:
        passes.append(("random-init baseline", tokens, _STREAMED))
    if config.interventions:
        few, short = min(config.intervention_sequences, sequences), min(config.intervention_length, length)
        number = _whole_passes(config, few=few, sequences=sequences, positions=short, steps=_STEPS)
        passes.append(("interventions", number * short, 1.0))
    made = [Pass(name=name, tokens=count, seconds=count * factor * one) for name, count, factor in passes]
    models = header.weight_bytes * (2 if config.random_init else 1)
    peak = _LIBRARIES + models + 3 * 4 * header.d_vocab * min(LOSS_CHUNK, length)
    return _in_words(
        f"{gguf.name}: {sequences} sequences of up to {length} tokens, from the file's header",
        made,
        f"memory: about {size(peak)} at its peak, of which {size(models)} are weights in float32"
        f"{' with the random-init baseline' if config.random_init else ''}",
        f"disk: {size(header.weight_bytes)} in the cache once, for the converted file",
        "The file is converted by the first command that runs. Times are from the model's operations at the speed of "
        f"one product of matrices, with {_STEPS} growth steps; once the file is converted, a dry run times a pass.",
    )


def cost_of(lens: LensModel, batch: TokenBatch, *, config: TraceConfig, other: TokenBatch | None) -> TraceCost:
    """The cost of a trace, from one forward of its measuring pass (after a warm-up)."""
    sequences = sequences_a_forward(config.batch_size, batch)
    sample = batch[:sequences].cut(_LONGEST_SAMPLE)
    scout(lens, sample, config=config)
    started = now(lens.device)
    aim = scout(lens, batch, config=config)
    scouting = now(lens.device) - started
    panel, full = _time_measuring(lens, sample, aim=aim, config=config, only=None)
    share = batch.tokens.numel() / sample.tokens.numel()
    scouted = batch[:8].cut(64).tokens.numel()
    passes = [
        Pass(name="scout", tokens=2 * scouted, seconds=scouting),
        Pass(name="measure", tokens=batch.tokens.numel(), seconds=full * share),
    ]
    if other is not None:
        _, partial = _time_measuring(lens, sample, aim=aim, config=config, only=CONDITION_READINGS)
        tokens = 2 * scouted + other.tokens.numel()
        passes.append(Pass(name="the other BOS condition", tokens=tokens, seconds=scouting + partial * share))
    if config.random_init:
        tokens = scouted + batch.tokens.numel()
        passes.append(Pass(name="random-init baseline", tokens=tokens, seconds=scouting / 2 + full * share))
    if config.interventions and why_no_interventions(lens, batch) is None:
        passes.append(_interventions(lens, batch, aim=aim, config=config))
    weights = weight_bytes(lens)
    panels = 1 + (other is not None) + config.random_init
    kept = panels * _streamed_bytes(panel) * batch.n_sequences // sample.n_sequences
    widths = {"z": lens.n_heads * lens.d_head}
    moments = sum(2 * 8 * len(panel.positions) * widths.get(site, lens.d_model) for site in SITES_BY_POSITION)
    patterns = lens.n_layers * lens.n_heads * min(64, batch.n_positions) ** 2
    neurons = len(aim.growth_layers) * lens.d_mlp * len(aim.sink_positions) * _BYTES_A_NEURON_ROW
    return TraceCost(
        passes=tuple(passes),
        bytes_weights=weights * (2 if config.random_init else 1),
        bytes_panel=kept + moments * lens.n_layers,
        bytes_peak=peak_bytes(lens.device) + kept - _streamed_bytes(panel) + (weights if config.random_init else 0),
        bytes_logits=3 * 4 * lens.d_vocab * min(LOSS_CHUNK, batch.n_positions),
        bytes_disk=patterns + neurons + batch.tokens.numel() * 8 + 2_000_000,
    )


def _interventions(lens: LensModel, batch: TokenBatch, *, aim: Location, config: TraceConfig) -> Pass:
    """Passes of the interventions, in units of a whole forward pass: many run only some of the layers."""
    few = batch[: config.intervention_sequences].cut(aim.sink_position + config.intervention_length)
    one = seconds_of(lambda: run_with(lens, few), device=lens.device)
    number = _whole_passes(
        config,
        few=few.n_sequences,
        sequences=batch.n_sequences,
        positions=few.n_positions,
        steps=len(segments(aim, n_layers=lens.n_layers)),
        sink_position=aim.sink_position,
    )
    return Pass(name="interventions", tokens=number * few.n_positions, seconds=number * one / few.n_sequences)


def _whole_passes(
    config: TraceConfig, *, few: int, sequences: int, positions: int, steps: int, sink_position: int = 0
) -> int:
    """Whole passes of the interventions, over one sequence each."""
    number = few * (_PASSES_OF_LINKS + _PASSES_A_STEP * steps)
    of_controls = _PASSES_OF_SETS + _PASSES_A_CONTROL * config.controls + _CONTROLS_A_STEP * steps
    number += min(config.control_sequences, few) * of_controls
    number += min(config.choosing_sequences, sequences) * _PASSES_OF_MAKERS
    several = few + _CONTROLLED * DRAWS * min(config.control_sequences, few)
    shorter = min(1.0, (sink_position + LENGTH) / positions)
    return number + round(shorter * several * (_PATHS + _PATHS_A_STEP * steps))


def _time_measuring(
    lens: LensModel, sample: TokenBatch, *, aim: Location, config: TraceConfig, only: frozenset[str] | None
) -> tuple[Panel, float]:
    started = now(lens.device)
    own = [link.readings for link in LINKS]
    panel = measure(lens, sample, plan=aim.plan(lens.n_layers), config=config, own=own, only=only)
    return panel, now(lens.device) - started


def _streamed_bytes(panel: Panel) -> int:
    """Bytes of the streamed numbers."""
    tensors = (tensor for by_layer in panel.streamed.values.values() for tensor in by_layer.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
