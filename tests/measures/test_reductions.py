import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sink_lens.measures.reductions import (
    mean_where,
    median_where,
    sort_last_axis,
)


def test_medians_of_nothing_nan_and_infinities():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert mean_where(torch.ones(2, 3), where=nothing, dim=1).isnan().all()
    assert median_where(torch.ones(2, 3), where=nothing).isnan().all()
    assert median_where(torch.ones(2, 0), where=nothing[:, :0]).isnan().all()
    assert median_where(torch.tensor([1.0, math.nan]), where=torch.tensor([True, True])).isnan()
    assert (
        median_where(torch.tensor([math.inf, math.inf]), where=torch.tensor([True, True]))
        == math.inf
    )


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.booleans()), min_size=1, max_size=12))
def test_the_median_is_numpys(pairs):
    x = torch.tensor([value for value, _ in pairs])
    where = torch.tensor([kept for _, kept in pairs])
    found = median_where(x, where=where)
    wanted = np.median(x[where].double().numpy()) if where.any() else math.nan
    assert found.item() == pytest.approx(wanted, rel=1e-6, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("gradient", [False, True])
def test_values_are_sorted_as_torch_sorts_them_nan_last(gradient):
    x = torch.tensor(
        [[2.0, math.nan, -math.inf, 1.0], [math.inf, 0.0, -3.0, 0.0]], requires_grad=gradient
    )
    torch.testing.assert_close(
        sort_last_axis(x.T), x.T.sort(dim=-1).values, rtol=0, atol=0, equal_nan=True
    )
