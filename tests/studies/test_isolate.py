"""``isolate`` on the planted model, whose answer is known."""

import dataclasses

import pandas as pd
import pytest
from planted_sequences import planted_lens, sequences

from sink_lens.errors import InputError
from sink_lens.studies.interventions import isolate


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


def test_a_configuration_names_its_position_default_a_third(tmp_path):
    _, lens = planted_lens()
    study = isolate(lens, tokens=sequences(), out=tmp_path / "run", progress=False)
    assert study.tables["summary"]["target_position"].tolist() == [10]  # 32 // 3


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
