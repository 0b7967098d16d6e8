"""What a user gives wrongly in Python is refused in a sentence of ours, and not by an error from within."""

import os
from pathlib import Path

import pytest
import torch

from sink_lens import edits, load, stream
from sink_lens.activations.views import Reading
from sink_lens.circuits import Circuit
from sink_lens.circuits.files import read
from sink_lens.circuits.pairs import read_pairs
from sink_lens.data.corpora import read_text, texts_of
from sink_lens.data.described import read_settings
from sink_lens.errors import InputError
from sink_lens.models.header import read_header
from sink_lens.models.tiny import tiny
from sink_lens.records import create_run
from sink_lens.report.export import save_figures
from sink_lens.report.html import render
from sink_lens.report.style import save_figure
from sink_lens.report.views import save_page
from sink_lens.sweeps import EditGrid, Grid, SweepConfig
from sink_lens.training import SinkMonitorCallback


def test_an_option_that_the_monitor_has_not():
    with pytest.raises(InputError, match=r"SinkMonitor has no option nope; need some of every, tokens"):
        SinkMonitorCallback(nope=1)


@pytest.mark.parametrize("axis", ["layers", "heads", "positions"])
def test_a_number_where_a_set_is_needed(axis):
    with pytest.raises(InputError, match=rf"{axis} is 1; need a list of numbers. Write {axis}=\[1\]"):
        edits.zero("z", **{axis: 1})
    for mean in (edits.mean_ordinary, edits.mean_all, edits.mean_aligned):
        with pytest.raises(InputError, match=rf"{axis} is 1; need a list of numbers"):
            mean(tiny("llama"), torch.randint(3, 300, (2, 12)), "z", **{axis: 1})


def test_a_site_that_a_reading_did_not_ask_for():
    reading = Reading(name="a", sites=("resid_post",), function=lambda view: view["z"].mean((1, 2)))
    with pytest.raises(InputError, match="asked for resid_post, and reads 'z'"):
        stream(load(tiny("llama")), torch.randint(3, 300, (2, 12)), [reading])


def test_a_reading_that_gives_nothing():
    def forgot(view):
        view["z"].mean((1, 2))

    def some(view):
        return view["z"].sum(-1) if view.layer else None

    readings = [Reading(name=one.__name__, sites=("z",), function=one) for one in (forgot, some)]
    found = stream(load(tiny("llama")), torch.randint(3, 300, (2, 12)), readings)
    for look in (lambda: found["forgot", 0], lambda: found.stacked("forgot"), lambda: found.frame("forgot")):
        with pytest.raises(InputError, match=r"'forgot' gave None in every layer.* Write return"):
            look()
    with pytest.raises(InputError, match="'some' gave nothing at layer 0; need one of 1-2"):
        found["some", 0]
    with pytest.raises(InputError, match="there is no reading 'other'; need one of forgot, some"):
        found.stacked("other")


def test_a_folder_that_only_a_shell_would_find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="in a folder named ~; need the path"):
        create_run("~/runs/x", kind="other", config={}, provenance={})
    with create_run(tmp_path / "run", kind="other", config={}, provenance={}):
        pass
    with pytest.raises(InputError, match="in a folder named ~"):
        render(tmp_path / "run", out=Path("~/page.html"))
    for write in (save_figure, save_page, Circuit.save):
        with pytest.raises(InputError, match="in a folder named ~"):
            write("", "~/a.html" if write is save_page else "~/a.png")
    with pytest.raises(InputError, match="in a folder named ~"):
        save_figures([tmp_path / "run"], "~/figures")
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("model.gguf", load),
        ("a.txt", read_text),
        ("a.jsonl", lambda path: list(texts_of(str(path)))),
        ("a.toml", lambda path: read_settings(path, what="a sweep")),
        ("a.jsonl", read_pairs),
        ("a.json", read),
        ("a.txt", lambda path: SweepConfig(grid=Grid(edits=(EditGrid(site="z"),)), text=str(path))),
    ],
)
def test_a_named_pipe_is_not_waited_for(name, call, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read: it is a named pipe; need a regular file"):
        call(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_named_pipe_in_the_folder_of_a_model(name, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "model" / name)
    for call in (load, read_header):
        with pytest.raises(InputError, match=f"{name}, cannot be read: it is a named pipe"):
            call(tmp_path / "model")
