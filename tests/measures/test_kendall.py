import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from sink_lens.measures.kendall import tau_b


def test_by_hand():
    # 1 2 3 4 against 1 3 2 4: of 6 pairs one is discordant: (5 - 1) / 6.
    found = tau_b(torch.tensor([[1.0, 3.0, 2.0, 4.0]]), reference=torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert found.item() == pytest.approx(4 / 6)


@pytest.mark.parametrize("n", [2, 3, 7, 8, 9, 64, 100])
@pytest.mark.parametrize("levels", [2, 5, 1_000_000])
def test_it_is_scipys_with_and_without_ties(n, levels):
    generator = torch.Generator().manual_seed(n * levels)
    x = torch.randint(0, levels, (6, n), generator=generator).double()
    y = torch.randint(0, levels, (6, n), generator=generator).double()
    pairs = zip(x.numpy(), y.numpy(), strict=True)
    expected = np.array([kendalltau(a, b)[0] for a, b in pairs], dtype=np.float64)
    np.testing.assert_allclose(tau_b(x, reference=y).numpy(), expected, rtol=1e-12, atol=1e-12)


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
        assert found == pytest.approx(agree / math.sqrt((total - ties_x) * (total - ties_y)), abs=1e-6)


def test_undefined_where_a_row_is_constant_too_short_or_holds_a_nan():
    line = torch.tensor([[1.0, 2.0, 3.0]])
    assert tau_b(torch.ones(1, 3), reference=line).isnan().all()
    assert tau_b(line, reference=torch.tensor([[1.0, math.nan, 2.0]])).isnan().all()
    assert tau_b(torch.tensor([[1.0, math.nan, 2.0]]), reference=line).isnan().all()
    assert tau_b(line[:, :1], reference=line[:, :1]).isnan().all()


def test_half_precision_is_allowed():
    x = torch.tensor([[1.0, 3.0, 2.0]])
    assert torch.equal(tau_b(x.bfloat16(), reference=x), torch.ones(1))
