"""``sink-lens fingerprint`` and ``fingerprint``: what is printed, written and refused."""

import io
from importlib import import_module

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sink_lens import cli, load, read_run
from sink_lens.cli.console import terminal_table
from sink_lens.errors import InputError
from sink_lens.identity import fingerprint
from sink_lens.identity.fingerprint import FingerprintConfig
from sink_lens.identity.pages import fingerprint as page
from sink_lens.identity.pages.fingerprint import FINGERPRINT
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.schema import FINGERPRINT_ERRORS
from tests.tiny_families import tiny

FEW = FingerprintConfig(sequences=200, length=4, coordinates=28)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))


def saved(folder, **fields):
    tiny("llama", **fields).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_pairs_of_one_initialisation_are_found_among_others(tmp_path):
    models = [load(tiny("llama", seed=seed)) for seed in (0, 0, 1, 1)]
    for number, lens in enumerate(models):
        object.__setattr__(lens, "name", f"model {number}")
    found = fingerprint(models, config=FEW, out=tmp_path / "out", progress=False)
    shown = Console(width=80, file=io.StringIO())
    shown.print(
        *(
            part if isinstance(part, str) else terminal_table(part.heads, part.rows)
            for part in page.show_fingerprint(found)
        )
    )
    assert "…" not in shown.file.getvalue()  # at 80 columns nothing is cut
    assert (found.frame["verdict"] == "same lineage").tolist() == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]
    assert (
        "2 of 6 pairs look as if they began with the same weights: 0 with 1 and 2 with 3."
        in found.headline
    )
    assert found.sentences == tuple(FINGERPRINT.headline(read_run(tmp_path / "out")))
    assert found.sentences[-1] == FINGERPRINT_ERRORS
    assert found.frame["tau_bar"][0] == 1.0
    assert any("the very same weights" in note for note in found.notes)
    assert set(read_run(tmp_path / "out").tables) >= {"models", "pairs", "nulls"}


def test_open_models_of_one_name_are_numbered_and_one_model_is_refused_twice():
    model = tiny("llama")
    found = fingerprint([model, tiny("llama", seed=1)], config=FEW, progress=False)
    name = found.frame["a"][0]
    assert found.frame["b"][0] == f"{name} (2)"
    with pytest.raises(InputError, match="twice"):
        fingerprint([model, model], config=FEW, progress=False)
    for option in ({"dtype": "bfloat16"}, {"device": "cpu"}):
        with pytest.raises(InputError, match="open model"):
            fingerprint([model, tiny("llama", seed=1)], config=FEW, progress=False, **option)


def test_states_are_cached_by_weights_and_inputs(tmp_path, monkeypatch):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    first = fingerprint([str(a), str(b)], config=FEW, progress=False)
    monkeypatch.setattr(
        import_module("sink_lens.identity.features"),
        "read_features",
        lambda *_, **__: pytest.fail("read again"),
    )
    second = fingerprint([str(a), str(b)], config=FEW, progress=False)
    np.testing.assert_array_equal(first.frame["tau_bar"], second.frame["tau_bar"])


def test_widths_that_differ_get_no_answer(tmp_path):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", hidden_size=64)
    options = ["--sequences", "200", "--length", "4", "--coordinates", "28"]
    done = CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(
        cli.app, ["fingerprint", str(a), str(b), *options]
    )
    assert done.exit_code == 0, done.stderr
    assert "have no answer: widths 48 and 64" in done.stdout
