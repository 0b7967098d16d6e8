"""Intervals over sequences."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.stats import (
    Interval,
    corrected_p,
    interval,
    mean_interval,
    paired_difference,
    paired_differences,
    studentised_interval,
    t_intervals,
)


def generator(seed=0):
    return np.random.default_rng(seed)


def test_two_units_are_drawn_as_pairs():
    # Draws of (0, 1) with replacement: means 0, 1/2, 1/2, 1, each a quarter: the outer quantiles are 0 and 1.
    found = interval([0.0, 1.0], generator=generator())
    assert found == Interval(estimate=0.5, low=0.0, high=1.0, n=2)


def test_a_difference_of_few_units_has_the_interval_of_students_t():
    # Standard deviation of (0, 1): sqrt(1/2); over sqrt(2) 1/2, times 12.706, the quantile at 1 degree of freedom.
    found = paired_difference([0.0, 2.0], [0.0, 1.0], generator=generator())
    assert [found.low, found.high] == pytest.approx([0.5 - 6.353, 0.5 + 6.353], abs=1e-3)
    rows, nothing = generator(3).normal(size=(2, 8)), np.zeros((1, 8))
    few = paired_differences(rows[:, :7], nothing[:, :7], generator=generator())
    assert few == t_intervals(rows[:, :7])
    assert paired_differences(rows, nothing, generator=generator()) != t_intervals(rows)


def test_a_mean_or_a_ratio_of_few_units_has_students_interval_and_of_more_a_drawn_one():
    found = mean_interval([0.0, 1.0], generator=generator())
    assert [found.low, found.high] == pytest.approx([0.5 - 6.353, 0.5 + 6.353], abs=1e-3)
    ratio = mean_interval([0.0, 2.0], over=[2.0, 2.0], generator=generator())
    assert [ratio.low, ratio.high] == pytest.approx([0.5 - 6.353, 0.5 + 6.353], abs=1e-3)
    values = generator(3).normal(size=8)
    drawn = interval(values, generator=generator())
    assert mean_interval(values, generator=generator()) == drawn
    halved = mean_interval(values, over=np.full(8, 2.0), generator=generator())
    assert (halved.low, halved.high) == pytest.approx((drawn.low / 2, drawn.high / 2))


def test_the_interval_of_a_mean_is_about_two_standard_errors_wide():
    # 400 draws of a standard normal: standard error 1 / 20, so bounds near the mean -+ 1.96 / 20 = 0.098.
    values = generator(1).normal(size=400)
    found = interval(values, generator=generator())
    assert found.estimate == pytest.approx(values.mean())
    assert found.high - found.estimate == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert found.estimate - found.low == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_a_statistic_of_two_columns_sees_paired_rows():
    x = generator(4).normal(size=50)
    found = interval(
        np.stack([x, 2 * x], axis=1),
        generator=generator(),
        statistic=lambda rows: np.corrcoef(rows[:, 0], rows[:, 1])[0, 1],
        n_resamples=200,
    )
    # Perfectly correlated pairs stay so on every draw.
    assert (found.estimate, found.low, found.high) == pytest.approx((1, 1, 1))


def test_a_statistic_without_an_axis_agrees_with_one_that_has_it_and_nan_units_are_dropped():
    values = generator(5).normal(size=20)
    fast = interval(values, generator=generator(), statistic=np.median, n_resamples=300)
    slow = interval(
        values, generator=generator(), statistic=lambda rows: np.median(rows), n_resamples=300
    )
    assert fast == slow
    found = interval([[1.0, 3.0], [np.nan, 5.0], [3.0, 5.0]], generator=generator())
    assert (found.estimate, found.n) == (3.0, 2)  # means 2 and 4 of the two whole rows


@pytest.mark.parametrize(
    ("values", "n"), [([], 0), ([np.nan], 0), ([2.0], 1), (np.zeros((0, 3)), 0)]
)
def test_fewer_than_two_units_have_no_bounds(values, n):
    found = interval(values, generator=generator())
    assert found.n == n
    assert np.isnan(found.low)
    assert np.isnan(found.high)
    assert np.isnan(found.estimate) == (n == 0)


def test_constant_and_infinite_units_stay_what_they_are():
    found = interval([0.1] * 7, generator=generator())
    assert found.low == found.high == found.estimate == pytest.approx(0.1)
    assert interval([1.0, np.inf, 2.0, np.inf], generator=generator()).estimate == np.inf


@settings(deadline=None, max_examples=40)
@example([0.0, *[999999.9999999999] * 3], np.max)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12),
    st.sampled_from([np.mean, np.median, np.max]),
)
def test_bounds_lie_within_the_values_and_in_order(values, statistic):
    found = interval(values, generator=generator(), statistic=statistic, n_resamples=100)
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack


def test_the_same_generator_gives_the_same_numbers():
    values = generator(6).normal(size=12)
    assert interval(values, generator=generator(7)) == interval(values, generator=generator(7))
    assert interval(values, generator=generator(7)) != interval(values, generator=generator(8))
    rows = generator(14).normal(size=(4, 6))
    first, second = (
        paired_differences(rows, rows[:1] * 0, generator=generator(5)) for _ in range(2)
    )
    assert first == second


def test_pairing_removes_what_the_units_share_and_drops_half_pairs():
    # b = a + 1 in every unit: the difference is -1 exactly, however much the units differ.
    a = generator(9).normal(scale=100, size=16).round()
    assert paired_difference(a, a + 1, generator=generator()) == Interval(
        estimate=-1.0, low=-1.0, high=-1.0, n=16
    )
    assert paired_difference([1.0, 2.0, np.nan], [0.0, np.nan, 1.0], generator=generator()).n == 1


@pytest.mark.parametrize(
    ("call", "given", "text"),
    [
        (interval, ([1, 2],), "need at least 1"),
        (interval, (3.0,), "need one number per unit"),
        (paired_difference, ([1, 2, 3], [1, 2]), r"shapes \(3,\) and \(2,\)"),
        (paired_differences, ([1.0, 2.0], [[1.0, 2.0]]), r"need \(rows, units\) twice"),
        (paired_differences, (np.zeros((3, 2)), np.zeros((2, 2))), r"need \(rows, units\) twice"),
        (paired_differences, ([[1.0, 2.0, 4.0]], [[0.0, 0.0, 0.0]]), "need at least 1"),
    ],
)
def test_what_makes_no_interval_is_refused(call, given, text):
    options = {"n_resamples": 0} if text == "need at least 1" else {}
    with pytest.raises(InputError, match=text):
        call(*given, generator=generator(), **options)


def test_each_row_has_the_estimate_of_its_paired_difference_to_the_last_bit():
    a, b = generator(10).normal(size=(2, 50, 11))
    found = paired_differences(a, b, generator=generator())
    for row, one in enumerate(found):
        assert one.estimate == paired_difference(a[row], b[row], generator=generator()).estimate
        assert one.n == 11


def test_each_row_has_the_bounds_of_its_paired_difference_up_to_the_draws():
    # A quantile at 2.5% of 20,000 draws of a normal has standard error sqrt(0.025 * 0.975 / 20,000) / 0.0584 = 0.019
    # standard errors of the mean; two such differ by less than 5 * sqrt(2) * 0.019 = 0.13 of it.
    n, draws = 30, 20_000
    a = generator(11).normal(size=(8, n))
    b = generator(12).normal(size=(1, n))
    found = paired_differences(a, b, generator=generator(1), n_resamples=draws)
    for row, one in zip(a, found, strict=True):
        alone = interval(row - b[0], generator=generator(2), n_resamples=draws)
        slack = 0.13 * np.std(row - b[0]) / np.sqrt(n)
        assert one.low == pytest.approx(alone.low, rel=0, abs=slack)
        assert one.high == pytest.approx(alone.high, rel=0, abs=slack)


def test_rows_do_not_touch_one_another():
    rows = generator(13).normal(size=(3, 9))
    with_nan = np.vstack([rows[:1], np.full((1, 9), np.nan), rows[1:]])
    found = paired_differences(rows, np.zeros((1, 9)), generator=generator())
    beside = paired_differences(with_nan, np.zeros((1, 9)), generator=generator())
    assert [beside[0], *beside[2:]] == found


def test_units_that_are_nan_in_a_row_are_dropped_from_it():
    nan = np.nan
    a = [[1.0, nan, 3.0], [nan, nan, nan], [nan, 5.0, nan], [1.0, 2.0, 3.0]]
    some, none, one, whole = paired_differences(a, [[0.0, 0.0, 1.0]], generator=generator())
    assert (some.estimate, some.n) == (1.5, 2)  # 1 - 0 and 3 - 1
    assert (some.low, some.high) == pytest.approx((1.5 - 6.353, 1.5 + 6.353), abs=1e-3)
    assert none.n == 0
    assert np.isnan([none.estimate, none.low, none.high]).all()
    assert (one.estimate, one.n) == (5.0, 1)
    assert np.isnan([one.low, one.high]).all()
    assert (whole.estimate, whole.n) == (pytest.approx(5 / 3), 3)


def test_rows_of_one_unit_of_equal_differences_and_no_rows():
    first, second = paired_differences([[3.0], [4.0]], [[1.0]], generator=generator())
    assert (first.estimate, first.n, second.estimate) == (2.0, 1, 3.0)
    assert np.isnan([first.low, first.high, second.low]).all()
    (one,) = paired_differences(
        [[0.3, 1.3, 2.3]], [[0.0, 1.0, 2.0]], generator=generator(), n_resamples=50
    )
    assert one.low <= one.estimate <= one.high
    (flat,) = paired_differences([[2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0]], generator=generator())
    assert flat == Interval(estimate=1.0, low=1.0, high=1.0, n=3)
    assert paired_differences(np.zeros((0, 4)), np.zeros((1, 4)), generator=generator()) == []


def coverage(make, truth, *, n, samples=600):
    drawn = make(generator(11), (samples, n))
    found = [
        studentised_interval(one, generator=generator(seed), n_resamples=400)
        for seed, one in enumerate(drawn)
    ]
    return float(np.mean([one.low <= truth <= one.high for one in found]))


@pytest.mark.parametrize(
    ("name", "truth", "least"), [("normal", 0.0, 0.93), ("lognormal", np.exp(0.5), 0.88)]
)
def test_studentised_intervals_cover_at_20_units(name, truth, least):
    # Nominal 0.95; 600 samples give a standard error of 0.01.
    make = lambda rng, shape: getattr(rng, name)(size=shape)  # noqa: E731
    reached = coverage(make, truth, n=20)
    assert least <= reached <= 0.98, reached
    percentile = [
        interval(one, generator=generator(0), n_resamples=400)
        for one in make(generator(11), (600, 20))
    ]
    assert reached > np.mean([one.low <= truth <= one.high for one in percentile])


@pytest.mark.parametrize("odd", [1, 4, 7])
def test_a_few_sequences_unlike_the_rest_make_no_endless_interval(odd):
    """Draws that miss them vary by nothing, and an error divided by nothing has no bound."""
    values = np.concatenate([np.full(odd, 0.95), np.zeros(8 - odd)])
    found = studentised_interval(values, generator=generator())
    assert found.low < found.estimate < found.high
    assert found.high - found.low < 1.5

    def two_valued(rng, shape):
        return np.where(rng.random(shape) < 0.5, 0.95, 0) + 0.01 * rng.normal(size=shape)

    assert coverage(two_valued, 0.475, n=8) >= 0.95


def test_a_studentised_ratio_of_means_is_that_of_its_parts():
    a, b = generator(12).lognormal(size=(2, 30))
    found = studentised_interval(a, over=b, generator=generator())
    assert found.estimate == pytest.approx(a.mean() / b.mean())
    assert found.low < found.estimate < found.high
    assert studentised_interval(2 * a, over=a, generator=generator()) == Interval(
        estimate=2.0, low=2.0, high=2.0, n=30
    )


def test_few_units_have_the_interval_of_student():
    # Two units 0 and 1: standard error 1/2, and t with one degree of freedom is 12.706.
    found = studentised_interval([0.0, 1.0], generator=generator())
    assert (found.low, found.high) == pytest.approx((0.5 - 12.706 / 2, 0.5 + 12.706 / 2), abs=1e-3)
    assert np.isnan(studentised_interval([1.0], generator=generator()).low)


def test_the_corrected_p_is_that_of_student_times_the_rows():
    # mean 2, standard deviation 1, n = 4: t = 4; two-sided with 3 degrees of freedom: p = 0.02801
    row = [2 - 1.5**0.5, 2.0, 2.0, 2 + 1.5**0.5]
    nan = float("nan")
    found = corrected_p(
        np.array([row, [0, 0, 0, 0], [3, 3, 3, 3], [1, nan, nan, nan], [*row[:3], nan]])
    )
    assert found[0] == pytest.approx(4 * 0.02801, rel=1e-3)  # four rows have a test
    assert found[1:3].tolist() == [1.0, 0.0]
    assert np.isnan(found[3])


def test_where_nothing_happens_the_smallest_corrected_p_is_seldom_small():
    draw = generator(0)
    noise = [
        np.sqrt(0.5) * (draw.normal(size=(12, 16)) + draw.normal(size=16)) for _ in range(1000)
    ]  # cells depend
    assert np.mean([corrected_p(one).min() <= 0.05 for one in noise]) <= 0.05
