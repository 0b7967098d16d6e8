"""Estimate what a training costs before it begins: parameters, a step, memory and checkpoints.

On the CPU all of it comes from the configuration and from the speed of one product of matrices, so that no model is
made; on a GPU, in bf16 and compiled, ``timed_estimate`` makes the model and times a step.
"""

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from ..engine.cost import LIBRARIES, duration, has_gpu, operations_a_second
from .config import TrainConfig

_OVERHEAD = 1.7
"""The time of a step over that of its products of matrices alone: 1.5 to 2.0 for the trainings toy and small."""
_COPIES = 4
"""Copies of the parameters: weights, gradients and the two moments of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCost:
    """Estimated cost of a training."""

    config: TrainConfig
    device: str
    n_parameters: int
    undecayed: int
    """Parameters without weight decay."""
    sequences: int
    """Number of sequences of a forward, or of those of a step that were timed."""
    length: int
    """Number of tokens of each of them."""
    step_seconds: float
    """A step on this device, in one process."""
    peak_bytes: int
    """Memory of weights, gradients, optimizer and the activations of one forward."""
    is_timed: bool = True
    """True if steps were timed, False if the time is reckoned from the number of parameters."""

    @property
    def checkpoint_bytes(self) -> int:
        """All checkpoints of a finished run: weights in each, two moments in the last."""
        return 4 * self.n_parameters * (len(self.config.kept) + 2)


def estimate(config: TrainConfig) -> RenderableType:
    """Estimate the cost of ``train`` with this configuration, in words.

    Raises:
        InputError: what ``train`` would refuse, the data apart.
    """
    found = cost_of(config)
    total = found.step_seconds * config.steps
    tokens = config.steps * config.step_tokens
    timed = f"{found.sequences} of its {config.batch} sequences"
    timed += "" if found.length == config.length else f", {found.length} tokens long"
    part = "" if found.sequences == config.batch and found.length == config.length else f" (from {timed})"
    part = part if found.is_timed else " (from the speed of a product of matrices: expect a factor of 2)"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("parameters", f"{found.n_parameters:,}, {found.undecayed:,} of them not decayed"),
        ("steps", f"{config.steps:,} of {config.batch} sequences of {config.length} tokens"),
        ("tokens", f"{tokens:,} ({tokens / found.n_parameters:.1f} a parameter)"),
        ("a step", f"{found.step_seconds:.3g} s on {found.device} in one process{part}"),
        ("tokens per second", f"{config.step_tokens / found.step_seconds:,.0f}"),
        ("in all", f"{duration(total)}, evaluations apart"),
        ("memory", f"{found.peak_bytes / 1e9:.2f} GB at {found.sequences} x {found.length} tokens per forward"),
        ("checkpoints", f"{len(config.kept)} kept, {found.checkpoint_bytes / 1e9:.2f} GB"),
    ):
        table.add_row(name, value)
    return table


def cost_of(config: TrainConfig) -> TrainCost:
    """The cost of a training with this configuration.

    Raises:
        InputError: what ``train`` would refuse, the data apart.
    """
    on_cpu = config.device == "cpu" or (config.device is None and not has_gpu())
    if config.trackers or config.compile or config.dtype != "float32" or not on_cpu:
        from .timed_estimate import timed_cost

        return timed_cost(config)
    n_parameters, undecayed = parameters_of(config)
    micro = config.batch // config.accumulation
    operations = flops_of(config, n_parameters, length=config.length) * config.batch
    width = config.n_layers * (16 * config.d_model + 4 * config.d_mlp) + 4 * config.vocab_size
    return TrainCost(
        config=config,
        device="cpu",
        n_parameters=n_parameters,
        undecayed=undecayed,
        sequences=micro,
        length=config.length,
        step_seconds=_OVERHEAD * operations / operations_a_second(),
        peak_bytes=LIBRARIES + 4 * (_COPIES * n_parameters + micro * config.length * width),
        is_timed=False,
    )


def parameters_of(config: TrainConfig) -> tuple[int, int]:
    """Number of parameters of a configuration's model, and of those without weight decay."""
    heads, kv_heads = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    norm = config.d_model if config.norm == "rms" else 1
    gates = {"gate_elementwise": heads, "gate_headwise": config.n_heads}.get(config.attention, 0)
    own = {"sink_logit": config.n_heads, "off_by_one": config.n_heads, "key_bias": heads}.get(config.attention, 0)
    gains = {"shared": config.d_head, "per_head": heads}.get(config.value_norm, 0)
    matrices = config.d_model * (2 * heads + 2 * kv_heads + gates + 3 * config.d_mlp)
    embeddings = config.vocab_size * config.d_model * (1 if config.tied else 2)
    found = embeddings + config.n_layers * (matrices + own + gains + 2 * norm) + norm
    decayed_gains = gains if config.decay_unshared_gain and config.value_norm == "per_head" else 0
    return found, config.n_layers * (own + gains - decayed_gains + 2 * norm) + norm


def flops_of(config: TrainConfig, n_parameters: int, *, length: int) -> float:
    """Operations per sequence, forward and backward: 6 per parameter and token, plus the causal half of attention."""
    return length * (6.0 * n_parameters + 6.0 * config.n_layers * config.d_model * length)
