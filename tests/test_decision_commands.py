"""``sink-lens quantise`` and ``streaming``: options, output, JSON and exit codes, with the work replaced."""

import json
import shlex
import sys
import types

import pandas as pd
import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.cli import decisions
from sink_lens.studies.config import QuantiseConfig, StreamingConfig

CONFIGS = {"quantise": QuantiseConfig, "streaming": StreamingConfig}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every call of a study: its name, configuration and options."""
    made = []

    def study(name):
        def call(config, **options):
            made.append((name, config, options))
            numbers = {"loss_nats": 3.25, "change_nats": 0.5, "closed_share": float("nan"), "closed_low": 0.1}
            row = {"kept": "all", "channels": 0, "inputs": 0, "tokens": 0.0, "closed_high": 0.9} | numbers
            rows = [row | {"part": "judge"}, row | {"part": "choose", "loss_nats": 9.75}]
            table = pd.DataFrame([*rows, row | {"part": "judge", "kept": "random"}])
            decision = {"sentence": f"Keep <{name}>.", "closed_share": float("nan"), "recommended": 1}
            frames = {"conditions": table, "losses": table}
            return types.SimpleNamespace(
                folder=tmp_path, kind=name, tables=frames, headline=decision["sentence"], decision=decision
            )

        return call

    for name, module in (("quantise", "quantisation"), ("streaming", "cache_window")):
        fake = types.ModuleType(f"sink_lens.studies.{module}")
        setattr(fake, name, study(name))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")
    monkeypatch.setenv("TQDM_DISABLE", "0")  # --quiet sets it: put back after the test
    return made


@pytest.mark.parametrize("command", CONFIGS)
def test_a_command_shows_the_held_out_losses_the_sentence_and_the_run(calls, command, tmp_path):
    done = run(command)
    assert done.exit_code == 0, done.exception
    assert "3.25" in done.stdout
    assert "9.75" not in done.stdout
    assert "random" not in done.stdout
    first, *_, page, folder = done.stdout.splitlines()
    assert [first, page, folder] == [
        f"Keep <{command}>.",
        f"report: {tmp_path / 'report.html'}",
        f"run: {tmp_path}",
    ]
    ((name, config, options),) = calls
    assert (name, config, options["progress"]) == (command, CONFIGS[command](), True)


@pytest.mark.parametrize("command", CONFIGS)
def test_json_is_one_object_on_stdout_and_everything_else_goes_to_stderr(calls, command, tmp_path):
    done = run(command, "--json")
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert found == {
        "command": command,
        "run": str(tmp_path),
        "report": str(tmp_path / "report.html"),
        "sentence": f"Keep <{command}>.",
        "closed_share": None,
        "recommended": 1,
    }
    assert "3.25" in done.stderr
    assert run(command, "--json", "--quiet").stdout == done.stdout


def test_quiet_prints_only_the_folder(calls, tmp_path):
    assert run("streaming", "--quiet").stdout == f"{tmp_path}\n"
    assert calls[0][2]["progress"] is False


def test_options_reach_the_studies(calls):
    run("quantise", "a/model", "--format", "nvfp4", "--site", "z", "--site", "v", "--channels", "1,3", "--goal", "0.8")
    run("streaming", "--window", "32", "--keep", "0,2", "--positions", "reindexed", "--controls", "2")
    (_, first, _), (_, second, _) = calls
    assert (first.model, first.format, first.sites, first.channels) == ("a/model", "nvfp4", ("z", "v"), (1, 3))
    assert first.goal == 0.8
    assert (second.window, second.keep, second.positions, second.controls) == (32, (0, 2), "reindexed", 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("quantise", "--format", "int3"), "format is 'int3'; need one of int8_tensor"),
        (("quantise", "--channels", "1,two"), "--channels is '1,two'"),
        (("streaming", "--keep", "1,2"), "need 0, which the others are compared with"),
        (("streaming", "--window", "4"), "a window of 4 cannot keep 8 tokens"),
    ],
)
def test_bad_input_ends_with_code_2(calls, arguments, text):
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not calls


@pytest.mark.parametrize("name", ["QUANTISE", "STREAMING"])
def test_every_example_of_the_help_runs(calls, name, monkeypatch, tmp_path):
    (tmp_path / "mine.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    lines = getattr(decisions, f"_{name}_EXAMPLES").splitlines()
    examples = [line.split("[dim]")[0].split(" > ")[0] for line in lines if line.startswith("sink-lens")]
    assert len(examples) == 3
    for example in examples:
        assert run(*shlex.split(example)[1:]).exit_code == 0, example
