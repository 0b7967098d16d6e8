"""``isolate`` on the planted model, whose answer is known."""

import pytest
from planted_sequences import planted_lens, sequences

from sink_lens.studies.isolate import isolate


def test_isolating_reports_both_positions_by_layer_and_the_loss(tmp_path):
    _, lens = planted_lens()
    study = isolate(lens, target_positions=[9, 15], tokens=sequences(), out=tmp_path / "run", progress=False)
    assert study.tables["summary"]["target_position"].tolist() == [9, 15]
    layers = study.tables["layers"]
    assert len(layers) == 2 * lens.n_layers
    assert {"target_mass", "baseline_sink_mass", "target_norm", "sink_value", "outlier_dimension"} <= set(
        layers.columns
    )
    summary = study.tables["summary"].iloc[0]
    assert summary["loss_change_nats"] == pytest.approx(summary["loss_nats"] - summary["baseline_loss_nats"], abs=1e-5)
    assert summary["outcome"] == "unchanged"  # the planted sink follows its token, not the variance
    assert "isolating position 9" in study.headline


def test_a_configuration_names_its_position_default_a_third(tmp_path):
    _, lens = planted_lens()
    study = isolate(lens, tokens=sequences(), out=tmp_path / "run", progress=False)
    assert study.tables["summary"]["target_position"].tolist() == [10]  # 32 // 3
