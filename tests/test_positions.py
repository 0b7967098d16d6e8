"""One rule for positions: they count from 0 and a negative one is refused, except where logits are scored.

Sequences of a batch end at different places, so "the last position" is one position only in what scores each sequence's
own logits; there, -1 is the last real token.
"""

import numpy as np
import pytest

from sink_lens import TokenBatch, capture, edits, patching, run_with, sweep, trace, wrap
from sink_lens.edits import metrics
from sink_lens.errors import SinkLensError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.sweeps import EditGrid, Grid, MetricSpec

PROMPTS = ["the cat and the dog", "the cat"]


@pytest.fixture(scope="module")
def lens():
    return wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))


@pytest.fixture(scope="module")
def batch(lens):
    return TokenBatch.from_text("the cat and the dog saw the river. " * 40, lens.tokenizer, sequences=2, length=16)


CALLS = {
    "a run that reads it": lambda lens, batch, out: run_with(lens, batch, positions=(-1,)),
    "an edit": lambda lens, batch, out: run_with(lens, batch, [edits.zero("z", positions=[-1])], positions=(0,)),
    "a mean ablation": lambda lens, batch, out: run_with(
        lens, batch, [edits.mean_aligned(lens, batch, "mlp_out", positions=[-1])], positions=(0,)
    ),
    "isolation": lambda lens, batch, out: edits.isolate([-1]),
    "captured rows": lambda lens, batch, out: capture(lens, batch, sites=["z"], layers=[0], positions=[-1]),
    "patched positions": lambda lens, batch, out: patching.patch(
        lens, batch, batch, site="z", metric=metrics.sink_mass(0), positions=[-1], progress=False
    ),
    "the mass of a metric": lambda lens, batch, out: patching.patch(
        lens, batch, batch, site="z", metric=metrics.sink_mass(-1), progress=False
    ),
    "the norm of a metric": lambda lens, batch, out: patching.patch(
        lens, batch, batch, site="z", metric=metrics.norm(-1, layer=1), progress=False
    ),
    "a sweep's grid": lambda lens, batch, out: sweep(
        lens,
        Grid.of(EditGrid(site="mlp_out", positions=[-1])),
        tokens=batch,
        metrics=[MetricSpec(name="loss")],
        out=out,
        progress=False,
    ),
    "the target of a trace": lambda lens, batch, out: trace(lens, tokens=batch, target_position=-1, out=out),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_negative_position_is_refused(name, lens, batch, tmp_path):
    with pytest.raises(SinkLensError, match="need"):
        CALLS[name](lens, batch, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_where_logits_are_scored_it_counts_back_from_each_sequences_last_token(lens):
    padded = TokenBatch.from_prompts(PROMPTS, lens.tokenizer)
    assert len(set(padded.lengths.tolist())) == 2  # the second is padded
    last = metrics.logit_difference(5, 6)
    run = run_with(lens, padded, positions=(0,), logits=True)
    alone = [
        float(last.function(run_with(lens, one, positions=(0,), logits=True)).squeeze())
        for one in (TokenBatch.from_prompts([prompt], lens.tokenizer) for prompt in PROMPTS)
    ]
    np.testing.assert_allclose(last.function(run).numpy(), alone, atol=1e-4)
