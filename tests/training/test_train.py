"""Training: it learns, stops and goes on bit for bit, keeps whole checkpoints, and says what went wrong."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import forks
import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from sink_lens.errors import InputError, RunError
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.training import checkpoint_files
from sink_lens.training.arguments import choose_device, trainer_arguments
from sink_lens.training.batches import (
    check_given_rows,
    load_training_rows,
    tokenizer_hash,
    training_order,
)
from sink_lens.training.loop import Loop, Steps
from sink_lens.training.model import model_of
from sink_lens.training.train import train

from .tiny_run import LENGTH, VOCAB_SIZE, after_step, config_of, data, rows, stop_at, trained

SCRIPT = Path(__file__).with_name("tiny_run.py")
KEPT = [0, 1, 2, 4, 8, 12]


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def same(a, b):
    """Whether two nests of tensors and numbers are equal, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return a == b or (a != a and b != b)


def state(folder, name):
    with torch.serialization.safe_globals(
        [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    ):
        return torch.load(folder / name, weights_only=True)


def same_run(a, b, *, log=True):
    """Two run folders hold the same training: every checkpoint, the optimizer at the end, and the log."""
    left, right = (
        pd.read_parquet(folder / "log.parquet").drop(columns="seconds") for folder in (a, b)
    )
    if log:
        pd.testing.assert_frame_equal(left, right, check_exact=True)
    names = sorted(path.name for path in (a / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (b / "checkpoints").iterdir())
    for name in names:
        assert same(weights(a / "checkpoints" / name), weights(b / "checkpoints" / name)), name
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        one, two = (state(folder / f"checkpoints/checkpoint-{KEPT[-1]}", name) for folder in (a, b))
        one.pop(
            "python", None
        )  # Python's generator: the checker of shapes draws from it while the tests run
        two.pop("python", None)
        assert same(one, two), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return stop_at(tmp_path_factory.mktemp("stopped") / "run", 10)


# --- what is decided by the configuration


def test_the_rate_rises_from_its_first_step_and_falls_to_its_end():
    config = config_of(steps=12, warmup=4, lr=8.0, min_lr=2.0)
    # 8/4, 16/4, 24/4, 32/4; then 2 + 6 (1 + cos(pi k/8)) / 2: 8 at k = 0, 5 at k = 4
    assert [config.learning_rate(step) for step in range(5)] == [2.0, 4.0, 6.0, 8.0, 8.0]
    assert config.learning_rate(8) == pytest.approx(5.0)
    assert config.learning_rate(11) > 2.0
    assert config.learning_rate(12) == 2.0
    falling = [config.learning_rate(step) for step in range(4, 13)]
    assert falling == sorted(falling, reverse=True)
    assert config_of(warmup=0).learning_rate(0) == 1e-2


def test_the_order_is_passes_over_the_data_by_the_data_seed_alone():
    drawn = training_order(n_sequences=5, drawn=12, seed=3).tolist()
    assert len(drawn) == 12
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == [0, 1, 2, 3, 4]
    assert drawn[:5] != drawn[5:10]
    torch.manual_seed(7)
    assert drawn == training_order(n_sequences=5, drawn=12, seed=3).tolist()
    assert drawn != training_order(n_sequences=5, drawn=12, seed=4).tolist()


def test_the_seed_makes_the_weights_and_nothing_else_does():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = model_of(config_of(seed=1))
    assert torch.equal(before, torch.get_rng_state())
    again = model_of(config_of(seed=1, data_seed=9, lr=1e-3, steps=40))
    other = model_of(config_of(seed=2))
    assert same(first.state_dict(), again.state_dict())
    assert not same(first.state_dict(), other.state_dict())


def test_the_model_is_the_configuration():
    config = config_of(
        attention="gate_headwise",
        value_norm="per_head",
        value_norm_init="ones",
        n_kv_heads=1,
        rms_eps=1e-5,
        tied=False,
    )
    model = model_of(config)
    found = model.config
    assert (found.attention, found.value_norm, found.value_norm_init) == (
        "gate_headwise",
        "per_head",
        "ones",
    )
    assert (found.num_hidden_layers, found.hidden_size, found.intermediate_size) == (2, 16, 24)
    assert (found.num_attention_heads, found.num_key_value_heads, found.rms_norm_eps) == (
        2,
        1,
        1e-5,
    )
    assert (found.tie_word_embeddings, found.vocab_size, found.max_position_embeddings) == (
        False,
        VOCAB_SIZE,
        LENGTH,
    )
    assert model.model.layers[0].self_attn.value_norm.gain.shape == (2, 8)


def test_arms_of_one_seed_begin_alike_where_they_have_the_same_parameters():
    plain = dict(model_of(config_of()).named_parameters())
    variant = model_of(
        config_of(attention="gate_elementwise", value_norm="shared", value_norm_init="first_token")
    )
    variants = dict(variant.named_parameters())
    assert plain.keys() < variants.keys()
    assert all(torch.equal(plain[name], variants[name]) for name in plain)
    attention = variant.model.layers[1].self_attn
    # the gain is the size of the first token's head output, which these value weights make: std of 16 products
    expected = attention.v_proj.weight.detach().norm(dim=1).mean()
    assert float(attention.value_norm.gain.detach()[0]) == pytest.approx(float(expected), rel=0.2)


def test_matched_gains_are_measured_at_the_trainings_length_and_said(tmp_path):
    config = config_of(
        value_norm="per_head", value_norm_init="matched", n_layers=3, warmup=1, steps=2
    )
    model, plain = model_of(config), model_of(config_of(n_layers=3))
    assert model.config.value_norm_length == LENGTH
    tokens = torch.randint(VOCAB_SIZE, (300, LENGTH), generator=torch.Generator().manual_seed(9))
    wanted = []
    for layer in plain.model.layers:
        layer.self_attn.head_out.register_forward_pre_hook(
            lambda module, given: wanted.append(
                given[0].square().mean((0, 1, 3)).sqrt().mean().item()
            )
        )
    plain(tokens)
    assert model.mean_gains() == pytest.approx(wanted, rel=0.1)
    found = trained(tmp_path / "run", config=config)
    least, most = (f"{of(model.mean_gains()):.3g}" for of in (min, max))
    assert (
        f"value norm per_head (first gain, matched: {least} to {most} over layers)"
        in found.headline
    )
    assert (
        trained(tmp_path / "run", config=config).headline == found.headline
    )  # read again, not trained
    assert "gain" not in trained(tmp_path / "plain", config=config_of(warmup=1, steps=2)).headline


def test_data_that_cannot_be_trained_on_is_refused(tmp_path):
    with pytest.raises(InputError, match="no/such/tokenizer"):
        train(config=config_of(), out=tmp_path / "run", tokenizer="no/such/tokenizer")
    with pytest.raises(InputError, match=r"there is no file .*text\.txt"):
        train(config=config_of(), out=tmp_path / "run", data=tmp_path / "text.txt")
    with pytest.raises(InputError, match="no rows were given"):
        train(config=config_of(), out=tmp_path / "run", tokenizer=tiny_tokenizer())
    with pytest.raises(
        InputError, match=r"the tokenizer has 300 ids and the model 40; .*vocab_size = 300"
    ):
        model_of(config_of(), tokenizer=tiny_tokenizer())
    bad = rows(4, seed=0)
    bad[2]["input_ids"] = bad[2]["input_ids"].clone()
    bad[2]["input_ids"][3] = VOCAB_SIZE
    with pytest.raises(InputError, match="the train data has the id 40 and the model 40 ids"):
        train(config=config_of(), out=tmp_path / "run", data=(bad, bad))
    with pytest.raises(InputError, match="the evaluation data has no sequence"):
        train(config=config_of(), out=tmp_path / "run", data=(rows(4, seed=0), []))
    with pytest.raises(
        InputError, match="a sequence of the train data has 12 tokens; need length = 11"
    ):
        train(config=config_of(length=11), out=tmp_path / "run", data=data())
    assert not (tmp_path / "run").exists()


def test_what_the_trainer_is_told_is_the_configuration(tmp_path, monkeypatch):
    config = config_of(
        batch=8, accumulation=2, dtype="bfloat16", compile=True, betas=(0.8, 0.9), clip=0.5, seed=3
    )
    args = trainer_arguments(config, tmp_path, device="cpu")
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert (args.max_steps, args.learning_rate, args.weight_decay, args.max_grad_norm) == (
        12,
        1e-2,
        0.1,
        0.5,
    )
    assert (args.adam_beta1, args.adam_beta2, args.seed) == (0.8, 0.9, 3)
    assert (args.bf16, args.torch_compile, args.report_to) == (True, True, [])
    monkeypatch.setattr(
        TrainingArguments, "n_gpu", property(lambda self: 4)
    )  # without a launcher: one of them
    assert (args.n_gpu, args.train_batch_size) == (1, 4)


def test_sharding_is_configured_and_refused_where_it_would_be_skipped(tmp_path, monkeypatch):
    config = config_of(device=None, fsdp=True)
    with pytest.raises(
        InputError,
        match="fsdp is asked for on cpu, where it would be skipped in silence; need GPUs",
    ):
        choose_device(config)
    args = trainer_arguments(config, tmp_path, device="cpu")
    assert args.fsdp_plugin_args["fsdp_version"] == 2
    assert args.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "HeadNormDecoderLayer"
    assert args.fsdp_plugin_args["state_dict_type"] == "FULL_STATE_DICT"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        InputError, match="fsdp is asked for in one process; need a launcher: torchrun"
    ):
        choose_device(config)
    monkeypatch.setenv("RANK", "0")
    assert choose_device(config) == "cuda"


def test_a_device_that_is_not_there_and_a_batch_that_cannot_be_shared_are_refused(
    tmp_path, monkeypatch
):
    with pytest.raises(InputError, match="device is cuda and there is none; need one of cpu"):
        choose_device(config_of(device="cuda"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        InputError, match="batch is 4 sequences, for 3 processes with 2 forwards per step each"
    ):
        trainer_arguments(config_of(accumulation=2), tmp_path, device="cpu")


# --- a run


def test_it_learns_and_the_folder_is_a_whole_run(whole):
    log = whole.frame
    assert log["step"].tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12]
    assert log["tokens"].tolist() == [step * 4 * LENGTH for step in log["step"]]
    assert np.isnan(log["loss"][0])
    assert log["loss"].iloc[-1] < log["loss"][1] - 0.2
    assert log["eval_loss"].dropna().index.tolist() == [0, 6, 10]
    assert log["eval_loss"].iloc[-1] < log["eval_loss"][0] - 0.2
    expected = [config_of().learning_rate(step - 1) for step in log["step"][1:]]
    assert log["lr"].tolist()[1:] == pytest.approx(expected, rel=1e-12)
    assert (log["grad_norm"][1:] > 0).all()
    run = read_run(whole.folder)
    assert (run.kind, run.status, run.missing) == ("train", "finished", [])
    assert run.config == json.loads((whole.folder / "config.json").read_text())
    assert run.config == json.loads(json.dumps(asdict(config_of())))
    pd.testing.assert_frame_equal(run.tables["log"], log)
    assert {
        "data_sha256",
        "tokenizer_sha256",
        "bos_condition",
        "device",
        "versions",
    } <= run.provenance.keys()
    assert "12 steps, 576 tokens" in whole.headline


def test_the_first_loss_is_that_of_the_first_sequences_of_the_order(whole):
    model = model_of(config_of())
    numbers = training_order(n_sequences=50, drawn=48, seed=0)[:4]
    ids = torch.stack([data()[0][number]["input_ids"] for number in numbers])
    assert whole.frame["loss"][1] == pytest.approx(
        model(input_ids=ids, labels=ids).loss.item(), abs=1e-6
    )
    ids = torch.stack([row["input_ids"] for row in data()[1]])
    assert whole.frame["eval_loss"][0] == pytest.approx(
        model(input_ids=ids, labels=ids).loss.item(), abs=1e-6
    )


def test_an_evaluation_is_the_mean_over_all_tokens_that_are_predicted(tmp_path):
    held_out = [
        {"input_ids": row["input_ids"], "labels": row["labels"].clone()} for row in data()[1]
    ]
    for number, row in enumerate(held_out):
        row["labels"][: 2 * number + 1] = -100  # 11, 9, 7, 5 and 3 tokens are predicted
    config = config_of(steps=1, warmup=0)
    found = train(config=config, out=tmp_path / "run", data=(data()[0], held_out), progress=False)
    ids, labels = (torch.stack([row[name] for row in held_out]) for name in held_out[0])
    logits = model_of(config)(input_ids=ids).logits[:, :-1].log_softmax(-1)
    seen = labels[:, 1:] != -100
    nats = -logits.gather(-1, ids[:, 1:, None])[..., 0][seen]
    assert len(nats) == 35
    assert found.frame["eval_loss"][0] == pytest.approx(nats.mean().item(), abs=1e-6)


def test_checkpoints_are_those_of_the_powers_of_two_and_the_end_and_hold_no_arguments(whole):
    assert {path.name for path in (whole.folder / "checkpoints").iterdir()} == {
        f"checkpoint-{step}" for step in KEPT
    }
    assert list(whole.checkpoints) == KEPT
    assert not list(whole.folder.rglob("training_args.bin"))
    first = model_of(config_of()).state_dict()
    del first["lm_head.weight"]
    assert same(weights(whole.checkpoints[0]), first)
    assert [
        step for step, path in whole.checkpoints.items() if (path / "optimizer.pt").exists()
    ] == [12]
    for path in whole.checkpoints.values():
        assert checkpoint_files.has_whole_state(path) == (path == whole.checkpoints[12])
        assert json.loads((path / "config.json").read_text())["use_cache"] is True


@pytest.mark.parametrize(
    ("fields", "spared"),
    [
        (
            {"attention": "sink_logit"},
            2 * 4 + 1,
        ),  # two norms, gamma and the logits a layer; the last norm
        ({"decay_unshared_gain": True}, 2 * 2 + 1),  # the norms of two layers, and the last one
    ],
)
def test_gains_and_sink_logits_are_not_decayed_but_a_gain_that_is_said_to_be(
    fields, spared, tmp_path
):
    config = config_of(value_norm="per_head", steps=1, warmup=0, eval_every=0, **fields)
    trained(tmp_path / "run", config=config)
    groups = state(tmp_path / "run/checkpoints/checkpoint-1", "optimizer.pt")["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert len(groups[1]["params"]) == spared
    assert len(groups[0]["params"]) == len(list(model_of(config).parameters())) - spared


def test_accumulation_is_the_same_training(whole, tmp_path):
    cut = trained(tmp_path / "run", config=config_of(accumulation=2))
    assert np.allclose(cut.frame["loss"][1:], whole.frame["loss"][1:], atol=2e-5)


def test_bf16_trains_weights_that_stay_in_float32(tmp_path):
    half = trained(tmp_path / "run", config=config_of(dtype="bfloat16"))
    assert half.frame["loss"].iloc[-1] < half.frame["loss"][1]
    assert {tensor.dtype for tensor in weights(half.checkpoints[12]).values()} == {torch.float32}


def test_training_leaves_the_callers_random_state_and_messages_alone(tmp_path):
    from transformers.utils import logging

    def states():
        legacy = np.random.get_state()  # noqa: NPY002  # Python's own is drawn from by the checker of shapes
        return (
            torch.get_rng_state(),
            legacy,
            logging.get_verbosity(),
            logging.is_progress_bar_enabled(),
        )

    torch.manual_seed(3)
    before = states()
    trained(tmp_path / "run", config=config_of(steps=1, warmup=0))
    assert same(before, states())


# --- stopped, and gone on


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Runs that were killed (kill -9): in the forward of step 8, and while the checkpoint of step 8 was written."""
    out = tmp_path_factory.mktemp("killed") / "run"
    code, said = forks.run(SCRIPT, out, "both", said=out.with_name("said"))
    assert code == -signal.SIGKILL, said
    return {place: out.with_name(f"run-{place}") for place in ("forward", "saving")}


@pytest.mark.parametrize("place", ["forward", "saving"])
def test_a_killed_training_goes_on_bit_for_bit(whole, killed, place):
    out = killed[place]
    assert read_run(out).status == "running"
    assert max(checkpoint_files.list_checkpoints(out / "checkpoints")) == 5
    assert bool(list((out / "checkpoints/.part").glob("*"))) == (place == "saving")
    again = trained(out)
    assert again.frame["step"].tolist() == whole.frame["step"].tolist()
    same_run(whole.folder, out)


def test_an_interrupt_ends_the_step_saves_it_and_the_same_call_goes_on(whole, tmp_path):
    out, before = tmp_path / "run", signal.getsignal(signal.SIGINT)
    with (
        after_step(6, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        trained(out)
    assert signal.getsignal(signal.SIGINT) is before
    assert read_run(out).status == "interrupted"
    assert max(checkpoint_files.list_checkpoints(out / "checkpoints")) == 7
    trained(out)
    same_run(whole.folder, out, log=False)
    loss = pd.read_parquet(out / "log.parquet").set_index("step")["loss"]
    assert loss.index.tolist() == [*whole.frame["step"][:7], 7, *whole.frame["step"][7:]]
    assert loss[[7, 8]].mean() == pytest.approx(whole.frame.set_index("step")["loss"][8], rel=1e-6)


def test_a_finished_run_is_read_and_another_configuration_or_other_data_is_refused(
    whole, tmp_path, monkeypatch
):
    out = shutil.copytree(whole.folder, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "training_step", lambda *given, **named: pytest.fail("it trains"))
        pd.testing.assert_frame_equal(trained(out).frame, whole.frame)
    with pytest.raises(RunError, match=r"holds a run that differs in lr: 0\.01 there, 0\.02 here"):
        trained(out, config=config_of(lr=2e-2))
    with pytest.raises(RunError, match="differs in tokens_sha256"):
        train(config=config_of(), out=out, data=(rows(50, seed=9), rows(6, seed=2)), progress=False)
    same_run(whole.folder, out)
    fresh = trained(out, config=config_of(steps=2, warmup=0), overwrite=True)
    assert list(fresh.checkpoints) == [0, 1, 2]


def test_given_rows_are_told_apart_by_what_is_held_out_and_by_their_labels():
    own, held_out = data()
    masked = [row | {"labels": torch.full_like(row["labels"], -100)} for row in own]
    given = ((own, held_out), (own, own[:6]), (masked, held_out), (own, masked[:6]))
    found = {check_given_rows(config_of(), one, tokenizer=None).sha256 for one in given}
    assert len(found) == len(given)


def test_given_rows_have_the_tokenizer_that_is_named(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    config = config_of(tokenizer=str(tmp_path), vocab_size=300)
    found = check_given_rows(config, data(), tokenizer=None).tokenizer
    assert found.get_vocab() == tiny_tokenizer().get_vocab()


def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(whole, stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    os.truncate(out / "checkpoints/latest-10/model.safetensors", 300)
    with pytest.warns(
        UserWarning, match=r"latest-10 is damaged .*model\.safetensors has 300 bytes"
    ):
        trained(out)
    same_run(whole.folder, out)


def test_weights_of_another_training_are_named_and_not_gone_on_from(whole, stopped, tmp_path):
    """As large as those that were written; an older checkpoint is not gone on from, and is the run's result too."""
    out, finished = (
        shutil.copytree(stopped, tmp_path / "run"),
        shutil.copytree(whole.folder, tmp_path / "whole"),
    )
    for folder, name in ((out, "latest-10"), (finished, "checkpoint-4")):
        shutil.copyfile(
            whole.folder / "checkpoints/checkpoint-8/model.safetensors",
            folder / "checkpoints" / name / "model.safetensors",
        )
        with pytest.warns(UserWarning, match=f"{name} is damaged .*model"):
            trained(folder)
    same_run(whole.folder, out)


def test_an_error_of_a_resumed_training_is_that_error_and_the_next_call_goes_on(
    whole, stopped, tmp_path, monkeypatch
):
    out = shutil.copytree(stopped, tmp_path / "run")
    there = sorted(path.name for path in (out / "checkpoints").iterdir())
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError) as raised:
        patched.setattr(
            Loop, "training_step", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
        )
        trained(out)
    said = " ".join([str(raised.value), *raised.value.__notes__])
    assert "latest-10" in said
    assert "overwrite" not in said
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == there
    trained(out)
    same_run(whole.folder, out)


class Evil:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (str(self.canary), "w")


def test_state_of_something_else_is_its_own_error_and_runs_no_code(whole, stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    newest = out / "checkpoints/latest-10"
    own = (newest / "scheduler.pt").read_bytes()
    evil = pickle.dumps(Evil(newest / "ran"), protocol=2)
    (newest / "scheduler.pt").write_bytes(evil + b"." * (len(own) - len(evil)))
    listed = (newest / "checkpoint.json").read_text()
    sha256 = json.loads(listed)["files"]["scheduler.pt"]["sha256"]
    its_own = hashlib.sha256((newest / "scheduler.pt").read_bytes()).hexdigest()
    (newest / "checkpoint.json").write_text(listed.replace(sha256, its_own))
    with pytest.raises(pickle.UnpicklingError) as raised:
        trained(out)
    assert "latest-10" in raised.value.__notes__[0]
    assert not (newest / "ran").exists()
    (newest / "scheduler.pt").write_bytes(own)
    (newest / "checkpoint.json").write_text(listed)
    trained(out)
    same_run(whole.folder, out)


def test_a_run_without_a_whole_checkpoint_says_which_files_are_needed(whole, tmp_path):
    out = shutil.copytree(whole.folder, tmp_path / "run")
    os.truncate(out / "checkpoints/checkpoint-12/optimizer.pt", 3)
    with (
        pytest.warns(UserWarning, match="checkpoint-12 is damaged"),
        pytest.raises(RunError, match=r"checkpoint\.json") as raised,
    ):
        trained(out)
    assert "overwrite" not in str(raised.value)


def test_a_damaged_checkpoint_does_not_cost_a_good_one_its_state(stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    folder = out / "checkpoints"
    os.truncate(folder / "latest-10/optimizer.pt", 3)
    shutil.copytree(folder / "latest-10", folder / "latest-11")
    checkpoint_files.remove_superseded_checkpoints(folder, finished=False)
    assert checkpoint_files.has_whole_state(folder / "checkpoint-8")


@pytest.fixture
def with_own_files(stopped, tmp_path):
    """A stopped run with files of the user's beside and within what the training writes."""
    out, home = shutil.copytree(stopped, tmp_path / "run"), tmp_path / "home"
    home.mkdir()
    names = (
        "best/model.safetensors",
        "checkpoint-8-best/config.json",
        "latest-10/notes.txt",
        "checkpoint-12/notes.txt",
    )
    own = [out / "checkpoints" / name for name in names]
    own.append(out / "checkpoints" / "latest-10" / "model-of-mine.safetensors")
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    return out, own


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_file_of_the_users_is_removed_or_replaced_in_the_folders_of_a_training(
    whole, with_own_files, overwrite
):
    out, own = with_own_files
    trained(out, overwrite=overwrite)
    assert [path.read_text() for path in own] == ["mine"] * len(own)
    assert checkpoint_files.newest_checkpoint(out / "checkpoints").name == "checkpoint-12"
    for path in own:
        path.unlink()
    for folder in ("best", "checkpoint-8-best", "latest-10"):
        (out / "checkpoints" / folder).rmdir()
    same_run(whole.folder, out, log=not overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/checkpoint-9", "checkpoints/.part"])
def test_a_link_where_a_training_has_a_folder_is_refused_and_not_followed(
    stopped, tmp_path, name, overwrite
):
    out, home = shutil.copytree(stopped, tmp_path / "run"), tmp_path / "home"
    if (out / name).exists():
        shutil.move(out / name, home)
    home.mkdir(exist_ok=True)
    (home / "model.safetensors").write_text("mine")
    there = sorted(home.rglob("*"))
    (out / name).symlink_to(home)
    with pytest.raises(RunError, match=rf"{name} is a link"):
        trained(out, overwrite=overwrite)
    assert sorted(home.rglob("*")) == there


def test_a_link_in_the_folder_of_an_unfinished_checkpoint_is_refused_and_not_followed(
    stopped, tmp_path
):
    out, home = shutil.copytree(stopped, tmp_path / "run"), tmp_path / "home"
    for folder in (home, out / "checkpoints" / ".part"):
        folder.mkdir()
    (home / "model.safetensors").write_text("mine")
    (out / "checkpoints/.part/checkpoint-9").symlink_to(home)
    with pytest.raises(RunError, match=r"\.part/checkpoint-9"):
        trained(out)
    assert (home / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint-8/config.json", ".part/notes.txt"])
def test_a_folder_of_a_checkpoint_that_the_training_did_not_write_is_refused(
    stopped, tmp_path, name
):
    out = shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree((out / "checkpoints" / name).parent, ignore_errors=True)
    (out / "checkpoints" / name).parent.mkdir()
    (out / "checkpoints" / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(RunError, match=name.split("/")[0]):
            trained(out, overwrite=overwrite)
    assert (out / "checkpoints" / name).read_text() == "mine"


# --- what goes wrong


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_stops_with_its_step_and_nothing_later_is_saved(
    tmp_path, monkeypatch, value
):
    out, forward = tmp_path / "run", Loop.compute_loss

    def broken(self, *given, **named):
        loss, outputs = forward(self, *given, **{**named, "return_outputs": True})
        loss = loss * value if self.state.global_step == 6 else loss
        return (loss, outputs) if named.get("return_outputs") else loss

    monkeypatch.setattr(Loop, "compute_loss", broken)
    with pytest.raises(
        RunError, match=r"loss .*not finite by step 8.*The last good checkpoint is .*latest-5\."
    ):
        trained(out)
    assert read_run(out).status == "failed"
    assert max(checkpoint_files.list_checkpoints(out / "checkpoints")) == 5
    assert all(
        torch.isfinite(tensor).all() for tensor in weights(out / "checkpoints/latest-5").values()
    )
    assert pd.read_parquet(out / "log.parquet")["step"].max() == 6


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, monkeypatch):
    out, forward = tmp_path / "run", Loop.training_step

    def poisoned(self, *given, **named):
        loss = forward(self, *given, **named)
        if self.state.global_step == 3:
            with torch.no_grad():
                self.model.model.norm.weight[0] = torch.nan
        return loss

    monkeypatch.setattr(Loop, "training_step", poisoned)
    with pytest.raises(RunError, match=r"weights not finite by step 4.*checkpoint-2\."):
        trained(out)
    assert not (out / "checkpoints/checkpoint-4").exists()


def test_a_full_disk_is_said_and_the_last_good_checkpoint_is_whole(whole, tmp_path, monkeypatch):
    out, save = tmp_path / "run", torch.save

    def full(thing, path, *given, **named):
        if "checkpoint-8" in str(path) and str(path).endswith("optimizer.pt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(thing, path, *given, **named)

    said = r"the checkpoint of step 8 cannot be written .*No space left.*latest-5\. Free some"
    with monkeypatch.context() as patched, pytest.raises(RunError, match=said):
        patched.setattr(torch, "save", full)
        trained(out)
    assert not (out / "checkpoints/.part").exists()
    assert checkpoint_files.newest_checkpoint(out / "checkpoints").name == "latest-5"
    trained(out)
    same_run(whole.folder, out)


def test_watching_changes_nothing_and_measures_every_kept_checkpoint(whole, tmp_path, monkeypatch):
    from sink_lens.records.checkpoints import checkpoint_folders

    watching = import_module("sink_lens.training.watch")
    seen = []

    def measured(folder, *, writer, device, progress):
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002
        seen.append(sorted(checkpoint_folders(read_run(folder))))
        assert pd.read_parquet(folder / "log.parquet")["step"].max() == seen[-1][-1]
        writer.write_table("watch", pd.DataFrame({"step": seen[-1]}))

    monkeypatch.setattr(watching, "watch", measured)
    watched = trained(tmp_path / "run", config=config_of(watch=True))
    assert seen == [KEPT[: n + 1] for n in range(len(KEPT))]
    assert read_run(watched.folder).missing == []
    same_run(whole.folder, watched.folder)


def test_text_is_packed_once_and_the_tokenizer_lies_in_every_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(
        "It was the best of times, it was the worst of times, and nobody knew which. " * 60
    )
    config = config_of(data=str(text), vocab_size=280, steps=2, warmup=0, eval_every=2)
    made = train(config=config, out=tmp_path / "run", progress=False)
    corpus = load_training_rows(config, progress=False)
    hashes = {"data_sha256": corpus.sha256, "tokenizer_sha256": tokenizer_hash(corpus.tokenizer)}
    assert hashes.items() <= read_run(made.folder).provenance.items()
    assert corpus.train[0]["input_ids"][0] == corpus.tokenizer.bos_token_id
    assert len(list((tmp_path / "cache/packed").glob("*/manifest.json"))) == 1
    assert all((folder / "tokenizer.json").is_file() for folder in made.checkpoints.values())
    other = train(
        config=config_of(**{**asdict(config), "seed": 5, "value_norm": "shared"}),
        out=tmp_path / "b",
        progress=False,
    )
    assert read_run(other.folder).provenance["data_sha256"] == corpus.sha256
    with pytest.raises(InputError, match="vocab_size"):
        train(
            config=config_of(data=str(text), tokenizer=str(made.checkpoints[2])), out=tmp_path / "c"
        )
    with pytest.raises(InputError, match="the tokenizer nowhere cannot be read"):
        train(config=config_of(data=str(text), tokenizer="nowhere"), out=tmp_path / "c")


def test_two_processes_are_one_process_with_the_doubled_batch(whole, tmp_path):
    out = tmp_path / "run"
    code, said = forks.run(SCRIPT, out, "-", said=tmp_path / "said", ranks=2)
    assert code == 0, said
    log = pd.read_parquet(out / "log.parquet")
    assert log["step"].tolist() == whole.frame["step"].tolist()
    for name in ("loss", "eval_loss", "grad_norm"):
        assert np.allclose(log[name], whole.frame[name], atol=1e-5, equal_nan=True), name
    for step in KEPT:
        one, two = weights(whole.checkpoints[step]), weights(out / f"checkpoints/checkpoint-{step}")
        assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one), step
    run = read_run(out)
    assert (run.status, run.provenance["processes"]) == ("finished", 2)
    states = (out / "checkpoints/checkpoint-12").glob("rng_state*")
    assert sorted(path.name for path in states) == ["rng_state_0.pth", "rng_state_1.pth"]


def test_the_loop_and_its_callback_override_public_names_of_the_trainer_alone():
    for own, base in ((Loop, Trainer), (Steps, TrainerCallback)):
        private = {name for name in vars(own) if name.startswith("_") and not name.startswith("__")}
        assert private & set(dir(base)) == set()
        assert {name for name in vars(own) if name.startswith("on_")} <= set(dir(base))
