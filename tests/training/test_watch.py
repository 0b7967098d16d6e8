"""Watching: planted sinks are found and measured by hand, and a run's checkpoints become one table."""

import json
import math
import os
import random
import shutil
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch

from sink_lens.chain.chain_measures import chain_measures
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError, RunError
from sink_lens.models.load import load, wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny_tokenizer
from sink_lens.records import add_to_run, create_run, read_run
from sink_lens.records.checkpoints import checkpoint_folders
from sink_lens.training.batches import load_training_rows
from sink_lens.training.checkpoint_folders import find_checkpoints
from sink_lens.training.config import build_train_config
from sink_lens.training.pages.training import checkpoint_table
from sink_lens.training.sink_birth import find_birth
from sink_lens.training.watch import (
    load_evaluation_tokens,
    load_run_tokenizer,
    measure_checkpoint,
    watch,
)
from tests.tiny_families import tiny

from .runs import CONFIG, EACH, watched, write_run

watching = import_module("sink_lens.training.watch")


def batch(sequences=3, length=24, seed=0):
    tokens = torch.randint(
        3, 300, (sequences, length), generator=torch.Generator().manual_seed(seed)
    )
    tokens[:, 0] = BOS_ID
    return from_tensor(tokens)


def value(frame, measure, *, layer=None, threshold=None):
    rows = frame[(frame["measure"] == measure) & frame["position"].isna()]
    rows = rows[rows["layer"].isna() if layer is None else rows["layer"].eq(layer).fillna(False)]
    if threshold is not None:
        rows = rows[np.isclose(rows["threshold"], threshold)]
    (found,) = rows["value"].tolist()
    return found


@pytest.fixture(scope="module")
def truth():
    return planted()


@pytest.fixture(scope="module")
def found(truth):
    return chain_measures(wrap(truth.model), batch())


def test_a_planted_sink_is_found_where_it_was_planted(truth, found):
    behind = range(truth.layer + 1, 5)
    assert all(value(found, "sink_rate", layer=layer, threshold=0.3) > 0.9 for layer in behind)
    assert all(
        value(found, "sink_rate", layer=layer, threshold=0.3) < 0.1
        for layer in range(truth.layer + 1)
    )
    assert [layer for layer in range(5) if value(found, "growth_layer", layer=layer)] == [
        truth.layer
    ]
    assert value(found, "growth_steps") == 1
    assert value(found, "super_neurons") == value(found, "super_neurons", layer=truth.layer) == 1


def test_mass_rate_and_loss_are_those_of_hugging_face(found):
    model = planted().model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(batch().tokens, output_attentions=True)
    for layer, pattern in enumerate(plain.attentions):
        column = pattern[..., 0]  # batch, head, query
        assert value(found, "sink_mass", layer=layer) == pytest.approx(
            float(column[..., 1:].mean()), abs=1e-6
        )
        for level in (0.05, 0.1):  # in 24 tokens uniform attention gives position 0 .157
            assert math.isnan(value(found, "sink_rate", layer=layer, threshold=level))
        for level in (0.2, 0.3):
            rate = float((column.mean(-1) > level).float().mean())
            assert value(found, "sink_rate", layer=layer, threshold=level) == pytest.approx(
                rate, abs=1e-6
            )
    whole = np.mean([float(pattern[..., 1:, 0].mean()) for pattern in plain.attentions])
    assert value(found, "sink_mass") == pytest.approx(whole, abs=1e-6)
    logits, labels = plain.logits[:, :-1].flatten(0, 1), batch().tokens[:, 1:].flatten()
    assert value(found, "loss") == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5
    )


def test_uniform_attention_has_no_sink_at_any_threshold():
    lens = wrap(tiny("mistral", initializer_range=1e-4, sliding_window=50, num_hidden_layers=2))
    for length, told in ((10, [0.3]), (18, [0.2, 0.3]), (64, [0.1, 0.2, 0.3])):
        found = chain_measures(lens, batch(sequences=2, length=length))
        rates = found.loc[(found["measure"] == "sink_rate") & found["layer"].isna()]
        known = rates.dropna(subset="value")
        assert known["threshold"].tolist() == told
        assert (known["value"] == 0).all()
    assert set(find_birth(found.assign(step=1, tokens=1)).others) == {(0.1, 0.0), (0.2, 0.0)}


