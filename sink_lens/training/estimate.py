"""Estimate what a training costs from one or two timed steps of its model on random tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from ..engine.cost import duration, now, peak_bytes
from ..models.headnorm import undecayed
from ..models.wrapping import random_state_kept
from .config import TrainConfig
from .model import model_of
from .trainer import check_device, check_trackers

_STEPS = 2
MOST_FLOPS = {"cpu": 3e11, "cuda": 1e15, "mps": 1e13}
"""Most operations in the timed forward and backward; for a larger step, fewer and shorter sequences are timed."""
_SHORTEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated cost of a training."""

    config: TrainConfig
    device: str
    n_parameters: int
    undecayed: int
    """Parameters without weight decay."""
    sequences: int
    """Number of sequences of a step that were timed."""
    length: int
    """Number of tokens of each of them."""
    step_seconds: float
    """A step on this device, in one process: what was timed by its share of the FLOPs, and the update."""
    peak_bytes: int
    """Memory of weights, gradients, optimizer and the activations of one forward."""

    @property
    def checkpoint_bytes(self) -> int:
        """All checkpoints of a finished run: weights in each, two moments in the last."""
        return 4 * self.n_parameters * (len(self.config.kept) + 2)


def estimate(config: TrainConfig, *, most_flops: Mapping[str, float] = MOST_FLOPS) -> Estimate:
    """Time two updates on random tokens, one where that is slow; nothing is written, and no data is read.

    Raises:
        InputError: what ``train`` would refuse, the data apart.
    """
    device = check_device(config)
    check_trackers(config)
    with random_state_kept():
        model: Any = model_of(config)
        apart = undecayed(model, unshared_gain=not config.decay_unshared_gain)
        model.to(device).train()
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": config.weight_decay}]
        groups.append({"params": [], "weight_decay": 0.0})
        for name, parameter in model.named_parameters():
            groups[name in apart]["params"].append(parameter)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]))
        counted = {name: one.numel() for name, one in model.named_parameters()}
        n_parameters = sum(counted.values())
        micro = config.batch // config.accumulation
        share = most_flops[device] / _flops(config, n_parameters, length=config.length)
        slow = share < 1
        sequences = max(1, min(micro, int(share)))
        length = min(config.length, max(_SHORTEST, int(share * config.length))) if slow else config.length
        ids = torch.randint(config.vocab_size, (sequences, length), device=device)
        run = torch.compile(model) if config.compile else model
        forwards, updates = [], []
        for number in range(1 + config.compile if slow else 1 + _STEPS):  # the first also warms up, or compiles
            begun = now(device)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=config.dtype == "bf16"):
                loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            halfway = now(device)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            if number >= 1 or slow:
                forwards.append(halfway - begun)
                updates.append(now(device) - halfway)
        longer = _flops(config, n_parameters, length=config.length) / _flops(config, n_parameters, length=length)
        return Estimate(
            config=config,
            device=device,
            n_parameters=n_parameters,
            undecayed=sum(counted[name] for name in apart),
            sequences=sequences,
            length=length,
            step_seconds=min(forwards) * longer * config.batch / sequences + min(updates),
            peak_bytes=peak_bytes(device),
        )


def _flops(config: TrainConfig, n_parameters: int, *, length: int) -> float:
    """Operations per sequence, forward and backward: 6 per parameter and token, plus the causal half of attention."""
    return length * (6.0 * n_parameters + 6.0 * config.n_layers * config.d_model * length)


def dry_run(config: TrainConfig) -> RenderableType:
    """Estimate the cost of ``train`` with this configuration, in words.

    Raises:
        InputError: what ``train`` would refuse, the data apart.
    """
    found = estimate(config)
    total = found.step_seconds * config.steps
    tokens = config.steps * config.step_tokens
    timed = f"{found.sequences} of its {config.batch} sequences"
    timed += "" if found.length == config.length else f", {found.length} tokens long"
    part = "" if found.sequences == config.batch and found.length == config.length else f" (from {timed})"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("parameters", f"{found.n_parameters:,}, {found.undecayed:,} of them not decayed"),
        ("steps", f"{config.steps:,} of {config.batch} sequences of {config.length} tokens"),
        ("tokens", f"{tokens:,} ({tokens / found.n_parameters:.1f} a parameter)"),
        ("a step", f"{found.step_seconds:.3g} s on {found.device} in one process{part}"),
        ("tokens a second", f"{config.step_tokens / found.step_seconds:,.0f}"),
        ("in all", f"{duration(total)}, evaluations apart"),
        ("memory", f"{found.peak_bytes / 1e9:.2f} GB at {found.sequences} x {found.length} tokens a forward"),
        ("checkpoints", f"{len(config.kept)} kept, {found.checkpoint_bytes / 1e9:.2f} GB"),
    ):
        table.add_row(name, value)
    return table
