"""Writers, readers and edges of a model."""

import re

import numpy as np
import pytest
from lenses import lens_of

from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.circuits.scores import score_by_gradients
from sink_lens.edits import metrics
from sink_lens.errors import InputError, ModelError
from tests.tiny_families import HYBRID_FAMILIES

from .tiny_runs import EXPERTS, METRIC, pair, runs_of


def test_what_has_no_circuit_is_refused(monkeypatch):
    for family in EXPERTS[:2]:
        with pytest.raises(ModelError, match="mixture of experts"):
            Graph.of(lens_of(family))
    with pytest.raises(ModelError, match="no attention"):
        Graph.of(lens_of(HYBRID_FAMILIES[0]))
    lens = lens_of("llama")
    clean, _ = pair()
    with pytest.raises(InputError, match="corrupted"):
        Runs.make(lens, clean, None, graph=Graph.of(lens), metric=METRIC)
    with pytest.raises(InputError, match="reads the residual stream"):
        runs_of(lens, metric=metrics.norm(0, layer=1))
    with pytest.raises(InputError, match="neurons"):
        Graph.of(lens, neurons={1: [80]})
    of_stream = metrics.Metric(
        name="size",
        function=lambda run: run.state_at(5)[1].square().sum(-1),
        positions=(5,),
        logits=True,
    )
    with pytest.raises(InputError, match="size reads the residual stream"):
        runs_of(lens, metric=of_stream)
    monkeypatch.setattr("sink_lens.circuits.runs._with_what_it_reads", lambda metric, run: metric)
    with pytest.raises(ModelError, match="something else reads the stream"):
        score_by_gradients(runs_of(lens, metric=of_stream), method="eap")


def came_before(writer, reader, *, parallel):
    """If a node writes before another reads, by their names alone."""
    if writer == "input" or reader == "logits":
        return True
    ends = (
        re.fullmatch(r"[am](\d+)", writer.partition(".")[0]),
        re.fullmatch(r"[am](\d+)", reader.partition(".")[0]),
    )
    first, second = (int(one[1]) for one in ends)
    beside = writer[0] == "a" and reader[0] == "m" and not parallel
    return first < second or (first == second and beside)


@pytest.mark.parametrize(
    "more",
    [{}, {"parallel": True, "gated": True}, {"neurons": {1: (3, 5)}}, {"spans": ("early", "late")}],
    ids=str,
)
def test_there_is_an_edge_from_every_writer_to_every_reader_that_comes_after_it(more):
    graph = Graph(n_layers=3, n_heads=4, n_kv_heads=2, d_model=8, **more)
    wanted = [
        f"{writer.name}->{reader.name}{span and '@'}{span}"
        for span in graph.spans
        for writer in graph.writers
        for reader in graph.readers
        if came_before(writer.name, reader.name, parallel=graph.parallel)
    ]
    assert graph.names.tolist() == wanted
    assert graph.n_edges == len(wanted)
    assert [graph.index[name] for name in wanted] == [*range(len(wanted))]
    values = np.arange(1, len(wanted) + 1)
    matrix = graph.matrix(values)
    for number, (span, writer, reader) in enumerate(zip(*graph.ends, strict=True)):
        assert matrix[span, writer, reader] == values[number]
    assert (matrix == 0).sum() == matrix.size - len(wanted)
    for reader in range(len(graph.readers)):
        mine = graph.ends[1][(graph.ends[2] == reader) & (graph.ends[0] == 0)]
        assert mine.tolist() == [*range(graph.n_writers_before(reader))]


def test_a_writer_is_computed_from_the_readers_of_its_own_node():
    graph = Graph(n_layers=2, n_heads=4, n_kv_heads=2, d_model=8, gated=True, neurons={0: (1,)})
    own = graph.reader_of_node
    writers = [one.name for one in graph.writers]
    readers = [one.name for one in graph.readers]

    def read(writer):
        return {readers[row] for row in np.flatnonzero(own[:, writers.index(writer)])}

    assert read("input") == set()
    assert read("a1.h3") == {"a1.h3<q>", "a1.kv1<k>", "a1.kv1<v>", "a1.h3<g>"}
    assert read("a0.h0") == {"a0.h0<q>", "a0.kv0<k>", "a0.kv0<v>", "a0.h0<g>"}
    assert (read("m0"), read("m0.n"), read("m1")) == ({"m0"}, {"m0.n"}, {"m1"})
    assert not own[readers.index("logits")].any()


def test_a_batch_has_as_many_pairs_as_what_writers_add_fits():
    graph = Graph(n_layers=2, n_heads=3, n_kv_heads=3, d_model=1024)
    size = 9 * 100 * 1024 * 4  # writers, positions, width, bytes
    assert graph.n_pairs_per_pass(n_positions=100, copies=20) == 192 * 2**20 // (20 * size)
    assert graph.n_pairs_per_pass(n_positions=1) == 32
    assert graph.n_pairs_per_pass(n_positions=10**6) == 1
