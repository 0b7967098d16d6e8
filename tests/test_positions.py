"""One rule for positions: they count from each text's first token, and below 0 from its end.

In a cell (an edit, a patch, a sweep) a position is one for all sequences, so there -1 needs sequences of one length.
Positions from 0 on are refused where rows, as they were given, begin with something else than a first token.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sink_lens import (
    TokenBatch,
    answers,
    capture,
    direct_logit_attribution,
    edits,
    generate,
    patching,
    run_with,
    stream,
    sweep,
    trace,
    wrap,
)
from sink_lens.activations.record import Reading
from sink_lens.edits import metrics
from sink_lens.engine.gradients import run_with_hooks
from sink_lens.errors import InputError, SinkLensError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.sweeps import EditGrid, Grid, MetricSpec, cell_of

PROMPTS = ["the cat and the dog", "the cat"]
METRIC = {"metric": metrics.logit_difference(5, 6), "progress": False, "controls": 0}


@pytest.fixture(scope="module")
def lens():
    return wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))


@pytest.fixture(scope="module")
def batch(lens):
    return TokenBatch.from_text(
        "the cat and the dog saw the river. " * 40, lens.tokenizer, sequences=2, length=16
    )


@pytest.fixture(scope="module")
def padded(lens):
    return TokenBatch.from_prompts(PROMPTS, lens.tokenizer)


@pytest.fixture(scope="module")
def left(lens):
    """The same texts as a tokenizer gives them that pads on the left."""
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokenizer.padding_side = "left"
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


def changed(tokens):
    """The same texts with another second token."""
    ids = tokens["input_ids"] if isinstance(tokens, dict) else tokens.tokens.clone()
    if isinstance(tokens, dict):
        return tokens | {"input_ids": torch.where(ids == 86, 90, ids)}
    ids[:, 1] = 90
    return replace(tokens, tokens=ids)


def swept(lens, tokens, out, **grid):
    what = Grid.of(EditGrid(site="mlp_out", layers=[1], **grid), controls=0)
    return sweep(
        lens, what, tokens=tokens, metrics=[MetricSpec(name="loss")], out=out, progress=False
    )


def patched(lens, tokens, **fields):
    return patching.patch(lens, tokens, changed(tokens), site="z", **METRIC | fields)


AT_THE_END = {
    "an edit": lambda lens, tokens, at, out: (
        run_with(lens, tokens, [edits.zero("z", positions=[at])]).loss
    ),
    "a generated text": lambda lens, tokens, at, out: (
        generate(lens, tokens[:1], [edits.set_to("z", 3.0, positions=[at])], max_new_tokens=4).ids
    ),
    "an edit's key": lambda lens, tokens, at, out: (
        run_with(
            lens,
            tokens,
            edits.edit("scores", lambda x, where: x - 3.0, positions=[15], keys=[at, 2]),
        ).loss
    ),
    "a patch": lambda lens, tokens, at, out: patched(lens, tokens, positions=[at]).frame["effect"],
    "a metric": lambda lens, tokens, at, out: patched(
        lens, tokens, metric=metrics.dominance(at, layer=2)
    ).frame["effect"],
    "a grid": lambda lens, tokens, at, out: swept(
        lens, tokens, out / str(at), positions=[at]
    ).frame["effect"],
    "a cell": lambda lens, tokens, at, out: sweep(
        lens,
        [cell_of(edits.zero("z", positions=[at]), name="mine")],
        tokens=tokens,
        metrics=[MetricSpec(name="loss")],
        out=out / str(at),
        progress=False,
    ).frame["effect"],
}


@pytest.mark.parametrize("name", AT_THE_END)
def test_minus_one_is_the_end_of_sequences_of_one_length(name, lens, batch, tmp_path):
    call = AT_THE_END[name]
    found, wanted = (np.asarray(call(lens, batch, at, tmp_path)) for at in (-1, 15))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "name",
    [one for one in AT_THE_END if one not in ("an edit's key", "a patch", "a generated text")],
)
def test_minus_one_in_a_cell_is_refused_where_lengths_differ(name, lens, padded, tmp_path):
    with pytest.raises(InputError, match="-1"):
        AT_THE_END[name](lens, padded, -1, tmp_path / "run")


REFUSED = {
    "beyond the start": lambda lens, batch, out: run_with(lens, batch, positions=(-17,)),
    "a mean ablation": lambda lens, batch, out: edits.mean_aligned(
        lens, batch, "mlp_out", positions=[-1]
    ),
    "isolation": lambda lens, batch, out: edits.isolate([-1]),
    "the mass of the last token": lambda lens, batch, out: metrics.sink_mass(-1),
    "a twice named place": lambda lens, batch, out: run_with(
        lens, batch, [edits.zero("z", positions=[15, -1])]
    ),
    "the target of a trace": lambda lens, batch, out: trace(
        lens, tokens=batch, target_position=-1, out=out
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_negative_positions_are_refused(name, lens, batch, tmp_path):
    with pytest.raises(SinkLensError, match="need"):
        REFUSED[name](lens, batch, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_reads_a_run_takes_minus_one_for_the_end_of_each_text(lens, padded):
    assert len(set(padded.lengths.tolist())) == 2  # the second is padded
    norm, difference = metrics.norm(-1, layer=1), metrics.logit_difference(5, 6)
    run = run_with(lens, padded, positions=(0, -1), sites=("resid_post",), logits=True)
    captured = capture(lens, padded, sites=["resid_post", "pattern"], layers=[1], positions=[-1, 0])
    for row, prompt in enumerate(PROMPTS):
        one = TokenBatch.from_prompts([prompt], lens.tokenizer)
        last = one.n_positions - 1
        alone = run_with(
            lens, one, positions=(0, last), sites=("resid_post", "pattern"), logits=True
        )
        torch.testing.assert_close(run.state[:, row], alone.state[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            run.mass[:, row, :, :1], alone.mass[:, 0, :, :1], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            captured["resid_post", 1][row], alone.state[1, 0, [1, 0]], rtol=1e-4, atol=1e-4
        )
        rows = captured["pattern", 1][row, :, :, : last + 1]
        torch.testing.assert_close(
            rows, alone.tensors["pattern", 1][0][:, [last, 0]], rtol=1e-4, atol=1e-4
        )
        for metric in (norm, difference):
            found, wanted = metrics.evaluate(metric, run)[row], metrics.evaluate(metric, alone)[0]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_read_at_a_position_that_a_text_does_not_have_is_nan(lens, padded):
    late = int(padded.lengths.min())
    kept = capture(lens, padded, sites=["resid_post", "pattern"], layers=[1], positions=[0, late])
    metric = metrics.on_outcome(lambda run: run.loss, positions=(late,), layers=(1,))
    ways = {
        "captured": kept["resid_post", 1][:, 1],
        "captured rows": kept["pattern", 1][:, :, 1].flatten(1),
        "state": run_with(lens, padded, positions=(late,), layers=[1]).state[0, :, 0],
        "state with gradients": run_with_hooks(lens, padded, metric=metric, hooks=[]).state[
            0, :, 0
        ],
    }
    for found in ways.values():
        assert torch.equal(found.isnan().all(1), padded.lengths <= late)
        assert torch.equal(found.isnan().any(1), padded.lengths <= late)


NAMED = {
    "a run that reads it": lambda lens, given, out: run_with(lens, given, positions=(0, 3)),
    "an edit": lambda lens, given, out: run_with(lens, given, [edits.zero("z", positions=[0])]),
    "an edit's key": lambda lens, given, out: run_with(
        lens, given, edits.edit("pattern", lambda x, at: x * 0.5, keys=[0])
    ),
    "captured rows": lambda lens, given, out: capture(
        lens, given, sites=["z"], layers=[0], positions=[2]
    ),
    "keys of a stream": lambda lens, given, out: stream(
        lens,
        given,
        [Reading(name="mass", sites=("mass",), function=lambda view: view["mass"])],
        keys=(1,),
    ),
    "patched positions": lambda lens, given, out: patched(lens, given, positions=[2]),
    "an edit beside a patch": lambda lens, given, out: patched(
        lens, given, edits=[edits.zero("z", positions=[2])]
    ),
    "the mass of a metric": lambda lens, given, out: patched(
        lens, given, metric=metrics.sink_mass(2)
    ),
    "the logits of a metric": lambda lens, given, out: patched(
        lens, given, metric=metrics.logit_difference(5, 6, position=2)
    ),
    "a sweep's grid": lambda lens, given, out: swept(lens, given, out, positions="2-3"),
    "a sweep's cell": lambda lens, given, out: sweep(
        lens,
        [cell_of(edits.zero("z", positions=[2]), name="mine")],
        tokens=given,
        out=out,
        progress=False,
    ),
    "an attribution": lambda lens, given, out: direct_logit_attribution(lens, given, 5, position=2),
    "an answer": lambda lens, given, out: answers(
        lens, given, edits=[edits.zero("z", positions=[2])]
    ),
    "a generated text": lambda lens, given, out: generate(
        lens, {name: one[1:] for name, one in given.items()}, edits.zero("z", positions=[2])
    ),
    "the target of a trace": lambda lens, given, out: trace(
        lens, tokens=given, target_position=2, out=out
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_position_in_rows_that_begin_elsewhere_is_refused_with_the_way_out(
    name, lens, left, tmp_path
):
    with pytest.raises(InputError, match="from_tensor"):
        NAMED[name](lens, dict(left), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_way_out_and_the_first_token_are_not_refused(lens, left):
    batch = TokenBatch.from_tensor(left["input_ids"], attention_mask=left["attention_mask"])
    run = run_with(lens, batch, [edits.zero("z", positions=[2])], positions=(0, 2))
    assert run.valid[:, 0].all()
    assert run_with(lens, left).mass.isfinite().all()
    ends, whole = (
        capture(lens, left, sites=["pattern"], layers=[1], positions=at) for at in ([0, -1], None)
    )
    first = left["attention_mask"].int().argmax(1)
    wanted = [whole["pattern", 1][row, :, [int(begin), -1]] for row, begin in enumerate(first)]
    torch.testing.assert_close(ends["pattern", 1], torch.stack(wanted), equal_nan=True)


def test_attention_to_the_last_token_is_refused_and_nan_where_it_is_the_last_of_some(
    lens, batch, padded
):
    last = batch.n_positions - 1
    for at in (-1, last):
        run = run_with(lens, batch, positions=(at,))
        assert "nan" in repr(run)
        with pytest.raises(InputError, match="last token"):
            run.mass_at(at)
    ends = padded.lengths - 1
    assert run_with(lens, padded, positions=(int(ends.min()),)).mass_at(
        int(ends.min())
    ).isnan().tolist() == [
        False,
        True,
    ]
