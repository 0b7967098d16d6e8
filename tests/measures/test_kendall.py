import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from sink_lens.measures.kendall import tau_b, tau_b_matrix


@pytest.mark.parametrize("n", [2, 3, 7, 8, 9, 64, 100])
@pytest.mark.parametrize("levels", [2, 5, 1_000_000])
def test_it_is_scipys_with_and_without_ties(n, levels):
    generator = torch.Generator().manual_seed(n * levels)
    x = torch.randint(0, levels, (6, n), generator=generator).double()
    y = torch.randint(0, levels, (6, n), generator=generator).double()
    pairs = zip(x.numpy(), y.numpy(), strict=True)
    expected = np.array([kendalltau(a, b)[0] for a, b in pairs], dtype=np.float64)
    np.testing.assert_array_equal(tau_b(x, reference=y).numpy(), expected)
    # Each with each divides by the same two roots in the other order.
    np.testing.assert_allclose(tau_b_matrix(x, y).diagonal().numpy(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [2, 3, 17, 63, 64, 65, 128, 129, 2000, 5000])
def test_it_is_scipys_to_the_last_bit(n):
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    y = torch.tensor([[0.5], [-0.5], [0.0], [10.0]]) * x + x.roll(1, dims=-1)
    expected = [[kendalltau(a, b)[0] for b in y.numpy()] for a in x.numpy()]
    np.testing.assert_array_equal(tau_b(x, reference=y).numpy(), np.diag(expected))
    np.testing.assert_array_equal(tau_b_matrix(x, y).numpy(), expected)


def test_chunks_of_rows_change_nothing():
    x, y = torch.randn(2, 300, 1000, generator=torch.Generator().manual_seed(0))  # 131 rows at once
    expected = torch.cat(
        [tau_b(one, reference=other) for one, other in zip(x.split(7), y.split(7), strict=True)]
    )
    assert torch.equal(tau_b(x, reference=y), expected)
    assert torch.equal(tau_b_matrix(x[:2], y).diagonal(), expected[:2])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=14))
def test_it_is_the_count_over_all_pairs(pairs):
    agree = ties_x = ties_y = 0
    for i, (x_i, y_i) in enumerate(pairs):
        for x_j, y_j in pairs[:i]:
            agree += int(np.sign(x_i - x_j) * np.sign(y_i - y_j))
            ties_x += x_i == x_j
            ties_y += y_i == y_j
    total = len(pairs) * (len(pairs) - 1) // 2
    x = torch.tensor([[float(x) for x, _ in pairs]])
    y = torch.tensor([[float(y) for _, y in pairs]])
    found = tau_b(x, reference=y).item()
    if ties_x == total or ties_y == total:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(
            agree / math.sqrt((total - ties_x) * (total - ties_y)), abs=1e-6
        )


def test_undefined_where_a_row_is_constant_too_short_or_holds_a_nan():
    line = torch.tensor([[1.0, 2.0, 3.0]])
    assert tau_b(torch.ones(1, 3), reference=line).isnan().all()
    assert tau_b(line, reference=torch.tensor([[1.0, math.nan, 2.0]])).isnan().all()
    assert tau_b(torch.tensor([[1.0, math.nan, 2.0]]), reference=line).isnan().all()
    assert tau_b(line[:, :1], reference=line[:, :1]).isnan().all()
    mixed = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    assert tau_b_matrix(mixed, mixed).isnan().tolist() == [[False, True], [True, True]]
