"""What the tests of links that read the key share: a plan with two outlier dimensions, a batch, a measuring pass."""

import torch
from evidences import random_batch

from sink_lens.activations.record import Reading, stream
from sink_lens.chain.locate import MeasuringPlan
from sink_lens.chain.readings import MeasuringPass

DIMS = (3, 17)


def plan(position=0, n_layers=3):
    """Two outlier dimensions enter every layer."""
    return MeasuringPlan(
        sink_positions=(position,), dimensions=dict.fromkeys(range(n_layers), DIMS)
    )


def batch(sequences=3, length=8, lengths=None):
    return random_batch(sequences, length, lengths=lengths, seed=2)


def own(link, lens, of, *, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return link.readings(
        MeasuringPass(lens=lens, plan=of, length=length, controls=5, generator=generator)
    )


def read(link, lens, tokens, *, position=0, keep=(), keys=(0,), of=None):
    """The link's own readings of some tokens, and the tensors in ``keep`` as they are."""
    kept = [
        Reading(
            name=f"kept:{name}", sites=(name,), function=lambda view, name=name: view[name].float()
        )
        for name in keep
    ]
    readings = own(link, lens, of or plan(position), length=tokens.n_positions)
    return stream(lens, tokens, [*readings, *kept], keys=keys)
