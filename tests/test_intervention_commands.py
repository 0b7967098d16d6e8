"""``sink-lens isolate``, ``amplify`` and ``ablate``: options, output and exit codes, with the work replaced."""

import re
import sys
import types

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.chain.config import TraceConfig
from sink_lens.cli import interventions
from sink_lens.studies.config import AblateConfig, AmplifyConfig, IsolateConfig


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Every call of a study: its name, configuration and options."""
    made = []

    def study(name):
        def call(config, **options):
            made.append((name, config, options))
            summary = pd.DataFrame(
                {"target_position": [21], "target_mass": [0.25], "outcome": ["shared"], "centre": ["values"]}
            )
            ablations = pd.DataFrame(
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
            )
            frames = {"summary": summary, "ablations": ablations}
            return types.SimpleNamespace(folder=tmp_path, tables=frames, headline=f"the headline of {name}")

        return call

    for name, module in (("isolate", "isolation"), ("amplify", "amplification"), ("ablate", "ablation")):
        fake = types.ModuleType(f"sink_lens.studies.{module}")
        setattr(fake, name, study(name))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("sink_lens.report.html.render", lambda folder: folder / "report.html")
    return made


@pytest.mark.parametrize("command", ["isolate", "amplify", "ablate"])
def test_a_command_ends_with_its_table_the_headline_and_the_run(calls, command, tmp_path):
    result = run(command)
    assert result.exit_code == 0
    assert f"the headline of {command}" in result.stdout
    assert result.stdout.splitlines()[-2:] == [f"report: {tmp_path / 'report.html'}", f"run: {tmp_path}"]
    ((name, config, options),) = calls
    assert name == command
    assert config == {"isolate": IsolateConfig, "amplify": AmplifyConfig, "ablate": AblateConfig}[command]()
    assert config.question() == TraceConfig(
        model=config.model, sequences=8, intervention_sequences=8, intervention_length=64
    )
    assert options["progress"] is True


def test_options_reach_the_study(calls):
    run(
        "isolate",
        "a/model",
        "--target-position",
        "9",
        "--target-position",
        "12",
        "--layers",
        "0-2,5",
        "--length",
        "40",
        "--bos",
        "with",
    )
    run("amplify", "--target-position", "7", "--factors", "0.5,2", "--centre", "none", "--seed", "3")
    (_, first, _), (_, second, _) = calls
    assert (first.model, first.length, first.bos, first.question().intervention_length) == ("a/model", 40, "with", 40)
    assert (first.target_positions, first.layers) == ((9, 12), (0, 1, 2, 5))
    assert (second.target_position, second.factors, second.centres) == (7, (0.5, 2.0), ("none",))
    assert second.seed == 3


def test_the_table_of_an_ablation_has_what_was_chosen_and_no_random_sets(calls):
    printed = run("ablate").stdout
    assert re.search(r"set +1\.2 +zero of outlier entries, sink +25% +\[20%, 30%\]", printed)
    assert "random" not in printed


def test_quiet_prints_only_the_folder(calls, tmp_path):
    assert run("ablate", "--quiet").stdout == f"{tmp_path}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("isolate", "--layers", "3-1"), "--layers is '3-1'"),
        (("amplify", "--factors", "1,two"), "--factors is '1,two'"),
        (("ablate", "--length", "1"), "length is 1"),
        (("isolate", "--tokens", "noise"), "tokens is 'noise'"),
    ],
)
def test_bad_input_ends_with_code_2(calls, arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert not calls


@pytest.mark.parametrize("name", ["ISOLATE", "AMPLIFY", "ABLATE"])
def test_every_example_of_the_help_runs(calls, name, monkeypatch, tmp_path):
    import shlex

    (tmp_path / "mine.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    lines = getattr(interventions, f"_{name}_EXAMPLES").splitlines()
    examples = [line.split("[dim]")[0] for line in lines if line.startswith("sink-lens")]
    assert examples
    for example in examples:
        assert run(*shlex.split(example)[1:]).exit_code == 0, example
