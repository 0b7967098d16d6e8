"""A command that is refused changes nothing: no file of a run is written over, and none is left in a folder."""

import json
import math
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from analyses.published_facts.facts import facts_of
from sink_lens import HeadNormConfig, cli, load, measures
from sink_lens.configuration import setting
from sink_lens.data.described import read_settings
from sink_lens.errors import InputError, ModelError, RunError
from sink_lens.models.tiny import tiny, tiny_tokenizer
from sink_lens.patching import PatchConfig
from sink_lens.records import create_run, read_run
from sink_lens.report import html
from sink_lens.sweeps import MetricSpec, SweepConfig

SMALL = "gpt2,n_layers=2,d_model=32,n_heads=4,vocab_size=100,n_context=64"
SWEEP = '[tokens]\nkind = "random"\nsequences = 2\nlength = 10\n[[edits]]\nsite = "z"\nheads = 0\nlayers = "all"\n'
TRAIN = 'size = "3M"\nsteps = 2\nbatch = 3\n'
RANDOM = ["--tokens", "random", "--sequences", 2, "--device", "cpu", "--quiet"]
UNTRAINED = ["--untrained", SMALL, "--sequences", 64, "--device", "cpu", "--quiet"]
PATCH = ["MODEL", "--clean", "a b c", "--corrupted", "a d c", "--device", "cpu", "--quiet"]
REFUSED = {
    "trace, one token": ["trace", "MODEL", *RANDOM, "--length", 1],
    "trace, a position outside": ["trace", "MODEL", *RANDOM, "--length", 24, "--target-position", 30],
    "isolate, a position outside": ["isolate", "MODEL", *RANDOM, "--length", 24, "--target-position", 99],
    "isolate, a position that no integer of torch holds": [
        *("isolate", "MODEL", *RANDOM, "--length", 24),
        *("--target-position", 10**30),
    ],
    "isolate, a layer that is not": ["isolate", "MODEL", *RANDOM, "--length", 24, "--layers", 9],
    "amplify, no layer to read": ["amplify", "MODEL", *RANDOM, "--length", 24, "--layers", "0-2"],
    "patch, a site that is not": ["patch", *PATCH, "--site", "heart"],
    "patch, less than one sequence a forward": ["patch", *PATCH, "--batch-size", -1],
    "patch, a layer that is not": ["patch", *PATCH, "--layers", 9],
    "patch, an axis that is not": ["patch", *PATCH, "--by", "layer,head"],
    "patch, a check of none": ["patch", *PATCH, "--approximate", "--check", -1],
    "sweep, an engine that is not": ["sweep", "SWEEP.toml", "--model", "MODEL", "--device", "cpu", "--engine", "slurm"],
    "sweep, a device that is not": ["sweep", "SWEEP.toml", "--model", "MODEL", "--devices", "cuda:7,cuda:8"],
    "tokens, over the context": ["tokens", "MODEL", "--tokens", "random", "--length", 5000, "--device", "cpu"],
    "tokens, a gap of one": ["tokens", "MODEL", "--gap", 1, "--device", "cpu"],
    "preference, over the context": ["preference", *UNTRAINED, "--length", 100],
    "preference, a device that is not": ["preference", *UNTRAINED, "--device", "@SUM(A1)"],
    "contraction, too short": ["contraction", *UNTRAINED, "--length", 8],
    "contraction, too many": ["contraction", *UNTRAINED, "--sequences", 10**30],
    "contraction, too few": ["contraction", "--untrained", SMALL, "--sequences", 10],
    "contraction, no such model": ["contraction", "missing", "--device", "cpu"],
    "fingerprint, too few": ["fingerprint", "MODEL", "MODEL", "--sequences", 5],
    "fingerprint, too many coordinates": ["fingerprint", "MODEL", "MODEL", "--coordinates", 5000, "--sequences", 60],
    "train, an odd batch": ["train", "TRAIN.toml", "--set", "accumulation=2", "--device", "cpu"],
    "train, a size that is not": ["train", "TRAIN.toml", "--set", "size=huge", "--device", "cpu"],
    "compare, no runs": ["compare", "MODEL", "missing"],
    "origin, no runs": ["origin", "MODEL", "missing"],
    "trace, a user's folder that is not": ["trace", "~no-such-user/model"],
    "sweep, invisible characters": ["sweep", "SWEEP.toml", "a\u202egnp.exe\nerror: not ours"],
}
"""What is asked of each command and cannot be done."""


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "MODEL"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def here(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "0")  # quiet commands set it
    Path("MODEL").symlink_to(model)
    Path("SWEEP.toml").write_text(SWEEP)
    Path("TRAIN.toml").write_text(TRAIN)


