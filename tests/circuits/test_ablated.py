"""A model with only a circuit's edges: all of them, none, and all but one."""

import numpy as np
import pytest

from sink_lens.circuits.ablated import compute_circuit_metrics
from sink_lens.circuits.exact import exact_scores

from .tiny_runs import DENSE, exact_lens, runs_of


@pytest.mark.parametrize("family", DENSE)
def test_a_circuit_of_all_edges_is_the_clean_run_and_one_edge_less_is_its_exact_patch(family):
    lens = exact_lens(family)
    runs = runs_of(lens, neurons={1: [3, 5, 9]})
    n = runs.graph.n_edges
    edges = [edge for edge in range(5, n, n // 6) if "<g>" not in runs.graph.names[edge]]
    kept = np.ones((2 + len(edges), n), dtype=bool)
    kept[0] = False
    kept[np.arange(2, len(kept)), edges] = False
    values = compute_circuit_metrics(runs, kept)
    found = (values[1] - values[2:]).T.numpy()
    assert (values[0] - runs.corrupted_values).abs().max() < 2e-6, family
    assert (values[1] - runs.clean_values).abs().max() < 4e-6, family
    exact = exact_scores(runs, edges)
    assert np.abs(exact).max() > 1e-3
    assert np.abs(found - exact).max() < 6e-6, family
