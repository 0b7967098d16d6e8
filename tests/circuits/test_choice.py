"""Edges chosen by size, along paths and at random."""

import numpy as np
import pytest

from sink_lens.circuits.choice import (
    connected_edges,
    draw_random_circuit,
    edges_between,
    greedy_edges,
    node_scores,
    output_readers,
    swap_tenth,
)
from sink_lens.circuits.graph import Graph
from sink_lens.edits import metrics

from .tiny_runs import circuit

SMALL = Graph(n_layers=2, n_heads=2, n_kv_heads=1, d_model=4)


def test_a_chain_of_edges_is_connected_and_what_leads_nowhere_is_not():
    graph = SMALL
    chain = ["input->a0.kv0<v>", "a0.h1->m0", "m0->a1.h0<q>", "a1.h0->logits"]
    loose = ["a0.h0->a1.h1<q>", "m1->logits", "input->m1"]
    some = np.zeros(graph.n_edges, dtype=bool)
    some[[graph.index[name] for name in [*chain, *loose]]] = True
    outputs = [len(graph.readers) - 1]
    kept = set(graph.names[connected_edges(graph, some, outputs=outputs)])
    assert kept == {*chain, "m1->logits", "input->m1"}  # a1.h1 is read by nobody
    some[graph.index["input->a0.kv0<v>"]] = False
    assert set(graph.names[connected_edges(graph, some, outputs=outputs)]) == {
        "m1->logits",
        "input->m1",
    }


def test_a_random_circuit_has_as_many_edges_between_layers():
    graph = Graph(n_layers=3, n_heads=4, n_kv_heads=2, d_model=4)
    values = np.random.default_rng(0).normal(size=graph.n_edges)
    found = greedy_edges(graph, values, 30, outputs=[len(graph.readers) - 1])
    other = draw_random_circuit(graph, found, generator=np.random.default_rng(1))
    layers = [np.array([one.layer for one in some]) for some in (graph.writers, graph.readers)]
    ends = [
        sorted(
            zip(
                *(of[end[one]] for of, end in zip(layers, graph.ends[1:], strict=True)), strict=True
            )
        )
        for one in (found, other)
    ]
    assert found.sum() == 30
    assert ends[0] == ends[1]
    assert (found != other).any()


def paths(graph, kept, *, outputs):
    """The chosen edges on a path from the input to an output, by walking every path."""
    heads = {
        number: (int(graph.ends[1][number]), int(graph.ends[2][number]))
        for number in np.flatnonzero(kept)
    }
    found = set()

    def walk(writer, path):
        for number, (begin, reader) in heads.items():
            if begin == writer:
                if reader in outputs:
                    found.update([*path, number])
                for node in np.flatnonzero(graph.reader_of_node[reader]):
                    walk(int(node), [*path, number])

    walk(0, [])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_connected_edges_are_those_on_a_path_that_can_be_walked(seed):
    graph = Graph(
        n_layers=2, n_heads=2, n_kv_heads=1, d_model=4, neurons={1: (2,)} if seed % 2 else {}
    )
    some = np.random.default_rng(seed).random(graph.n_edges) < 0.35
    outputs = [len(graph.readers) - 1, 3 * seed]
    found = set(np.flatnonzero(connected_edges(graph, some, outputs=outputs)).tolist())
    assert found == paths(graph, some, outputs=outputs)
    assert 0 < len(found) < some.sum()


def test_a_greedy_circuit_is_the_largest_edge_into_what_is_chosen_again_and_again():
    graph = SMALL
    values = np.random.default_rng(3).normal(size=graph.n_edges)
    opened, left = {len(graph.readers) - 1}, []
    for _ in range(12):
        into = [
            one
            for one in range(graph.n_edges)
            if int(graph.ends[2][one]) in opened and one not in left
        ]
        best = max(into, key=lambda one: abs(values[one]))
        left.append(best)
        opened |= set(np.flatnonzero(graph.reader_of_node[:, graph.ends[1][best]]).tolist())
    assert np.flatnonzero(
        greedy_edges(graph, values, 12, outputs=[len(graph.readers) - 1])
    ).tolist() == sorted(left)


def test_nodes_score_the_sum_of_their_edges_and_a_circuit_of_nodes_has_all_edges_between_them():
    graph = SMALL
    values = np.random.default_rng(0).normal(size=graph.n_edges)
    names = [one.name for one in graph.writers]
    scores = dict(zip(names, node_scores(graph, values), strict=True))
    for name in names:
        out = [values[at] for edge, at in graph.index.items() if edge.startswith(f"{name}->")]
        assert scores[name] == pytest.approx(sum(out))
    nodes = np.isin(names, ["a0.h1", "m1"])
    kept = set(graph.names[edges_between(graph, nodes)])
    reads = {"a0.h1<q>", "a0.kv0<k>", "a0.kv0<v>", "m1", "logits"}
    assert kept == {
        name
        for name in graph.names
        if name.split("->")[0] in ("input", "a0.h1", "m1") and name.split("->")[1] in reads
    }


def test_a_metric_is_read_at_the_logits_or_at_queries_and_keys_of_its_layers():
    def outputs(metric):
        return {SMALL.readers[one].name for one in output_readers(metric, SMALL)}

    assert outputs(metrics.logit_difference([1], [2])) == outputs(metrics.loss()) == {"logits"}
    assert outputs(metrics.sink_mass(0, layers=[1])) == {"a1.h0<q>", "a1.h1<q>", "a1.kv0<k>"}


def test_a_tenth_of_the_edges_is_swapped_for_others_between_the_same_nodes():
    found = circuit(edges=60)
    (one,) = swap_tenth(found.graph, found.chosen, draws=1, generator=np.random.default_rng(0))
    assert one.sum() == found.n_edges
    assert (found.chosen & ~one).sum() == round(0.1 * found.n_edges)
    _, writers, readers = found.graph.ends
    new = one & ~found.chosen
    read = found.graph.reader_of_node[readers[found.chosen]].any(0)
    nodes = read | (np.bincount(writers[found.chosen], minlength=len(read)) > 0)
    assert nodes[writers[new]].all()
    logits = np.array([reader.kind == "logits" for reader in found.graph.readers])
    assert ((found.graph.reader_of_node & nodes).any(1) | logits)[readers[new]].all()
