"""``isolate`` and ``amplify`` on the planted model, whose answer is known."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from planted_sequences import planted_lens, sequences

from sink_lens import read_run
from sink_lens.errors import InputError
from sink_lens.studies.interventions import amplify, isolate


def test_isolating_reports_both_positions_by_layer_and_the_loss(tmp_path):
    _, lens = planted_lens()
    study = isolate(lens, target_positions=[9, 15], tokens=sequences(), out=tmp_path / "run", progress=False)
    assert study.tables["summary"]["target_position"].tolist() == [9, 15]
    layers = study.tables["layers"]
    assert len(layers) == 2 * lens.n_layers
    assert {"target_mass", "baseline_sink_mass", "sink_mass"} <= set(layers.columns)
    summary = study.tables["summary"].iloc[0]
    assert summary["loss_change_nats"] == pytest.approx(summary["loss_nats"] - summary["baseline_loss_nats"], abs=1e-5)
    assert summary["outcome"] == "unchanged"  # the planted sink follows its token, not the variance
    assert "Position 9 isolated in all layers" in study.headline
    usual = isolate(lens, tokens=sequences(), out=tmp_path / "usual", progress=False)
    assert usual.tables["summary"]["target_position"].tolist() == [10]  # 32 // 3


def test_sequences_of_unequal_length_count_as_those_cut_to_the_shortest(tmp_path):
    _, lens = planted_lens()
    whole = sequences()
    lengths = whole.lengths.clone()
    lengths[1] = 20
    unequal = dataclasses.replace(whole, lengths=lengths)
    found, cut = (
        isolate(lens, target_positions=[9], tokens=one, out=tmp_path / name, progress=False).tables["summary"]
        for name, one in (("unequal", unequal), ("cut", whole.cut(20)))
    )
    pd.testing.assert_frame_equal(found, cut)
    assert found["n"].tolist() == [whole.n_sequences]
    with pytest.raises(InputError, match="the target position is 19; need one from 1 to 18"):
        isolate(lens, target_positions=[19], tokens=unequal, out=tmp_path / "late", progress=False)


def test_amplifying_sweeps_factors_and_centres(tmp_path):
    _, lens = planted_lens()
    given = {"target_position": 9, "layers": [0], "tokens": sequences(), "progress": False}
    study = amplify(lens, factors=(1.0, 4.0), out=tmp_path / "run", **given)
    summary = study.tables["summary"]
    assert list(zip(summary["centre"], summary["factor"], strict=True)) == [
        (centre, factor) for centre in ("values", "aggregated", "none") for factor in (1.0, 4.0)
    ]
    ones = summary.query("factor == 1")
    assert (ones["times"] == 1).all()
    assert (ones[["change", "change_low", "change_high"]] == 0).all(axis=None)
    assert np.allclose(summary["change"], summary["target_mass"] - summary["baseline_target_mass"], atol=1e-6)
    assert ((summary["change_low"] <= summary["change"]) & (summary["change"] <= summary["change_high"])).all()
    assert (ones["loss_change_nats"] == 0).all()
    assert set(read_run(tmp_path / "run").tensors("centring_means")) >= {"values.0", "aggregated.4"}
    amplify(lens, factors=(2.0,), centres=("none",), out=tmp_path / "norm", **given)  # needs no means
    assert not (tmp_path / "norm" / "centring_means.safetensors").exists()
