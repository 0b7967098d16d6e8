"""Trainings that several analyses compare arms on go on from a checkpoint, and several processes share a table."""

import itertools
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from analyses import prose_and_trigger, shared_table
from analyses.a_structural_origin.headnorm_first_gain import run as first_gain
from analyses.prose_and_trigger import Asked, training

TINY = SimpleNamespace(tiny=True, progress=False, size=lambda real, tiny: tiny)


@pytest.mark.parametrize("with_task", [True, False])
def test_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, with_task):
    monkeypatch.setattr(prose_and_trigger, "SAVE_EVERY", 2)
    fields = first_gain.ARMS["matched"]
    asked = Asked(
        budget="middle", rate=1e-2, seed=0, fields=fields, with_task=with_task, by_layer=True
    )
    whole = list(training(TINY, asked))
    list(
        itertools.islice(training(TINY, asked, keep=tmp_path / "one"), 5)
    )  # steps 0 to 4; the last checkpoint is of 4
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "progress.json",
        "state.safetensors",
    ]
    rest = list(training(TINY, asked, keep=tmp_path / "one"))
    pd.testing.assert_frame_equal(pd.DataFrame(rest), pd.DataFrame(whole), check_exact=True)
    assert not (tmp_path / "one").exists()
    assert math.isnan(whole[0]["task"]) != with_task
    assert whole[0]["gain_0"] != whole[-1]["gain_0"]
    assert whole[0]["wrote_1"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("arm", ["softmax", "matched"])
def test_a_step_on_a_gpu_is_a_step_on_a_processor(arm):
    asked = Asked(budget="middle", rate=1e-2, seed=0, fields=first_gain.ARMS[arm], by_layer=True)
    here, there = (
        pd.DataFrame(list(training(TINY, asked, device=device))) for device in ("cpu", "cuda")
    )
    assert here["prose"].iloc[0] - here["prose"].iloc[-1] > 0.1  # it learns something
    for name in ("prose", "task", "wrote_0"):
        assert there[name].tolist() == pytest.approx(here[name].tolist(), rel=1e-3)


def test_what_a_size_is_compared_with_has_that_size():
    wrote = {}
    for arm, (fields, change) in first_gain.CONTROLS.items():
        asked = Asked(
            budget="middle", rate=1e-2, seed=0, fields=fields, change=change, by_layer=True
        )
        wrote[arm] = next(training(TINY, asked))
    ratio = wrote["authors' draw"]["gain_0"] / wrote["matched"]["gain_0"]
    assert ratio > 2
    for large, small in (
        ("softmax, drawn size", "softmax"),
        ("softmax", "softmax, smaller W_O"),
        ("authors' draw", "authors' draw, smaller W_O"),
        ("parity by hand, drawn size", "parity by hand, matched size"),
    ):  # in layer 0: what the next one aggregates depends on it
        assert wrote[large]["wrote_0"] / wrote[small]["wrote_0"] == pytest.approx(ratio, rel=1e-4)
    for by_hand, norm in (("matched size", "matched"), ("drawn size", "authors' draw")):
        assert wrote[f"parity by hand, {by_hand}"]["wrote_0"] == pytest.approx(
            wrote[norm]["wrote_0"], rel=0.1
        )
    # a text repeats its tokens, so that softmax writes more than on random ones
    assert wrote["matched"]["wrote_0"] == pytest.approx(wrote["softmax"]["wrote_0"], rel=0.2)


def test_trials_come_first_and_the_best_rate_is_the_finals(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gain, "HERE", tmp_path)
    monkeypatch.setattr(first_gain, "KEPT", tmp_path / "kept")
    pd.DataFrame(columns=[*first_gain.RUN, "step", "prose"]).to_csv(
        tmp_path / "runs.csv", index=False
    )
    asked = SimpleNamespace(device="cpu", until=math.inf, data=["prose and task"], trials=True)
    first_gain.train_what_is_missing(TINY, asked)
    table = pd.read_csv(tmp_path / "runs.csv")
    assert set(table["kind"]) == {"trial"}
    assert len(table[first_gain.RUN].drop_duplicates()) == 15
    assert not [path for path in (tmp_path / "kept").iterdir() if path.is_dir()]
    missing = [one for one in first_gain.not_there(table) if one.data == "prose and task"]
    assert [(one.kind, one.arm, one.seed) for one in missing[:3]] == [
        ("final", arm, 0) for arm in first_gain.ARMS
    ]
    ends = table[table["arm"] == "matched"].groupby("rate")["prose"].last()
    assert missing[2].rate == ends.idxmin()
    # a machine that made the same
    shared_table.append(table, tmp_path / "runs.csv", by=first_gain.RUN, locks=tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "runs.csv"), table)
