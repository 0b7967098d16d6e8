import math

import pytest
import torch
from drawn import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.measures.rank import effective_rank, effective_ranks


def slow(x):
    singular = torch.linalg.svdvals(x.double()).tolist()
    p = [s / sum(singular) for s in singular]
    return math.exp(-sum(q * math.log(q) for q in p if q > 0))


def test_by_hand():
    # Singular values 3 and 1: p = 3/4, 1/4; exp(-(3/4 log 3/4 + 1/4 log 1/4)) = 4 / 3^(3/4).
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))).item() == pytest.approx(4 / 3**0.75)
    assert effective_rank(draw(0, 4, 1) * draw(1, 1, 9)).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("positions", [70, 20])  # more than dimensions, and fewer
def test_a_second_massive_token_is_left_out_with_the_first(positions):
    x = draw(0, positions, 60)
    x[0], x[3] = 0.0, 0.0
    x[0, 5] = x[3, 7] = 1e5
    whole, one, both = effective_ranks(x, without=((), (0,), (0, 3))).tolist()
    assert whole < 2.1
    assert one < 1.1  # the other token is all that is left
    assert both == pytest.approx(
        slow(x[[n for n in range(positions) if n not in (0, 3)]]), rel=1e-4
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_it_is_the_singular_values_entropy_within_range(seed, n_positions, d_model):
    x = draw(seed, 2, n_positions, d_model)
    found = effective_rank(x)
    assert found.tolist() == pytest.approx([slow(x[0]), slow(x[1])], rel=1e-5)
    assert (found <= min(n_positions, d_model) + 1e-4).all()


def test_padding_is_left_out():
    x = draw(3, 2, 8, 5)
    valid = torch.arange(8) < torch.tensor([[8], [4]])
    x[1, 4:] = math.nan
    assert effective_rank(x, valid=valid).tolist() == pytest.approx(
        [slow(x[0]), slow(x[1, :4])], rel=1e-5
    )


def test_what_is_undefined_is_nan_or_refused():
    x = draw(4, 3, 4, 5)
    x[0] = 0
    x[1, 2, 3] = math.inf
    assert effective_rank(x).isnan().tolist() == [True, True, False]
    with pytest.raises(InputError, match="key position 4 is outside the sequence; need 0 to 3"):
        effective_rank(torch.ones(4, 5), without=4)
