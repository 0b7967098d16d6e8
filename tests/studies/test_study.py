"""All studies: run folders, families, refusals."""

import numpy as np
import pytest
import torch
from lenses import speaking
from planted_sequences import planted_lens, sequences

from sink_lens import read_run
from sink_lens.errors import InputError, RunError
from sink_lens.studies import card, quantise
from sink_lens.studies.interventions import amplify, isolate
from tests.tiny_families import TINY_FAMILIES


def test_a_folder_that_is_taken_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    _, lens = planted_lens()
    folder = isolate(lens, target_positions=[9], tokens=sequences(), out=tmp_path / "run", progress=False).folder
    run = read_run(folder)
    assert (run.kind, run.status, run.missing) == ("isolate", "finished", [])
    assert (run.config["isolate_target_positions"], len(run.provenance["weights_sha256"])) == ([9], 64)
    (folder / "report.html").write_text("a page")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.setattr("sink_lens.engine.forward.run_with", None)
    monkeypatch.setattr("sink_lens.activations.forward.forward", None)
    for study in (amplify, isolate, card, quantise):
        with pytest.raises(RunError, match=r"holds a finished run \(isolate, .*need another folder, or overwrite=True"):
            study(lens, tokens=sequences(), out=folder, progress=False)
        with pytest.raises(RunError, match=r"holds files and no run.json \(notes.txt\)"):
            study(lens, tokens=sequences(), out=tmp_path / "mine", progress=False)
        with pytest.raises(RunError, match="is a file; need a folder"):
            study(lens, tokens=sequences(), out=tmp_path / "mine" / "notes.txt", progress=False)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_studies_run_on_families_without_special_cases(family, tmp_path):
    lens = speaking(family)
    tokens = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    assert len(isolate(lens, tokens=tokens, out=tmp_path / "a", progress=False).tables["summary"]) == 1
    options = {"factors": (3.0,), "centres": ("values",), "layers": [0]}
    study = amplify(lens, tokens=tokens, out=tmp_path / "b", progress=False, **options)
    assert np.isfinite(study.tables["summary"]["target_mass"]).all()


@pytest.mark.parametrize(
    ("study", "fields", "text"),
    [
        (isolate, {"target_positions": [0]}, "target position is 0"),
        (isolate, {"target_positions": [99]}, "need one from 1 to 30"),
        (isolate, {"layers": [99]}, "layer 99"),
        (amplify, {"factors": ()}, "no factor"),
        (amplify, {"layers": [4]}, "leave no layer to read"),
        (isolate, {"tokens": torch.full((2, 9), 5)}, "9 tokens, and interventions need 12"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(study, fields, text, tmp_path):
    with pytest.raises(InputError, match=text):
        study(planted_lens()[1], out=tmp_path / "run", **{"tokens": sequences()} | fields)
    assert not (tmp_path / "run").exists()
