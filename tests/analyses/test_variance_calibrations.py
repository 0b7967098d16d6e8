"""Calibration: the edits do what they say, and without one the numbers are those of the plain passes."""

import numpy as np
import pytest
import torch

from analyses.variance_calibrations import CALIBRATIONS, calibration
from sink_lens.data.tokens import from_tensor
from sink_lens.engine.forward import run_with
from sink_lens.identity.contraction import contraction
from sink_lens.identity.models_to_measure import RandomSequences
from sink_lens.identity.untrained_models import UntrainedConfig, untrained

CONFIG = UntrainedConfig(
    activation="relu", n_layers=2, d_model=32, n_heads=4, vocab_size=100, n_context=64, init_std=0.2
)


@pytest.fixture(scope="module")
def lens():
    return untrained(CONFIG, seed=0)


@pytest.fixture(scope="module")
def tokens(lens):
    return from_tensor(torch.cat([one.tokens for one in RandomSequences(sequences=64, length=16, seed=0).chunks(lens)]))


@pytest.fixture(scope="module")
def frame(lens, tokens):
    return calibration(lens, tokens)


def test_without_an_edit_the_numbers_are_those_of_contraction(lens, frame):
    plain = contraction(lens, sequences=64, length=16).summary.set_index("measure")["value"]
    none = frame[frame["calibration"] == "none"].set_index("measure")
    for measure in ("inter_excess", "intra_excess", "discrepancy", "smallest_dimension_share"):
        assert none.loc[measure, "value"] == pytest.approx(plain[measure], abs=1e-5)
        assert none.loc[measure, "effect"] == 0
    assert set(frame["calibration"]) == set(CALIBRATIONS)


def test_the_edits_change_z_as_their_formulas_say(lens, tokens):
    z = {
        name: run_with(lens, tokens, make(lens, tokens), sites=("z",)).tensors["z", 0]
        for name, make in CALIBRATIONS.items()
    }
    root = torch.arange(1, 17).sqrt()[None, :, None, None]
    assert torch.allclose(z["amplify"], z["none"] * root, atol=1e-6)
    assert torch.allclose(z["attenuate"], z["none"] * root / 4, atol=1e-6)
    size = z["head_rms"].square().mean(-1).sqrt()
    assert torch.allclose(size, size[:1, :1].expand_as(size), rtol=1e-4)


def test_effects_are_paired_with_none(frame):
    rows = frame.set_index(["calibration", "measure"])
    for name in ("amplify", "attenuate", "head_rms"):
        effect = rows.loc[name, "loss"]["value"] - rows.loc["none", "loss"]["value"]
        assert rows.loc[name, "loss"]["effect"] == pytest.approx(effect, abs=1e-6)
    found = rows.loc["amplify", "inter_excess"]
    assert found["effect_low"] < found["effect"] < found["effect_high"]
    assert np.isfinite(rows["value"]).all()
