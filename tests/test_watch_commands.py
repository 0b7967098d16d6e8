"""``sink-lens watch`` and ``compare``: what they print, what they write, exit codes."""

import shlex
from importlib import import_module

import pytest
from typer.testing import CliRunner

from sink_lens import cli, read_run
from sink_lens.cli import compare as compare_command
from sink_lens.cli import watch as watch_command
from sink_lens.records import display
from sink_lens.training.config import WatchConfig

from .training.runs import watched, write_run

comparison = import_module("sink_lens.training.compare")
watching = import_module("sink_lens.training.watch")

BASE = [6.0, 5.0, 4.0, 3.0]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(display, "figure", lambda name, *data, **options: None)
        monkeypatch.setattr(display, "image", lambda figure, form: b"a picture")
        monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")


@pytest.fixture
def drawn():
    """The figures are really drawn."""


@pytest.fixture
def asked(monkeypatch):
    """Every call of the measuring, in place of it: it gives a course with a sink from step 20 on."""
    made = []

    def measure(folder, **options):
        made.append((folder, options))
        return watched([0.0, 0.05, 0.6])

    monkeypatch.setattr(watching, "watch", measure)
    return made


def variants(tmp_path, *, seeds=(0, 1, 2), norm=(5.5, 4.5, 3.0, 2.0), masses=(0.0, 0.02)):
    made = []
    for seed in seeds:
        made.append(write_run(tmp_path / f"softmax-{seed}", BASE, seed=seed, masses=masses))
        made.append(write_run(tmp_path / f"norm-{seed}", list(norm), seed=seed, masses=masses, value_norm="shared"))
    return made


# --- watch


def test_watch_says_when_the_sink_was_born(asked, drawn, tmp_path):
    folder = write_run(tmp_path / "run", BASE)
    done = run("watch", folder)
    assert done.exit_code == 0, done.stderr
    assert "the sink was born between 640 and 1.28k tokens (step 20)" in done.stdout
    for word in ("sinks above 0.3", "mass", "dominance", "norm", "w/o 0", "neurons"):
        assert word in done.stdout
    assert "30.0%" in done.stdout  # half of the mass
    assert done.stdout.splitlines()[-1] == str(folder / "course.png")
    assert (folder / "course.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "course.svg").read_bytes()
    assert read_run(folder).status == "finished"


def test_watch_passes_its_options_on(asked, tmp_path):
    folder = write_run(tmp_path / "run", BASE)
    options = ["--sequences", 8, "--length", 32, "--threshold", 0.1, "--device", "cpu", "--again", "--quiet"]
    done = run("watch", folder, *options)
    assert done.exit_code == 0, done.stderr
    wanted = WatchConfig(run=str(folder), sequences=8, length=32, threshold=0.1, device="cpu", resume=False)
    assert asked[0] == (wanted, {"progress": False})
    assert len(done.stdout.splitlines()) == 1
    assert "(step 10)" in done.stdout  # 5% over 0.1 at step 10 already, and no less after it


def test_a_run_without_a_sink_says_so_plainly(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "watch", lambda folder, **options: watched([0.0, 0.02]))
    done = run("watch", write_run(tmp_path / "run", BASE))
    assert done.exit_code == 0
    assert "no sink at threshold 0.3; at the last checkpoint (640 tokens) 1.0% of layers and heads" in done.stdout


def test_a_run_whose_checkpoints_are_all_damaged_is_an_error(tmp_path, monkeypatch):
    frame = watched([0.1]).assign(measure="error", error="damaged")
    monkeypatch.setattr(watching, "watch", lambda folder, **options: frame)
    done = run("watch", write_run(tmp_path / "run", BASE))
    assert done.exit_code == 2
    assert "no checkpoint of" in done.stderr


def test_watching_what_is_no_training_ends_with_code_2(tmp_path):
    assert run("watch", tmp_path).exit_code == 2
    done = run("watch", write_run(tmp_path / "run", BASE))
    assert done.exit_code == 2
    assert "has no checkpoint; need checkpoints/checkpoint-N" in done.stderr


# --- compare


def test_compare_prints_what_it_finds_and_keeps_it(tmp_path):
    done = run("compare", *variants(tmp_path), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    for words in (
        "value_norm: shared against none, 3 seeds each (0, 1, 2), 2.56k tokens per run, same data in the same order",
        "shared 2.0000, none 3.0000 nats, difference -1.0000",
        "“none” has no sink at 0.3 (fewer than 5%) in any of 3 seeds",
        "final losses, nats",
        "times as fast",
        "1.33",  # 2560 over 1920
        "sink rate above 0.3",
        "effective rank",
    ):
        assert words in done.stdout
    assert done.stdout.splitlines()[-1] == str(tmp_path / "out")
    assert read_run(tmp_path / "out").kind == "compare"


def test_an_arm_that_is_behind_is_printed_as_such(tmp_path):
    done = run("compare", *variants(tmp_path, norm=(6.0, 5.9, 5.5, 5.0)))
    assert done.exit_code == 0
    assert "shared is behind the baseline" in done.stdout
    assert "not reached" in done.stdout
    assert "does not reach the baseline's final evaluation loss in any of 3 seeds" in done.stdout
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("compare-")


def test_two_seeds_come_with_a_warning(tmp_path):
    done = run("compare", *variants(tmp_path, seeds=(0, 1)), "--quiet")
    assert "warning: an interval of two seeds says little" in done.stderr
    assert "final losses" not in done.stdout


def test_the_baseline_can_be_named(tmp_path):
    done = run("compare", *variants(tmp_path), "--by", "value_norm", "--baseline", "shared", "--quiet")
    assert "value_norm: none against shared" in done.stdout
    assert "none is behind the baseline" in done.stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [({"lr": 5}, "the runs also differ in lr"), ({"seed": 9}, "the variants have other seeds")],
)
def test_arms_that_cannot_be_compared_end_with_code_2(tmp_path, change, says):
    runs = [write_run(tmp_path / f"b{s}", BASE, seed=s) for s in (0, 1)]
    runs += [write_run(tmp_path / f"n{s}", BASE, **{"seed": s, "value_norm": "shared"} | change) for s in (0,)]
    done = run("compare", *runs)
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (tmp_path / "runs").exists()


# --- help


@pytest.mark.parametrize("module", [watch_command, compare_command])
def test_every_example_of_the_help_is_a_command_that_runs(module, asked, tmp_path, monkeypatch):
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(comparison, "group", lambda runs, **options: (_ for _ in ()).throw(SystemExit(0)))
    write_run(tmp_path / "runs" / "headnorm-0", BASE)
    lines = [line.split("[dim]")[0] for line in module._EXAMPLES.splitlines() if line.startswith("sink-lens")]
    assert len(lines) == {"watch": 3, "compare": 2}[name]
    write_run(tmp_path / "runs" / "watch-output", BASE)
    (tmp_path / "output").mkdir()  # checkpoints of others, whose run folder is another
    for line in lines:
        done = run(*shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.stderr)
    assert name in run("--help").stdout
    assert "Exit" not in run(name, "--help").stderr
