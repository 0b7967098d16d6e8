"""The metric of a run: by its name, and as a function of the user's."""

import json
import sys

import numpy as np
import pytest
import torch
from lenses import lens_of, speaking
from typer.testing import CliRunner

from sink_lens import circuits
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.tasks import task_of
from sink_lens.cli import app
from sink_lens.edits import metrics
from sink_lens.edits.named_metrics import import_metric
from sink_lens.errors import InputError, RunError

from .tiny_runs import pair, reference_pairs, unfinish

CODE = """
import torch
from sink_lens import circuits
from sink_lens.edits import metrics

@circuits.MetricOfTask
def difference(task):
    right, wrong = ([ids[0] for ids in side] for side in (task.correct, task.incorrect))

    def metric(logits, right, wrong):
        last, rows = logits[:, -1], torch.arange(len(logits))
        return last[rows, right] - last[rows, wrong]

    return metrics.on_logits(metric, right=right, wrong=wrong)

def certainty(logits):
    return logits[:, -1].log_softmax(-1).max(-1).values
"""
FIELDS = {
    "check": 0,
    "random": 0,
    "nodes": False,
    "sizes": (1.0,),
    "method": "eap",
    "report": False,
    "pairs": 8,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metrics.py").write_text(CODE)
    reference_pairs(tmp_path / "pairs.jsonl", n=8)
    monkeypatch.setattr("sys.path", sys.path[:])
    yield tmp_path
    sys.modules.pop("own_metrics", None)


def run(out, **fields):
    return circuits.run(
        speaking("llama"), out=out, task="file", pairs_file="pairs.jsonl", **FIELDS | fields
    )


def test_a_function_of_the_task_is_the_metric_that_it_returns(folder):
    own, named = run("own", metric="own_metrics:difference"), run("named")
    np.testing.assert_allclose(
        own.tables["edges"]["score"], named.tables["edges"]["score"], atol=1e-6
    )
    assert own.tables["summary"]["metric"].item() == "metric"
    unfinish(folder / "own")
    (folder / "own_metrics.py").write_text(CODE.replace("] - last[", "] - 2 * last["))
    sys.modules.pop("own_metrics")
    with pytest.raises(RunError, match="holds a run that differs in code"):
        run("own", metric="own_metrics:difference")


def test_the_command_imports_a_metric_and_a_file_of_settings_does_not(folder):
    lens = speaking("llama")
    lens.plain.save_pretrained("model")
    lens.tokenizer.save_pretrained("model")
    asked = [
        "circuit",
        "model",
        "--task",
        "file",
        "--pairs-file",
        "pairs.jsonl",
        "--pairs",
        "8",
        "--method",
        "eap",
    ]
    asked += ["--check", "0", "--random", "0", "--no-nodes", "--sizes", "1", "--batch-size", "4"]
    asked += ["--ablation", "mean_ordinary"]
    said = CliRunner().invoke(
        app, [*asked, "--metric", "own_metrics:certainty", "--out", "run", "--json"]
    )
    assert said.exit_code == 0, said.output
    summary = json.loads(said.stdout)["summary"]
    assert summary["metric"] == "certainty"
    tokens = torch.tensor(
        [json.loads(line)["clean"] for line in (folder / "pairs.jsonl").read_text().splitlines()]
    )
    with torch.no_grad():
        expected = lens.plain(tokens).logits[:, -1].log_softmax(-1).max(-1).values.mean()
    assert summary["clean"] == pytest.approx(float(expected), abs=1e-5)
    (folder / "c.toml").write_text('metric = "own_metrics:certainty"\n')
    said = CliRunner().invoke(app, [*asked, "--config", "c.toml", "--out", "other"])
    assert said.exit_code != 0
    assert "which is code to import; need it on the command line" in " ".join(said.output.split())


def test_the_divergence_from_the_clean_run_is_that_of_its_predictions(folder):
    by_name, task = (
        run("kl", metric="kl"),
        task_of(speaking("llama"), task="file", pairs_file="pairs.jsonl", pairs=8),
    )
    with torch.no_grad():
        logits = speaking("llama").plain(task.clean.tokens).logits
    clean, corrupted = pair(n=8, length=9)
    assert torch.equal(task.clean.tokens, clean)
    found = circuits.find(
        lens_of("llama"), clean, corrupted, metric=metrics.kl_to(logits), method="eap", edges=20
    )
    np.testing.assert_allclose(
        by_name.tables["edges"]["score"], found.every_edge["score"], atol=1e-6
    )
    assert (
        abs(by_name.tables["summary"]["clean"].item())
        < 1e-6
        < by_name.tables["summary"]["corrupted"].item()
    )


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no_such_module:f", r"cannot be imported \(ModuleNotFoundError"),
        ("own_metrics:absent", "own_metrics has no function 'absent'"),
    ],
)
def test_what_cannot_be_imported_is_refused(reference, says, folder):
    with pytest.raises(InputError, match=says):
        import_metric(reference)


def test_a_metric_of_no_name_is_refused():
    with pytest.raises(
        InputError,
        match="metric is 'norm'; need one of logit_difference, sink_mass, loss, kl, or your",
    ):
        CircuitConfig(metric="norm").check_together()
    with pytest.raises(
        InputError,
        match="the span at has the positions 'O', which may be a column of a file of pairs",
    ):
        CircuitConfig(spans=("at=O",)).check_together()
