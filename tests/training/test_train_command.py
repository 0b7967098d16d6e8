"""``sink-lens train``: what it shows, what it passes on, exit codes, and one real training from a text file."""

import re
import shlex
from importlib import import_module
from typing import get_args

import pandas as pd
import pytest
from typer.testing import CliRunner

from sink_lens import cli, read_run
from sink_lens.cli import train as command
from sink_lens.errors import RunError
from sink_lens.models.headnorm import HeadNormForCausalLM, undecayed
from sink_lens.models.variants import Attention
from sink_lens.training import estimate, timed_estimate
from sink_lens.training.config import TrainConfig, read_train
from sink_lens.training.model import model_of

trainer = import_module("sink_lens.training.train")

FILE = """\
n_layers = 2
d_model = 16
d_mlp = 24
n_heads = 2
vocab_size = 280
length = 12
batch = 4
steps = 4
warmup = 1
log_every = 2
eval_every = 4
device = "cpu"
data = "text.txt"
"""


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times, and nobody knew. " * 40)
    path = tmp_path / "toy.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every call of the training, in place of it."""
    made = []

    def train(config, **options):
        made.append((config, options))
        log = pd.DataFrame({"step": [600], "tokens": [9], "loss": [2.5], "seconds": [3.0], "eval_loss": [2.75]})
        return trainer.TrainResult(folder=tmp_path / "the" / "run", config=config, log=log, checkpoints={})

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")
    monkeypatch.setattr(estimate, "estimate", lambda config: made.append((config, "dry")) or "what it would take")
    return made


# --- with the work replaced


def test_help_shows_every_option_the_examples_and_the_exit_codes():
    shown = run("train", "--help").stdout
    for option in ["out", "seed", "set", "device", "dry-run", "example", "overwrite", "quiet"]:
        assert f"--{option} " in shown
    assert "sink-lens train --example > train.toml" in shown
    assert "torchrun --nproc_per_node 4 --no-python sink-lens train train.toml" in shown
    assert "Exit codes: 0 trained to the end, 2 bad input, 130 interrupted." in shown
    assert "train" in run("--help").stdout


def test_every_example_of_the_help_is_a_command_that_runs(calls, tmp_path):
    (tmp_path / "train.toml").write_text(run("train", "--example").stdout)
    lines = [line.split("[dim]")[0] for line in command._EXAMPLES.splitlines() if "sink-lens train" in line]
    assert len(lines) == 6
    for line in lines:
        words = line.partition(">")[0].partition("sink-lens ")[2]
        done = run(*shlex.split(words))
        assert done.exit_code == 0, (line, done.stderr)
    assert len(calls) == 5


def test_the_example_is_a_file_to_begin_with(tmp_path):
    shown = run("train", "--example")
    assert shown.exit_code == 0
    (tmp_path / "train.toml").write_text(shown.stdout)
    assert read_train(tmp_path / "train.toml") == TrainConfig()


def test_options_reach_the_training(calls, file):
    run("train", file)
    run("train", file, "--seed", 3, "--set", "lr=0.5", "--set", "attention=sigmoid", "--out", "here", "--overwrite")
    (first, plain), (second, chosen) = calls
    assert first == read_train(file)
    assert {name: str(value) if name == "out" else value for name, value in plain.items()} == {
        "out": "runs/toy-0",
        "overwrite": False,
        "progress": True,
    }
    assert (second.seed, second.lr, second.attention, second.d_model) == (3, 0.5, "sigmoid", 16)
    assert (str(chosen["out"]), chosen["overwrite"]) == ("here", True)
    run("train", file, "--seed", 3, "--quiet")
    assert (str(calls[2][1]["out"]), calls[2][1]["progress"]) == ("runs/toy-3", False)


def test_it_ends_with_the_headline_and_the_folder(calls, file, tmp_path):
    done = run("train", file)
    assert done.exit_code == 0
    headline, report, folder = done.stdout.splitlines()
    assert headline == "toy, softmax, seed 0: 600 steps, 9 tokens, 3 s; loss 2.5000 nats, held out 2.7500"
    assert report == f"report: {tmp_path / 'the' / 'run' / 'report.html'}"
    assert folder == str(tmp_path / "the" / "run")
    assert run("train", file, "--quiet").stdout == f"{folder}\n"


