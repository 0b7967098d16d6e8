"""``sink-lens card`` with one model and two on a tiny model: sentence, run folder, page and one JSON object."""

import json

import pytest
import torch
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.studies.card_pair import _change

SIZE = ("--sequences", "4", "--length", "24")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "planted"
    planted().model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def _progress(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")  # --quiet sets it: put back after the test


def test_card(model, tmp_path):
    done = run("card", model, *SIZE, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.exception
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Keep the token at position 0: it is the sink of 40% [40%, 40%] of heads; ")
    assert lines[-3:] == [
        f"block for a model card: {tmp_path / 'run' / 'card.md'}",
        f"report: {tmp_path / 'run' / 'report.html'}",
        f"run: {tmp_path / 'run'}",
    ]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "A sink at position 0 in 40% [40%, 40%] of heads, outlier dimension 29" in page
    assert "undefined" not in done.stdout


def test_what_bos_changes_quietly(model, tmp_path):
    done = run("card", model, "--by", "bos", *SIZE, "--quiet", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.exception
    assert done.stdout == f"{tmp_path / 'run'}\n"
    assert read_run(tmp_path / "run").config["by"] == "bos"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "nats, from the first model to the other BOS condition" in page
    assert "within the bound of 0.25 nats" in page


def test_a_loss_above_its_bound_ends_with_code_1(model, tmp_path):
    other = planted().model
    with torch.no_grad():
        other.lm_head.weight.mul_(-20)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer(adds_bos=True).save_pretrained(tmp_path / "other")
    pair = ("card", model, tmp_path / "other", *SIZE, "--overwrite", "--out", tmp_path / "run", "--json")
    done = run(*pair)
    assert (done.exit_code, json.loads(done.stdout)["within_bound"]) == (1, False), done.output
    assert "lm_head.weight" in done.stderr
    assert run(*pair, "--most-loss", "1000").exit_code == 0


def test_a_change_names_neurons_as_neurons():
    row = {"quantity": "writing_neurons", "unit": "index", "first_indices": "1.49, 11.1229", "second_indices": ""}
    row |= dict.fromkeys(("first", "second", "change", "change_low", "change_high"), float("nan"))
    assert _change(row) == "writing neurons L1.N49, L11.N1229 → none"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("card", "--threshold", "2"), "threshold is 2.0; need a number between 0 and 1"),
        (("card", "--columns", "loss"), "--columns was given; need more than two models, or folders of runs for it"),
        (("card", "--by", "bos", "--trace", "x"), "--trace goes with the card of one model"),
        (("card", "--by", "taste"), "by is 'taste'; need one of weights, dtype, bos"),
        (("card", "--most-loss", "0"), "most_loss is 0.0; need nats above 0"),
    ],
)
def test_bad_input_ends_with_code_2(model, arguments, text):
    name, *rest = arguments
    done = run(name, model, *rest, *SIZE)
    assert done.exit_code == 2
    assert text in done.stderr
