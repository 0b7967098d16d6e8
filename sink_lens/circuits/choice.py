"""Choose edges: the largest scores, a connected set that grows backwards from the output, or all above a threshold.

Scores are compared by magnitude, since an edge that lowers the metric is as much a part of what the model does as one
that raises it. Edges on no path from the input to what the metric reads are dropped afterwards
(``connected_edges``): nothing that they carry arrives.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from ..edits.metrics import Metric
from .config import Choice
from .graph import Graph, Reader


def largest_edges(values: Float[np.ndarray, " edge"], n: int) -> Bool[np.ndarray, " edge"]:
    """Mark the n edges of the largest magnitude."""
    found = np.zeros(len(values), dtype=bool)
    if n > 0:
        found[np.argpartition(-np.abs(values), min(n, len(values)) - 1)[:n]] = True
    return found


def greedy_edges(
    graph: Graph, values: Float[np.ndarray, " edge"], n: int, *, outputs: Sequence[int]
) -> Bool[np.ndarray, " edge"]:
    """Grow backwards from the outputs, the readers that the metric reads: add the largest edge into what is chosen."""
    _, writers, readers = graph.ends
    into: list[np.ndarray] = [np.flatnonzero(readers == reader) for reader in range(len(graph.readers))]
    found, opened, waiting = np.zeros(len(values), dtype=bool), set[int](), list[tuple[float, int]]()

    def open_reader(reader: int) -> None:
        """Put the edges into a reader among those that can be chosen, once."""
        if reader not in opened:
            opened.add(reader)
            for edge in into[reader]:
                heapq.heappush(waiting, (-abs(float(values[edge])), int(edge)))

    for reader in outputs:
        open_reader(reader)
    while waiting and n > 0:
        _, edge = heapq.heappop(waiting)
        found[edge] = True
        n -= 1
        for reader in np.flatnonzero(graph.reader_of_node[:, writers[edge]]):
            open_reader(int(reader))
    return found


def connected_edges(
    graph: Graph, chosen: Bool[np.ndarray, " edge"], *, outputs: Sequence[int]
) -> Bool[np.ndarray, " edge"]:
    """Mark those of the chosen edges that are on a path from the input to an output."""
    _, writers, readers = graph.ends
    own = graph.reader_of_node
    edge = np.zeros((len(graph.writers), len(graph.readers)), dtype=bool)
    np.logical_or.at(edge, (writers[chosen], readers[chosen]), True)
    reached = np.zeros(len(graph.writers), dtype=bool)  # from the input
    reached[0] = True
    for index in range(1, len(graph.writers)):
        reached[index] = bool((edge[reached][:, own[:, index]]).any())
    leads = np.zeros(len(graph.readers), dtype=bool)  # to an output
    leads[list(outputs)] = True
    for index in range(len(graph.writers) - 1, -1, -1):
        if edge[index, leads].any():
            leads |= own[:, index]
    return chosen & reached[writers] & leads[readers]


def outputs_of(metric: Metric, graph: Graph) -> tuple[int, ...]:
    """The readers that a metric reads: the logits, or queries and keys of the layers whose attention it reads."""
    layers, attention = set(metric.read_layers(graph.n_layers)), not (metric.whole and metric.state)

    def is_read(reader: Reader) -> bool:
        """Check if the metric reads what a reader makes."""
        if reader.kind == "logits":
            return metric.whole
        return reader.layer in layers and (bool(metric.sites) or (attention and reader.kind in ("q", "k")))

    return tuple(index for index, reader in enumerate(graph.readers) if is_read(reader))


def choose_edges(
    graph: Graph, values: Float[np.ndarray, " edge"], n: int, *, how: Choice, outputs: Sequence[int]
) -> Bool[np.ndarray, " edge"]:
    """Choose n edges: the largest, also where a threshold chose their number, or greedily."""
    return greedy_edges(graph, values, n, outputs=outputs) if how == "greedy" else largest_edges(values, n)


def node_scores(graph: Graph, values: Float[np.ndarray, " edge"]) -> Float[np.ndarray, " writer"]:
    """Score of every writer: the sum of its outgoing edges, a first-order estimate of replacing the writer."""
    return np.bincount(graph.ends[1], weights=values, minlength=len(graph.writers))


def edges_between(graph: Graph, nodes: Bool[np.ndarray, " writer"]) -> Bool[np.ndarray, " edge"]:
    """Mark all edges between chosen nodes; the input and the logits belong to every circuit.

    A key or value of a key-value head is read where any of the heads that share it is chosen.
    """
    nodes = nodes.copy()
    nodes[0] = True
    own = graph.reader_of_node
    reads = (own & nodes[None]).any(1)
    reads |= np.array([reader.kind == "logits" for reader in graph.readers])
    _, writers, readers = graph.ends
    return nodes[writers] & reads[readers]


def random_circuit_like(
    graph: Graph, chosen: Bool[np.ndarray, " edge"], *, generator: np.random.Generator
) -> Bool[np.ndarray, " edge"]:
    """A random circuit of the same size and depth: as many edges between every two layers, none of them twice."""
    _, writers, readers = graph.ends
    first = np.array([writer.layer for writer in graph.writers])[writers] + 1
    second = np.array([reader.layer for reader in graph.readers])[readers]
    stratum = first * (graph.n_layers + 2) + second
    order = generator.permutation(len(chosen))
    order = order[np.argsort(stratum[order], kind="stable")]
    sizes = np.bincount(stratum, minlength=int(stratum.max()) + 1)
    wanted = np.bincount(stratum[chosen], minlength=len(sizes))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rank = np.arange(len(order)) - starts[stratum[order]]
    found = np.zeros(len(chosen), dtype=bool)
    found[order[rank < wanted[stratum[order]]]] = True
    return found
