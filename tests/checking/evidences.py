"""Builders of ``Evidence`` for the tests of the links."""

import functools

import torch
from lenses import lens_of

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.evidence import gather_evidence
from sink_lens.chain.links import LINKS
from sink_lens.chain.measure import scout_and_measure
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted

CONFIG = TraceConfig(model="tiny")
OWN = [link.readings for link in LINKS]


def random_batch(sequences=8, length=24, *, first=None, lengths=None, seed=0):
    tokens = torch.randint(
        3, 300, (sequences, length), generator=torch.Generator().manual_seed(seed)
    )
    if first is not None:
        tokens[:, 0] = first
    return from_tensor(tokens, lengths=None if lengths is None else torch.tensor(lengths))


@functools.cache
def planted_evidence(sink=True, seed=0):
    truth = planted(seed=seed, sink=sink)
    lens = wrap(truth.model)
    return gather_evidence(
        lens,
        scout_and_measure(lens, random_batch(first=truth.bos_id), config=CONFIG, own=OWN),
        config=CONFIG,
    )


def evidence_of(family, **batch):
    lens = lens_of(family)
    return gather_evidence(
        lens, scout_and_measure(lens, random_batch(**batch), config=CONFIG, own=OWN), config=CONFIG
    )
