import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.measures.reductions import (
    check_position,
    expand_kv,
    mean_where,
    median_where,
    queries_from,
    sort_last_axis,
    widen,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_narrow_types_are_widened_to_float32(dtype):
    assert widen(torch.ones(2, dtype=dtype)).dtype == torch.float32


def test_double_precision_is_kept():
    assert widen(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_masked_places_do_not_matter_even_when_they_are_nan():
    x = torch.tensor([[1.0, 3.0, math.nan], [math.inf, 5.0, math.nan]])
    where = torch.tensor([[True, True, False], [False, True, False]])
    # (1 + 3) / 2 and 5 / 1
    assert mean_where(x, where=where, dim=1).tolist() == [2.0, 5.0]
    assert median_where(x, where=where).tolist() == [2.0, 5.0]


def test_medians_of_nothing_nan_and_infinities():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert mean_where(torch.ones(2, 3), where=nothing, dim=1).isnan().all()
    assert median_where(torch.ones(2, 3), where=nothing).isnan().all()
    assert median_where(torch.ones(2, 0), where=nothing[:, :0]).isnan().all()
    assert median_where(torch.tensor([1.0, math.nan]), where=torch.tensor([True, True])).isnan()
    assert median_where(torch.tensor([math.inf, math.inf]), where=torch.tensor([True, True])) == math.inf


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.booleans()), min_size=1, max_size=12))
def test_the_median_is_numpys(pairs):
    x = torch.tensor([value for value, _ in pairs])
    where = torch.tensor([kept for _, kept in pairs])
    found = median_where(x, where=where)
    kept = x[where].double().numpy()
    if kept.size == 0:
        assert found.isnan()
    else:
        assert found.item() == pytest.approx(np.median(kept), rel=1e-6, abs=1e-6)


def test_queries_from_keeps_the_real_ones_only():
    valid = torch.tensor([[True, True, True, True], [True, True, True, False]])
    assert queries_from(valid, start=2).tolist() == [[False, False, True, True], [False, False, True, False]]


@pytest.mark.parametrize("key", [-1, 4])
def test_a_position_outside_the_sequence_is_refused(key):
    with pytest.raises(InputError, match=rf"key position {key} is outside the sequence; need 0 to 3"):
        check_position(key, n_positions=4)


def test_query_heads_read_the_key_value_head_of_their_group():
    # 6 query heads over 3: heads 0 and 1 read 0, heads 2 and 3 read 1, heads 4 and 5 read 2.
    x = torch.tensor([[10.0, 20.0, 30.0]])[..., None]
    assert expand_kv(x, n_heads=6).flatten().tolist() == [10, 10, 20, 20, 30, 30]
    with pytest.raises(InputError, match="7 query heads over 3 key-value heads; need a multiple"):
        expand_kv(torch.zeros(1, 3, 2), n_heads=7)


@pytest.mark.parametrize("gradient", [False, True])
def test_values_are_sorted_as_torch_sorts_them_nan_last(gradient):
    x = torch.tensor([[2.0, math.nan, -math.inf, 1.0], [math.inf, 0.0, -3.0, 0.0]], requires_grad=gradient)
    torch.testing.assert_close(sort_last_axis(x.T), x.T.sort(dim=-1).values, rtol=0, atol=0, equal_nan=True)
