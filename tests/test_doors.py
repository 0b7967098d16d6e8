"""The doors by which numbers of before come into a result: what decided them is compared at each, by computing again.

A door that is not here is ``report``, which shows runs as they are and says of what models.
"""

import functools
import json
import os
import shutil

import numpy as np
import pytest
import torch
from tiers import first

from sink_lens import circuits, patching, sweeps
from sink_lens.chain.trace import trace
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.errors import InputError, RunError
from sink_lens.models.load import load, wrap
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.records import RUN_FILE, read_run
from sink_lens.studies.card import read_chain_answers
from sink_lens.sweeps.grid import EditGrid, Grid
from tests.tiny_families import tiny

IDS = torch.randint(3, 300, (6, 12), generator=torch.Generator().manual_seed(0))
GRID = Grid.of(EditGrid(kind="zero", site="z", layers="each", heads="each"), controls=0)


def llama(changed=False):
    """A model, or the same by every hash and by its weights, whose rotary frequencies are halved in memory."""
    model = tiny("llama")
    if changed:
        model.model.rotary_emb.inv_freq.mul_(0.5)
    return wrap(model, tokenizer=tiny_tokenizer(adds_bos=True))


def swept(lens, out, **options):
    return sweeps.sweep(
        lens,
        GRID,
        tokens=from_tensor(IDS),
        out=out,
        progress=False,
        **{"metrics": metrics.loss()} | options,
    )


def patched(lens, out, **options):
    asked = {"metric": "loss", "site": "z", "controls": 0} | options
    return patching.patch(lens, IDS[:2], IDS[2:4], out=out, progress=False, **asked)


def circuited(lens, out, **options):
    how = {"task": "text", "pairs": 6, "length": 10, "bos": "without", "check": 0, "random": 0}
    how |= {"sizes": (1.0,), "nodes": False, "method": "eap", "report": False}
    return circuits.run(lens, out=out, **how | options)


def traced(lens, out, **options):
    how = {"interventions": False, "random_init": False, "report": False, "progress": False}
    return trace(lens, IDS, out=out, **how | options)


DOORS = {"sweep": swept, "patch": patched, "circuit": circuited, "trace": traced}


def stop(folder):
    """Make a finished run one that was stopped before its last tables."""
    for path in folder.rglob(RUN_FILE):
        record = json.loads(path.read_text()) | {"status": "interrupted"}
        for name in ("summary.csv", "cells.parquet", "patches.parquet"):
            record["files"].pop(name, None)
            (path.parent / name).unlink(missing_ok=True)
        path.write_text(json.dumps(record))


