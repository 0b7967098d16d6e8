"""``amplify`` on the planted model, whose answer is known."""

import numpy as np
from planted_sequences import planted_lens, sequences

from sink_lens import read_run
from sink_lens.studies.interventions import amplify


def test_amplifying_sweeps_factors_and_centres(tmp_path):
    _, lens = planted_lens()
    study = amplify(
        lens, target_position=9, layers=[0], factors=(1.0, 4.0), tokens=sequences(), out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    summary = study.tables["summary"]
    assert list(zip(summary["centre"], summary["factor"], strict=True)) == [
        (centre, factor) for centre in ("values", "aggregated", "none") for factor in (1.0, 4.0)
    ]
    ones = summary.query("factor == 1")
    assert (ones["times"] == 1).all()
    assert (ones[["change", "change_low", "change_high"]] == 0).all(axis=None)
    assert np.allclose(summary["change"], summary["target_mass"] - summary["baseline_target_mass"], atol=1e-6)
    assert (summary["change_low"] <= summary["change"]).all()
    assert (summary["change"] <= summary["change_high"]).all()
    assert (ones["loss_change_nats"] == 0).all()
    assert set(read_run(tmp_path / "run").tensors("centring_means")) >= {"values.0", "aggregated.4"}


def test_the_norm_only_control_needs_no_means(tmp_path):
    _, lens = planted_lens()
    out = tmp_path / "run"
    amplify(
        lens, target_position=9, layers=[0], factors=(2.0,), centres=("none",), tokens=sequences(), out=out,
        progress=False,
    )  # fmt: skip
    assert not (out / "centring_means.safetensors").exists()
