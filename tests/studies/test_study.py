"""All studies: run folders, families, refusals."""

import json
import sys

import pytest
from planted_sequences import planted_lens, sequences

from sink_lens import answers, patching, read_run, trace, wrap
from sink_lens.edits import metrics
from sink_lens.errors import InputError, RunError
from sink_lens.models.tiny import planted
from sink_lens.studies import card, cards, quantise, sink_tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*begin with BOS twice"
)  # the batch does not know that it has BOS


def test_a_folder_that_is_taken_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    _, lens = planted_lens()
    folder = quantise(
        lens, controls=1, tokens=sequences(), out=tmp_path / "run", progress=False
    ).folder
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


@pytest.mark.parametrize("study", [card, sink_tokens, quantise, trace])
def test_options_of_text_beside_tokens_are_refused_and_the_record_says_what_ran(study, tmp_path):
    _, lens = planted_lens()
    for given in (
        {"sequences": 3},
        {"length": 9},
        {"bos": "without"},
        {"prompts": ["a b c"]},
        {"text": "a.txt"},
    ):
        with pytest.raises(InputError, match=next(iter(given))):
            study(lens, tokens=sequences(), progress=False, **given)
    if study is card:
        batch = sequences()
        made = study(lens, tokens=batch, progress=False).run.config
        assert (made["sequences"], made["length"]) == (batch.n_sequences, batch.n_positions)
        with pytest.raises(InputError, match="length"):
            cards([lens], batch, length=9)


def test_bos_beside_token_ids_is_refused():
    _, lens = planted_lens()
    ids = sequences().tokens[:1]
    with pytest.raises(InputError, match="bos='with'"):
        answers(lens, ids, bos="with")
    with pytest.raises(InputError, match="bos='with'"):
        patching.patch(lens, ids, ids.flip(1), metric=metrics.sink_mass(0), bos="with")


def test_an_option_that_nothing_reads_is_refused():
    _, lens = planted_lens()
    other = wrap(planted().model)
    with pytest.raises(InputError, match="columns"):
        card(lens, other, tokens=sequences(), columns="model,nonsense")
    with pytest.raises(InputError, match="most_loss"):
        card(lens, tokens=sequences(), most_loss=0.1)


def test_a_study_started_before_it_measured(monkeypatch):
    _, lens = planted_lens()
    times = iter(f"2026-01-01T00:00:0{n}+00:00" for n in range(9))
    for place in ("records.writing", "studies.study", "studies.card"):
        monkeypatch.setattr(sys.modules[f"sink_lens.{place}"], "utc_now_text", lambda: next(times))
    for one in (
        card(lens, tokens=sequences(), progress=False),
        sink_tokens(lens, tokens=sequences(), progress=False),
    ):
        record = json.loads((one.run.folder / "run.json").read_text())
        assert record["started"] < record["ended"]
