"""Trainings on crops of any length, the gate that decides which are compared, and the order of what is missing."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.a_structural_origin.headnorm_by_length import crops, run
from analyses.shared_table import append, work_off

SHAPE = run.TINY.shape


def test_crops_begin_anywhere_and_bos_takes_the_place_of_their_first_token(monkeypatch):
    rows, stream, apart = crops.corpus_of(SHAPE)
    seen = []
    real = crops.step_on_cpu

    def step_on_cpu(*given, **options):
        advance = real(*given, **options)
        return lambda rate, tokens: (seen.append(tokens), advance(rate, tokens))

    monkeypatch.setattr(crops, "step_on_cpu", step_on_cpu)
    asked = {"length": 64, "steps": 2, "rate": 1e-3, "seed": 0, "fields": {}, "losses_only": True}
    ended = [crops.train_on_crops(SHAPE, bos=bos, **asked) for bos in (False, True)]
    without, with_bos = seen[:2], seen[2:]
    assert [len(one.rows) for one in ended] == [2, 2]
    assert rows.tokenizer is not None
    for crop, other in zip(without, with_bos, strict=True):
        assert crop.shape == (SHAPE.step_tokens // 64, 64)
        assert torch.equal(crop[:, 1:], other[:, 1:])
        assert set(other[:, 0].tolist()) == {rows.tokenizer.bos_token_id}
        windows = stream.unfold(0, 64, 1)
        assert all((windows == one).all(1).any() for one in crop)
    assert len(apart) % SHAPE.block == 0
    assert not torch.equal(without[0], without[1])


def test_s2_in_bins_is_the_mean_over_its_positions():
    by_position = np.array([[8.0, 4.0, 2.0, 4.0, 1.0, 1.0]])
    found = crops.in_bins(by_position)
    assert found[["from", "to"]].to_numpy().tolist() == [[0, 0], [1, 1], [2, 3], [4, 5]]
    assert found["s2"].tolist() == [8.0, 4.0, 3.0, 1.0]


def test_the_first_token_is_compared_with_positions_from_8_on():
    assert crops.of_first(np.array([6.0, *[100.0] * 7, 2.0, 4.0])) == 2.0


def of_gate(ratios):
    """A table of the gate, from length -> S2 of the first token without BOS; with BOS it is 9."""
    rows = [
        one.label(
            [dict.fromkeys(run.READ, 0.0) | {"step": one.steps, "tokens": 100, "prose": 1.0}]
        ).assign(s2_ratio=9.0 if one.bos else ratios[one.length])
        for one in run.gate_of(run.REAL)
        if one.bos or one.length in ratios
    ]
    return pd.concat(rows, ignore_index=True)


@pytest.mark.parametrize(
    ("ratios", "longest"),
    [
        ({64: 1.0, 256: 1.3, 1024: 1.24}, 256),
        ({64: 1.0, 256: 1.2, 1024: 1.25}, 1024),
        ({64: 1.0, 256: 1.2, 1024: 1.2}, None),
        ({64: 1.0, 256: 1.4}, None),  # that of 1,024 has not ended
        ({1024: 1.4}, 1024),
    ],
)
def test_the_longest_length_that_passes_without_bos_is_compared(ratios, longest):
    table = of_gate(ratios)
    assert run.longest_of(table, run.REAL) == longest
    missing = list(run.not_there(table, run.REAL))
    if longest is None:
        assert not [one for one in missing if one.seed == run.TRIAL_SEED]
        assert math.isnan(run.numbers_of(table, run.REAL)["difference"].estimate)
    else:
        assert {(one.length, one.arm) for one in missing if one.seed == run.TRIAL_SEED} == {
            (64, "softmax"), (64, "matched"), (longest, "softmax"), (longest, "matched"), (longest, "authors' draw")
        }  # fmt: skip
        others = [
            one for one in missing if one.seed != run.TRIAL_SEED
        ]  # before its trials an arm has no rate
        assert {one.key for one in others} == {
            one.key for one in run.gate_of(run.REAL) if one.length not in ratios and not one.bos
        }


def table_of(leads):
    """A table of all trainings: length -> arm -> the loss minus softmax's at the end of each seed."""
    table = [of_gate({64: 1.0, 256: 1.2, 1024: 1.3})]
    for length, by_arm in leads.items():
        for arm, of_seeds in by_arm.items():
            asked = {"length": length, "arm": arm, "steps": run.REAL.steps}
            for rate in run.RATES:
                one = run.Training(**asked | {"rate": rate, "seed": run.TRIAL_SEED, "steps": 85})
                table.append(one.label([{"step": 85, "prose": 5 + abs(rate - 4e-3)}]))
            for seed, lead in enumerate(of_seeds):
                one = run.Training(**asked, rate=4e-3, seed=seed)
                ends = {
                    "prose": 4 + seed + lead,
                    "s2_ratio": 1,
                    "rate_first": 0,
                    "kurtosis": 0,
                    "max_activation": 1,
                }
                first = {"step": 0, "tokens": 0, "prose": 8.0}
                table.append(one.label([first, {"step": 256, "tokens": 100} | ends]))
    return pd.concat(table, ignore_index=True)


