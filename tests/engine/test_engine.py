"""A sweep gives what ``run_with`` gives for one cell alone on one batch of prompts, but for rounding."""

import json
from dataclasses import replace

import lenses
import pytest
import torch
from rounding import CLOSE, MOVED, assert_close, close

from sink_lens.edits.constructors import edit, scalar, scale, zero
from sink_lens.edits.metrics import (
    Metric,
    dominance,
    kl_to,
    logit_difference,
    loss,
    norm,
    sink_mass,
)
from sink_lens.engine import passes
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.forward import run_with
from sink_lens.engine.passes import Passes
from sink_lens.engine.trust import make_accurate_engine
from sink_lens.models.load import wrap
from sink_lens.models.sites import SITES
from tests.tiny_families import tiny

EVERYTHING = (
    sink_mass(0),
    sink_mass(3),
    replace(sink_mass(0, layers=[2]), name="late sink mass"),
    norm(0, layer=1),
    norm(3, layer=2, site="z"),
    dominance(3, layer=1),
    loss(),
    logit_difference(5, 6),
    logit_difference(7, 8, position=1),
    Metric(
        name="largest of the stream",
        function=lambda run: run.state_at(3)[run.layers.index(1)].amax(1),
        positions=(3,),
        layers=(1,),
    ),
)
EVERYTHING = tuple(replace(one, name=f"{place} {one.name}") for place, one in enumerate(EVERYTHING))
EARLY = (replace(sink_mass(3, layers=[0, 1]), name="early sink mass"),)


def mixed(site, **layers):
    """An edit of a whole site that no norm behind it undoes, as it would a scale."""
    return edit(site, lambda x, at: x.flip(-1) + 0.5 * x, **layers)


SOME = {"positions": [1, 3]}
EDITS = (
    (mixed("resid_pre", layers=[1]),),
    (zero("q", layers=[0], heads=[1], units=[2, 5], **SOME),),
    (zero("pattern", layers=[2], heads=[1], keys=[0, 1], **SOME),),
    (zero("neurons", layers=[2], units=[2, 5], **SOME),),
    (mixed("mlp_out", layers=[0]),),
    (zero("v", layers=[1]),),
    (mixed("final"),),
    (
        scale("attn_out", 2.0, layers=[0]),
        zero("z", layers=[2], heads=[3]),
        scale("mlp_out", 0.5, layers=[0], **SOME),
    ),
)
"""``test_cone.py`` asks every site of every family."""
CELLS = [cell_of_edits(edits) for edits in EDITS]


@pytest.mark.parametrize(
    "sizes", [{"prompts": 1, "pack": 3}, {"prompts": 3, "pack": 7}, {"prompts": 4, "pack": 1}]
)
def test_however_the_sweep_is_cut_the_numbers_are_those_of_its_batches(
    lens_of, tokens_of, engine_of, swept, slowly, measured, sizes
):
    lens, before = (
        lens_of("qwen3"),
        slowly(lens_of("qwen3"), tokens_of(), (), prompts=sizes["prompts"]),
    )
    found = swept(engine_of(lens, tokens_of(), CELLS, EVERYTHING, cut=False, **sizes))
    assert len(found) == len(EDITS) * len(EVERYTHING)
    for cell, edits in enumerate(EDITS):
        outcomes, moves = slowly(lens, tokens_of(), edits, prompts=sizes["prompts"]), []
        for metric in EVERYTHING:
            value, unedited = (measured(metric, runs, keys=(0, 3)) for runs in (outcomes, before))
            assert_close(found[cell, metric.name], value)
            moves.append(float(((value - unedited).abs() / unedited.abs().clamp(min=1)).max()))
        assert max(moves) >= MOVED, cell


@pytest.mark.parametrize("path", ["blocks", "bridge"])
def test_the_baseline_is_the_unedited_run(lens_of, tokens_of, engine_of, slowly, measured, path):
    lens = lens_of("llama")
    engine = engine_of(lens, tokens_of(), CELLS, EVERYTHING, path=path)
    frame = engine.baseline_metrics()
    outcomes = slowly(lens, tokens_of(), ())
    for metric in EVERYTHING:
        rows = frame[frame["metric"] == metric.name]
        assert_close(
            torch.tensor(rows["value"].to_numpy()), measured(metric, outcomes, keys=(0, 3))
        )
        assert rows["sequence"].tolist() == [0, 1, 2, 3]


