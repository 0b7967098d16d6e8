"""``sink-lens preference`` and ``contraction``: what they print and write, resuming, exit codes."""

import shlex
from importlib import import_module

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from sink_lens import cli, read_run
from sink_lens.cli import preference as commands
from sink_lens.identity import surveys
from sink_lens.identity.models_to_measure import ModelToMeasure

SMALL = "n_layers=2,d_model=32,n_heads=4,vocab_size=100,n_context=64"
SIZE = ["--sequences", 64, "--length", 16]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unseen(monkeypatch):
    """No page is drawn."""
    monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")


def report(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_preference_of_untrained_models(tmp_path):
    done = run("preference", "--untrained", f"gpt2,activation=relu,{SMALL}", "--seeds", "0-1", *SIZE, "--out", "run")
    assert done.exit_code == 0, done.stderr
    assert "top token relative to chance" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("report.html")
    tables = read_run(tmp_path / "run").tables
    assert set(tables) >= {"models", "summary", "coverage", "tokens", "arms"}
    assert tables["models"]["weights_sha256"].nunique() == 2
    page = report(tmp_path / "run")
    assert "models predict one token more often than chance would" in page
    assert "Do few tokens take most predictions?" in page
    assert "Along training" not in page
    assert "RunError" not in page


def test_contraction_with_switches(tmp_path):
    done = run(
        "contraction", "--untrained", f"gpt2,{SMALL}", "--seeds", "0-1", "--switch", "mlp", *SIZE, "--out", "run"
    )
    assert done.exit_code == 0, done.stderr
    for words in ("cosine between sequences", "by att.", "no MLP", "All models: gpt2"):
        assert words in done.stdout
    found = read_run(tmp_path / "run")
    variants = found.tables["arms"].set_index(["measure", "variant"])
    off = next(variant for _, variant in variants.index if "mlp=False" in variant)
    assert variants.loc[("inter_by_mlp", off), "mean"] == pytest.approx(0, abs=1e-6)
    assert variants.loc[("inter_by_mlp", off), "n"] == 2
    assert len(found.tables["agreement"]) == 2 * 6  # pairs of four models, after the last layer and after the norm
    assert found.missing == []
    page = report(tmp_path / "run")
    for words in ("Where do states become alike?", "Does the seed set the direction?", "Contraction beside the sink"):
        assert words in page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["preference", "MODEL", "--seeds", "0-3"], "--seeds was given and no untrained model"),
        (["contraction", "--untrained", "gpt2", "--length", 5, "--dry-run"], "the length is 5; need 10 tokens"),
        (["report", "RUN", "--only", "circuit"], "--only was given without --figures"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments, text):
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr


@pytest.mark.parametrize("command", ["preference", "contraction"])
def test_a_dry_run_says_what_it_costs_and_writes_nothing(command, tmp_path):
    done = run(command, "--untrained", f"gpt2,{SMALL}", "--seeds", "0-2", "--sequences", 1000, "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "192k" in done.stdout  # 3 x 1000 x 64 tokens
    assert "the memory does not grow with the sequences" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_survey_goes_on_behind_what_is_finished(unseen, tmp_path, monkeypatch):
    opened, really = [], ModelToMeasure.open

    def stopping(self, **options):
        opened.append(self.seed)
        if self.seed == 1 and len(opened) == 2:
            raise KeyboardInterrupt
        return really(self, **options)

    monkeypatch.setattr(ModelToMeasure, "open", stopping)
    asked = ["contraction", "--untrained", f"gpt2,{SMALL}", "--seeds", "0-2", "--no-sinks", *SIZE]
    done = run(*asked, "--out", "run")
    assert done.exit_code == 130
    assert "the same command with --out run continues" in done.stderr
    assert read_run(tmp_path / "run").status == "interrupted"
    assert run(*asked, "--out", "run").exit_code == 0
    assert opened == [0, 1, 1, 2]
    assert run(*asked, "--out", "whole").exit_code == 0
    for name in ("summary", "layers", "agreement", "arms"):
        one, other = (read_run(tmp_path / folder).tables[name] for folder in ("run", "whole"))
        pd.testing.assert_frame_equal(one, other)


def test_the_sums_of_a_model_in_work_survive_a_stop(unseen, tmp_path, monkeypatch):
    measuring = import_module("sink_lens.identity.preference")
    really, chunks = measuring.last_logits, []

    def stopping(lens, part):
        chunks.append(part)
        if len(chunks) == 3:
            raise KeyboardInterrupt
        return really(lens, part)

    monkeypatch.setattr(measuring, "last_logits", stopping)
    asked = {"untrained": [f"gpt2,{SMALL}"], "sequences": 200, "length": 16, "progress": False, "keep_every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        surveys.survey("preference", out="run", **asked)
    assert (tmp_path / "run" / "partial.safetensors").exists()
    surveys.survey("preference", out="run", **asked)
    assert len(chunks) == 5  # 4 chunks of 64, 64, 64 and 8, and the one that was stopped
    assert not (tmp_path / "run" / "partial.safetensors").exists()
    surveys.survey("preference", out="whole", **asked)
    one, other = (read_run(tmp_path / folder).tables["summary"] for folder in ("run", "whole"))
    pd.testing.assert_frame_equal(one, other)


@pytest.mark.filterwarnings("default:missing is left out")
def test_a_model_that_cannot_be_opened_is_left_out_with_its_reason(unseen, tmp_path):
    done = run("preference", "missing", "--untrained", f"gpt2,{SMALL}", *SIZE, "--out", "run")
    assert done.exit_code == 0, done.stderr
    assert "missing is left out" in done.stderr
    models = read_run(tmp_path / "run").tables["models"]
    assert models["error"].notna().tolist() == [True, False]


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("preference", [], "nothing to measure"),
        ("contraction", ["--switch", "mlp"], "--switch was given and no untrained model"),
        ("preference", ["--untrained", "gpt3"], "style is 'gpt3'"),
        ("contraction", ["--untrained", f"gpt2,{SMALL}", "--sequences", "10"], "need at least 50"),
        ("preference", ["--untrained", f"gpt2,{SMALL}", "--length", "100"], "takes at most 64"),
        ("contraction", ["--untrained", f"gpt2,{SMALL}", "--seeds", "a"], "need numbers and ranges"),
        ("contraction", ["missing"], "is no folder and no file here"),
    ],
)
def test_bad_input_ends_with_code_2(unseen, command, arguments, says):
    done = run(command, *arguments, "--out", "run")
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize("name", ["preference", "contraction"])
def test_every_example_of_the_help_can_be_read(name, monkeypatch):
    lines = [line.split("[dim]")[0] for line in getattr(commands, f"_{name.upper()}_EXAMPLES").splitlines()]
    asked = []

    def stopped(config, **options):
        asked.append(config)
        raise typer.Exit

    monkeypatch.setattr(surveys, "survey", stopped)
    monkeypatch.setattr(surveys, "estimate", stopped)
    lines = [line for line in lines if line.startswith("sink-lens")]
    for line in lines:
        done = run(*shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.stderr)
    assert len(asked) == len(lines) >= 3
    assert name in run("--help").stdout
