import importlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from sink_lens.errors import InputError
from sink_lens.identity.kendall import tau, tau_matrix


def scipys(x, y):
    return np.array([kendalltau(a, b).statistic for a, b in zip(x.T, y.T, strict=True)])


def test_by_hand():
    # 1 2 3 4 against 1 3 2 4: of 6 pairs one is discordant: (5 - 1) / 6.
    found = tau(np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[1.0], [3.0], [2.0], [4.0]]))
    assert found == pytest.approx([4 / 6])


@pytest.mark.parametrize("n", [2, 3, 17, 64, 65, 999, 2000, 5000])
def test_it_is_scipys_to_the_last_bit(n):
    generator = np.random.default_rng(n)
    x = generator.standard_normal((n, 7))
    y = 0.5 * x + generator.standard_normal((n, 7))
    y[:, 1] = -y[:, 1]
    np.testing.assert_array_equal(tau(x, y), scipys(x, y))


def test_values_on_one_place_of_the_grid_are_put_right():
    # The grid runs over the whole range: an outlier or heavy tails put most values on few places of it.
    generator = np.random.default_rng(0)
    x = generator.standard_normal((500, 4))
    x[0, 0] = 1e6
    x[:, 1] = np.exp(10 * x[:, 1])
    x[:, 2] = np.exp(60 * x[:, 2])
    x[:, 3] = 1 + 1e-13 * x[:, 3]
    y = generator.standard_normal((500, 4))
    np.testing.assert_allclose(tau(x, y), scipys(x, y), atol=1e-15)
    np.testing.assert_allclose(tau(y, x), scipys(y, x), atol=1e-15)


@pytest.mark.parametrize("levels", [2, 5, 60])
def test_ties_are_counted_as_scipy_does(levels):
    generator = np.random.default_rng(levels)
    x, y = (generator.integers(levels, size=(200, 5)).astype(float) for _ in range(2))
    y[:, 0] = generator.standard_normal(200)  # only the other has ties
    np.testing.assert_allclose(tau(x, y), scipys(x, y), atol=1e-15)
    np.testing.assert_allclose(np.diag(tau_matrix(x, y)), scipys(x, y), atol=1e-15)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=20))
def test_it_is_the_count_over_all_pairs(pairs):
    x, y = (np.array(side, dtype=float)[:, None] for side in zip(*pairs, strict=True))
    signs = [np.sign(one - one.T)[np.triu_indices(len(pairs), 1)] for one in (x, y)]
    untied = np.prod([np.count_nonzero(sign) for sign in signs])
    found = tau(x, y)[0]
    if untied == 0:
        assert np.isnan(found)
    else:
        assert found == pytest.approx((signs[0] * signs[1]).sum() / np.sqrt(untied))


def test_each_with_each_is_pair_by_pair():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((300, 5)), generator.standard_normal((300, 4))
    expected = [[kendalltau(a, b).statistic for b in y.T] for a in x.T]
    done = []
    np.testing.assert_array_equal(tau_matrix(x, y, advance=done.append), expected)
    assert sum(done) == 5


def test_threads_change_nothing():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2, 400, 200))
    np.testing.assert_array_equal(tau(x, y, threads=1), tau(x, y, threads=4))


def test_undefined_where_a_column_is_constant_or_holds_a_nan():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2, 50, 3))
    x[:, 0] = 1.0
    y[3, 1] = np.nan
    assert np.isnan(tau(x, y)).tolist() == [True, True, False]
    assert np.isnan(tau_matrix(x, y)).tolist() == [[True] * 3, [False, True, False], [False, True, False]]


@pytest.mark.parametrize("shapes", [((5, 2), (5, 3)), ((5, 2), (4, 2)), ((1, 2), (1, 2))])
def test_what_cannot_be_paired_is_refused(shapes):
    with pytest.raises(InputError, match="need"):
        tau(*(np.ones(shape) for shape in shapes))
    if shapes[0][0] != shapes[1][0]:
        with pytest.raises(InputError, match="need the same ones"):
            tau_matrix(*(np.ones(shape) for shape in shapes))


def test_without_numba_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "sink_lens.identity.kendall")
    with pytest.raises(InputError, match=r"numba is not installed.*'sink-lens\[fingerprint\]'"):
        importlib.import_module("sink_lens.identity.kendall")
