import math

import pytest
import torch
from drawn import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.measures.outputs import (
    sink_head_label,
    triangular_factor,
    value_norm_ratio,
    value_norms,
)


def ratio(v, w_o, *, valid, key):
    return value_norm_ratio(value_norms(v, factor=triangular_factor(w_o)), valid=valid, key=key)


def test_value_norms_by_hand():
    # W_O = diag(1, 2) into 3 dimensions. Values [3 2] -> [3 4]: 5; [0 5] -> 10; [30 0] -> 30. 5 / 20.
    w_o = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    v = torch.tensor([[3.0, 2.0], [0.0, 5.0], [30.0, 0.0]])[None, :, None]
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert ratio(v, w_o, valid=valid, key=0).item() == pytest.approx(0.25)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 3), st.sampled_from([3, 4, 9]))
def test_value_norms_are_the_nested_loops_with_distinct_kv_heads(seed, key, d_model):
    # d_model under, at and over d_head: the triangular factor is wide, square and square.
    v, w_o = draw(seed, 2, 5, 2, 4), draw(seed + 1, 6, 4, d_model)
    valid = torch.arange(5) < torch.tensor([[5], [4]])
    v[1, 4] = math.nan
    found = ratio(v, w_o, valid=valid, key=key)
    for batch, length in enumerate((5, 4)):
        for head in range(6):
            norms = [(v[batch, t, head // 3] @ w_o[head]).norm().item() for t in range(length)]
            others = [norm for t, norm in enumerate(norms) if t != key]
            assert found[batch, head].item() == pytest.approx(
                norms[key] / (sum(others) / len(others)), rel=1e-4
            )


def test_a_padded_or_lonely_key_is_nan():
    valid = torch.tensor([[True, False], [True, False]])
    v, w_o = torch.ones(2, 2, 1, 2), torch.ones(1, 2, 3)
    assert ratio(v, w_o, valid=valid, key=1).isnan().all()
    assert ratio(v, w_o, valid=valid, key=0).isnan().all()


def test_labels():
    assert sink_head_label(0.1, is_sink=False) == ""
    assert sink_head_label(math.nan, is_sink=False) == ""
    assert sink_head_label(0.2, is_sink=True) == "no-op"
    assert sink_head_label(0.21, is_sink=True) == "broadcast"
    assert sink_head_label(math.nan, is_sink=True) == "undecided"


def test_half_precision_norms_do_not_overflow():
    v = torch.full((1, 3, 1, 2), 24_000.0).half()
    w_o = torch.full((1, 2, 4), 3.0).half()
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert ratio(v, w_o, valid=valid, key=0).item() == pytest.approx(1.0)