def mean_read(x, at):
    """The mean of what is read in each sequence, with the axes of ``x``."""
    return at.read.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1))


READING = {
    "attention of values": edit("z", lambda x, at: x + mean_read(x, at), reads="v", layers=[1]),
    "values of the pattern": edit(
        "z", lambda x, at: x * mean_read(x, at), reads="pattern", layers=[1]
    ),
    "MLP of attention": edit(
        "down_out", lambda x, at: x + mean_read(x, at), reads="z", layers=[1], positions=[2]
    ),
    "MLP of its gate": edit(
        "mlp_out", lambda x, at: x * mean_read(x, at), reads="gate", layers=[1]
    ),
    "neurons of the gate": edit(
        "neurons", lambda x, at: x * mean_read(x, at), reads="gate", layers=[1], units=[3]
    ),
    "single entries": scalar(
        lenses.lens_of("llama"), layer=1, neurons=[3, 9], dimensions=[1, 4, 7]
    ),
    "the last norm of a layer": edit(
        "final", lambda x, at: x + mean_read(x, at), reads="resid_post"
    ),
}


@pytest.mark.parametrize("name", READING)
def test_what_an_edit_reads_is_computed(
    lens_of, tokens_of, engine_of, swept, slowly, measured, name
):
    lens, metrics = lens_of("llama"), (loss(), sink_mass(0))
    found = swept(engine_of(lens, tokens_of(), [cell_of_edits(READING[name])], metrics))
    outcomes = slowly(lens, tokens_of(), READING[name])
    for metric in metrics:
        assert_close(found[0, metric.name], measured(metric, outcomes, keys=(0,)))


@pytest.mark.parametrize("site", ["scores", "pattern"])
def test_metrics_of_whole_patterns_are_read(
    lens_of, tokens_of, engine_of, swept, slowly, measured, site
):
    lens = lens_of("llama")
    corner = lambda run: run.tensors[site, 1][:, 0, 3, :4].sum(1)  # noqa: E731
    metric = Metric(name="corner", function=corner, sites=(site,), layers=(1,))
    edits = (zero("z", layers=[0], heads=[1]), scale("q", 2.0, layers=[1]))
    engine = engine_of(lens, tokens_of(), [cell_of_edits(one) for one in edits], [metric])
    found = swept(engine)
    unedited = measured(metric, slowly(lens, tokens_of(), (), sites=(site,)), keys=(0,))
    assert_close(torch.tensor(engine.baseline_metrics()["value"].to_numpy()), unedited)
    assert engine.deviations([])[0][0] < CLOSE
    for cell, one in enumerate(edits):
        slow = measured(metric, slowly(lens, tokens_of(), one, sites=(site,)), keys=(0,))
        assert_close(found[cell, "corner"], slow)


def test_cells_that_change_nothing_that_is_read_are_not_run(
    lens_of, tokens_of, engine_of, monkeypatch
):
    lens = lens_of("llama")
    edits = (
        zero("z", layers=[1]),
        zero("resid_pre", layers=[2]),
        zero("final"),
    )  # behind all attention that is read
    engine = engine_of(lens, tokens_of(), [cell_of_edits(one) for one in edits], EARLY)
    monkeypatch.setattr(Passes, "run_pack", lambda *args, **options: pytest.fail("a cell was run"))
    baseline = engine.baseline_metrics()["value"].tolist()
    frames = [engine.run(block) for block in engine.blocks]
    assert [block.first for block in engine.blocks] == [4, 4]
    for cell in range(3):
        rows = [frame[frame["cell"] == cell] for frame in frames]
        assert [value for frame in rows for value in frame["value"]] == baseline
        assert not any(frame["changed"].any() for frame in rows)


