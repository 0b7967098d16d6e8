"""``sink-lens sweep``: what it shows, what it passes on, exit codes, and one real sweep of a tiny model."""

import json
import re
import shlex
from importlib import import_module

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from sink_lens import cli, read_run
from sink_lens.cli import sweep as command
from sink_lens.engine.engine import Engine
from sink_lens.errors import RunError
from sink_lens.models.tiny import tiny
from sink_lens.records import display
from sink_lens.sweeps import EditGrid, MetricSpec, estimate, read_sweep

runner = import_module("sink_lens.sweeps.sweep")

FILE = '[tokens]\nkind = "random"\nsequences = 3\nlength = 10\n[[edits]]\nsite = "z"\nheads = "each"\n'


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "image", lambda figure, form: b"a picture")
    monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "heads.toml"
    path.write_text(FILE)
    return path


def result(tmp_path, *, errors=(None, None)):
    n = len(errors)
    columns = {"cell": range(n), "kind": "zero", "site": "z", "where": [f"layer {cell}" for cell in range(n)]}
    columns |= {"metric": "loss", "effect": [0.5, -2.0][:n], "control_effect": 0.125}
    columns |= dict.fromkeys(("ci_low", "ci_high", "over_low", "over_high"), 0.25)
    frame = pd.DataFrame(columns | {"error": pd.array(errors, dtype="string")})
    folder = tmp_path / "the" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    from sink_lens.sweeps.results import SweepResult

    return SweepResult(folder=folder, frame=frame, controls=frame, values=frame, headline="the headline")


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every call of the sweep, in place of it."""
    made = []

    def sweep(config, **options):
        made.append((config, options))
        return result(tmp_path)

    monkeypatch.setattr(runner, "sweep", sweep)
    monkeypatch.setattr(runner, "sweep_shard", sweep)
    monkeypatch.setattr(estimate, "estimate", lambda config: made.append((config, "dry")) or "what it would cost")
    return made


# --- with the work replaced


def test_help_shows_every_option_the_examples_and_the_exit_codes():
    shown = run("sweep", "--help").stdout
    options = "model out device devices engine workers retry-failed dry-run example overwrite quiet"
    for option in options.split():
        assert f"--{option} " in shown
    assert "sink-lens sweep --example > sweep.toml" in shown
    assert "--engine ray --workers 16" in shown
    assert "Exit codes: 0 all cells, 1 some cells failed, 2 bad input, 130 interrupted." in shown
    assert "sweep" in run("--help").stdout


def test_every_example_of_the_help_is_a_command_that_runs(calls, tmp_path):
    (tmp_path / "sweep.toml").write_text(run("sweep", "--example").stdout)
    lines = [line.split("[dim]")[0] for line in command._EXAMPLES.splitlines() if line.startswith("sink-lens")]
    assert len(lines) == 7
    for line in lines:
        done = run(*shlex.split(line.partition(">")[0])[1:])
        assert done.exit_code == 0, (line, done.stderr)
    assert len(calls) == 6


def test_the_example_is_a_file_to_begin_with(tmp_path):
    shown = run("sweep", "--example")
    assert shown.exit_code == 0
    (tmp_path / "sweep.toml").write_text(shown.stdout)
    config = read_sweep(tmp_path / "sweep.toml")
    assert config.metrics == (MetricSpec(name="sink_mass", options={"sink_position": 0, "layers": "12-29"}),)
    assert config.grid.edits[1] == EditGrid(kind="zero", site="z", heads="each")


def test_without_a_file_the_error_says_how_to_get_one():
    done = run("sweep")
    assert done.exit_code == 2
    assert "no file was given" in done.stderr
    assert "sink-lens sweep --example > sweep.toml" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 1\n" + FILE, "has 'colour', which is not known; need some of"),
        ("[tokens]\nlength = 9\n", "has no edits"),
        ("[[edits]\n", "cannot be read as a configuration of sweep"),
        (FILE.replace("length = 10", "length = 1"), "length is 1; need at least 2"),
    ],
)
def test_a_bad_file_ends_with_code_2(calls, tmp_path, text, says):
    (tmp_path / "bad.toml").write_text(text)
    done = run("sweep", tmp_path / "bad.toml")
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not calls


def test_a_file_that_is_not_there_and_no_workers_end_with_code_2(calls, file):
    missing = run("sweep", "none.toml")
    assert missing.exit_code == 2
    assert "none.toml cannot be read as a configuration of sweep" in missing.stderr
    assert run("sweep", file, "--workers", "0").exit_code == 2
    assert not calls


def test_options_reach_the_sweep(calls, file, tmp_path):
    run("sweep", file)
    options = "--model a/model --device cpu --out here --engine ray --workers 3 --overwrite --retry-failed"
    run("sweep", file, *options.split())
    run("sweep", file, "--devices", "cpu, cuda:1", "--quiet")
    (first, plain), (second, chosen), (third, spread) = calls
    assert first == read_sweep(file)
    assert {name: str(value) if name == "out" else value for name, value in plain.items()} == {
        "out": "runs/heads",
        "engine": "local",
        "devices": [],
        "workers": None,
        "overwrite": False,
        "retry_failed": False,
        "progress": True,
    }
    assert (second.model, second.device) == ("a/model", "cpu")
    assert (str(chosen["out"]), chosen["engine"], chosen["workers"]) == ("here", "ray", 3)
    assert (chosen["overwrite"], chosen["retry_failed"]) == (True, True)
    assert (third.device, spread["devices"], spread["progress"]) == ("cpu", ["cpu", "cuda:1"], False)


def test_it_ends_with_the_headline_a_table_for_each_metric_and_the_folder(calls, file, tmp_path):
    done = run("sweep", file)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "the headline"
    assert "strongest effects on loss" in done.stdout
    assert done.stdout.index("zero z layer 1") < done.stdout.index("zero z layer 0")
    assert lines[-1] == str(tmp_path / "the" / "folder")
    assert done.stderr == ""


def test_quiet_prints_only_the_folder(calls, file, tmp_path):
    assert run("sweep", file, "--quiet").stdout == f"{tmp_path / 'the' / 'folder'}\n"


def test_failed_cells_are_named_and_end_with_code_1(monkeypatch, file, tmp_path):
    failed = result(tmp_path, errors=(None, "ValueError: no luck"))
    monkeypatch.setattr(runner, "sweep", lambda config, **options: failed)
    done = run("sweep", file)
    assert done.exit_code == 1
    assert done.stderr == "failed: zero z layer 1: ValueError: no luck\n"
    quiet = run("sweep", file, "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, f"{failed.folder}\n", "")


def test_an_error_of_the_sweep_is_one_message(monkeypatch, file):
    def sweep(config, **options):
        raise RunError("runs/heads holds a run that differs in mode")

    monkeypatch.setattr(runner, "sweep", sweep)
    monkeypatch.setattr(runner, "sweep_shard", sweep)
    done = run("sweep", file)
    assert done.exit_code == 2
    assert done.stderr == "error: runs/heads holds a run that differs in mode\n"


def test_an_interrupt_says_where_the_finished_blocks_are_and_how_to_go_on(monkeypatch, file, tmp_path):
    def sweep(config, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "sweep", sweep)
    monkeypatch.setattr(runner, "sweep_shard", sweep)
    done = run("sweep", file)
    assert (done.exit_code, done.stderr) == (130, "stopped; nothing was written\n")
    folder = tmp_path / ("a long name of a folder " * 9)
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    done = run("sweep", file, "--out", folder)
    assert done.exit_code == 130
    assert done.stderr == f"stopped; the finished blocks are in {folder}: the same command goes on from there\n"


def test_a_dry_run_says_what_it_would_cost(calls, file):
    done = run("sweep", file, "--dry-run", "--seed", "4")
    assert done.exit_code == 0
    assert done.stdout == "what it would cost\n"
    ((config, called),) = calls
    assert (config.seed, called) == (4, "dry")


# --- a real sweep of a tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny("llama").save_pretrained(folder)
    return folder


def real(model, file, *more):
    return run("sweep", file, "--model", model, "--device", "cpu", "--out", "out", *more)


def test_a_sweep_that_is_stopped_goes_on_with_the_same_command(model, file, tmp_path, monkeypatch):
    monkeypatch.setattr("sink_lens.engine.engine.CELLS_A_BLOCK", 1)
    monkeypatch.setattr("sink_lens.engine.plan._CPU_TOKENS", 60)
    engine_run = Engine.run
    begun = []

    def stopped(self, block, **options):
        begun.append(block.number)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return engine_run(self, block, **options)

    monkeypatch.setattr(Engine, "run", stopped)
    first = real(model, file, "--quiet")
    assert first.exit_code == 130
    assert "the finished blocks are in out: the same command goes on from there" in first.stderr
    assert read_run("out").status == "interrupted"
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/block-*")}
    assert len(kept) == 2
    second = real(model, file, "--quiet")
    assert (second.exit_code, second.stdout) == (0, "out\n")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/block-*") if path.name in kept} == kept
    run_of = read_run("out")
    assert (run_of.status, run_of.missing) == ("finished", [])
    assert len(run_of.tables["cells"]) == 12
    other = real(model, file, "--seed", "4")
    assert other.exit_code == 2
    assert "interval_seed: 0 there, 4 here" in other.stderr


def test_failed_cells_end_with_code_1_and_are_computed_again_when_that_is_asked(model, file, monkeypatch):
    from sink_lens.edits import named_edits as kinds
    from sink_lens.edits.constructors import edit

    state = {"broken": True}

    def fragile(place, references):
        def change(x, at):
            if state["broken"] and place.part.heads == (2,) and at.layer == 1:
                raise ValueError("no luck")
            return torch.zeros_like(x)

        return edit(place.part.site, change, **place.arguments)

    kind = kinds.Kind(meaning="breaks", make=fragile)
    monkeypatch.setattr(kinds, "KINDS", kinds.KINDS | {"zero": kind})
    monkeypatch.setattr("sink_lens.sweeps.grid.KINDS", kinds.KINDS)
    file.write_text("controls = 0\n" + FILE.replace('"z"\n', '"z"\nlayers = "0-1"\n'))
    first = real(model, file)
    assert first.exit_code == 1
    assert first.stderr.endswith("failed: zero z layer 1, head 2: ValueError: no luck\n")
    assert "8 cells on 3 sequences, 1 failed" in first.stdout
    state["broken"] = False
    assert real(model, file, "--quiet").exit_code == 1
    again = real(model, file, "--retry-failed")
    assert again.exit_code == 0
    assert "failed" not in again.stdout


def test_a_dry_run_counts_cells_and_writes_nothing(model, file, tmp_path):
    done = real(model, file, "--dry-run")
    assert done.exit_code == 0
    assert re.search(r"cells\W+12\b", done.stdout)
    assert re.search(r"random controls beside them\W+0\b", done.stdout)  # every head is a cell of the table itself
    # of the three layers a head of layer L takes 3 - L: (3 + 2 + 1) / 9
    assert re.search(r"layers run for a cell\W+67% of all", done.stdout)
    assert "Nothing was written" in " ".join(done.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["heads.toml"]


def test_json_is_read_too(model, tmp_path):
    asked = {"tokens": {"kind": "random", "sequences": 2, "length": 8}, "edits": [{"site": "z", "layers": 1}]}
    (tmp_path / "sweep.json").write_text(json.dumps(asked))
    done = real(model, tmp_path / "sweep.json")
    assert done.exit_code == 0
    assert "strongest zero z layer 1" in done.stdout
