"""Estimate what a trace costs from one timed forward of the model itself: on a GPU, or where headers do not say it."""

from dataclasses import dataclass

from rich.console import RenderableType

from ..activations.attention import choose_kernel
from ..activations.forward import check_tokens
from ..activations.record import sequences_a_forward
from ..data.tokens import TokenBatch
from ..engine.cost import now, peak_bytes, seconds_of, size, weight_bytes
from ..engine.forward import run_with
from ..models.inputs import model_of, tokens_of
from ..models.lens import LensModel, check_every_layer
from ..models.memory import LOSS_CHUNK
from .config import TraceConfig
from .estimate import Pass, in_words, whole_passes
from .inputs import other_condition
from .links import LINKS
from .locate import Location
from .measure import CONDITION_READINGS, Panel, measure, scout
from .readings import SITES_BY_POSITION
from .setting import segments, why_no_interventions

_LONGEST_SAMPLE = 2048
_BYTES_A_NEURON_ROW = 64
_NOT_INCLUDED = (
    "Not included: converting a GGUF file on first use, a second measuring pass if the first looked at the wrong "
    "position, the bootstrap, the tables and the report (seconds). Times are scaled by tokens from one forward "
    "pass: they come out too long if the costly measures look at only a few sequences, and too short if sequences "
    "are longer than 2,048 tokens."
)


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


def timed_estimate(config: TraceConfig) -> RenderableType:
    """Estimate the cost of ``trace`` with this configuration, in words; loads the model.

    Raises:
        ModelError, InputError, KernelError: what ``trace`` would refuse before it measures.
    """
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
    return in_words(
        f"{title}, on {lens.device}", cost.passes, memory, f"disk: about {size(cost.bytes_disk)}", _NOT_INCLUDED
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
    number = whole_passes(
        config,
        few=few.n_sequences,
        sequences=batch.n_sequences,
        positions=few.n_positions,
        steps=len(segments(aim, n_layers=lens.n_layers)),
        sink_position=aim.sink_position,
    )
    return Pass(name="interventions", tokens=number * few.n_positions, seconds=number * one / few.n_sequences)


def _time_measuring(
    lens: LensModel, sample: TokenBatch, *, aim: Location, config: TraceConfig, only: frozenset[str] | None
) -> tuple[Panel, float]:
    """Run the measuring pass on a sample; what it found, and its seconds."""
    started = now(lens.device)
    own = [link.readings for link in LINKS]
    panel = measure(lens, sample, plan=aim.plan(lens.n_layers), config=config, own=own, only=only)
    return panel, now(lens.device) - started


def _streamed_bytes(panel: Panel) -> int:
    """Bytes of the streamed numbers."""
    tensors = (tensor for by_layer in panel.streamed.values.values() for tensor in by_layer.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
