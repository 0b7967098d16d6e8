"""A survey of several models goes on where it was stopped, and gives what one gives that nobody stopped."""

from types import SimpleNamespace

import pandas as pd
import pytest

from sink_lens import read_run
from sink_lens.errors import RunError
from sink_lens.identity import surveys
from sink_lens.identity.models_to_measure import ModelToMeasure
from sink_lens.identity.pages.contraction import CONTRACTION
from sink_lens.identity.pages.survey import read_variants_and_models
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.text import as_text

SMALL = "n_layers=2,d_model=32,n_heads=4,vocab_size=100,n_context=64"


def test_a_stopped_survey_goes_on_behind_what_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened, really = [], ModelToMeasure.open

    def stopping(self, **options):
        opened.append(self.seed)
        if self.seed == 1 and len(opened) == 2:
            raise KeyboardInterrupt
        return really(self, **options)

    monkeypatch.setattr(ModelToMeasure, "open", stopping)
    asked = {
        "untrained": [f"gpt2,{SMALL}"],
        "seeds": (0, 1, 2),
        "sinks": False,
        "sequences": 64,
        "length": 16,
    }
    with pytest.raises(KeyboardInterrupt):
        surveys.survey("contraction", out="run", progress=False, **asked)
    assert read_run(tmp_path / "run").status == "interrupted"
    surveys.survey("contraction", out="run", progress=False, **asked)
    assert opened == [0, 1, 1, 2]
    surveys.survey("contraction", out="whole", progress=False, **asked)
    for name in ("summary", "layers", "agreement", "variants"):
        one, other = (read_run(tmp_path / folder).tables[name] for folder in ("run", "whole"))
        pd.testing.assert_frame_equal(one, other)


def save_model(folder, *, seed):
    """A tiny model in a folder."""
    planted(seed=seed).model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)


def test_a_model_that_was_replaced_meanwhile_is_measured_again_and_a_finished_survey_of_it_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a", "b")):
        save_model(name, seed=seed)
    asked = {"models": ("a", "b"), "sinks": False, "sequences": 64, "length": 16, "progress": False}
    really = ModelToMeasure.open

    def stopping(self, **options):
        if self.name == "b":
            raise KeyboardInterrupt
        return really(self, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ModelToMeasure, "open", stopping)
        surveys.survey("contraction", out="run", **asked)
    save_model("a", seed=2)
    surveys.survey("contraction", out="run", **asked)
    surveys.survey("contraction", out="whole", **asked)
    for name in ("summary", "layers", "agreement"):
        one, other = (read_run(tmp_path / folder).tables[name] for folder in ("run", "whole"))
        pd.testing.assert_frame_equal(one, other)
    (tmp_path / "run/report.html").unlink()
    surveys.survey("contraction", out="run", **asked)
    (tmp_path / "run/report.html").unlink()
    save_model("b", seed=3)
    with pytest.raises(RunError, match="b is another model"):
        surveys.survey("contraction", out="run", **asked)


def test_the_page_of_one_model_has_its_interval_over_sequences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model("a", seed=0)
    asked = {"models": ("a",), "sinks": False, "sequences": 64, "length": 16, "progress": False}
    run = read_run(surveys.survey("contraction", out="run", **asked).folder)
    row = run.tables["summary"].set_index("measure").loc["inter_excess"]
    said = f"{as_text(row['value'])} ({as_text(row['low'])} to {as_text(row['high'])})"
    assert said in CONTRACTION.title(run)
    assert said in CONTRACTION.headline(run)[0]


def test_two_models_of_one_variant_have_no_interval_over_sequences_and_the_next_keeps_its_own():
    columns = {"measure": "tau", "seed": float("nan"), "value": 1.0, "step": float("nan")}
    summary = pd.DataFrame(
        {"variant": ["a", "a", "b"], "low": [1.0, 2.0, 3.0], "high": 4.0}
    ).assign(model=["a 1", "a 2", "b"], **columns)
    variants = pd.DataFrame({"variant": ["a", "b"], "measure": "tau", "n": 1, "mean": 1.0})
    tables = {"summary": summary, "variants": variants.assign(low=float("nan"), high=float("nan"))}
    run = SimpleNamespace(need=lambda name, columns: tables[name][list(columns)])
    found, _ = read_variants_and_models(run)
    assert found["low"].isna().tolist() == [True, False]
    assert found.loc[1, ["low", "high"]].tolist() == [3.0, 4.0]
