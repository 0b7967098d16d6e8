"""What a user gives wrongly in Python is refused in a sentence of ours, and not by an error from within."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from sink_lens import edits, load, measures, stream
from sink_lens.activations.views import Reading
from sink_lens.circuits import Circuit
from sink_lens.circuits.files import read
from sink_lens.configuration import parse_setting, read_settings
from sink_lens.data.corpora import open_texts, read_text
from sink_lens.errors import InputError, ModelError
from sink_lens.models.bundled import read_header
from sink_lens.models.headnorm import HeadNormConfig
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.patching import PatchConfig
from sink_lens.patching.pair_file import read_pairs
from sink_lens.records import create_run
from sink_lens.report.export import save_figures
from sink_lens.report.html import render
from sink_lens.report.offline import write_page
from sink_lens.report.style import save_figure
from sink_lens.sweeps import EditGrid, Grid, MetricSpec, SweepConfig
from tests.tiny_families import tiny


@pytest.mark.parametrize("axis", ["layers", "heads", "positions"])
def test_a_number_where_a_set_is_needed(axis):
    with pytest.raises(
        InputError, match=rf"{axis} is 1; need a list of numbers. Write {axis}=\[1\]"
    ):
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
    for look in (
        lambda: found["forgot", 0],
        lambda: found.stacked("forgot"),
        lambda: found.frame("forgot"),
    ):
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
    for write in (save_figure, write_page, Circuit.save):
        with pytest.raises(InputError, match="in a folder named ~"):
            write("", "~/a.html" if write is write_page else "~/a.png")
    with pytest.raises(InputError, match="in a folder named ~"):
        save_figures([tmp_path / "run"], "~/figures")
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("model.gguf", load),
        ("a.txt", read_text),
        ("a.jsonl", lambda path: list(open_texts(str(path)))),
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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_named_pipe_in_the_folder_of_a_model(name, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "model" / name)
    for call in (load, read_header):
        with pytest.raises(InputError, match=f"{name}, cannot be read: it is a named pipe"):
            call(tmp_path / "model")


def test_a_setting_of_the_tokenizer_that_has_another_type_is_refused_with_its_folder(tmp_path):
    folder = tmp_path / "wrong"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "many"}))
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be read"):
        load(folder)
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_max_length": 100, "unk_token": "\ud800"})
    )
    with pytest.raises(ModelError, match=r"the tokenizer .*; need "):
        load(folder)


def test_what_is_given_to_a_configuration_is_shown_on_one_line():
    with pytest.raises(
        InputError, match=r"^value_norm_init is .*; need one of first_token"
    ) as refused:
        HeadNormConfig(value_norm_init=torch.eye(3).to_sparse())
    assert "\n" not in str(refused.value)
    for wrong in ({"id2label": 2j}, {"rope_parameters": math.inf}):
        with pytest.raises(
            InputError, match=r"a field cannot be used .*; need values as LlamaConfig"
        ):
            HeadNormConfig(**wrong)
    for call, says in (
        (
            lambda: measures.massive_ratio(torch.eye(3).to_sparse()),
            r"is a Tensor .* of the layout torch.sparse_coo",
        ),
        (
            lambda: measures.sink_rate(torch.ones(2, 2), threshold=-(10**30)),
            r"is -1000.*of more than 64 bits\)",
        ),
        (
            lambda: MetricSpec(name=[None]),
            r"a metric is \[None\] with the options .*; need a name and a mapping",
        ),
        (lambda: SweepConfig(grid=-1), "grid is -1; need a Grid"),
        (lambda: PatchConfig(by=np.array("a")), r"by is array\('a'.*; need a list"),
    ):
        with pytest.raises(InputError, match=says):
            call()


@pytest.mark.parametrize("content", ["a." * 50_000 + "a = 1", "a = 1\n" * 2_000_000, None])
def test_settings_that_would_be_read_for_ever_are_refused_at_once(content, tmp_path):
    path = Path("/dev/zero") if content is None else tmp_path / "s.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(path, what="a sweep")


def test_a_setting_is_a_name_and_a_toml_value_or_a_text():
    for text, found in (
        ("lr = 3e-4", 3e-4),
        ("a=true", True),
        ("a=x=b.txt", "x=b.txt"),
        ("a=[3, 5]", [3, 5]),
    ):
        assert parse_setting(text)[1] == found
    assert parse_setting("x={" + "a." * 50_000 + "a=1}")[0] == "x"
    assert parse_setting("x=" + "[" * 50_000)[0] == "x"