@pytest.mark.parametrize("door", DOORS)
def test_a_stopped_run_goes_on_with_the_model_that_it_was_begun_with_and_no_other(door, tmp_path):
    call = DOORS[door]
    call(llama(), tmp_path / "run")
    stop(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.parquet")}
    with pytest.raises(RunError, match="numbers of something else"):
        call(llama(changed=True), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.parquet")} == before
    call(llama(), tmp_path / "run")
    assert {read_run(path.parent).status for path in (tmp_path / "run").rglob(RUN_FILE)} == {
        "finished"
    }


def test_a_finished_run_is_returned_for_its_model_and_no_other(tmp_path):
    whole = swept(llama(), tmp_path / "sweep")
    assert swept(llama(), tmp_path / "sweep").frame.equals(whole.frame)
    every = functools.partial(patched, site="every")
    every(llama(), tmp_path / "patch")
    for call, folder in ((swept, "sweep"), (every, "patch")):
        with pytest.raises(RunError, match="numbers of something else"):
            call(llama(changed=True), tmp_path / folder)


@pytest.mark.parametrize("door", first(["sweep", "patch", "circuit"]))
def test_a_shard_of_another_model_is_not_taken_and_nothing_of_it_stays(door, tmp_path):
    call = DOORS[door]
    options = {"site": "z"} if door == "patch" else {}
    call(llama(), tmp_path / "run", shard="1/2", **options)
    theirs = tmp_path / "run" / "shard-2-of-2"
    shutil.copytree(tmp_path / "run" / "shard-1-of-2", theirs)
    record = json.loads((theirs / RUN_FILE).read_text())
    record["provenance"]["weights_sha256"] = "another"
    (theirs / RUN_FILE).write_text(json.dumps(record))
    with pytest.raises(RunError, match="weights_sha256"):
        call(llama(), tmp_path / "run", **options)
    shutil.rmtree(theirs)
    assert call(llama(), tmp_path / "run", **options).frame.equals(
        call(llama(), tmp_path / "whole", **options).frame
    )


def test_a_shard_whose_numbers_are_of_something_else_is_refused(tmp_path):
    for folder, changed in (("run", False), ("other", True)):
        swept(llama(changed), tmp_path / folder, shard="1/2")
    shutil.rmtree(tmp_path / "run" / "shard-1-of-2")
    shutil.copytree(tmp_path / "other" / "shard-1-of-2", tmp_path / "run" / "shard-1-of-2")
    for shard in ("1/2", None):
        with pytest.raises(RunError, match="numbers of something else"):
            swept(llama(), tmp_path / "run", shard=shard)
    shutil.rmtree(tmp_path / "run" / "shard-1-of-2")
    assert swept(llama(), tmp_path / "run").frame.equals(swept(llama(), tmp_path / "whole").frame)


@pytest.mark.parametrize(
    "entry", first([{"rope_theta": 5.0}, {"rms_norm_eps": 0.3}, {"hidden_act": "relu"}])
)
def test_a_configuration_that_was_edited_is_another_model(entry, tmp_path):
    lens = planted(sink=True)
    lens.model.save_pretrained(tmp_path / "model")
    tiny_tokenizer(adds_bos=True).save_pretrained(tmp_path / "model")
    ran = traced(load(tmp_path / "model"), tmp_path / "trace")
    with pytest.raises(InputError, match="without BOS"):
        read_chain_answers(ran.folder, load(tmp_path / "model"), bos=True)
    swept(load(tmp_path / "model"), tmp_path / "sweep")
    stop(tmp_path / "sweep")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    if "rope_theta" in entry and "rope_parameters" in config:
        entry = {"rope_parameters": config["rope_parameters"] | entry}
    file.write_text(json.dumps(config | entry))
    other = load(tmp_path / "model")
    with pytest.raises(RunError, match="config_sha256"):
        swept(other, tmp_path / "sweep")
    with pytest.raises(InputError, match="other configuration"):
        read_chain_answers(ran.folder, other, bos=False)


def reads_file(logits):
    return logits[:, -1, 7] * float(np.load(os.environ["OF_TEST"] + ".npy"))


def reads_environment(logits):
    return logits[:, -1, 7] * len(os.environ["OF_TEST"])


def reads_module(logits):
    return logits[:, -1, 7] * np.of_test


@pytest.mark.parametrize("metric", first([reads_file, reads_environment, reads_module]))
@pytest.mark.parametrize("door", ["sweep", "patch"])
def test_a_function_that_reads_something_else_is_another_function(
    metric, door, tmp_path, monkeypatch
):
    def set_to(number):
        monkeypatch.setenv("OF_TEST", str(tmp_path / ("x" * number)))
        np.save(tmp_path / ("x" * number), number)
        monkeypatch.setattr(np, "of_test", number, raising=False)

    options = {"metrics": metric} if door == "sweep" else {"metric": metric, "site": "z"}
    set_to(1)
    DOORS[door](llama(), tmp_path / "run", **options)
    stop(tmp_path / "run")
    set_to(2)
    with pytest.raises(RunError, match="numbers of something else"):
        DOORS[door](llama(), tmp_path / "run", **options)
    set_to(1)
    DOORS[door](llama(), tmp_path / "run", **options)


def test_other_versions_are_a_note_where_the_numbers_are_the_same(tmp_path, monkeypatch):
    whole = swept(llama(), tmp_path / "run")
    path = tmp_path / "run" / RUN_FILE
    record = json.loads(path.read_text())
    record["provenance"]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(record))
    with pytest.warns(UserWarning, match="goes on from .*1.0"):
        assert swept(llama(), tmp_path / "run").frame.equals(whole.frame)
    assert "1.0" in read_run(tmp_path / "run").provenance["notes"][-1]
