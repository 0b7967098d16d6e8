"""What was removed says what to use instead: commands, options, Python names, kinds of run."""

import importlib
import json

import pytest
import typer
from typer.testing import CliRunner

import sink_lens
from sink_lens import gone, read_run, studies
from sink_lens.cli import app
from sink_lens.errors import GoneError

ROW = ("sink-lens weigh", "--weigh of sink-lens trace", "weigh", "kind weighing")


@pytest.fixture(autouse=True)
def removed(monkeypatch):
    monkeypatch.setattr(gone, "GONE", {ROW: "sink-lens card A B"})


def test_a_removed_command_or_option_says_what_to_use():
    result = CliRunner().invoke(app, ["weigh", "gpt2", "--json"])
    assert result.exit_code == 2
    assert result.stderr == "error: sink-lens weigh was removed; use sink-lens card A B\n"
    result = CliRunner().invoke(app, ["trace", "--weigh", "3"])
    assert result.exit_code == 2
    assert result.stderr == "error: --weigh of sink-lens trace was removed; use sink-lens card A B\n"
    assert "No such option: --weigh" in CliRunner().invoke(app, ["card", "--weigh", "3"]).stderr


def test_a_removed_python_name_says_what_to_use():
    for package in (sink_lens, studies):
        with pytest.raises(GoneError, match=rf"^{package.__name__}.weigh was removed; use sink-lens card A B$"):
            package.weigh  # noqa: B018
    with pytest.raises(ImportError, match=r"sink_lens\.weigh was removed; use sink-lens card A B"):
        exec("from sink_lens import weigh")


def test_a_run_of_a_removed_kind_says_so_and_that_its_tables_can_be_read(tmp_path):
    record = {"kind": "weighing", "status": "finished", "started": "", "ended": "", "error": None}
    record |= {"config": {}, "provenance": {}, "expects": [], "files": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    said = "a run of the kind 'weighing', which was removed; use sink-lens card A B. Its tables are Parquet"
    with pytest.raises(GoneError, match=said):
        read_run(tmp_path)
    for command in ("report", "status"):
        result = CliRunner().invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 2
        assert said in result.stderr


def test_nothing_that_is_there_is_said_to_be_removed(monkeypatch):
    monkeypatch.undo()
    commands = typer.main.get_group(app).commands
    rooms = [sink_lens, *(importlib.import_module(f"sink_lens.{one}") for one in ("studies", "identity", "training"))]
    there = {f"sink-lens {command}" for command in commands}.union(*(room.__all__ for room in rooms))
    assert there.isdisjoint(name for names in gone.GONE for name in names)
