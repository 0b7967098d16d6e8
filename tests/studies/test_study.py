"""What the studies share: run folders, families, refusals, notebooks, configurations."""

import numpy as np
import pytest
import torch
from lenses import speaking
from planted_sequences import planted_lens, sequences

from analyses.tiny_families import TINY_FAMILIES
from sink_lens import TokenBatch, read_run
from sink_lens.errors import InputError, RunError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.studies import IsolateConfig, ablate, card, quantise
from sink_lens.studies.interventions import amplify, isolate


def test_a_study_leaves_a_finished_run(tmp_path):
    _, lens = planted_lens()
    ids = sequences().tokens  # a row per sequence, as trace takes them
    isolate(lens, ids, target_positions=[9], out=tmp_path / "run", progress=False)
    run = read_run(tmp_path / "run")
    assert (run.kind, run.status, run.missing) == ("isolate", "finished", [])
    assert run.config["isolate_target_positions"] == [9]
    assert len(run.provenance["weights_sha256"]) == 64
    with pytest.raises(RunError, match="finished"):
        isolate(lens, target_positions=[9], tokens=sequences(), out=tmp_path / "run", progress=False)


def test_a_folder_that_is_taken_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    _, lens = planted_lens()
    folder = isolate(lens, target_positions=[9], tokens=sequences(), out=tmp_path / "run", progress=False).folder
    (folder / "report.html").write_text("a page")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.setattr("sink_lens.engine.forward.run_with", None)
    monkeypatch.setattr("sink_lens.activations.forward.forward", None)
    for study in (amplify, isolate, ablate, card, quantise):
        with pytest.raises(RunError, match=r"holds a finished run \(isolate, .*need another folder, or overwrite=True"):
            study(lens, tokens=sequences(), out=folder, progress=False)
        with pytest.raises(RunError, match=r"holds files and no run.json \(notes.txt\)"):
            study(lens, tokens=sequences(), out=tmp_path / "mine", progress=False)
        with pytest.raises(RunError, match="is a file; need a folder"):
            study(lens, tokens=sequences(), out=tmp_path / "mine" / "notes.txt", progress=False)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_studies_run_on_families_without_special_cases(family, tmp_path):
    lens = speaking(family)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens = TokenBatch.from_tensor(ids)
    assert len(isolate(lens, tokens=tokens, out=tmp_path / "a", progress=False).tables["summary"]) == 1
    options = {"factors": (3.0,), "centres": ("values",), "layers": [0]}
    study = amplify(lens, tokens=tokens, out=tmp_path / "b", progress=False, **options)
    assert np.isfinite(study.tables["summary"]["target_mass"]).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda lens, out: isolate(lens, target_positions=[0], tokens=sequences(), out=out), "target position is 0"),
        (lambda lens, out: isolate(lens, target_positions=[99], tokens=sequences(), out=out), "need one from 1 to 30"),
        (lambda lens, out: isolate(lens, target_positions=[9], layers=[99], tokens=sequences(), out=out), "layer 99"),
        (lambda lens, out: amplify(lens, factors=(), tokens=sequences(), out=out), "no factor"),
        (lambda lens, out: amplify(lens, layers=[4], tokens=sequences(), out=out), "leave no layer to read"),
        (lambda lens, out: isolate(lens, tokens=sequences(2, 9), out=out), "9 tokens, and interventions need 12"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(call, text, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match=text):
        call(planted_lens()[1], out)
    assert not out.exists()


def test_a_study_can_be_asked_by_configuration(tmp_path):
    planted(seed=1).model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    config = IsolateConfig(
        model=str(tmp_path / "model"), tokens="random", sequences=3, length=24, intervention_length=24, device="cpu"
    )
    study = isolate(config, out=tmp_path / "run", progress=False)
    assert study.tables["summary"]["n"].tolist() == [3]
    assert len(read_run(tmp_path / "run").tables["tokens"]) == 3 * 24
