"""Estimate what a training costs from one or two timed steps of its model on random tokens: on a GPU, or compiled."""

from collections.abc import Mapping
from typing import Any

import torch

from ..engine.cost import now, peak_bytes
from ..models.headnorm import undecayed
from ..models.wrapping import random_state_kept
from .config import TrainConfig
from .estimate import TrainCost, flops_of
from .model import model_of
from .train import check_device, check_trackers

_STEPS = 2
MOST_FLOPS = {"cpu": 3e11, "cuda": 1e15, "mps": 1e13}
"""Most operations in the timed forward and backward; for a larger step, fewer and shorter sequences are timed."""
_SHORTEST = 64


def timed_cost(config: TrainConfig, *, most_flops: Mapping[str, float] = MOST_FLOPS) -> TrainCost:
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
        share = most_flops[device] / flops_of(config, n_parameters, length=config.length)
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
        longer = flops_of(config, n_parameters, length=config.length) / flops_of(config, n_parameters, length=length)
        return TrainCost(
            config=config,
            device=device,
            n_parameters=n_parameters,
            undecayed=sum(counted[name] for name in apart),
            sequences=sequences,
            length=length,
            step_seconds=min(forwards) * longer * config.batch / sequences + min(updates),
            peak_bytes=peak_bytes(device),
        )
