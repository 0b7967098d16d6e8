"""Estimate what a training costs: from the configuration alone, or on a GPU from a timed step of its model."""

from typing import Any

from ..estimate import (
    BACKWARD,
    LIBRARIES,
    OF_A_MATRIX,
    Cost,
    PassCount,
    PassCounts,
    seconds_per_token,
    time_call,
)
from ..models.memory import peak_bytes
from ..text import size_text
from .config import TrainConfig

_OVERHEAD = 1.7
"""The time of a step over that of its products of matrices alone: 1.5 to 2.0 for the trainings toy and small."""
_COPIES = 4
"""Copies of the parameters: weights, gradients and the two moments of the optimizer."""


def estimate_training_cost(config: TrainConfig) -> Cost:
    """Estimate the time, memory and disk of a training.

    Raises:
        InputError: ``train`` would refuse the configuration (the data are not looked at).
    """
    n_parameters, undecayed = count_parameters(config)
    micro, tokens = config.batch // config.accumulation, config.batch * config.length
    width = config.n_layers * (16 * config.d_model + 4 * config.d_mlp) + 4 * config.vocab_size
    kept = len(config.kept_steps)
    asked = PassCounts(
        parts=(PassCount(forwards=0, backwards=config.steps, tokens=tokens),),
        sequences=config.batch,
        positions=config.length,
        bytes=4 * ((_COPIES - 1) * n_parameters + micro * config.length * width),
        each="step",
        facts={
            "parameters": f"{n_parameters:,}, {undecayed:,} of them not decayed",
            "steps": f"{config.steps:,} of {config.batch} sequences of {config.length} tokens",
            "tokens": f"{config.steps * tokens:,} ({config.steps * tokens / n_parameters:.1f} a parameter)",
            # weights in each, two moments in the last
            "checkpoints": f"{kept} kept, {size_text(4 * n_parameters * (kept + 2))}",
        },
        apart="evaluations",
        memory=f", at {micro} x {config.length} tokens per forward",
    )
    device, source = config.device, "one timed step"
    if device is None:
        import torch

        if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            device = "cpu"
    if device == "cpu":
        attention = config.n_layers * config.d_model * config.length  # its causal half
        a_token = seconds_per_token(n_parameters + attention, slowness=_OVERHEAD)
        peak, source = LIBRARIES + 4 * n_parameters + asked.bytes, OF_A_MATRIX
    else:
        seconds, peak, device = time_training_step(config)
        a_token = seconds / (BACKWARD * tokens)
    return Cost(
        model=config.size,
        passes=asked,
        bytes_weights=4 * n_parameters,
        device=device,
        seconds_per_token=a_token,
        bytes_peak=peak,
        source=source,
    )


def time_training_step(config: TrainConfig) -> tuple[float, int, str]:
    """Return the seconds of a training step on random tokens, the peak of memory in bytes, and the device.

    Raises:
        InputError: ``train`` would refuse the configuration (the data are not looked at).
    """
    import torch

    from ..models.wrapping import keep_random_state
    from .arguments import choose_device
    from .model import model_of

    device = choose_device(config)
    with keep_random_state():
        model: Any = model_of(config)
        model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        ids = torch.randint(
            config.vocab_size, (config.batch // config.accumulation, config.length), device=device
        )
        run = torch.compile(model) if config.compile else model

        def update() -> None:
            for _ in range(config.accumulation):
                with torch.autocast(
                    device, dtype=torch.bfloat16, enabled=config.dtype == "bfloat16"
                ):
                    loss = run(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad()

        return time_call(update, device=device, warm_up=1), peak_bytes(device), device


def count_parameters(config: TrainConfig) -> tuple[int, int]:
    heads, kv_heads = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    norm = config.d_model if config.norm == "rms" else 1
    gates = {"gate_elementwise": heads, "gate_headwise": config.n_heads}.get(config.attention, 0)
    own = {"sink_logit": config.n_heads, "off_by_one": config.n_heads, "key_bias": heads}
    own = own.get(config.attention, 0)
    gains = {"shared": config.d_head, "per_head": heads}.get(config.value_norm, 0)
    matrices = config.d_model * (2 * heads + 2 * kv_heads + gates + 3 * config.d_mlp)
    embeddings = config.vocab_size * config.d_model * (1 if config.tied else 2)
    found = embeddings + config.n_layers * (matrices + own + gains + 2 * norm) + norm
    decayed_gains = gains if config.decay_unshared_gain and config.value_norm == "per_head" else 0
    return found, config.n_layers * (own + gains - decayed_gains + 2 * norm) + norm
