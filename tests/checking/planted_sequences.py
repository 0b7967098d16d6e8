"""The planted model and sequences with its sink, for the tests of the studies."""

import functools

from evidences import random_batch

from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted, tiny_tokenizer


@functools.cache
def planted_lens():
    truth = planted(seed=1)
    return truth, wrap(truth.model, tokenizer=tiny_tokenizer(), name="planted")


@functools.cache
def sequences(n=4, length=32):
    """Ordinary tokens after BOS, which is the planted sink."""
    return random_batch(n, length, first=planted_lens()[0].bos_id)
