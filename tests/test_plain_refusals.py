"""What a user gives wrongly in Python is refused in a sentence of ours, and not by an error from within."""

from pathlib import Path

import pytest
import torch

from sink_lens import edits, load, stream
from sink_lens.activations.views import Reading
from sink_lens.errors import InputError
from sink_lens.models.tiny import tiny
from sink_lens.records import create_run
from sink_lens.report.html import render
from sink_lens.training import SinkMonitorCallback


def test_an_option_that_the_monitor_has_not():
    with pytest.raises(InputError, match=r"SinkMonitor has no option nope; need some of every, tokens"):
        SinkMonitorCallback(nope=1)


@pytest.mark.parametrize("axis", ["layers", "heads", "positions"])
def test_a_number_where_a_set_is_needed(axis):
    with pytest.raises(InputError, match=rf"{axis} is 1; need a list of numbers. Write {axis}=\[1\]"):
        edits.zero("z", **{axis: 1})


def test_a_site_that_a_reading_did_not_ask_for():
    reading = Reading(name="a", sites=("resid_post",), function=lambda view: view["z"].mean((1, 2)))
    with pytest.raises(InputError, match="asked for resid_post, and reads 'z'"):
        stream(load(tiny("llama")), torch.randint(3, 300, (2, 12)), [reading])


def test_a_folder_that_only_a_shell_would_find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="in a folder named ~; need the path"):
        create_run("~/runs/x", kind="other", config={}, provenance={})
    with create_run(tmp_path / "run", kind="other", config={}, provenance={}):
        pass
    with pytest.raises(InputError, match="in a folder named ~"):
        render(tmp_path / "run", out=Path("~/page.html"))
    assert not (tmp_path / "~").exists()
