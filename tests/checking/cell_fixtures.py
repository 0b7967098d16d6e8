"""Sequences of different lengths, engines of cells over them, and the slow way to every number."""

from dataclasses import replace

import pytest
import torch

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.metrics import evaluate
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.plan import Plan
from sink_lens.models.tiny import VOCAB_SIZE


@pytest.fixture(scope="session")
def tokens_of():
    """``tokens_of(lengths)``: random sequences of these lengths, padded on the right."""

    def build(lengths=(12, 9, 5, 12), *, seed=1):
        size = (len(lengths), max(lengths))
        ids = torch.randint(3, VOCAB_SIZE, size, generator=torch.Generator().manual_seed(seed))
        return from_tensor(ids, lengths=torch.tensor(lengths))

    return build


@pytest.fixture(scope="session")
def engine_of():
    """``engine_of(lens, tokens, cells, metrics, ...)``: three sequences and four cells a forward, if not said."""

    def build(lens, tokens, cells, metrics, *, path="blocks", prompts=3, pack=4, cut=True, lanes=1):
        plan = Plan(path=path, prompts=prompts, pack=pack, cut=cut, lanes=lanes)
        return Engine(lens, tokens, cells, metrics, plan=plan)

    return build


@pytest.fixture(scope="session")
def swept():
    """``swept(engine)``: every number, (cell, metric) -> float64 by sequence; no cell may have failed."""

    return numbers


def numbers(engine):
    found = {}
    for block in engine.blocks:
        frame = engine.run(block)
        assert frame["error"].isna().all(), frame["error"].dropna().tolist()
        for (cell, metric), rows in frame.groupby(["cell", "metric"], sort=False):
            found.setdefault((cell, metric), []).append(torch.tensor(rows["value"].to_numpy()))
    return {place: torch.cat(parts) for place, parts in found.items()}


@pytest.fixture(scope="session")
def slowly():
    """``slowly(lens, tokens, edits, prompts=...)``: the outcomes of one cell alone, one a batch of prompts."""

    def outcomes(lens, tokens, edits, *, prompts=3, keys=(0, 3), sites=("resid_post", "z")):
        return [
            run_with(lens, part, edits, positions=keys, sites=sites, logits=True, quiet=True)
            for part in (tokens[at : at + prompts] for at in range(0, tokens.n_sequences, prompts))
        ]

    return outcomes


@pytest.fixture(scope="session")
def measured():
    """``measured(metric, outcomes, keys=...)``: the metric of these runs, one after the other, in float64.

    A mean is taken in the order in which its numbers lie in memory, so that its last bit depends on which keys were
    read beside its own: ``keys`` are those that the sweep reads.
    """

    def values(metric, outcomes, *, keys, prompts=None):
        if prompts is not None:  # a run of all sequences
            outcomes = cut(outcomes, prompts)
        return torch.cat(
            [evaluate(metric, reading(outcome, keys)) for outcome in outcomes]
        ).double()

    return values


def reading(outcome, keys):
    """The same run, of which only these keys were read."""
    index = [outcome.positions.index(key) for key in keys]
    return replace(
        outcome,
        positions=keys,
        mass=outcome.mass[..., index].contiguous(),
        state=outcome.state[:, :, index].contiguous(),
    )


def cut(outcome, size):
    """A run in batches, as if each had been run by itself."""
    batches = [slice(at, at + size) for at in range(0, len(outcome.valid), size)]
    return [
        replace(
            outcome,
            valid=outcome.valid[rows],
            mass=outcome.mass[:, rows].contiguous(),
            state=outcome.state[:, rows].contiguous(),
            loss=outcome.loss[rows],
            token_loss=None,
            logits=None,
            tensors={place: tensor[rows] for place, tensor in outcome.tensors.items()},
        )
        for rows in batches
    ]
