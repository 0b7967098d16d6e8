import math

import numpy as np
import pytest
import torch
from drawn import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.measures import variance
from sink_lens.measures.variance import (
    Moments,
    decay_exponent,
    output_preservation,
    s1,
    s2,
    token_std,
    variance_ratio,
)


def full(batch, n):
    return torch.ones(batch, n, dtype=torch.bool)


def test_token_std_by_hand():
    # [1 2 3 6]: mean 3, squares 4 + 1 + 0 + 9 = 14, over 3.
    x = torch.tensor([1.0, 2.0, 3.0, 6.0]).reshape(1, 1, 2, 2)
    assert token_std(x).item() == pytest.approx(math.sqrt(14 / 3))
    assert token_std(torch.ones(2, 3, 1)).isnan().all()
    assert token_std(torch.ones(2, 3)).isnan().all()


def test_s1_and_s2_are_different_numbers():
    # Two sequences, one position, values [0 2] and [4 2]. Over samples: std(0, 4) = 2 sqrt 2, std(2, 2) = 0,
    # mean sqrt 2. Within tokens: std(0, 2) = sqrt 2 and std(4, 2) = sqrt 2, mean sqrt 2. With [0 2] and
    # [4 6]: over samples 2 sqrt 2 twice; within tokens still sqrt 2.
    x = torch.tensor([[[0.0, 2.0]], [[4.0, 6.0]]])
    assert s1(x, valid=full(2, 1)).item() == pytest.approx(2 * math.sqrt(2))
    assert s2(x, valid=full(2, 1)).item() == pytest.approx(math.sqrt(2))


def test_one_sequence_has_no_s1():
    valid = torch.tensor([[True, True], [True, False]])
    assert s1(draw(0, 2, 2, 5), valid=valid).isnan().tolist() == [False, True]


def test_padding_is_ignored():
    x = draw(1, 3, 4, 5)
    valid = full(3, 4)
    valid[2, 2:] = False
    x[2, 2:] = math.nan
    assert torch.equal(s2(x, valid=valid)[2:], s2(x[:2], valid=full(2, 4))[2:])
    assert torch.equal(s1(x, valid=valid)[2:], s1(x[:2], valid=full(2, 4))[2:])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_number_of_batches_gives_the_same_as_all_at_once(seed, sizes):
    x = 3 + draw(seed, sum(sizes), 4, 2, 3)
    lengths = torch.randint(1, 5, (sum(sizes),), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(4) < lengths[:, None]
    stream = Moments.empty(n_positions=4, n_values=6)
    for part, part_valid in zip(x.split(sizes), valid.split(sizes), strict=True):
        stream.update(part, valid=part_valid)
    at_once = Moments.empty(n_positions=4, n_values=6)
    at_once.update(x, valid=valid)
    torch.testing.assert_close(stream.std(), at_once.std(), rtol=1e-6, atol=1e-9, equal_nan=True)
    for position in range(4):
        kept = x[valid[:, position], position].flatten(1).double().numpy()
        assert stream.count[position] == len(kept)
        if len(kept) > 1:
            np.testing.assert_allclose(
                stream.std()[position], kept.std(axis=0, ddof=1), rtol=1e-6, atol=1e-9
            )


def test_a_large_mean_does_not_drown_the_spread():
    # Values 1e6 apart from 0 with a spread of 1: squares of the raw numbers would lose it in float32.
    x = 1e6 + draw(2, 200, 1, 3).double()
    moments = Moments.empty(n_positions=1, n_values=3)
    for part in x.split(7):
        moments.update(part, valid=full(part.shape[0], 1))
    np.testing.assert_allclose(moments.std()[0], x[:, 0].numpy().std(axis=0, ddof=1), rtol=1e-9)


def test_averaging_independent_values_follows_the_uniform_law():
    values = draw(3, 400, 16, 64).double()
    aggregated = values.cumsum(1) / torch.arange(1, 17)[:, None]
    found = s1(aggregated, valid=full(400, 16))
    torch.testing.assert_close(found, torch.arange(1, 17).double() ** -0.5, rtol=0.03, atol=0)
    assert decay_exponent(found).item() == pytest.approx(-0.5, abs=0.02)


def test_the_exponent_of_a_power_is_the_power():
    s = 7 * torch.arange(1, 33).double() ** -0.25
    assert decay_exponent(s).item() == pytest.approx(-0.25)
    s = torch.tensor([1.0, math.nan, 1 / 3, 0.0, 0.2])
    assert decay_exponent(s).item() == pytest.approx(-1.0)
    assert decay_exponent(s[:2]).isnan()
    assert decay_exponent(torch.zeros(4)).isnan()


def test_the_variance_ratio_by_hand():
    # First 6; positions from 2 on: 1, 2, 3, nan -> median 2; 6 / 2 = 3.
    s = torch.tensor([6.0, 50.0, 3.0, 1.0, 2.0, math.nan])
    assert variance_ratio(s, others_from=2).item() == 3.0
    assert variance_ratio(s).isnan()


def test_preservation_is_one_where_weights_follow_the_spread():
    std = torch.tensor([0.1, 0.4, 0.2, 0.3])
    w_o = torch.stack([-2 * std, 1 / std, torch.ones(4)])
    found = output_preservation(w_o, first_std=std)
    # |w| rises with the spread; falls with it; is constant, so that no order exists.
    assert found[:2].tolist() == [1.0, -1.0]
    assert found[2].isnan()


def test_preservation_of_chosen_dimensions_and_chunks_is_the_same(monkeypatch):
    w_o, std = draw(5, 20, 33), draw(6, 33).abs()
    whole = output_preservation(w_o, first_std=std)
    monkeypatch.setattr(variance, "_WEIGHTS_AT_ONCE", 70)
    assert torch.equal(output_preservation(w_o, first_std=std), whole)
    chosen = torch.tensor([7, 0, 19])
    assert torch.equal(output_preservation(w_o, first_std=std, per_dimension=chosen), whole[chosen])
    assert output_preservation(w_o, first_std=std, per_dimension=chosen[:0]).shape == (0,)