def files(folder):
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_is_refused_leaves_no_folder(asked):
    done = run(*REFUSED[asked], "--out", "deep/run")
    assert done.exit_code == 2, done.output
    assert "\u202e" not in done.output
    assert not any(line.startswith("error: not ours") for line in done.output.splitlines())
    assert not Path("deep").exists()


@pytest.mark.parametrize("asked", ["contraction, too short", "patch, a layer that is not", "trace, a position outside"])
def test_what_is_refused_leaves_an_empty_folder_empty_and_the_corrected_command_uses_it(asked, monkeypatch):
    monkeypatch.setattr(html, "page_text", lambda *folders, by=(): "a page")
    Path("run").mkdir()
    assert run(*REFUSED[asked], "--out", "run").exit_code == 2
    assert files("run") == {}
    assert Path("run").is_dir()
    if asked.startswith("contraction"):
        assert run("contraction", *UNTRAINED, "--length", 16, "--out", "run").exit_code == 0


@pytest.mark.parametrize("asked", REFUSED)
def test_what_is_refused_with_overwrite_leaves_the_run_that_was_there(asked):
    with create_run("run", kind="trace", config={}, provenance={}) as writer:
        writer.write_text("kept.txt", "kept")
    Path("run/report.html").write_text("its page")
    before = files("run")
    done = run(*REFUSED[asked], "--out", "run", "--overwrite")
    assert done.exit_code == 2, done.output
    assert files("run") == before


@pytest.mark.filterwarnings("default:missing is left out")
def test_a_failed_model_is_still_written_where_another_is_measured(monkeypatch):
    monkeypatch.setattr(html, "page_text", lambda *folders, by=(): "a page")
    run("preference", "missing", *UNTRAINED, "--length", 16, "--out", "run")
    assert read_run("run").tables["models"]["error"].notna().tolist() == [True, False]


@pytest.fixture
def whole():
    with create_run("run", kind="trace", config={}, provenance={}) as writer:
        writer.write_text("table.csv", "a\n1\n")
        writer.write_text("gone.csv", "a\n1\n")
    Path("run/gone.csv").unlink()
    Path("run/notes.txt").write_text("mine")
    Path("run/deep").mkdir()
    Path("run/deep/weights.bin").write_text("weights")
    return Path("run")


@pytest.mark.parametrize(
    "name", ["run.json", "table.csv", "gone.csv", "notes.txt", "deep/weights.bin", "deep/../run.json"]
)
def test_a_page_is_not_written_over_a_file_of_a_run(whole, name):
    before = files(whole)
    done = run("report", whole, "--out", whole / name)
    assert done.exit_code == 0
    page = (whole / name).with_name(f"{(whole / name).name}.html")
    assert str(page) in done.stdout  # a page has an ending
    page.unlink()
    assert files(whole) == before
    page.mkdir()
    assert run("report", whole, "--out", page).exit_code == 0
    assert [one.name for one in page.iterdir()] == ["report.html"]


def test_a_page_is_not_written_through_a_link_to_a_file_of_a_run(whole):
    Path("page.html").symlink_to(Path("run/run.json").resolve())
    before = files(whole)
    assert run("report", whole, "--out", "page.html").exit_code == 2
    assert files(whole) == before


@pytest.mark.parametrize("name", ["run/report.html", "run/again.html", "run/deep/page.html", "page.txt"])
def test_a_page_may_be_written_beside_the_files_of_a_run(whole, name):
    assert run("report", whole, "--out", name).exit_code == 0
    assert run("report", whole, "--out", name).exit_code == 0


def test_figures_are_not_written_over_a_file_of_a_run(whole):
    from sink_lens.report.export import save_figures

    assert run("isolate", "MODEL", *RANDOM, "--length", 24, "--out", "isolated").exit_code == 0
    files_of, _ = save_figures(["isolated"], "figures")
    with create_run("other", kind="isolate", config={}, provenance={}) as writer:
        writer.write_text(files_of[0].name, "a file of the run")
    with pytest.raises(InputError, match="belongs to the run"):
        save_figures(["isolated"], "other")
    assert (Path("other") / files_of[0].name).read_text() == "a file of the run"


def test_figures_that_are_refused_leave_the_page_as_it_was(whole):
    page = Path("run/report.html")
    page.write_text("before")
    assert run("report", whole, "--figures", "figures", "--font", "No Such Font").exit_code == 2
    assert page.read_text() == "before"


