"""The commands of the page that train at the paper's size, run with every size small; its arithmetic."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sink_lens import cli, read_run, train
from sink_lens.training.config import TrainConfig, read_train_config
from sink_lens.training.passes import count_parameters

PAGE = (Path(__file__).parents[2] / "docs/train_at_scale.md").read_text(encoding="utf-8")
SMALL = {
    "n_layers": 1, "d_model": 16, "d_mlp": 24, "n_heads": 2, "vocab_size": 280, "length": 16, "batch": 10,
    "accumulation": 5, "steps": 2, "warmup": 1, "dtype": "float32", "log_every": 1, "eval_every": 2, "save_every": 2,
}  # fmt: skip
"""A small value of every field that the size sets but the learning rates."""


def run(command):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        cli.app, shlex.split(command)[1:]
    )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*held-out sequence")
def test_the_papers_commands_train_both_variants_and_print_their_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(
        "It was the best of times, it was the worst of times, and nobody knew. " * 60
    )
    (file,) = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.M | re.S)
    Path("paper.toml").write_text(file)
    asked = read_train_config("paper.toml")
    given = {"data": asked.data, "tokenizer": asked.tokenizer, "compile": True, "watch": True}
    assert asked == replace(
        TrainConfig(size="paper", value_norm_init="dummy_pass", bos="without"), **given
    )
    (block,) = re.findall(r"^```\n(sink-lens.*?)^```", PAGE, flags=re.M | re.S)
    *trainings, comparison = block.strip().splitlines()
    assert len(trainings) == 4
    offline = SMALL | {"data": "text.txt", "tokenizer": "bpe", "device": "cpu"}
    options = (
        " ".join(f"--{name.replace('_', '-')} {value}" for name, value in offline.items())
        + " --no-compile"
    )
    for command in trainings:
        done = run(f"{command} {options}")
        assert done.exit_code == 0, done.output
    done = run(comparison)
    assert done.exit_code == 0, done.output
    for said in ("final losses, nats", "sink rate", "dominance ratio", "effective rank"):
        assert said in done.output
    finals = read_run("runs/paper-compare").tables["finals"]
    norms = {"shared/dummy_pass", "per_head/dummy_pass", "per_head/matched"}
    assert set(finals["variant"]) == {"none/dummy_pass", *norms}


def test_random_crops_of_the_page_are_trained_on_once_each(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    config = TrainConfig(**SMALL | {"device": "cpu", "bos": "without"})
    names = {
        "torch": torch,
        "config": config,
        "stream": torch.arange(280),
        "generator": torch.Generator().manual_seed(0),
    }
    exec(block, names)
    rows = names["rows"]
    assert len(rows) == config.steps * config.batch
    firsts = {int(row["input_ids"][0]) for row in rows}
    assert len(firsts) > len(rows) // 2  # they begin anywhere
    assert all(
        torch.equal(row["input_ids"], torch.arange(16) + row["input_ids"][0]) for row in rows
    )
    trained = train(config=config, out=tmp_path / "run", data=(rows, rows[:2]), progress=False)
    assert trained.frame["step"].max() == config.steps


def test_the_sizes_in_the_table_are_arithmetic():
    assert "--d-model 576 --d-mlp 1536 --n-heads 9" in PAGE
    wider = TrainConfig(size="medium", d_model=576, d_mlp=1536, n_heads=9)
    assert 49e6 < count_parameters(wider)[0] < 51e6
    for config in (TrainConfig(size="paper"), TrainConfig(size="medium"), wider):
        tokens = config.steps * config.step_tokens
        assert f"{tokens / 1e9:.2f}e9 tokens" in PAGE
        a_token = (
            6 * count_parameters(config)[0] + 6 * config.n_layers * config.d_model * config.length
        )
        assert f"{a_token * tokens:.1e} operations a run".replace("+", "") in PAGE
    config = TrainConfig(size="paper")
    assert f"all {len(config.kept_steps)} checkpoints" in PAGE
    assert (
        f"{4 * count_parameters(config)[0] * (len(config.kept_steps) + 2) / 1e9:.0f} GB a run"
        in PAGE
    )
    batch, accumulation, steps = re.search(
        r"--batch (\d+) --accumulation (\d+) --steps (\d+)", PAGE
    ).groups()
    assert int(batch) % (8 * int(accumulation)) == 0
    assert int(batch) * int(steps) == config.batch * config.steps
