import math

import pytest
import torch
from drawn import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.measures.locking import logit_split, positive_share, qk_alignment


def test_alignment_by_hand():
    # W_Q = diag(3, 1) padded: u_1 = e_0. Keys [2 0]: 1; [0 -5]: 0; [3 4]: 3/5.
    w_q = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).expand(3, 2, 3)
    keys = torch.tensor([[2.0, 0.0], [0.0, -5.0], [3.0, 4.0]])
    assert qk_alignment(w_q, w_k_column=keys).tolist() == pytest.approx([1.0, 0.0, 0.6])
    w_q = torch.stack([torch.zeros(2, 3), draw(0, 2, 3)])
    keys = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert qk_alignment(w_q, w_k_column=keys).isnan().all()
    with pytest.raises(InputError, match="3 query heads over 2 key-value heads; need a multiple"):
        qk_alignment(draw(0, 3, 2, 4), w_k_column=draw(1, 2, 2))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000))
def test_alignment_is_the_singular_vectors_with_distinct_kv_heads(seed):
    w_q, keys = draw(seed, 6, 4, 10), draw(seed + 1, 3, 4)
    found = qk_alignment(w_q, w_k_column=keys)
    for head in range(6):
        u = torch.linalg.svd(w_q[head].double()).U[:, 0]
        key = keys[head // 2].double()
        assert found[head].item() == pytest.approx(abs(u @ key / key.norm()).item(), abs=1e-5)


def test_positive_share_by_hand():
    # Key [1 0]; queries after position 0: 2, -1, 0 (not positive), 5 -> 2 of 4; without the last, 1 of 3.
    q = torch.tensor([9.0, 2.0, -1.0, 0.0, 5.0])
    q = torch.stack([q, torch.full((5,), 7.0)], dim=-1)[None, :, None].repeat(2, 1, 1, 1)
    valid = torch.tensor([[True] * 5, [True] * 4 + [False]])
    q[1, 4] = math.nan
    k = torch.tensor([1.0, 0.0]).expand(2, 1, 2)
    assert positive_share(q, k=k, valid=valid, key=0).flatten().tolist() == pytest.approx(
        [0.5, 1 / 3]
    )
    assert positive_share(q, k=k, valid=valid, key=4).isnan().all()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_positive_share_is_the_nested_loops_with_distinct_kv_heads(seed, key):
    q, k = draw(seed, 2, 7, 4, 3), draw(seed + 1, 2, 2, 3)
    found = positive_share(q, k=k, valid=torch.ones(2, 7, dtype=torch.bool), key=key)
    for batch in range(2):
        for head in range(4):
            signs = [
                (q[batch, t, head] @ k[batch, head // 2]).item() > 0 for t in range(key + 1, 7)
            ]
            assert found[batch, head].item() == pytest.approx(sum(signs) / len(signs))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000))
def test_the_parts_sum_to_the_logit_with_distinct_kv_heads(seed):
    query, parts = draw(seed, 2, 6, 5, 4), draw(seed + 1, 2, 3, 3, 4)
    found = logit_split(query, parts=parts, scale=0.5)
    for batch in range(2):
        for head in range(6):
            for position in range(5):
                logit = 0.5 * (query[batch, head, position] @ parts[batch, head // 2].sum(0))
                assert found[batch, head, position].sum().item() == pytest.approx(
                    logit.item(), abs=1e-5
                )