def test_cells_begin_at_the_first_layer_that_is_touched_and_stand_once_a_batch_by_it(
    lens_of, tokens_of, engine_of
):
    engine = engine_of(lens_of("llama"), tokens_of(), CELLS, EVERYTHING)
    for prompts in (slice(0, 3), slice(3, 4)):
        blocks = [block for block in engine.blocks if block.prompts == prompts]
        assert sorted(cell for block in blocks for cell in block.cells) == list(range(len(CELLS)))
        firsts = [engine.first_layers[cell] for block in blocks for cell in block.cells]
        assert firsts == sorted(firsts)
        for block in blocks:
            assert block.first == engine.first_layers[block.cells[0]]
            for cell in block.cells:
                inner = [layers for site, layers in CELLS[cell].touches if SITES[site].per_layer]
                # the last norm needs the last layer's stream
                assert engine.first_layers[cell] == min(sum(inner, ()), default=2)
    assert [block.number for block in engine.blocks] == list(range(len(engine.blocks)))


def test_a_cell_that_changes_nothing_says_so_by_batch(lens_of, tokens_of, engine_of):
    lens = lens_of("llama")
    only_second = edit("z", lambda x, at: x * 2 if at.sequences.start else x, layers=[1])
    edits = (scale("z", 1.0, layers=[1]), only_second, scale("z", 2.0, layers=[1]))
    engine = engine_of(lens, tokens_of(), [cell_of_edits(one) for one in edits], [loss()])
    baseline = engine.baseline_metrics()["value"].tolist()
    first, second = (engine.run(block) for block in engine.blocks)
    assert first.groupby("cell")["changed"].agg(set).tolist() == [{False}, {False}, {True}]
    assert second.groupby("cell")["changed"].agg(set).tolist() == [{False}, {True}, {True}]
    assert first.loc[first["cell"] == 0, "value"].tolist() == close(baseline[:3])
    assert second.loc[second["cell"] == 1, "value"].tolist() != close(baseline[3:])


@pytest.fixture
def tamper(monkeypatch):
    """``tamper(change)``: the last outcome of every pack is what ``change`` makes of it."""
    right = Passes.run_pack

    def by(change):
        def pack(self, edits, **options):
            outcomes, changed = right(self, edits, **options)
            return [*outcomes[:-1], change(outcomes[-1])], changed

        monkeypatch.setattr(Passes, "run_pack", pack)

    return by


def test_the_deviation_sees_wrong_numbers_and_numbers_that_are_missing(
    lens_of, tokens_of, engine_of, tamper
):
    cells = [cell_of_edits(scale("z", factor, layers=[1])) for factor in (0.0, 2.0, 3.0)]
    engine = engine_of(lens_of("llama"), tokens_of(), cells, [sink_mass(0)])
    assert engine.deviations([2])[0][1] < CLOSE
    tamper(lambda one: replace(one, mass=one.mass + 0.25))
    assert engine.deviations([2])[0][1] == pytest.approx(0.25, abs=1e-6)
    tamper(lambda one: replace(one, mass=one.mass * torch.nan))
    assert engine.deviations([2])[0][1] == float("inf")


def test_a_number_that_is_undefined_on_one_way_alone_is_not_trusted_in_half_precision(
    tokens_of, engine_of, tamper
):
    lens, tokens = wrap(tiny("llama").to(torch.bfloat16)), tokens_of()
    cells = [cell_of_edits(scale("z", 2.0, layers=[1]))]
    tamper(lambda one: replace(one, mass=one.mass * torch.nan))
    plan = engine_of(lens, tokens, cells, [sink_mass(0)]).plan
    found = make_accurate_engine(lens, tokens, cells, [sink_mass(0)], plan=plan).plan
    assert found.path == "bridge"
    assert found.deviation < 0.1


@pytest.mark.parametrize(
    ("dtype", "path"),
    [(torch.float64, "bridge"), (torch.float32, "bridge"), (torch.bfloat16, "blocks")],
)
def test_no_deviation_is_too_large_in_half_precision_alone(
    tokens_of, engine_of, tamper, dtype, path
):
    lens, tokens = wrap(tiny("llama").to(dtype)), tokens_of()
    cells = [cell_of_edits(scale("z", 2.0, layers=[1]))]
    plan = engine_of(lens, tokens, cells, [sink_mass(0)]).plan
    tamper(lambda one: replace(one, mass=one.mass + 0.25))
    found = make_accurate_engine(lens, tokens, cells, [sink_mass(0)], plan=plan).plan
    assert found.path == path