def test_the_difference_is_the_norms_lead_at_the_longest_minus_that_at_64():
    near = {"softmax": [0, 0, 0], "matched": [0.1, 0.2, 0.3]}
    far = near | {"matched": [-0.1, 0.1, 0.3], "authors' draw": [1, 1, 1]}
    found = run.numbers_of(table_of({64: near, 1024: far}), run.REAL)
    assert found["difference"].estimate == pytest.approx((-0.2 - 0.1 + 0) / 3)
    half = 4.302653 * 0.1 / math.sqrt(3)  # t of two degrees of freedom, standard deviation .1
    assert found["difference"].high - found["difference"].estimate == pytest.approx(half, rel=1e-4)
    assert found["loss @ 64 tokens"].estimate == pytest.approx(0.2)
    assert found["drawn_loss"].estimate == pytest.approx(1)
    far["matched"] = far["matched"][:2]
    found = run.numbers_of(table_of({64: near, 1024: far}), run.REAL)
    assert math.isnan(found["difference"].low)  # before three seeds nothing is judged


def test_seeds_come_one_after_another_over_all_arms():
    near = {"softmax": [0], "matched": [0]}
    table = table_of({64: near, 1024: near | {"authors' draw": []}})
    missing = list(run.not_there(table, run.REAL))
    assert [(one.seed, one.length, one.arm) for one in missing[:3]] == [
        (0, 1024, "authors' draw"), (1, 64, "softmax"), (1, 64, "matched")
    ]  # fmt: skip
    assert {one.rate for one in missing} == {4e-3}


def test_what_a_process_makes_is_added_once(tmp_path):
    def missing():
        done = (
            pd.read_csv(tmp_path / "a.csv")["key"].tolist() if (tmp_path / "a.csv").exists() else []
        )
        return [SimpleNamespace(key=key, name=f"k{key}") for key in (1, 2, 3) if key not in done]

    def make(one):
        for _ in range(2):  # another machine made it too
            append(
                pd.DataFrame({"value": [one.key * 10], "key": [one.key]}),
                tmp_path / "a.csv",
                by=["key"],
                locks=tmp_path,
            )

    work_off(missing, make, locks=tmp_path, until=math.inf)
    assert pd.read_csv(tmp_path / "a.csv").to_dict("list") == {
        "key": [1, 2, 3],
        "value": [10, 20, 30],
    }


def test_the_larger_training_goes_on_with_the_steps_of_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crops, "CURVE", 1)
    monkeypatch.setattr(crops, "READINGS", 1)
    monkeypatch.setattr(run, "LARGER", SHAPE)
    monkeypatch.setattr(run, "LARGER_LENGTH", 64)
    monkeypatch.setattr(run, "steps_in", lambda *given, **options: 4)
    monkeypatch.setattr(run, "LOCKS", tmp_path)
    path = tmp_path / "gpu.csv"
    run.train_larger(["--device", "cpu", "--into", str(path)])
    whole = pd.read_csv(path)
    assert whole[["arm", "seed", "steps"]].drop_duplicates().to_numpy().tolist() == [
        [arm, seed, 4] for seed in (0, 1) for arm in ("softmax", "matched")
    ]
    whole[whole["seed"] == 0].to_csv(path, index=False)
    monkeypatch.setattr(run, "steps_in", None)
    run.train_larger(["--device", "cpu", "--into", str(path)])
    pd.testing.assert_frame_equal(pd.read_csv(path), whole, rtol=1e-4)
    assert capsys.readouterr().out.count("heads with a sink") == 6