def test_dominance_norm_and_rank_are_those_of_the_stream(truth, found):
    streams = []
    hooks = [
        layer.register_forward_hook(lambda *given: streams.append(given[2]))
        for layer in truth.model.model.layers
    ]
    with torch.no_grad():
        truth.model(batch().tokens)
    for hook in hooks:
        hook.remove()
    for layer, stream in enumerate(streams):
        first = stream[:, 0].abs()
        ratio = float((first.amax(-1) / first.mean(-1)).mean())
        assert value(found, "dominance_ratio", layer=layer) == pytest.approx(ratio, rel=1e-5)
        norms = stream.norm(dim=-1).numpy()
        grown = float(np.mean([one[0] / np.median(one[8:]) for one in norms]))
        assert value(found, "norm_ratio", layer=layer) == pytest.approx(grown, rel=1e-5)
        for name, start in (("effective_rank", 0), ("effective_rank_without", 1)):
            ranks = []
            for states in stream:
                p = torch.linalg.svdvals(states[start:].double())
                p = p / p.sum()
                ranks.append(float((-p * p.log()).sum().exp()))
            assert value(found, name, layer=layer) == pytest.approx(np.mean(ranks), rel=1e-4)
    assert value(found, "norm_ratio") == max(
        value(found, "norm_ratio", layer=layer) for layer in range(-1, 5)
    )


def test_uniform_attention_in_a_window_is_that_of_the_queries_that_see_the_first_token():
    model = tiny("mistral")  # windows of 8 tokens
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = chain_measures(wrap(model), batch(sequences=2, length=24))
    assert value(found, "uniform_mass") == pytest.approx(value(found, "sink_mass"), rel=1e-4)
    assert value(found, "uniform_mass", layer=1) == pytest.approx(
        value(found, "sink_mass", layer=1), rel=1e-4
    )


def test_measuring_twice_gives_the_same_and_leaves_everything_as_it_was():
    model = tiny("llama", attention_dropout=0.1).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    given = {"tokenizer": tiny_tokenizer(), "step": 3, "seen": 99}
    one, two = (measure_checkpoint(model, batch(length=12), **given) for _ in range(2))
    pd.testing.assert_frame_equal(one, two)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # noqa: NPY002
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == "sdpa"
    assert (set(one["step"]), set(one["tokens"])) == ({3}, {99})


def test_what_cannot_be_measured_or_gone_on_with_is_refused():
    lens = wrap(tiny("llama", num_hidden_layers=2))
    with pytest.raises(
        InputError, match=r"thresholds are \[.*1\.5\]; need numbers between 0 and 1"
    ):
        chain_measures(lens, batch(length=12), threshold=1.5)
    with pytest.raises(InputError, match="shortest sequence has 9 tokens; need 10"):
        chain_measures(lens, batch(length=9))
    with pytest.raises(InputError, match="shortest sequence has 43 tokens; need 44"):
        chain_measures(lens, batch(length=43), threshold=0.1)
    with pytest.raises(InputError, match=r"not measured at threshold 0\.2; need one of 0\.1, 0\.3"):
        find_birth(watched([0.1]), threshold=0.2)
    with pytest.raises(InputError, match="no checkpoint was measured"):
        find_birth(watched([0.1]).iloc[:0])


# --- a run