@pytest.mark.parametrize(("off", "path"), [(3e-6, "blocks"), (1e-3, "bridge")])
def test_a_small_difference_of_large_logits_is_trusted_as_far_as_they_are(
    tokens_of, engine_of, tamper, off, path
):
    model = tiny("llama")
    head = model.get_output_embeddings().weight.data.mul_(1000)
    head[6] = head[5]
    lens, tokens, metric = wrap(model), tokens_of(), logit_difference(5, 6)
    engine = engine_of(lens, tokens, [cell_of_edits(scale("z", 2.0, layers=[1]))], [metric])
    assert engine.baseline_metrics()["value"].abs().max() < 0.01
    (_, largest), fifth = engine.deviations([]), torch.arange(300) == 5
    assert largest > 10
    tamper(lambda one: replace(one, logits=one.logits + off * largest * fifth))
    assert (
        make_accurate_engine(lens, tokens, engine.cells, [metric], plan=engine.plan).plan.path
        == path
    )


def test_a_layer_that_counts_from_the_last_is_edited_on_both_ways(lens_of, tokens_of, engine_of):
    cells = [cell_of_edits(scale("z", 3.0, layers=[-1]))]
    engine = engine_of(lens_of("llama"), tokens_of(), cells, [loss()])
    assert engine.run(engine.blocks[0])["changed"].all()
    assert engine.deviations([0])[0][1] < CLOSE


@pytest.mark.parametrize("lengths", [(12, 5, 9), (5, 12, 12)])
def test_metrics_of_the_ends_of_unlike_texts_are_checked_in_batches_of_one(
    lens_of, tokens_of, engine_of, swept, lengths
):
    metrics, cells = [logit_difference(5, 6)], [cell_of_edits(zero("z", layers=[1]))]
    one, all_of = (
        engine_of(lens_of("llama"), tokens_of(lengths), cells, metrics, prompts=n) for n in (1, 3)
    )
    one.check_metrics()
    found, wanted = (swept(engine)[0, metrics[0].name] for engine in (one, all_of))
    assert_close(found, wanted)


def test_the_deviation_of_the_unedited_run_sees_wrong_numbers(
    lens_of, tokens_of, engine_of, monkeypatch
):
    engine = engine_of(lens_of("llama"), tokens_of(), [cell_of_edits(zero("z"))], [sink_mass(0)])
    right = Passes.run_baseline

    def wrong(self, *args, **options):
        found = right(self, *args, **options)
        outcome = replace(found.outcome, mass=found.outcome.mass + 0.25)
        return replace(found, early=replace(found.early, outcome=outcome))

    monkeypatch.setattr(Passes, "run_baseline", wrong)
    assert engine.deviations([])[0][0] == pytest.approx(0.25, abs=1e-6)


def test_cells_are_compared_in_one_forward_each_way(lens_of, tokens_of, engine_of, monkeypatch):
    cells = [cell_of_edits(scale("z", 2.0, layers=[layer])) for layer in (0, 1)]
    right, bridge, sizes, beside = Passes.run_pack, passes.run_checked_edits, [], []

    def pack(self, edits, **options):
        sizes.append(len(edits))
        return right(self, edits, **options)

    def on_bridge(lens, runs, needs, **options):
        beside.append(len(runs))
        return bridge(lens, runs, needs, **options)

    monkeypatch.setattr(Passes, "run_pack", pack)
    monkeypatch.setattr(passes, "run_checked_edits", on_bridge)
    engine = engine_of(lens_of("llama"), tokens_of(), cells, [sink_mass(0)])
    assert max(engine.deviations([0, 1])[0]) < CLOSE
    assert (sizes, beside) == ([2], [3])


