"""Token preference: counted right, against a null that is right, the same however it is cut up."""

import copy
from importlib import import_module

import numpy as np
import pytest
import torch

from sink_lens.errors import InputError
from sink_lens.identity.preference import Votes, make_preference, preference
from sink_lens.identity.untrained_models import UntrainedConfig, untrained
from sink_lens.models.load import load, wrap
from tests.tiny_families import tiny

SMALL = UntrainedConfig(
    activation="relu", n_layers=2, d_model=32, n_heads=4, vocab_size=100, n_context=64
)


def votes_of(logits):
    votes = Votes(logits.shape[1], generator=torch.Generator().manual_seed(0))
    votes.add(logits)
    return votes


def values(found, column="value"):
    return found.frame.set_index("measure")[column]


def test_a_model_that_always_says_the_same_by_hand():
    logits = torch.zeros(100, 50)
    logits[:, 7], logits[:, 9] = 2.0, -3.0
    found = make_preference(votes_of(logits), length=8, generator=np.random.default_rng(0))
    got = values(found)
    assert got["argmax_top_share"] == 1
    assert got["argmax_top_ratio"] == 50
    assert got["argmax_covering"] == got["argmin_covering"] == 1
    # e^2 / (48 + e^2 + e^-3) is the mean probability of token 7
    assert got["mean_probability_ratio"] == pytest.approx(50 * np.e**2 / (48 + np.e**2 + np.e**-3))
    assert found.top(1)[["kind", "token", "count"]].to_numpy().tolist() == [
        ["argmax", 7, 100],
        ["argmin", 9, 100],
    ]
    assert set(found.tables["coverage"]["share"]) == {1.0}


def test_a_model_without_preference_lies_within_chance():
    logits = torch.randn(400, 60, generator=torch.Generator().manual_seed(1))
    found = make_preference(votes_of(logits), length=8, generator=np.random.default_rng(0))
    for measure in ("argmax_top_share", "argmin_top_share", "argmax_covering", "argmin_covering"):
        row = found.frame.set_index("measure").loc[measure]
        assert row["null_low"] <= row["value"] <= row["null_high"], measure
    got = found.frame.set_index("measure").loc["mean_probability_ratio"]
    assert got["null"] == pytest.approx(got["value"], rel=0.15)
    assert (found.tables["coverage"]["null_low"] <= found.tables["coverage"]["null_high"]).all()


def test_the_null_is_the_multinomial():
    # 3 events on 2 tokens: the top count is 3 with probability 2 (1/2)^3 = 1/4, else 2: mean 2.25
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    found = make_preference(votes_of(logits), length=8, generator=np.random.default_rng(0))
    assert values(found, "null")["argmax_top_share"] == pytest.approx(2.25 / 3, abs=0.02)


def test_shifting_keeps_each_sequences_probabilities():
    votes = votes_of(torch.randn(30, 40, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(
        votes.shifted.sum(1), torch.full((len(votes.shifted),), 30.0, dtype=torch.float64)
    )


def test_how_the_sequences_are_batched_changes_nothing(monkeypatch):
    lens = untrained(SMALL, seed=0)
    whole = preference(lens, sequences=150, length=16)
    monkeypatch.setattr(import_module("sink_lens.identity.preference"), "_TOKENS_A_FORWARD", 7 * 16)
    small = preference(lens, sequences=150, length=16)
    assert (whole.argmax == small.argmax).all()
    assert np.allclose(whole.probability, small.probability)


def test_an_untrained_relu_model_prefers_tokens():
    got = preference(untrained(SMALL, seed=0), sequences=500, length=16)
    row = got.frame.set_index("measure").loc["argmin_top_share"]
    assert row["value"] > 2 * row["null_high"]
    assert row["low"] < row["value"] < row["high"]


def test_bad_input_is_refused():
    lens = untrained(SMALL, seed=0)
    with pytest.raises(InputError, match="49 sequences were asked for; need at least 50"):
        preference(lens, sequences=49, length=16)
    with pytest.raises(InputError, match=r"have 65 tokens; .* takes at most 64"):
        preference(lens, sequences=50, length=65)
    lens = load(tiny("llama").to(torch.float16))
    with torch.no_grad():
        lens.plain.lm_head.weight.mul_(1e6)
    with pytest.raises(InputError, match="the logits are not finite"):
        preference(lens, sequences=50, length=8)


def test_logits_that_tie_in_16_bit_do_not_all_vote_for_the_smaller_id():
    model = tiny("llama", tie_word_embeddings=False).bfloat16()
    with torch.no_grad():
        head = model.lm_head.weight
        head[5] = 40 * head[9]
        head[9] = head[5]
        head[9, 0] *= 1 + 2.0**-7  # the next number; which logit is larger hangs on one sign
    given = {"sequences": 60, "length": 8, "progress": False}
    found = preference(wrap(model), **given).argmax[[5, 9]]
    exact = preference(wrap(copy.deepcopy(model).float()), **given).argmax[[5, 9]]
    assert exact.min() > 10
    assert np.abs(found - exact).max() <= 3
