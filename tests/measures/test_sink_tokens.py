"""The scores of sinks and massive activations, and the gap that parts them, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.measures.sink_tokens import (
    earlier_keys,
    fair_shares,
    ratios_to_median_norm,
    sampled_queries,
    score_gap,
    share_score,
)


def uniform(length):
    """Uniform attention of every query but the first: "batch head row key"."""
    rows = torch.tril(torch.ones(length, length)) / torch.arange(1, length + 1)[:, None]
    return rows[1:].expand(1, 2, -1, -1), torch.arange(1, length)


def scored(rows, positions, *, reach=None, **options):
    shares = fair_shares(rows, row_positions=positions, reach=reach)
    seen = earlier_keys(positions, n_keys=rows.shape[3], reach=reach)
    valid = options.pop("row_valid", torch.ones(len(rows), len(positions), dtype=torch.bool))
    return share_score(shares, seen=seen, row_positions=positions, row_valid=valid, **options)


def test_every_query_but_the_first_is_sampled_from_short_sequences():
    assert sampled_queries(4, first=1).tolist() == [1, 2, 3]
    assert sampled_queries(65, first=1).tolist() == list(range(1, 65))
    assert sampled_queries(64).tolist() == list(range(64))
    long = sampled_queries(4096, first=1)
    assert (len(long), long[0], long[-1]) == (64, 1, 4095)


def test_uniform_attention_is_the_fair_share_everywhere():
    rows, positions = uniform(12)
    shares = fair_shares(rows, row_positions=positions)
    seen = earlier_keys(positions, n_keys=12)
    torch.testing.assert_close(shares[0][seen], torch.ones(66))
    assert (shares[0][~seen] == 0).all()
    torch.testing.assert_close(scored(rows, positions), torch.ones(1, 12))


def test_shares_by_hand():
    # The query at position 2 sees 3 keys, so that its attention .5 .2 .3 is 1.5, .6 and (its own) 0 fair shares. Two
    # heads .5 and .1 on key 0 have the mean .3, which is .9. With a window of 2 it sees keys 1 and 2: .2 is .4.
    row = torch.tensor([0.5, 0.2, 0.3, 0.0]).expand(1, 1, 1, 4)
    positions = torch.tensor([2])
    assert fair_shares(row, row_positions=positions).flatten().tolist() == pytest.approx(
        [1.5, 0.6, 0, 0]
    )
    heads = torch.cat([row, torch.tensor([0.1, 0.2, 0.7, 0.0]).expand(1, 1, 1, 4)], dim=1)
    assert fair_shares(heads, row_positions=positions)[0, 0, 0] == pytest.approx(0.9)
    assert fair_shares(row, row_positions=positions, reach=2).flatten().tolist() == pytest.approx(
        [0, 0.4, 0, 0]
    )


def test_a_score_by_hand():
    # Query 1 gives key 0 two shares, query 2 gives key 0 three and key 1 nothing. Distance 1: shares 2 (query 1, key 0)
    # and 0 (query 2, key 1), median 1; distance 2: 3 alone, so its median is 3.
    # Key 0: 2/1 + 3/3 = 3 over 2 queries, with two more at 1: 5/4. Key 1: 0 over one query: 2/3. Key 2: no query: 1.
    shares = torch.tensor([[[2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]])
    positions = torch.tensor([1, 2])
    options = {
        "seen": earlier_keys(positions, n_keys=3),
        "row_valid": torch.ones(1, 2, dtype=torch.bool),
    }
    score = share_score(shares, row_positions=positions, **options)
    assert score[0].tolist() == pytest.approx([5 / 4, 2 / 3, 1.0])


def slow_score(shares, positions, prior=2):
    """The same in loops, for one sequence whose rows are all real."""
    n_keys = shares.shape[1]
    cells = {
        (row, key): int(q) - key
        for row, q in enumerate(positions)
        for key in range(n_keys)
        if key < q
    }
    kind = {cell: math.ceil(math.log2(distance)) for cell, distance in cells.items()}
    value = {}
    for cell in cells:
        alike = sorted(float(shares[other]) for other in cells if kind[other] == kind[cell])
        middle = (alike[(len(alike) - 1) // 2] + alike[len(alike) // 2]) / 2
        value[cell] = float(shares[cell]) / max(1.0, middle)
    found = []
    for key in range(n_keys):
        own = [value[cell] for cell in cells if cell[1] == key]
        found.append((sum(own) + prior) / (len(own) + prior))
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(2, 20))
def test_the_score_equals_its_slow_twin(seed, length):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(1, length)
    shares = torch.rand(1, length - 1, length, generator=generator) * 5
    seen = earlier_keys(positions, n_keys=length)
    valid = torch.ones(1, length - 1, dtype=torch.bool)
    found = share_score(shares * seen, seen=seen, row_positions=positions, row_valid=valid)
    assert found[0].tolist() == pytest.approx(slow_score(shares[0], positions), rel=1e-5)


def test_attention_to_the_previous_token_makes_no_sink():
    rows = torch.diag(torch.ones(39), -1)[1:]
    score = scored(rows.expand(1, 3, -1, -1), torch.arange(1, 40))
    assert score.max() < 1.5
    assert score_gap(score, least=2.5) is None


def test_a_key_that_gets_most_of_the_attention_stands_out():
    rows, positions = uniform(40)
    rows = rows.clone() * 0.4
    rows[:, :, 9:, 9] += 0.6  # queries 10 and later
    score = scored(rows, positions)[0]
    assert score.argmax() == 9
    assert score[9] > 10 * score[torch.arange(40) != 9].max()


def test_padding_counts_for_nothing():
    rows, positions = uniform(30)
    rows = rows.clone()
    rows[:, :, 15:] = math.nan  # queries 16 and later are padding
    valid = (positions < 16).expand(1, -1)
    score = scored(rows, positions, row_valid=valid)
    torch.testing.assert_close(score[:, :16], scored(*uniform(16)))


def test_norms_are_over_the_median_of_the_real_tokens():
    norms = torch.tensor([[8.0, 2.0, 1.0, 4.0, 99.0]])  # the median of 8 2 1 4 is 3
    valid = torch.tensor([[True, True, True, True, False]])
    found = ratios_to_median_norm(norms, valid=valid)
    assert found[0, :4].tolist() == pytest.approx([8 / 3, 2 / 3, 1 / 3, 4 / 3])
    assert found[0, 4].isnan()


def test_a_gap_by_hand():
    # Scores 1 1.2 | 4.8 10: the widest step is from 1.2 to 4.8, whose middle is 2.4.
    gap = score_gap(torch.tensor([4.8, 1.0, 10.0, 1.2, math.nan]), least=2.5)
    assert gap == pytest.approx((1.2, 4.8, 2.4, 2, 0))


@pytest.mark.parametrize(
    "scores",
    [
        [1.0, 1.1, 0.9, 1.3],  # nothing stands out
        [
            1.0,
            1.4,
            2.0,
            2.8,
            4.0,
            5.6,
        ],  # an even fall: each score is less than 1.5 times the one before
        [0.1, 0.9, 1.0, 2.4],  # the high one is not high enough
        [3.0, 3.0],
        [],
    ],
)
def test_without_a_gap_there_is_no_threshold(scores):
    assert score_gap(torch.tensor(scores), least=2.5) is None


def test_a_stray_token_does_not_close_the_gap_of_many():
    scores = torch.cat([torch.linspace(0.5, 1.2, 500), torch.tensor([1.5]), torch.full((40,), 9.0)])
    gap = score_gap(scores, least=2.5)
    assert (gap.low, gap.high, gap.above) == (1.5, 9.0, 40)
    # 15 of 200 that rise evenly to 9 are within the first factor of 1.5, over 5% of the 225 above.
    crowded = torch.cat(
        [torch.linspace(0.5, 1.2, 500), torch.linspace(1.2, 9.0, 200), torch.full((40,), 9.0)]
    )
    assert score_gap(crowded, least=2.5) is None


def test_the_lower_of_two_wide_gaps_decides():
    # From 3 to 5 is a factor of 1.7; from 11 to 160 one of 14.5, over twice as wide on the logarithm's scale.
    gap = score_gap(torch.tensor([1.0] * 50 + [3.0, 5.0, 7.0, 9.0, 11.0] + [160.0] * 8), least=4.0)
    assert (gap.low, gap.high, gap.above) == (11.0, 160.0, 8)
    # Two kinds of sinks: at 5 and at 50. Factors of 5 and 10: both are above the lower gap.
    gap = score_gap(torch.tensor([1.0] * 50 + [5.0] * 10 + [50.0] * 10), least=2.5)
    assert (gap.low, gap.high, gap.above) == (1.0, 5.0, 20)
    with pytest.raises(InputError, match=r"found gap = 1\.0; need a ratio above 1"):
        score_gap(torch.ones(3), least=2.0, gap=1.0)
    # Above 1.7 lie 1.7 and 2.6, whose median is 2.15; above 2.6 lies 2.6 alone.
    gap = score_gap(torch.tensor([1.0] * 20 + [1.7, 2.6]), least=2.5)
    assert (gap.low, gap.high, gap.above) == (pytest.approx(1.7), pytest.approx(2.6), 1)