@pytest.mark.parametrize(("off", "pack"), [(1e-3, 2), (10.0, 1)])
def test_forwards_are_shared_where_that_changes_little_and_not_where_it_changes_more(
    lens_of, tokens_of, engine_of, monkeypatch, caplog, off, pack
):
    cells = [cell_of_edits(zero("z", layers=[layer])) for layer in (0, 0)]
    engine = engine_of(lens_of("llama"), tokens_of((9, 9)), cells, [loss()], pack=2)
    right = passes.partial_pass

    def other_numbers(lens, tokens, asked):
        out = right(lens, tokens, asked)
        if len(asked.layout.begins) > 1:
            out[-1, :, -1] += (
                off  # of 300 logits one: the loss moves by 3e-6, or by the whole of it
            )
        return out

    monkeypatch.setattr(passes, "partial_pass", other_numbers)
    plan = make_accurate_engine(engine.lens, engine.tokens, cells, [loss()], plan=engine.plan).plan
    assert (plan.pack, plan.path) == (pack, "blocks")
    assert (1e-7 < plan.deviation < 6 * CLOSE) if pack == 2 else plan.deviation < 6 * CLOSE
    assert ["this run does without" in line for line in caplog.messages] == (
        [] if pack == 2 else [True]
    )


@pytest.mark.parametrize("prompts", [1, 3, 4])
def test_metrics_with_a_number_a_sequence_get_those_of_their_batch(
    lens_of, tokens_of, engine_of, swept, prompts
):
    lens, tokens = lens_of("llama"), tokens_of()
    clean = run_with(lens, tokens, (), logits=True, quiet=True)
    right, wrong = [5, 6, 7, 8], [11, 12, 13, 14]
    rows = torch.arange(4)
    last = clean.logits[rows, tokens.lengths - 1]
    metrics = [replace(logit_difference(right, wrong), name="of each"), kl_to(clean.logits)]
    found = swept(
        engine_of(lens, tokens, [cell_of_edits(scale("z", 1.0))], metrics, prompts=prompts)
    )
    assert torch.allclose(
        found[0, "of each"], (last[rows, right] - last[rows, wrong]).double(), atol=1e-5
    )
    assert torch.allclose(found[0, metrics[1].name], torch.zeros(4).double(), atol=1e-6)


def test_undefined_numbers_are_no_deviation(lens_of, tokens_of, engine_of):
    """No query comes after the only token of a sequence: its sink mass is undefined on both ways."""
    tokens = tokens_of((6, 1, 4))
    engine = engine_of(
        lens_of("llama"), tokens, [cell_of_edits(zero("z", layers=[0]))], [sink_mass(0)]
    )
    frame = engine.run(engine.blocks[0])
    assert frame["value"].isna().tolist() == [False, True, False]
    assert frame["error"].isna().all()
    assert engine.deviations([0])[0][1] < CLOSE


def failing(*, layer):
    def fail(values, at):
        raise RuntimeError("of the edit")

    return cell_of_edits(edit("z", fail, layers=[layer]))


def test_a_plan_of_cells_that_all_fail_is_not_trusted(lens_of, tokens_of, engine_of, caplog):
    cells = [failing(layer=number % 2) for number in range(12)]
    engine = engine_of(lens_of("llama"), tokens_of((9, 9)), cells, [loss()], pack=4)
    plan = make_accurate_engine(engine.lens, engine.tokens, cells, [loss()], plan=engine.plan).plan
    assert (plan.path, plan.pack, plan.lanes, plan.cut, plan.n_compared) == (
        "bridge",
        1,
        1,
        False,
        0,
    )
    (said,) = [line for line in caplog.messages if "no cell could be compared" in line]
    assert "of the edit" in said


def test_cells_that_fail_leave_others_to_be_compared(lens_of, tokens_of, engine_of, caplog):
    cells = [*(failing(layer=0) for _ in range(3)), cell_of_edits(zero("z", layers=[0]))]
    engine = engine_of(lens_of("llama"), tokens_of((9, 9)), cells, [loss()], pack=1)
    plan = make_accurate_engine(engine.lens, engine.tokens, cells, [loss()], plan=engine.plan).plan
    assert plan == engine.plan
    assert plan.n_compared == 1
    assert json.loads(plan.as_json())["n_compared"] == 1
    assert caplog.messages == []
