"""Runs that cells continue: under edits of their own, of fewer sequences, with more sites, and side by side."""

from dataclasses import replace

import pytest
import torch
from lenses import lens_of
from rounding import assert_close, assert_rows_close

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import edit, freeze, scale, zero
from sink_lens.edits.isolation import isolate
from sink_lens.engine import threads
from sink_lens.engine.baseline_run import BaselineRun
from sink_lens.engine.engine import outcomes_in_one_queue, outcomes_under_edits
from sink_lens.engine.forward import run_with
from sink_lens.engine.needs import Needs
from sink_lens.engine.plan import Plan
from sink_lens.models.tiny import VOCAB_SIZE

KEYS = (0, 6)
TOKENS = from_tensor(
    torch.randint(3, VOCAB_SIZE, (5, 20), generator=torch.Generator().manual_seed(2))
)
NEEDS = Needs(
    keys=KEYS,
    layers=(0, 1, 2),
    sites=("resid_post",),
    loss=True,
    logits=False,
    state=True,
    whole=True,
    positions=None,
)
EARLY = (isolate([6]), scale("mlp_out", 2.0, layers=[0], positions=[3, 9]))
LATE = [
    (zero("z", layers=[2], positions=[12]),),  # after all positions of the run's own edits
    (scale("resid_pre", 0.5, layers=[1], positions=[8]),),  # between those of one of them
    (scale("k", 2.0, layers=[1], positions=[6]), zero("attn_out", layers=[2])),
    (),
]


def baseline_run_of(lens, *, edits=(), **plan):
    options = {"path": "blocks", "prompts": 2, "pack": 2} | plan
    return BaselineRun(lens, TOKENS, plan=Plan(**options), needs=NEEDS, edits=edits)


def assert_alike(found, wanted):
    assert_rows_close(found.state, wanted.state)
    for name in ("mass", "loss"):
        assert_close(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("path", ["blocks", "bridge"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_what_goes_on_from_a_run_is_one_run_under_both(family, path):
    lens = lens_of(family)
    baseline_run = baseline_run_of(lens, edits=EARLY, path=path, pack=1 if path == "bridge" else 2)
    found = outcomes_under_edits(baseline_run, LATE, needs=NEEDS)
    for edits, (outcome, changed) in zip(LATE, found, strict=True):
        assert_alike(outcome, run_with(lens, TOKENS, [*EARLY, *edits], positions=KEYS))
        assert changed == set(range(len(edits)))


@pytest.mark.parametrize("kept", [{}, {"sites": ("resid_post",)}, {"streams": (1, 2)}])
@pytest.mark.parametrize(
    "early",
    [
        zero("v", layers=[1], positions=[0]),
        scale("resid_pre", 3.0, layers=[1]),
        scale("resid_post", 3.0, layers=[0]),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_where_cells_begin_is_that_of_the_edited_run(family, early, kept):
    needs = replace(NEEDS, sites=kept.get("sites", ()))
    run = BaselineRun(
        lens_of(family),
        TOKENS,
        plan=Plan(path="blocks", prompts=5, pack=4),
        needs=needs,
        edits=[early],
        streams=kept.get("streams", ()),
    )
    cells = [
        [zero("neurons", layers=[1], positions=[5])],
        [zero("z", layers=[1], positions=[5])],
        [scale("mlp_out", 2.0, layers=[2])],
    ]
    for late, (outcome, _) in zip(
        cells, outcomes_under_edits(run, cells, needs=needs), strict=True
    ):
        assert_alike(outcome, run_with(run.lens, TOKENS, [early, *late], positions=KEYS))


def test_of_fewer_sequences_each_has_its_own_values():
    lens = lens_of("llama")
    given = torch.randn(5, 1, 48, generator=torch.Generator().manual_seed(1))
    one = freeze("resid_pre", {1: given}, positions=[4], layers=[1])
    few = baseline_run_of(lens).with_fewer_sequences(2)
    assert (few.n_sequences, few.prompt_batches) == (2, [slice(0, 5, 3)])
    ((found, _),) = outcomes_under_edits(few, [[one]], needs=NEEDS)
    whole = run_with(lens, TOKENS, one, positions=KEYS)
    torch.testing.assert_close(found.loss, whole.loss[[0, 3]])
    torch.testing.assert_close(found.mass, whole.mass[:, [0, 3]])
    assert few.with_fewer_sequences(2) is few


def test_of_fewer_positions_more_cells_share_a_forward():
    lens = lens_of("llama")
    few = baseline_run_of(lens).with_fewer_sequences(2, length=9)
    assert few.tokens.n_positions == 9
    assert few.plan.pack == 4  # 2 sequences x 2 cells x 20 positions = 80 = 2 x 4.4 x 9
    one = scale("k", 2.0, layers=[1], positions=[6])
    ((found, _),) = outcomes_under_edits(few, [[one]], needs=NEEDS)
    wanted = run_with(lens, TOKENS.cut(9), one, positions=KEYS)
    torch.testing.assert_close(found.loss, wanted.loss[[0, 3]])


def test_runs_of_several_baselines_in_one_queue_are_each_as_alone():
    lens = lens_of("llama")
    plain = baseline_run_of(lens, lanes=2)
    isolated, less = plain.with_edits(EARLY), replace(NEEDS, layers=(2,), loss=False, whole=False)
    asked = [
        (run, edits, needs)
        for edits in LATE
        for run, needs in ((plain, NEEDS), (isolated, NEEDS), (plain, less))
    ]
    found = outcomes_in_one_queue(asked)
    for (run, edits, needs), (outcome, changed) in zip(asked, found, strict=True):
        wanted = run_with(lens, TOKENS, [*run.edits, *edits], positions=KEYS)
        assert_close(outcome.mass, wanted.mass[list(needs.layers)])
        assert changed == set(range(len(edits)))


def test_forwards_side_by_side_give_the_same_numbers(monkeypatch):
    lens = lens_of("llama")
    alone = outcomes_under_edits(baseline_run_of(lens, edits=EARLY), LATE, needs=NEEDS)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 2)
    beside = outcomes_under_edits(baseline_run_of(lens, edits=EARLY, lanes=2), LATE, needs=NEEDS)
    for (one, _), (other, _) in zip(alone, beside, strict=True):
        assert_alike(one, other)


def test_more_sites_are_kept_where_they_are_asked_for():
    baseline_run = baseline_run_of(lens_of("llama"))
    assert baseline_run.with_sites(("resid_post",), layers=(1,), loss=True) is baseline_run
    more = baseline_run.with_sites(("z",), layers=(0, 1), loss=False)
    assert more is baseline_run.with_sites(("z",), layers=(0, 1), loss=False) is not baseline_run
    assert set(more.batch(0).outcome.tensors) == {("z", 0), ("z", 1)}
    assert more.outcome.loss is None
    assert baseline_run.with_sites(("z",), layers=(0, 1), loss=True).outcome.loss is not None


def test_an_edit_that_fails_fails_the_run():
    def bad(x, at):
        raise ValueError("no such number")

    with pytest.raises(ValueError, match="no such number"):
        outcomes_under_edits(
            baseline_run_of(lens_of("llama")), [[edit("z", bad, layers=[1])]], needs=NEEDS
        )
