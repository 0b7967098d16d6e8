"""``sink-lens fingerprint`` and ``fingerprint``: what is printed, written and refused."""

import io
from importlib import import_module

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sink_lens import cli, load, read_run
from sink_lens.cli import fingerprint as commands
from sink_lens.identity import fingerprint
from sink_lens.identity.fingerprint import FingerprintConfig
from sink_lens.models.tiny import tiny, tiny_tokenizer

module = import_module("sink_lens.identity.fingerprint")

FEW = FingerprintConfig(sequences=200, length=4, coordinates=28)
OPTIONS = ["--sequences", 200, "--length", 4, "--coordinates", 28]
SMALL = "gpt2,n_layers=1,d_model=48,n_heads=4,vocab_size=300"


def run(*arguments):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(cli.app, ["fingerprint", *map(str, arguments)])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))


def saved(folder, *, seed=0, tokenizer=None, **fields):
    tiny("llama", seed=seed, **fields).save_pretrained(folder)
    (tiny_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return folder


def test_two_models_and_a_report(tmp_path, monkeypatch):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    done = run(a, b, *OPTIONS, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "no common lineage shown" in done.stdout
    assert "tau_bar" in done.stdout
    assert done.stdout.splitlines()[-1] == str(tmp_path / "out" / "report.html")
    made = read_run(tmp_path / "out")
    assert (made.kind, made.status, made.missing) == ("fingerprint", "finished", [])
    assert len(made.tables["nulls"]) == 5
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("One seed?", "Pair by pair", "relabelled", "2 (1 − Φ)"):
        assert words in page
    assert (tmp_path / "out" / "fingerprint.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(module, "facts", None)  # refused before a model is opened
    again = run(a, b, *OPTIONS, "--out", tmp_path / "out")
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_pairs_of_one_initialisation_are_found_among_others(tmp_path):
    models = [load(tiny("llama", seed=seed)) for seed in (0, 0, 1, 1)]
    for number, lens in enumerate(models):
        object.__setattr__(lens, "name", f"model {number}")
    found = fingerprint(models, config=FEW, out=tmp_path / "out", progress=False)
    shown = Console(width=80, file=io.StringIO())
    shown.print(commands._table(found))
    assert "…" not in shown.file.getvalue()  # at 80 columns nothing is cut
    assert (found.pairs["verdict"] == "same lineage").tolist() == [True, False, False, False, False, True]
    assert "2 of 6 pairs show a common lineage: model 0 with model 1 and model 2 with model 3" in found.headline
    assert found.matrix().loc["model 0", "model 1"] == 1.0
    assert any("the very same weights" in note for note in found.notes)
    assert set(read_run(tmp_path / "out").tables) >= {"models", "pairs", "nulls"}


def test_states_are_cached_by_weights_and_inputs(tmp_path, monkeypatch):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    first = fingerprint([str(a), str(b)], config=FEW, progress=False)
    monkeypatch.setattr(module, "kept_features", lambda *_, **__: pytest.fail("read again"))
    second = fingerprint([str(a), str(b)], config=FEW, progress=False)
    assert (first.models["cached"].any(), second.models["cached"].all()) == (False, True)
    np.testing.assert_array_equal(first.pairs["tau_bar"], second.pairs["tau_bar"])
    dry = run(a, b, *OPTIONS, "--dry-run")
    assert dry.exit_code == 0, dry.stderr
    assert "2 models, 1 pairs; about 0 s" in dry.stdout
    assert "cached" in dry.stdout
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_times_what_is_not_cached(tmp_path):
    done = run("--untrained", SMALL, "--seeds", "0,1", *OPTIONS, "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "800" in done.stdout  # tokens
    assert "cached" not in done.stdout
    assert not (tmp_path / "cache").exists()


def test_embeddings_come_with_their_warning(tmp_path):
    done = run("--untrained", SMALL, "--seeds", "0,1", *OPTIONS, "--embeddings", "--quiet")
    assert done.exit_code == 0, done.stderr
    assert "unrelated models then look related" in done.stderr


def test_widths_that_differ_get_no_answer(tmp_path):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", hidden_size=64)
    done = run(a, b, *OPTIONS, "--quiet")
    assert done.exit_code == 0, done.stderr
    assert "no answer (widths 48 and 64" in done.stdout


def test_bad_input_ends_with_code_2(tmp_path):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    other = tiny_tokenizer()
    other.add_tokens(["zzz"])
    c = saved(tmp_path / "c", tokenizer=other, vocab_size=310)
    for arguments, says in (
        ((a, a), "is there twice; need each model once"),
        ((a, f"{a}/../a"), "is there twice"),
        ((), "no model was given; need two or more"),
        ((a,), "1 model was given"),
        ((a, c), "2 different tokenizers"),
        ((a, b, "--sequences", 49), "49 inputs were asked for; need at least 50"),
        ((a, b, "--length", 300), "takes at most 256"),
        ((a, b, "--length", 0), "the length is 0"),
        ((a, b, "--null", "bayes"), "--null is 'bayes'; need one of analytical"),
        ((a, b, "--coordinates", 60), "60 of 48 coordinates"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, arguments
        assert says in done.stderr
    assert not (tmp_path / "runs").exists()