def course(folder, *, sinks, status="finished"):
    """A training run whose checkpoints at steps 0, 10, 20, ... have the planted sink or not."""
    write_run(folder, [5.0] * len(sinks), status=status)
    for index, sink in enumerate(sinks):
        for saved in (planted(sink=sink).model, tiny_tokenizer(adds_bos=True)):
            saved.save_pretrained(folder / "checkpoints" / f"checkpoint-{10 * index}")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run watched once: no sink, no sink, a sink."""
    folder = course(tmp_path_factory.mktemp("made") / "run", sinks=(False, False, True))
    return folder, watch(folder, tokens=batch(), progress=False)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


def test_every_checkpoint_of_a_run_is_measured_and_kept(made):
    folder, frame = made
    assert sorted(set(zip(frame["step"], frame["tokens"], strict=True))) == [
        (0, 0),
        (10, 640),
        (20, 1280),
    ]
    kept = read_run(folder)
    pd.testing.assert_frame_equal(kept.tables["watch"], frame)
    assert kept.status == "finished"
    assert set(frame["tokens_sha256"]) == {batch().hash}


def test_watching_again_goes_on_where_it_stopped_and_a_stopped_watch_keeps_what_it_had(
    run, monkeypatch
):
    planted(sink=True).model.save_pretrained(run / "checkpoints" / "checkpoint-30")
    measured = []

    def counted(path, *given, step, **named):
        measured.append(step)
        if measured[-3:] == [0, 10, 20]:
            raise KeyboardInterrupt
        return measure_checkpoint(path, *given, step=step, **named)

    monkeypatch.setattr(watching, "measure_checkpoint", counted)
    for _ in range(2):
        frame = watch(run, tokens=batch(), progress=False)
        assert measured == [30]
        assert sorted(set(frame["step"])) == [0, 10, 20, 30]
    with pytest.raises(KeyboardInterrupt):
        watch(run, tokens=batch(), progress=False, resume=False)
    assert sorted(set(read_run(run).tables["watch"]["step"])) == [0, 10]
    assert read_run(run).status == "finished"


def test_a_second_training_into_the_same_folder_is_measured_and_not_the_first(made, tmp_path):
    steps = made[0] / "checkpoints"
    first = tmp_path / "course"
    shutil.copytree(steps, first)
    before = watch(first, tokens=batch(), out=tmp_path / "watched", progress=False)
    for one, sink in ((10, True), (20, True)):  # as large as before, and written as they were
        planted(sink=sink, seed=5).model.save_pretrained(tmp_path / "new")
        weights = first / f"checkpoint-{one}" / "model.safetensors"
        when = weights.stat()
        shutil.copyfile(tmp_path / "new" / "model.safetensors", tmp_path / "weights")
        (tmp_path / "weights").replace(weights)
        os.utime(weights, ns=(when.st_atime_ns, when.st_mtime_ns))
    shutil.rmtree(first / "checkpoint-0")
    with pytest.warns(UserWarning, match="checkpoint 10 in .* is another"):
        after = watch(first, tokens=batch(), out=tmp_path / "watched", progress=False)
    fresh = watch(first, tokens=batch(), out=tmp_path / "fresh", progress=False)
    pd.testing.assert_frame_equal(after, fresh)
    assert not after.loc[after["step"] == 10, "value"].equals(
        before.loc[before["step"] == 10, "value"]
    )


def test_a_damaged_checkpoint_is_named_and_the_rest_goes_on(run):
    weights = run / "checkpoints" / "checkpoint-10" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.warns(UserWarning, match="checkpoint 10 is left out: .*weights cannot be read"):
        frame = watch(run, tokens=batch(), progress=False, resume=False)
    assert sorted(set(frame["step"])) == [0, 10, 20]
    (error,) = frame["error"].dropna().tolist()
    assert "weights cannot be read" in error
    assert find_birth(frame).step == 20
    weights.write_bytes(whole)
    assert watch(run, tokens=batch(), progress=False)["error"].isna().all()


def test_how_a_run_ended_stays_as_it_was(tmp_path):
    folder = course(tmp_path / "failed", sinks=(False,), status="failed")
    before = read_run(folder)
    watch(folder, tokens=batch(), progress=False)
    after = read_run(folder)
    assert before.status == after.status == "failed"
    assert (before.error, before.ended, before.config) == (after.error, after.ended, after.config)
    assert "watch" in after.tables


def test_what_was_measured_otherwise_is_not_gone_on_with(run):
    with pytest.raises(
        RunError,
        match=r"was measured on other tokens .*; need the same\. Give the same, or measure",
    ):
        watch(run, tokens=batch(seed=1), progress=False)
    with pytest.raises(RunError, match=r"at the thresholds 0\.05, 0\.1, 0\.2, 0\.3, not 0\.25"):
        watch(run, tokens=batch(), threshold=0.25, progress=False)


def test_runs_that_cannot_be_watched_are_refused(tmp_path):
    with create_run(tmp_path / "trace", kind="trace", config={}, provenance={}) as writer:
        writer.write_text("a", "b")
    with pytest.raises(RunError, match="holds a trace run; need one of sink-lens train"):
        watch(tmp_path / "trace", tokens=batch())
    bare = write_run(tmp_path / "bare", [5.0])
    (bare / "checkpoints" / "latest-10").mkdir(parents=True)
    with pytest.raises(RunError, match=r"has no checkpoint; need checkpoints/checkpoint-N"):
        checkpoint_folders(read_run(bare))
    with pytest.raises(RunError, match="no run"):
        watch(tmp_path, tokens=batch())


def test_a_run_that_is_being_written_is_refused(run):
    with add_to_run(run), pytest.raises(RunError, match="in use by another process"):
        watch(run, tokens=batch(), progress=False)
    with add_to_run(run) as writer:
        assert len(watch(run, tokens=batch(), progress=False, writer=writer))


def test_rows_that_cannot_be_had_again_are_replaced_by_the_prose_and_that_is_said(tmp_path):
    run = read_run(course(tmp_path / "run", sinks=(False,)))
    with pytest.warns(UserWarning, match="measured on the bundled prose: .*given as rows"):
        tokens = load_evaluation_tokens(run, load_run_tokenizer(run), sequences=4, length=64)
    assert (tokens.n_sequences, tokens.n_positions) == (
        4,
        CONFIG["length"],
    )  # the run's context is shorter than 64
    assert tokens.source == "text:moby_dick"
    with pytest.raises(RunError, match="has no tokenizer for other text"):
        load_evaluation_tokens(run, None, sequences=4, length=64)


def test_as_many_held_out_sequences_are_measured_as_are_asked_for(tmp_path):
    (tmp_path / "text.txt").write_text(bundled_text()[:4000])
    fields = {"data": str(tmp_path / "text.txt"), "vocab_size": 300, "eval_frac": 0.5}
    fields |= {"eval_sequences": 2}
    found = load_training_rows(build_train_config(CONFIG | fields), progress=False)
    known = {"data_source": fields["data"], "data_sha256": found.sha256}
    run = read_run(write_run(tmp_path / "run", [5.0], provenance=known, **fields))
    assert load_evaluation_tokens(run, None, sequences=6, length=64).n_sequences == 6
    with pytest.warns(UserWarning, match="held-out sequences, fewer than the 5000 that were asked"):
        few = load_evaluation_tokens(run, None, sequences=5000, length=64)
    assert 6 <= few.n_sequences < 5000


# --- checkpoints of others


def saved(folder, *, sinks=(False, True), tokens=None):
    """Checkpoints as the Hugging Face Trainer leaves them, at steps 100, 200, ..."""
    for index, sink in enumerate(sinks):
        path = folder / f"checkpoint-{100 * (index + 1)}"
        planted(sink=sink).model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        if tokens:
            state = {
                "global_step": 100 * (index + 1),
                "num_input_tokens_seen": tokens * (index + 1),
            }
            (path / "trainer_state.json").write_text(json.dumps(state))
    (folder / "runs-2026").mkdir()  # no checkpoint, though it ends in a number
    return folder


def test_a_folder_of_checkpoints_is_watched_in_the_order_of_their_steps(tmp_path):
    folder = saved(tmp_path / "trainer", sinks=(False, False, True))
    frame = watch(folder, out=tmp_path / "out", tokens=batch(), progress=False)
    assert frame["step"].drop_duplicates().tolist() == [100, 200, 300]
    assert frame["tokens"].isna().all()
    born = find_birth(frame)
    assert (born.step, born.unit, born.tokens) == (300, "steps", 300)
    assert "born between 200 and 300 steps (step 300)" in born.sentence
    assert checkpoint_table(frame, threshold=0.3).columns[:2] == ("step", "sink_rate")
    own = chain_measures(load(str(folder / "checkpoint-300")), batch())
    last = frame[frame["step"] == 300]
    assert last["value"].to_numpy() == pytest.approx(own["value"].to_numpy(), nan_ok=True)
    again = watch(folder, out=tmp_path / "out", tokens=batch(), progress=False)
    pd.testing.assert_frame_equal(again, frame, check_dtype=False)
    kept = read_run(tmp_path / "out")
    assert (kept.kind, kept.status, kept.missing) == ("watch", "finished", [])


@pytest.mark.parametrize(
    ("options", "tokens"), [({}, [5000, 10000]), ({"step_tokens": 64}, [6400, 12800])]
)
def test_tokens_of_others_are_counted_by_the_trainer_or_by_the_user(options, tokens, tmp_path):
    folder = saved(tmp_path / "trainer", tokens=5000)
    frame = watch(folder, out=tmp_path / "out", tokens=batch(), progress=False, **options)
    assert frame["tokens"].drop_duplicates().tolist() == tokens


def test_tokens_that_are_counted_later_are_those_of_the_checkpoints_measured_before(tmp_path):
    folder, out = saved(tmp_path / "trainer"), tmp_path / "out"
    assert watch(folder, out=out, tokens=batch(), progress=False)["tokens"].isna().all()
    for options in ({"step_tokens": 64}, {}):
        frame = watch(folder, out=out, tokens=batch(), progress=False, **options)
        assert frame["tokens"].drop_duplicates().tolist() == [6400, 12800]
        pd.testing.assert_frame_equal(read_run(out).tables["watch"], frame)


def test_models_are_watched_in_the_order_of_the_steps_that_are_given(tmp_path):
    models = {20: planted(sink=True).model, 3: planted(sink=False).model}
    frame = watch(models, out=tmp_path / "a", tokens=batch(), progress=False)
    assert frame["step"].drop_duplicates().tolist() == [3, 20]


def test_checkpoints_of_one_step_and_none_at_all_are_refused(tmp_path):
    (tmp_path / "two").mkdir()
    for name in ("checkpoint-1.gguf", "step_1.gguf", "final.gguf"):
        (tmp_path / "two" / name).write_text("")
    with pytest.raises(InputError, match="are both of step 1"):
        find_checkpoints(tmp_path / "two")
    with pytest.raises(
        RunError, match="is no run and has no checkpoint; need a run of sink-lens train, or folders"
    ):
        watch(tmp_path, tokens=batch())
    run = write_run(tmp_path / "run", [5.0])
    with pytest.raises(InputError, match="out and step_tokens are for other checkpoints"):
        watch(run, out=tmp_path / "out", tokens=batch())


@pytest.mark.parametrize(
    ("masses", "step", "before"),
    [
        ([0.0, 0.2, 0.4], 10, 0),  # rates over 0.3 are half the masses: 0, 0.1, 0.2
        ([0.0, 0.08, 0.1], 20, 640),  # 0.04 is not enough, 0.05 is
        ([0.0, 0.4, 0.0, 0.4], 30, 1280),  # what comes and goes is no birth
        ([0.4, 0.4], 0, None),
        ([0.0, 0.4, 0.02], None, None),
    ],
)
def test_a_birth_is_where_the_rate_stays(masses, step, before):
    born = find_birth(watched(masses))
    assert (born.step, born.before) == (step, before)
    assert born.tokens == (None if step is None else step * EACH)


def test_a_sink_that_never_comes_or_was_always_there_is_said_plainly():
    said = find_birth(watched([0.0, 0.02, 0.08])).sentence
    assert said == (
        "no sink at threshold 0.3; at the last checkpoint (1.28k tokens) 4.0% of layers and heads above 0.3 "
        "(8.0% at 0.1); layer 1 has most: mean mass 0.08, uniform attention 0.25"
    )
    said = find_birth(watched([0.4, 0.4])).sentence
    assert "at the first checkpoint already (0 tokens), so its birth is not known" in said
