"""A metric is asked for: two answers are a logit difference, also of a file of pairs, and nothing is assumed."""

import json

import pytest
import torch
from lenses import speaking
from typer.testing import CliRunner

from sink_lens.cli import app
from sink_lens.data.tokens import as_batch
from sink_lens.edits import metrics
from sink_lens.errors import InputError, RunError
from sink_lens.patching import PatchConfig, patch
from sink_lens.patching.attribution import attribution_patch

CLEAN, CORRUPTED = ["x y z", "y x z", "z z x"], ["x x z", "y z z", "z y x"]
PART = {"layers": [1], "positions": [1, 2], "controls": 0}


@pytest.mark.parametrize("patched", [patch, attribution_patch])
def test_patching_has_no_metric_of_its_own(patched):
    with pytest.raises(InputError, match=r"correct=.* and incorrect="):
        patched(speaking(), CLEAN, CORRUPTED, layers=[1])
    with pytest.raises(InputError, match="need incorrect"):
        patched(speaking(), CLEAN, CORRUPTED, layers=[1], correct="!")


@pytest.mark.parametrize(
    ("correct", "incorrect"),
    [(5, 6), ("!", "?"), ([5, [6, 7], 8], 9), (["!", "?", "!"], [7, 7, 7])],
)
def test_answers_alone_are_a_logit_difference(correct, incorrect):
    found = patch(
        speaking(), CLEAN, CORRUPTED, correct=correct, incorrect=incorrect, progress=False, **PART
    )
    wanted = patch(
        speaking(),
        CLEAN,
        CORRUPTED,
        metric=metrics.logit_difference(correct, incorrect),
        progress=False,
        **PART,
    )
    assert found.metric == wanted.metric
    assert torch.equal(found.values, wanted.values)


def test_a_file_of_pairs_has_prompts_and_answers_of_each_pair(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lens, answers = speaking(), [5, [6, 7], "!"]
    ids = [as_batch(side[0], lens.tokenizer).tokens[0].tolist() for side in (CLEAN, CORRUPTED)]
    rows = [
        {"clean": one, "corrupted": other, "correct": right, "incorrect": 9}
        for one, other, right in zip(
            [ids[0], *CLEAN[1:]], [ids[1], *CORRUPTED[1:]], answers, strict=True
        )
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = patch(lens, pairs_file="pairs.jsonl", progress=False, **PART)
    wanted = patch(lens, CLEAN, CORRUPTED, correct=answers, incorrect=9, progress=False, **PART)
    assert torch.equal(found.values, wanted.values)
    lens.plain.save_pretrained("model")
    lens.tokenizer.save_pretrained("model")
    asked = [
        "patch",
        "model",
        "--pairs-file",
        "pairs.jsonl",
        "--layers",
        "1",
        "--positions",
        "1,2",
        "--json",
    ]
    said = CliRunner().invoke(app, [*asked, "--controls", "0", "--out", "run"])
    assert said.exit_code == 0, said.output
    rows = {row["position"]: row["effect"] for row in json.loads(said.stdout)["strongest"]}
    assert rows == pytest.approx(dict(zip([1, 2], found.frame["effect"], strict=True)), abs=1e-5)
    assert CliRunner().invoke(app, [*asked, "--dry-run"]).exit_code == 0
    for more in ({"clean": ("a b",)}, {"correct": "!"}):
        with pytest.raises(InputError, match="pairs_file"):
            PatchConfig(pairs_file="pairs.jsonl", **more)
    with pytest.raises(InputError, match="pairs_file"):
        patch(lens, CLEAN, CORRUPTED, pairs_file="pairs.jsonl")


def test_answers_beside_a_metric_that_reads_none_are_refused():
    with pytest.raises(InputError, match="correct"):
        patch(speaking(), CLEAN, CORRUPTED, metric="loss", correct=5, incorrect=6)


@pytest.mark.parametrize("patched", [patch, attribution_patch])
@pytest.mark.parametrize(
    "option", [{"correct": "!"}, {"sink_position": 2}, {"metric_layers": "1"}], ids=str
)
def test_an_option_beside_a_metric_that_is_an_object_is_refused(patched, option):
    (name,) = option
    for metric in (metrics.logit_difference(5, 6), lambda logits: logits[:, -1, 5]):
        with pytest.raises(InputError, match=f"{name} is"):
            patched(speaking(), CLEAN, CORRUPTED, metric=metric, layers=[1], **option)


def test_an_approximation_reads_a_file_of_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"clean": one, "corrupted": other, "correct": 5, "incorrect": 9}
        for one, other in zip(CLEAN, CORRUPTED, strict=True)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lens = speaking()
    lens.plain.save_pretrained("model")
    lens.tokenizer.save_pretrained("model")
    asked = [
        "patch",
        "model",
        "--pairs-file",
        "pairs.jsonl",
        "--layers",
        "1",
        "--approximate",
        "--check",
        "2",
    ]
    said = CliRunner().invoke(app, [*asked, "--out", "run"])
    assert said.exit_code == 0, said.output
    assert CliRunner().invoke(app, [*asked, "--controls", "2"]).exit_code == 2


@pytest.mark.parametrize("site", ["z", "every"])
def test_a_shard_that_is_not_the_last_ends_well_and_its_tables_say_that_they_wait(
    tmp_path, monkeypatch, site
):
    monkeypatch.chdir(tmp_path)
    lens = speaking()
    how = {
        "correct": "!",
        "incorrect": "?",
        "site": site,
        "by": ("layer",),
        "controls": 0,
        "progress": False,
    }
    first = patch(lens, CLEAN, CORRUPTED, **how, out="run", shard="1/2")
    assert not first.finished
    assert str(first) == first.headline + "\nin run"
    assert "shard 1/2 is done" in first._repr_html_()
    for read in (
        lambda: first.frame,
        lambda: first.tables,
        first.strongest,
        first.draw,
        first.to_transformer_lens,
    ):
        with pytest.raises(RunError, match=r"sink-lens report run.* --status"):
            read()
    last = patch(lens, CLEAN, CORRUPTED, **how, out="run", shard="2/2")
    assert last.finished
    assert last.frame.equals(patch(lens, CLEAN, CORRUPTED, **how).frame)


@pytest.mark.exhaustive
def test_a_command_that_computes_a_shard_ends_with_code_0(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lens = speaking()
    lens.plain.save_pretrained("model")
    lens.tokenizer.save_pretrained("model")
    (tmp_path / "sweep.toml").write_text(
        'model = "model"\nprompts = ["x y z"]\n[[edits]]\nsite = "z"\nheads = "each"\n'
    )
    texts = ["--clean", "x y z", "--corrupted", "x x z", "--correct", "!", "--incorrect", "?"]
    asked = {
        "patch": ["patch", "model", *texts, "--site", "z"],
        "sweep": ["sweep", "sweep.toml"],
        "circuit": [
            "circuit",
            "model",
            "--task",
            "text",
            "--pairs",
            "40",
            "--length",
            "6",
            "--random",
            "1",
        ],
    }
    for name, words in asked.items():
        for shard, finished in (("1/2", False), ("2/2", True)):
            said = CliRunner().invoke(app, [*words, "--out", name, "--shard", shard, "--json"])
            assert said.exit_code == 0, said.output
            assert json.loads(said.stdout).get("finished", True) is finished
            assert finished or f"sink-lens report {name} --status" in said.stderr
