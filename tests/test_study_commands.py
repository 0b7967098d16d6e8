"""The commands that run a study: options, output, JSON and exit codes, with the work replaced."""

import json
import re
import shlex
import sys
import types

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.chain.config import TraceConfig
from sink_lens.studies import config as configs

MODULES = {
    "isolate": "isolation",
    "amplify": "amplification",
    "ablate": "ablation",
    "quantise": "quantisation",
}
HELD_OUT = {"loss_nats": 3.25, "change_nats": 0.5, "closed_share": np.nan, "closed_low": 0.1, "closed_high": 0.9}
CONDITION = {"kept": "all", "channels": 0, "part": "judge"} | HELD_OUT
CONDITIONS = pd.DataFrame(
    [CONDITION, CONDITION | {"part": "choose", "loss_nats": 9.75}, CONDITION | {"kept": "random"}]
)
TABLES = {
    "summary": pd.DataFrame(
        {"target_position": [21], "target_mass": [0.25], "outcome": ["shared"], "centre": ["values"]}
    ),
    "ablations": pd.DataFrame(
        {
            "step": [0, 0],
            "kind": ["set", "random, same layers"],
            "neurons": ["1.2", "1.3"],
            "method": ["zero", "mean_ordinary"],
            "what": ["scalar", "column"],
            "where": ["sink", "sink"],
            "removed_share": [0.25, -0.001],
            "ci_low": [0.2, np.nan],
            "ci_high": [0.3, np.nan],
        }
    ),
    "conditions": CONDITIONS,
}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


def run_line(line):
    return run(*line.split())


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every call of a study: its name, configuration and options."""
    made = []

    def study(name):
        def call(config, **options):
            made.append((name, config, options))
            decision = {"sentence": f"Keep <{name}>.", "closed_share": float("nan"), "recommended": 1}
            return types.SimpleNamespace(
                folder=tmp_path, tables=TABLES, headline=decision["sentence"], decision=decision
            )

        return call

    for name, module in MODULES.items():
        fake = types.ModuleType(f"sink_lens.studies.{module}")
        setattr(fake, name, study(name))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")
    monkeypatch.setenv("TQDM_DISABLE", "0")  # --quiet sets it: put back after the test
    return made


@pytest.mark.parametrize("command", MODULES)
def test_a_command_shows_the_sentence_the_table_and_the_run(calls, command, tmp_path):
    done = run(command)
    assert done.exit_code == 0, done.exception
    first, *_, page, folder = done.stdout.splitlines()
    assert [first, page, folder] == [
        f"Keep <{command}>.",
        f"report: {tmp_path / 'report.html'}",
        f"run: {tmp_path}",
    ]
    ((name, config, options),) = calls
    assert (name, config, options["progress"]) == (command, getattr(configs, f"{command.title()}Config")(), True)
    if command != "quantise":
        assert config.question() == TraceConfig(
            model=config.model, sequences=8, intervention_sequences=8, intervention_length=64
        )


def test_quantise_shows_the_held_out_losses_alone(calls):
    printed = run("quantise").stdout
    assert "3.25" in printed
    assert "9.75" not in printed
    assert "random" not in printed


def test_json_is_one_object_on_stdout_and_everything_else_goes_to_stderr(calls, tmp_path):
    done = run("quantise", "--json")
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert found == {
        "command": "quantise",
        "run": str(tmp_path),
        "report": str(tmp_path / "report.html"),
        "sentence": "Keep <quantise>.",
        "closed_share": None,
        "recommended": 1,
    }
    assert "3.25" in done.stderr
    assert run("quantise", "--json", "--quiet").stdout == done.stdout


@pytest.mark.parametrize("command", ["ablate", "quantise"])
def test_quiet_prints_only_the_folder(calls, command, tmp_path):
    assert run(command, "--quiet").stdout == f"{tmp_path}\n"
    assert calls[0][2]["progress"] is False


def test_options_reach_the_studies(calls):
    run_line("quantise a/model --format nvfp4 --site z --site v --channels 1,3 --goal 0.8")
    run_line("isolate a/model --target-position 9 --target-position 12 --layers 0-2,5 --length 40 --bos with")
    run_line("amplify --target-position 7 --factors 0.5,2 --centre none --seed 3")
    quantise, isolate, amplify = (config for _, config, _ in calls)
    assert (quantise.model, quantise.format, quantise.sites, quantise.channels) == (
        "a/model",
        "nvfp4",
        ("z", "v"),
        (1, 3),
    )
    assert quantise.goal == 0.8
    assert (isolate.model, isolate.length, isolate.bos) == ("a/model", 40, "with")
    assert isolate.question().intervention_length == 40
    assert (isolate.target_positions, isolate.layers) == ((9, 12), (0, 1, 2, 5))
    assert (amplify.target_position, amplify.factors, amplify.centres) == (7, (0.5, 2.0), ("none",))
    assert amplify.seed == 3


def test_the_table_of_an_ablation_has_what_was_chosen_and_no_random_sets(calls):
    printed = run("ablate").stdout
    assert re.search(r"set +1\.2 +zero of outlier entries, sink +25% +\[20%, 30%\]", printed)
    assert "random" not in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("quantise --format int3", "format is 'int3'; need one of int8_tensor"),
        ("quantise --channels 1,two", "--channels is '1,two'"),
        ("isolate --layers 3-1", "--layers is '3-1'"),
        ("amplify --factors 1,two", "--factors is '1,two'"),
        ("ablate --length 1", "length is 1"),
        ("isolate --tokens noise", "tokens is 'noise'"),
    ],
)
def test_bad_input_ends_with_code_2(calls, arguments, text):
    done = run_line(arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not calls


@pytest.mark.parametrize("command", MODULES)
def test_every_example_of_the_help_runs(calls, command, monkeypatch, tmp_path):
    (tmp_path / "mine.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    epilog = typer.main.get_command(cli.app).commands[command].epilog
    lines = [line.split("[dim]")[0].split(" > ")[0] for line in epilog.splitlines() if line.startswith("sink-lens")]
    assert len(lines) >= 2
    for line in lines:
        assert run(*shlex.split(line)[1:]).exit_code == 0, line
