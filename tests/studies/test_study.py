"""All studies: run folders, families, refusals."""

import pytest
from planted_sequences import planted_lens, sequences

from sink_lens import read_run
from sink_lens.errors import RunError
from sink_lens.studies import card, quantise


def test_a_folder_that_is_taken_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    _, lens = planted_lens()
    folder = quantise(lens, controls=1, tokens=sequences(), out=tmp_path / "run", progress=False).folder
    run = read_run(folder)
    assert (run.kind, run.status, run.missing) == ("quantise", "finished", [])
    assert len(run.provenance["weights_sha256"]) == 64
    (folder / "report.html").write_text("a page")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.setattr("sink_lens.engine.forward.run_with", None)
    monkeypatch.setattr("sink_lens.activations.forward.forward", None)
    for study in (card, quantise):
        with pytest.raises(RunError, match=r"quantise, .*overwrite=True"):
            study(lens, tokens=sequences(), out=folder, progress=False)
        with pytest.raises(RunError, match=r"notes.txt"):
            study(lens, tokens=sequences(), out=tmp_path / "mine", progress=False)
        with pytest.raises(RunError, match="is a file"):
            study(lens, tokens=sequences(), out=tmp_path / "mine" / "notes.txt", progress=False)
