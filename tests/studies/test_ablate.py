"""``ablate`` on the planted model, whose answer is known."""

import pytest
import torch
from lenses import speaking
from planted_sequences import planted_lens, sequences

from sink_lens import TokenBatch
from sink_lens.errors import InputError
from sink_lens.studies.interventions import ablate


def test_the_planted_neuron_alone_is_the_smallest_set(tmp_path):
    truth, lens = planted_lens()
    study = ablate(lens, tokens=sequences(), out=tmp_path / "run", progress=False)
    (row,) = study.tables["summary"].to_dict("records")
    assert row["neurons"] == f"{truth.layer}.{truth.neuron}"
    assert row["removes"]
    assert row["removed_share"] > 0.5 > row["random_max"]
    assert f"L{truth.layer}.N{truth.neuron}" in study.headline
    assert "removes" in study.headline


def test_a_model_without_growth_steps_is_not_ablated(tmp_path):
    lens = speaking("gpt_oss")
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="has no growth step on these tokens"):
        ablate(lens, tokens=TokenBatch.from_tensor(ids), out=tmp_path / "run", progress=False)
