"""Error bars of circuits: draws of pairs, inclusion, core, and what a sample can miss."""

import numpy as np
import pytest
from lenses import lens_of

from sink_lens import circuits
from sink_lens.circuits import stability
from sink_lens.circuits.core import edge_verdicts
from sink_lens.edits import metrics

from .tiny_runs import circuit, pair


def test_an_edge_is_core_undecided_or_contingent_by_how_sure_each_setting_is():
    settings = {
        "resample": np.array([1.0, 0.96, 0.5, 0.0]),
        "mean": np.array([0.95, 0.2, 0.1, 0.0]),
    }
    circuits = {
        "resample": np.array([1, 1, 1, 0], dtype=bool),
        "mean": np.array([1, 0, 0, 0], dtype=bool),
    }
    assert edge_verdicts(settings, circuits).tolist() == ["core", "undecided", "contingent", "none"]
    without = np.array([0, 1, 1, 1], dtype=bool)
    assert edge_verdicts(settings, circuits, within=without)[0] == "undecided"


def test_a_sample_bounds_the_edges_that_are_missed():
    # 4 of 10 sampled, none found: with 5 such edges the sample avoids all with 5 C 4 / 10 C 4 = 5/210 = 2%, with 4 with
    # 15/210 = 7%; all sampled: what was found is all
    assert stability.upper_bound_of_count(0, sampled=4, total=10) == 4
    assert stability.upper_bound_of_count(2, sampled=10, total=10) == 2
    assert stability.upper_bound_of_count(10, sampled=10, total=70_000) == 70_000
    assert stability.upper_bound_of_count(0, sampled=10, total=70_000) == pytest.approx(
        70_000 * (1 - 0.05**0.1), rel=1e-3
    )
    found = circuit()
    check = found.check(edges=12, pairs=2)
    outside = check.frame[check.frame["drawn"] == "other"]
    assert check.weakest == np.abs(found.scores.mean[found.chosen]).min()
    assert check.outside_counts == ((outside["exact"].abs() > check.weakest).sum(), 6)
    assert (
        check.outside_counts[0]
        <= check.most_outside
        <= check.n_outside
        == found.graph.n_edges - found.n_edges
    )


def test_the_bounds_of_few_pairs_are_student_s():
    values = np.array([[1.0], [2.0], [3.0]], dtype=np.float32)
    weights = stability.bootstrap_weights([""] * 3, draws=1000, generator=np.random.default_rng(0))
    low, high = stability.bootstrap_bounds(values, weights)
    wide = 4.3027 / 3**0.5  # a bootstrap has 1 and 3 at most
    assert (low[0], high[0]) == pytest.approx((2 - wide, 2 + wide), rel=1e-4)


def test_a_template_keeps_its_share_of_every_draw_and_of_both_halves():
    weights = stability.bootstrap_weights(
        ["a"] * 10 + ["b"] * 30, draws=200, generator=np.random.default_rng(1)
    )
    assert weights.sum(1) == pytest.approx(np.ones(200))
    assert weights[:, :10].sum(1) == pytest.approx(np.full(200, 0.25))
    first, second = stability.random_halves(
        ["a"] * 5 + ["b"] * 5, generator=np.random.default_rng(2)
    )
    assert sorted([*first, *second]) == list(range(10))
    assert len(first) == len(second) == 5


def test_inclusion_and_bounds_are_those_of_a_loop_over_draws():
    values = np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
    weights = stability.bootstrap_weights(
        ["a", "b"] * 6, draws=70, generator=np.random.default_rng(1)
    )
    counts, means = np.zeros(7), []
    for row in weights:
        mean = sum(weight * one for weight, one in zip(row, values, strict=True))
        means.append(mean)
        counts[sorted(range(7), key=lambda edge: -abs(mean[edge]))[:3]] += 1
    assert stability.inclusion_probabilities(values, weights, n=3) == pytest.approx(counts / 70)
    low, high = stability.bootstrap_bounds(values, weights)
    assert low == pytest.approx(np.percentile(means, 2.5, axis=0), abs=1e-6)
    assert high == pytest.approx(np.percentile(means, 97.5, axis=0), abs=1e-6)


def test_two_circuits_share_edges_over_those_that_either_has():
    one, other = np.array([1, 1, 0, 0], dtype=bool), np.array([1, 0, 1, 0], dtype=bool)
    assert stability.jaccard(one, other) == pytest.approx(1 / 3)
    assert np.isnan(stability.jaccard(~one & one, ~one & one))


def test_a_pair_alone_in_its_template_is_not_in_every_draw():
    templates = ["a", "a", "a", "b"]
    weights = stability.bootstrap_weights(templates, draws=50, generator=np.random.default_rng(0))
    assert weights.sum(1) == pytest.approx(np.ones(50))
    assert (weights[:, 3] == 0).any()
    alone = stability.bootstrap_weights(list("abcd"), draws=50, generator=np.random.default_rng(0))
    assert alone.std(0).min() > 0


def test_one_pair_has_no_interval_and_no_inclusion():
    prompts = pair(n=1, length=9)
    found = circuits.find(
        lens_of("llama"), *prompts, metric=metrics.logit_difference(5, 7), method="eap", edges=20
    )
    assert found.frame[["low", "high", "inclusion"]].isna().all(axis=None)
    assert found.every_edge["inclusion"].isna().all()


def test_edges_into_gates_are_among_those_that_a_sample_may_have_missed():
    found = circuit("headnorm_gate", method="eap")
    check = found.check(edges=4, pairs=2)
    gates = np.array(["<g>" in name for name in found.graph.names[~found.chosen]])
    assert check.n_outside == len(gates)
    assert gates.sum() + check.outside_counts[0] <= check.most_outside <= len(gates)
    whole = found.check(edges=2 * found.graph.n_edges, pairs=2)
    assert whole.most_outside == gates.sum() + whole.outside_counts[0]
