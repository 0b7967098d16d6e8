from itertools import permutations

import numpy as np
import pytest
from scipy.stats import kendalltau

from sink_lens.errors import InputError
from sink_lens.identity import nulls


def test_the_standard_deviation_and_the_check_value_of_the_paper():
    assert nulls.tau_deviation(2000) == pytest.approx(0.0149202, abs=5e-8)
    assert nulls.tau_deviation(10_000) == pytest.approx(0.0066678, abs=5e-8)
    with pytest.raises(InputError, match="two or more"):
        nulls.tau_deviation(1)
    # n 2000, |S| 81, z 153.7581: tau_bar .2549 and two-sided log10 p -5135.98 (arXiv 2509.26404).
    null = nulls.analytical_null(2000, shared=81)
    tau_bar = 153.7581 * null.sd
    assert tau_bar == pytest.approx(0.2549, abs=5e-5)
    assert null.z(tau_bar) == pytest.approx(153.7581, abs=1e-9)
    assert nulls.log10_p(153.7581, convention="code") == pytest.approx(-5135.98, abs=5e-3)
    assert nulls.log10_p(153.7581, convention="paper") == pytest.approx(
        -5135.98 - np.log10(2), abs=5e-3
    )


def test_the_conventions_differ_by_a_factor_of_two_and_at_one():
    assert 10 ** nulls.log10_p(1.0) == pytest.approx(0.158655, abs=1e-6)
    assert 10 ** nulls.log10_p(1.0, convention="code") == pytest.approx(0.317311, abs=1e-6)
    assert (
        nulls.log10_p(-3.0, convention="code") == 0.0
    )  # cut at 1: never significant on the other side
    assert 10 ** nulls.log10_p(-3.0) == pytest.approx(0.99865, abs=1e-5)
    assert np.isnan(nulls.log10_p(np.nan))


def test_relabelling_has_the_moments_of_all_permutations():
    matrix = np.random.default_rng(0).standard_normal((5, 5))
    every = np.array([matrix[np.arange(5), list(order)].mean() for order in permutations(range(5))])
    null = nulls.relabelled_null(matrix, draws=300, generator=np.random.default_rng(1))
    assert null.mean == pytest.approx(every.mean(), abs=1e-12)
    assert null.sd == pytest.approx(every.std(), abs=1e-12)
    assert null.draws.mean() == pytest.approx(every.mean(), abs=5 * every.std() / 300**0.5)
    assert set(np.round(null.draws, 9)) <= set(np.round(every, 9))


@pytest.mark.parametrize(("name", "count", "width"), [("matrices", 12, 12), ("pipeline", 24, 48)])
def test_simulations_agree_with_the_formula_where_all_is_independent(name, count, width):
    null = nulls.simulate_null(
        name, n=100, width=width, count=count, temperature=10.0, draws=400, seed=0
    )
    formula = nulls.analytical_null(100, shared=12)  # 24 of 48 in each: 12 in common on average
    assert len(null.draws) == 400
    assert null.sd == pytest.approx(formula.sd, rel=0.15)
    assert abs(null.mean) < 4 * formula.sd / 20


def test_shuffled_inputs_keep_how_coordinates_go_together():
    # One factor moves all coordinates of a model: their taus are one number, and the mean is no surer than one of them.
    generator = np.random.default_rng(0)
    x, y = (
        generator.standard_normal((200, 1)) + 0.01 * generator.standard_normal((200, 30))
        for _ in range(2)
    )
    null = nulls.shuffled_null(x, y, draws=200, generator=generator)
    assert null.sd == pytest.approx(nulls.tau_deviation(200), rel=0.2)
    assert null.sd > 4 * nulls.analytical_null(200, shared=30).sd


def test_the_softmax_is_scipys_order():
    # log changes no order: tau of the logs is tau of the softmax.
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2, 60, 9))
    coordinates = np.array([0, 2, 3, 7])
    soft = [np.exp(one[:, coordinates] / 10) for one in (x, y)]
    soft = [one / one.sum(1, keepdims=True) for one in soft]
    ours = [
        nulls.log_softmax_states(one, coordinates=coordinates, temperature=10.0) for one in (x, y)
    ]
    assert nulls.tau_by_column(*ours).tolist() == [
        kendalltau(a, b).statistic for a, b in zip(soft[0].T, soft[1].T, strict=True)
    ]


def test_the_smallest_means_are_chosen():
    states = np.array([[3.0, -1, 5, 0], [3.0, -1, 4, -4]])
    assert nulls.identity_coordinates(states, count=2).tolist() == [1, 3]


def test_p_has_its_least_value():
    null = nulls.relabelled_null(np.eye(9), draws=10, generator=np.random.default_rng(0))
    assert 10 ** null.log10_p(1.0) == pytest.approx(1 / 362_880)  # 9!
    assert nulls.analytical_null(2000, shared=81).log10_p(1.0) < -10_000
    null = nulls.Null(name="any", mean=0.0, sd=1.0, draws=np.array([0.1, 0.2, 0.3]))
    assert null.p_by_draws(0.25) == 0.5
    assert null.p_by_draws(9.0) == 0.25
    assert np.isnan(nulls.analytical_null(50, shared=8).p_by_draws(1.0))
