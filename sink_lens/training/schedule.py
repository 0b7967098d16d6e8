"""What a training does when: the learning rate of each step, and which sequence comes when."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .config import TrainConfig


def learning_rate(step: int, *, config: TrainConfig) -> float:
    """The rate of an update, counted from 0.

    Linear to ``lr`` over the warm-up (never 0: the first update counts), then a cosine that would reach ``min_lr``
    at the update after the last.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * done)) / 2


class Order(Sampler[int]):
    """Which sequence comes when: passes over all of them, each in an order drawn from the seed, one after the other.

    The order does not depend on how a step is cut into forwards and processes.
    """

    def __init__(self, *, n_sequences: int, drawn: int, seed: int) -> None:
        self._n_sequences, self._drawn, self._seed = n_sequences, drawn, seed

    def __len__(self) -> int:
        return self._drawn

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        left = self._drawn
        while left > 0:
            passed = torch.randperm(self._n_sequences, generator=generator)[:left].tolist()
            yield from passed
            left -= len(passed)


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of sequences of one length."""
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
