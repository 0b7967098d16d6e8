import math

import numpy as np
import pytest
import torch
from drawn import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kurtosis

from sink_lens.measures.neurons import (
    column_kurtosis,
    contribution_share,
    contributions,
    norm_rank,
    row_norms,
    selectivity,
    spike_ratio,
    super_neurons,
)


def test_contributions_by_hand():
    # Activations 2 and -3, entries 5 and 7: 10 and -21. Scale 1/2 and gain 4 double them.
    activations, weights = torch.tensor([[2.0, -3.0]]), torch.tensor([5.0, 7.0])
    assert contributions(activations, weights=weights).tolist() == [[10.0, -21.0]]
    scaled = contributions(activations, weights=weights, scale=torch.tensor([0.5]), gain=4.0)
    assert scaled.tolist() == [[20.0, -42.0]]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_contributions_sum_to_the_mlp_output(seed, dimension):
    w_down, activations = draw(seed, 6, 9).double(), draw(seed + 1, 4, 9).double()
    output = activations @ w_down.T
    terms = contributions(activations, weights=w_down[dimension])
    torch.testing.assert_close(terms.sum(-1), output[:, dimension])


def test_the_share_is_a_ratio_of_means():
    # Means of the terms: 3 and 1; mean change (2 + 6) / 2 = 4: shares 3/4 and 1/4.
    terms = torch.tensor([[2.0, 0.0], [4.0, 2.0]])
    share = contribution_share(terms, change=torch.tensor([2.0, 6.0]))
    assert share.tolist() == [0.75, 0.25]
    assert contribution_share(terms, change=torch.tensor([1.0, -1.0])).isnan().all()


def test_super_neurons_reach_the_share_and_nan_never_does():
    shares = torch.tensor([0.5, 0.25, 0.2, -0.5, math.nan])
    assert super_neurons(shares, share=0.25).tolist() == [True, True, False, False, False]


def test_the_spike_ratio_by_hand():
    # |-6| and |2| at the sink: mean 4; elsewhere 1 and 3: mean 2. Fires only there: infinite. Never: nan.
    at_sink = torch.tensor([[-6.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    elsewhere = torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    found = spike_ratio(at_sink, elsewhere=elsewhere)
    assert found.tolist() == pytest.approx([2.0, math.inf, math.nan], nan_ok=True)


def test_row_norms_and_their_ranks():
    assert row_norms(torch.tensor([[3.0, 4.0], [5.0, 12.0]])).tolist() == [5.0, 13.0]
    assert norm_rank(torch.tensor([5.0, 9.0, 1.0, 5.0])).tolist() == [
        2,
        1,
        4,
        2,
    ]  # equal norms share the better rank


def test_selectivity_by_hand():
    # x = [3 4], gate row [1 0], up row [1 1]: cosine 3/5, gate 3, up 7.
    x, gate_row, up_row = (
        torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]),
        torch.tensor([1.0, 0.0]),
        torch.ones(2),
    )
    found = selectivity(x, gate_row=gate_row, up_row=up_row)
    assert found.cosine[0].tolist() == pytest.approx([0.6, math.nan], nan_ok=True)
    assert (found.gate[0].tolist(), found.up[0].tolist()) == ([3.0, 0.0], [7.0, 0.0])


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e6])
def test_column_kurtosis_is_scipys_whatever_the_size_of_the_weights(size):
    w_down = draw(0, 50, 7) * size
    w_down[3, 2] += 40 * size
    expected = kurtosis(w_down.double().numpy(), axis=0)
    np.testing.assert_allclose(column_kurtosis(w_down).numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(column_kurtosis(w_down, chunk=2), column_kurtosis(w_down))


def test_the_extremes_of_column_kurtosis():
    # One entry of 5: mean 0.2, m2 = (0.64 + 4 * 0.04) / 5 = 0.16, m4 = (0.4096 + 4 * 0.0016) / 5 = 0.0832;
    # 0.0832 / 0.0256 - 3 = 0.25 = n - 5 + 1/(n - 1). Half and half +-1: 1 - 3 = -2.
    sparse = torch.tensor([1.0, 0, 0, 0, 0])[:, None]
    assert column_kurtosis(sparse).item() == pytest.approx(0.25, abs=1e-5)
    assert column_kurtosis(torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]).item() == pytest.approx(
        -2
    )
    assert column_kurtosis(torch.full((5, 1), 0.1)).isnan().all()
