"""Exact scores: a node that is patched whole; ``test_ablated.py`` has those of edges."""

import numpy as np
import pytest
import torch

from analyses.zoo.mechanisms import wire
from sink_lens.circuits.ablated import circuit_values
from sink_lens.circuits.circuit import find
from sink_lens.circuits.exact import exact_node_scores
from sink_lens.models.load import wrap

from .tiny_runs import exact_lens, runs_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "gpt_neox", "headnorm"])
def test_a_node_that_is_patched_whole_is_a_circuit_without_its_edges(family):
    runs = runs_of(exact_lens(family), neurons={1: [3, 5, 9]})
    graph = runs.graph
    nodes = range(0, len(graph.writers), 4)
    kept = np.stack([graph.ends[1] != node for node in nodes])
    expected = (runs.clean_values - circuit_values(runs, kept)).T.numpy()
    found = exact_node_scores(runs)[:, nodes]
    assert np.abs(found).max() > 1e-3
    assert np.abs(found - expected).max() < 6e-6, family


def test_a_real_patch_of_a_node_shows_what_cancels_before_a_threshold():
    for name, ablation in (("hidden", "resample"), ("hidden", "mean_ordinary"), ("cancellation", "resample")):
        mechanism = wire(name, seed=20, family="llama")
        clean, corrupted, metric = mechanism.pairs(4, generator=torch.Generator().manual_seed(0))
        lens = wrap(mechanism.model)
        found = find(lens, clean, corrupted, metric=metric, ablation=ablation, edges=10, most_steps=5)
        nodes = found.check_nodes()
        cancels = {edge.partition("->")[0] for edge in mechanism.edges if edge.endswith("->m1")} - {"input"}
        assert len(cancels) == (2 if name == "hidden" else 0)
        assert set(nodes["node"][nodes["unseen"]]) == cancels
        assert (nodes["magnitude"] >= nodes["score"].abs() - 1e-6).all()
