import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.measures.attention import (
    entropy,
    fewest_tokens,
    mean_over_rows,
    null_mass,
    row_shares,
    sink_mass,
    sink_rate,
    sink_score,
    uniform_mass,
)


def uniform_pattern(n):
    return torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]


def random_pattern(seed, *, batch=2, heads=3, n=12):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(batch, heads, n, n, generator=generator)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def all_valid(batch, n):
    return torch.ones(batch, n, dtype=torch.bool)


def test_three_uniform_rows_by_hand():
    # Rows [1], [1/2 1/2], [1/3 1/3 1/3]: key 0 gets 1, 1/2, 1/3; (1 + 1/2 + 1/3) / 3 = (11/6) / 3 = 11/18.
    column = uniform_pattern(3)[None, None, :, 0]
    score = sink_score(column, valid=all_valid(1, 3), key=0, min_queries=1)
    assert score.item() == pytest.approx(11 / 18)
    # Queries after key 0 give it 1/2 and 1/3; (5/6) / 2 = 5/12.
    assert sink_mass(column, valid=all_valid(1, 3), key=0).item() == pytest.approx(5 / 12)


@pytest.mark.parametrize("n", [8, 9, 10, 16, 64])  # at 9 the first key would score .314
def test_uniform_pattern_has_no_sink_at_any_key(n):
    pattern = uniform_pattern(n)
    for key in range(n):
        score = sink_score(pattern[None, None, :, key], valid=all_valid(1, n), key=key)
        rate = sink_rate(score, threshold=0.3)
        assert rate.isnan().all() or rate.item() == 0


def test_a_head_that_always_attends_to_itself_scores_high_only_where_it_is_not_counted():
    # The identity pattern: key k gets 1 from itself and 0 from the n - 1 - k others: 1 / (n - k). With at
    # least 10 queries that is at most 1/10; the last key alone would score 1, the tail artefact.
    eye = torch.eye(20)
    scores = [
        sink_score(eye[None, None, :, key], valid=all_valid(1, 20), key=key).item()
        for key in range(20)
    ]
    assert scores[10] == pytest.approx(1 / 10)
    assert all(math.isnan(score) for score in scores[11:])
    last = sink_score(eye[None, None, :, 19], valid=all_valid(1, 20), key=19, min_queries=1)
    assert last.item() == 1


def test_padding_is_ignored():
    column = random_pattern(0)[..., 0]
    valid = all_valid(2, 12)
    valid[1, 10:] = False
    polluted = column.clone()
    polluted[1, :, 10:] = math.nan
    for measure in (sink_score, sink_mass):
        found = measure(polluted, valid=valid, key=0)
        alone = measure(column[1:, :, :10], valid=all_valid(1, 10), key=0)
        assert torch.equal(found[1:], alone)


def test_what_is_undefined_is_nan():
    valid = torch.tensor([[True] * 4 + [False] * 8])
    column = torch.ones(1, 2, 12)
    assert sink_score(column, valid=valid, key=5, min_queries=1).isnan().all()
    assert sink_mass(column, valid=valid, key=5).isnan().all()
    assert sink_mass(torch.ones(1, 1, 3), valid=all_valid(1, 3), key=2).isnan().all()


@pytest.mark.parametrize("measure", [sink_score, sink_mass])
def test_a_key_outside_the_sequence_is_refused(measure):
    with pytest.raises(InputError, match="key position -1 is outside the sequence"):
        measure(torch.ones(1, 1, 3), valid=all_valid(1, 3), key=-1)


def test_the_rate_is_strict_per_sequence_and_leaves_out_nan():
    # Head 0: 0.5 and 0.3 over 0.3 -> 1 of 2 (0.3 itself is not over it). Head 1: nan and 0.9 -> 1 of 1.
    score = torch.tensor([[0.5, math.nan], [0.25, 0.9]])
    assert sink_rate(score, threshold=0.25).tolist() == [0.5, 1.0]
    assert sink_rate(torch.full((2, 1), math.nan), threshold=0.3).isnan().all()


def test_entropy_by_hand():
    # [1/2 1/4 1/4 0]: entropy = 1/2 log 2 + 2 * 1/4 log 4 = 1.5 log 2.
    assert entropy(torch.tensor([[[[0.5, 0.25, 0.25, 0.0]]]])).item() == pytest.approx(
        1.5 * math.log(2)
    )


def test_null_mass_is_what_a_row_lacks():
    rows = torch.tensor([[0.5, 0.25], [0.5, 0.5], [0.5, 0.505], [0.9, 0.9]])[None, None]
    found = null_mass(rows)[0, 0]
    # 1 - 0.75; exact; 0.005 over 1 is rounding of a half type; 1.8 is no softmax.
    assert found[:3].tolist() == [0.25, 0.0, 0.0]
    assert found[3].isnan()