def test_a_link_to_itself_is_no_model(tmp_path):
    (tmp_path / "model.gguf").symlink_to("model.gguf")
    with pytest.raises(ModelError, match=r"there is no file .*model\.gguf"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("table", "column", "cell", "said"),
    [
        ("baseline", "value", [1, 2], "'value' is mixed; need float"),
        ("baseline", "value", "a", "'value' is string; need float"),
        ("baseline", "metric", [1, 2], "'metric' is mixed; need str"),
        ("baseline", "sequence", float("inf"), "'sequence' holds inf; need whole numbers"),
        ("baseline", "sequence", 0.5, "'sequence' holds 0.5; need whole numbers"),
    ],
)
def test_a_table_with_other_content_is_no_table_of_the_run(table, column, cell, said):
    assert run("sweep", "SWEEP.toml", "--model", "MODEL", "--device", "cpu", "--out", "run", "--quiet").exit_code == 0
    path, record = Path(f"run/{table}.parquet"), json.loads(Path("run/run.json").read_text())
    frame = pd.read_parquet(path)
    frame.assign(**{column: [cell] * len(frame)}).to_parquet(path, index=False)
    record["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
    Path("run/run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=said):
        read_run("run").tables[table]
    done = run("sweep", "SWEEP.toml", "--model", "MODEL", "--device", "cpu", "--out", "run", "--quiet")
    assert done.exit_code == 2, done.output


def test_a_setting_of_the_tokenizer_that_has_another_type_is_refused_with_its_folder(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "wrong")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "many"}))
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be read"):
        load(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 100, "unk_token": "\ud800"}))
    with pytest.raises(ModelError, match=r"the tokenizer .*; need "):
        load(folder)


def test_what_is_given_to_a_configuration_is_shown_on_one_line():
    with pytest.raises(InputError, match=r"^value_norm_init is .*; need one of first_token") as refused:
        HeadNormConfig(value_norm_init=torch.eye(3).to_sparse())
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match=r"a field cannot be used .*; need values as LlamaConfig"):
        HeadNormConfig(id2label=2j)
    for wrong in ({"rope_parameters": math.inf}, {"bos_token_id": "a"}, {"num_attention_heads": int}):
        with pytest.raises(InputError, match=r"a field cannot be used .*; need values as LlamaConfig"):
            HeadNormConfig(**wrong)
    with pytest.raises(InputError, match=r"of massive_ratio is a Tensor .* of the layout torch.sparse_coo"):
        measures.massive_ratio(torch.eye(3).to_sparse())
    with pytest.raises(InputError, match=r"sigma of uniform_law is -1000.*of more than 64 bits\); need a number"):
        measures.uniform_law(sigma=-(10**30), n_positions=1)
    with pytest.raises(InputError, match=r"a metric is \[None\] with the options .*; need a name and a mapping"):
        MetricSpec(name=[None])
    with pytest.raises(InputError, match="grid is -1; need a Grid"):
        SweepConfig(grid=-1)
    with pytest.raises(InputError, match=r"by is 1\.5"):
        PatchConfig(by=1.5)
    with pytest.raises(InputError, match=r"by is array\('a'.*; need a list"):
        PatchConfig(by=np.array("a"))


@pytest.mark.parametrize("content", ["a." * 50_000 + "a = 1", "a = 1\n" * 2_000_000, None])
def test_settings_that_would_be_read_for_ever_are_refused_at_once(content, tmp_path):
    path = Path("/dev/zero") if content is None else tmp_path / "s.toml"
    if content is not None:
        path.write_text(content)
    for call in (lambda: read_settings(path, what="a sweep"), lambda: facts_of(path)):
        with pytest.raises(InputError, match="cannot be read"):
            call()


def test_a_setting_of_many_parts_is_a_text():
    assert setting("x={" + "a." * 50_000 + "a=1}")[0] == "x"
    assert setting("x=" + "[" * 50_000)[0] == "x"


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": 3},
        {"model": [3]},
        {"condition": [1]},
        {"tolerance": {"absolute": "a"}},
        {"tolerance": {"relative": True}},
        {"value": 10**400},
        {"source": 3},
        {"quantity": ["sink_rate"]},
    ],
)
def test_a_fact_that_cannot_be_used_is_refused(wrong, tmp_path):
    fact = {"id": "a", "model": ["m"], "quantity": "sink_rate", "value": 0.5}
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"schema": "sink_lens.facts/1", "facts": [fact | {"condition": False}]}))
    (read,) = facts_of(path)
    assert (read.condition, read.room) == ({}, 0.05)
    path.write_text(json.dumps({"schema": "sink_lens.facts/1", "facts": [fact | wrong]}))
    with pytest.raises(InputError, match="fact 0 of"):
        facts_of(path)