def test_a_dry_run_says_what_it_would_take(calls, file):
    done = run("train", file, "--dry-run", "--set", "steps=9")
    assert (done.exit_code, done.stdout) == (0, "what it would take\n")
    ((config, called),) = calls
    assert (config.steps, called) == (9, "dry")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no file was given; need one that says what to train: sink-lens train --example > train.toml"),
        (("none.toml",), "none.toml cannot be read as a configuration of train"),
        (("toy.toml", "--set", "lr"), "--set lr is no setting; need NAME=VALUE"),
        (("toy.toml", "--set", "speed=3"), "--set has 'speed', which is not known; did you mean seed?"),
        (("toy.toml", "--set", "lr=fast"), "lr is 'fast'; need a number"),
        (("toy.toml", "--device", "tpu"), "device is 'tpu'; need one of cpu, cuda, mps"),
    ],
)
def test_bad_input_ends_with_code_2(calls, file, arguments, says):
    done = run("train", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not calls


def test_an_error_of_the_training_is_one_message(monkeypatch, file):
    def train(config, **options):
        raise RunError("the loss is not finite at step 7")

    monkeypatch.setattr(trainer, "train", train)
    done = run("train", file)
    assert (done.exit_code, done.stderr) == (2, "error: the loss is not finite at step 7\n")


def test_an_interrupt_says_how_to_go_on(monkeypatch, file, tmp_path):
    def train(config, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train", train)
    done = run("train", file)
    assert (done.exit_code, done.stderr) == (130, "stopped; nothing was written\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").write_text("{}")
    done = run("train", file, "--out", "out")
    assert done.exit_code == 130
    assert done.stderr == "stopped; the checkpoints are in out: the same command goes on from there\n"


# --- a real training of a tiny model


def test_a_real_training_from_a_text_file_and_the_refusal_of_another(file, tmp_path):
    done = run("train", file, "--out", "out")
    assert done.exit_code == 0, done.stderr
    assert re.match(r"toy, softmax, seed 0: 4 steps, 192 tokens, \d+ s; loss 5\.\d+ nats, held out 5\.", done.stdout)
    found = read_run("out")
    assert (found.status, found.missing) == ("finished", [])
    assert run("train", file, "--out", "out", "--quiet").stdout == "out\n"
    other = run("train", file, "--out", "out", "--set", "value_norm=shared")
    assert other.exit_code == 2
    assert "value_norm: none there, shared here" in other.stderr


def test_a_dry_run_counts_parameters_and_writes_nothing(file, tmp_path):
    done = run("train", file, "--dry-run", "--set", "value_norm=per_head")
    assert done.exit_code == 0, done.stderr
    # 280 x 16, two layers of 4 x 256 + 3 x 384 + 2 x 16 + 2 x 8, and a last norm of 16
    assert re.search(r"parameters +8,944, 112 of them not decayed", done.stdout)
    assert re.search(r"tokens +192 \(0\.0 a parameter\)", done.stdout)
    assert re.search(r"a step +[\d.e-]+ s on cpu in one process \(from the speed of a product", done.stdout)
    assert "4 kept" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "toy.toml"]


def test_a_dry_run_of_a_slow_model_does_one_forward_or_one_more_after_compiling(monkeypatch):
    calls = []
    monkeypatch.setattr(timed_estimate.torch, "compile", lambda model: model)
    forward = HeadNormForCausalLM.forward
    monkeypatch.setattr(HeadNormForCausalLM, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    sizes = {"n_layers": 1, "d_model": 16, "d_mlp": 24, "n_heads": 2, "vocab_size": 300, "length": 256, "device": "cpu"}
    for compiled in (False, True):
        found = timed_estimate.timed_cost(TrainConfig(**sizes, compile=compiled), most_flops={"cpu": 1.0})
        assert (found.sequences, found.length) == (1, 64)
    assert len(calls) == 1 + 2


@pytest.mark.parametrize("attention", get_args(Attention))
@pytest.mark.parametrize("other", [{}, {"value_norm": "shared", "norm": "single_scale"}, {"value_norm": "per_head"}])
def test_the_parameters_are_counted_from_the_configuration_as_the_model_has_them(attention, other):
    sizes = {"n_layers": 2, "d_model": 16, "d_mlp": 24, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 300}
    for more in ({}, {"tied": False}, {"decay_unshared_gain": other.get("value_norm") == "per_head"}):
        config = TrainConfig(**sizes, attention=attention, **other, **more)
        model = model_of(config)
        counted = {name: one.numel() for name, one in model.named_parameters()}
        apart = undecayed(model, unshared_gain=not config.decay_unshared_gain)
        assert estimate.parameters_of(config) == (sum(counted.values()), sum(counted[name] for name in apart))
