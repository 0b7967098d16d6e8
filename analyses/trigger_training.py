"""A training on the trigger task, and what the monitor reads of it; several analyses compare models on it."""

from collections.abc import Iterator
from typing import Any

import torch

from analyses.trigger import trigger_rows
from sink_lens.training import SinkMonitor

VOCAB, LENGTH, ANSWER, BATCH = 64, 32, 16, 32
"""Ids, tokens of a sequence, width of an answer, and sequences a step."""
RATE = 3e-3
"""Learning rate."""
READ = ("rate_first", "mass_first", "norm_ratio", "max_activation", "kurtosis")


def train_on_trigger(
    model: Any, *, optimizer: torch.optim.Optimizer, seed: int, steps: int, every: int
) -> Iterator[dict[str, float]]:
    """Train a model in place; step, loss and readings on 64 sequences kept apart, at the start and at regular steps.

    Models of one seed see the same sequences, with the same answers.
    """
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(VOCAB, ANSWER, generator=generator)
    apart = torch.Generator().manual_seed(seed + 10**6)
    tokens, answers = trigger_rows(vectors, sequences=64, length=LENGTH, generator=apart)
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                loss = (
                    (model(input_ids=tokens, use_cache=False).logits[..., :ANSWER] - answers)
                    .square()
                    .mean()
                )
            with SinkMonitor(model, every=1, tokens=tokens) as monitor:
                reading = monitor.finish()
            assert reading is not None  # each step is read
            row = {name: reading[f"sinks/{name}"] for name in READ}
            yield {"seed": seed, "step": step, "loss": loss.item()} | row
        seen, wanted = trigger_rows(vectors, sequences=BATCH, length=LENGTH, generator=generator)
        (
            model(input_ids=seen, use_cache=False).logits[..., :ANSWER] - wanted
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