def test_the_mean_leaves_out_padded_and_undefined_rows():
    per_row = torch.tensor([[[1.0, math.nan, 3.0, 100.0]], [[math.nan, 2.0, 4.0, 6.0]]])
    row_valid = torch.tensor([[True, True, True, False], [True, False, False, False]])
    found = mean_over_rows(per_row, row_valid=row_valid)
    assert found[0].item() == 2.0  # (1 + 3) / 2
    assert found[1].isnan()  # only an undefined row is left
    ranks = torch.tensor([[[0, 1, 5, 9]]])
    assert mean_over_rows(ranks, row_valid=row_valid[:1]).item() == 2.0  # (0 + 1 + 5) / 3


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 11))
def test_score_and_mass_are_the_nested_loops(seed, key):
    pattern = random_pattern(seed)
    lengths = [12, 10]
    valid = torch.arange(12) < torch.tensor(lengths)[:, None]
    score = sink_score(pattern[..., key], valid=valid, key=key, min_queries=3)
    mass = sink_mass(pattern[..., key], valid=valid, key=key)
    for batch, length in enumerate(lengths):
        for head in range(3):
            seen = [pattern[batch, head, query, key].item() for query in range(key, length)]
            mean = sum(seen) / len(seen) if len(seen) >= 3 else math.nan
            assert score[batch, head].item() == pytest.approx(mean, abs=1e-6, nan_ok=True)
            mean = sum(seen[1:]) / len(seen[1:]) if seen[1:] else math.nan
            assert mass[batch, head].item() == pytest.approx(mean, abs=1e-6, nan_ok=True)


def test_only_queries_whose_window_reaches_the_key_are_averaged_over():
    column = torch.tensor([0.0, 1.0, 0.5, 0.3, 0.0, 0.0, 0.0])[None, None]  # key 1, a window of 3
    at = {"valid": all_valid(1, 7), "key": 1, "reach": 3}
    assert sink_mass(column, **at).item() == pytest.approx((0.5 + 0.3) / 2)
    assert sink_score(column, **at).item() == pytest.approx((1.0 + 0.5 + 0.3) / 3)
    assert (
        sink_score(column[..., :3], valid=all_valid(1, 3), key=1, reach=3).isnan().all()
    )  # not a full window
    assert sink_mass(column, valid=all_valid(1, 7), key=1, reach=1).isnan().all()


@pytest.mark.parametrize("measure", [sink_score, sink_mass])
def test_a_window_as_long_as_the_sequence_changes_no_bit(measure):
    column = random_pattern(3)[..., 2]
    whole = measure(column, valid=all_valid(2, 12), key=2)
    assert torch.equal(measure(column, valid=all_valid(2, 12), key=2, reach=12), whole)


def test_uniform_mass_is_the_mass_of_uniform_attention():
    valid = all_valid(2, 12)
    valid[1, 7:] = False
    pattern = uniform_pattern(12)[None, None].expand(2, 1, -1, -1)
    for key in (0, 3):
        found = uniform_mass(valid, key=key)
        torch.testing.assert_close(
            found.float(), sink_mass(pattern[..., key], valid=valid, key=key)[:, 0]
        )
        # rows that sum to a half, and windows of 4
        half = uniform_mass(valid, key=key, row_sum=torch.full((2, 12), 0.5))
        torch.testing.assert_close(half, found / 2)
    assert uniform_mass(valid, key=3, reach=4)[0].item() == pytest.approx(1 / 4)
    assert uniform_mass(valid, key=0, reach=4)[0].item() == pytest.approx(
        (1 / 2 + 1 / 3 + 1 / 4) / 3
    )


def test_shares_of_equal_weights_are_uniform_attention_whatever_the_weights():
    rows = 0.5 * torch.tril(torch.ones(1, 1, 9, 9))
    torch.testing.assert_close(row_shares(rows)[0, 0], uniform_pattern(9))
    assert (row_shares(torch.zeros(1, 1, 2, 3)) == 0).all()


@pytest.mark.parametrize(
    ("threshold", "fewest"), [(0.5, 5), (0.3, 10), (0.2, 18), (0.1, 44), (0.05, 105)]
)
def test_uniform_attention_passes_a_threshold_in_shorter_texts_only(threshold, fewest):
    assert fewest_tokens(threshold=threshold) == fewest
    for n, passes in ((fewest - 1, True), (fewest, False)):
        column = uniform_pattern(n)[None, None, :, 0]
        score = sink_score(column, valid=all_valid(1, n), key=0, min_queries=1)
        assert bool(score >= threshold) == passes
