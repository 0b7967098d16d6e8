"""Choose edges: the largest scores, a connected set that grows backwards from the output, or all above a threshold.

Scores are compared by magnitude: an edge that lowers the metric is as much a part of what the model does as one that
raises it. Edges on no path from the input to what the metric reads are dropped afterwards (``connected_edges``).
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from ..edits.metrics import Metric
from .config import Choice
from .graph import EdgeMask, EdgeValues, Graph, Node


def largest_edges(values: EdgeValues, n: int) -> EdgeMask:
    found = np.zeros(len(values), dtype=bool)
    if n > 0:
        found[np.argpartition(-np.abs(values), min(n, len(values)) - 1)[:n]] = True
    return found


def greedy_edges(graph: Graph, values: EdgeValues, n: int, *, outputs: Sequence[int]) -> EdgeMask:
    """Choose ``n`` edges one by one: the largest |value| into ``outputs`` or into nodes that were reached."""
    _, writers, readers = graph.ends
    found, opened = np.zeros(len(values), dtype=bool), set[int]()
    waiting: list[tuple[float, int]] = []

    def open_readers(some: Sequence[int]) -> None:
        for reader in some:
            if reader not in opened:
                opened.add(reader)
                for edge in np.flatnonzero(readers == reader).tolist():
                    heapq.heappush(waiting, (-abs(float(values[edge])), edge))

    open_readers(outputs)
    while waiting and n > 0:
        _, edge = heapq.heappop(waiting)
        found[edge] = True
        n -= 1
        open_readers(np.flatnonzero(graph.reader_of_node[:, writers[edge]]).tolist())
    return found


def connected_edges(graph: Graph, chosen: EdgeMask, *, outputs: Sequence[int]) -> EdgeMask:
    """Return a mask of the ``chosen`` edges on a path of such edges from the input to a reader in ``outputs``."""
    _, writers, readers = graph.ends
    own = graph.reader_of_node
    edge = np.any(graph.matrix(chosen), axis=0)
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


def output_readers(metric: Metric, graph: Graph) -> tuple[int, ...]:
    """Return the indices of the readers that a metric depends on: the logits, or its layers' queries and keys."""
    layers = set(metric.read_layers(graph.n_layers))
    attention = not (metric.reads_past_layers and metric.state)

    def is_read(reader: Node) -> bool:
        if reader.kind == "logits":
            return metric.reads_past_layers
        of_attention = attention and reader.kind in ("q", "k")
        return reader.layer in layers and (of_attention or bool(metric.sites))

    return tuple(index for index, reader in enumerate(graph.readers) if is_read(reader))


def choose_edges(
    graph: Graph, values: EdgeValues, n: int, *, how: Choice, outputs: Sequence[int]
) -> EdgeMask:
    if how == "greedy":
        return greedy_edges(graph, values, n, outputs=outputs)
    return largest_edges(values, n)


def strongest_edges(
    graph: Graph,
    values: EdgeValues,
    chosen: EdgeMask,
    *,
    most: int,
    outputs: Sequence[int],
) -> EdgeMask:
    inside = np.flatnonzero(chosen)
    order = inside[np.argsort(-np.abs(values[inside]), kind="stable")]

    def mark_largest(n: int) -> np.ndarray:
        return np.isin(np.arange(graph.n_edges), order[:n])

    def mark_largest_on_paths(n: int) -> np.ndarray:
        return connected_edges(graph, mark_largest(n), outputs=outputs)

    fits = bisect_right(
        range(1, len(order) + 1), most, key=lambda n: int(mark_largest_on_paths(n).sum())
    )
    found = mark_largest_on_paths(fits)
    return found if found.any() else mark_largest(most)


def node_scores(graph: Graph, values: EdgeValues) -> Float[np.ndarray, " writer"]:
    """Sum the scores of the edges that leave each writer: an estimate of ablating it."""
    return np.bincount(graph.ends[1], weights=values, minlength=len(graph.writers))


def edges_between(graph: Graph, nodes: Bool[np.ndarray, " writer"]) -> EdgeMask:
    """Return a mask of all edges between the marked nodes, the input and the logits.

    An edge into a key or value that several heads share is marked if one of these heads is.
    """
    nodes = nodes.copy()
    nodes[0] = True
    reads = (graph.reader_of_node & nodes[None]).any(1)
    reads |= np.array([reader.kind == "logits" for reader in graph.readers])
    _, writers, readers = graph.ends
    return nodes[writers] & reads[readers]


def swap_tenth(
    graph: Graph,
    chosen: EdgeMask,
    *,
    draws: int,
    generator: np.random.Generator,
) -> list[EdgeMask]:
    """Return masks of ``chosen`` with a random tenth of its edges replaced by random others between its own nodes.

    There are none if fewer others are there than a tenth: a circuit of all edges between its nodes, as a list of heads
    is, would stand beside itself.
    """
    _, writers, readers = graph.ends
    nodes = np.bincount(writers[chosen], minlength=len(graph.writers)) > 0
    read = graph.reader_of_node[readers[chosen]]
    nodes |= read[read.sum(1) == 1].any(0)  # a key of several heads is none's own
    inside, others = np.flatnonzero(chosen), np.flatnonzero(edges_between(graph, nodes) & ~chosen)
    n, found = max(1, round(0.1 * len(inside))), list[np.ndarray]()
    for _ in range(draws if n <= min(len(inside), len(others)) else 0):
        one = chosen.copy()
        one[generator.choice(inside, n, replace=False)] = False
        one[generator.choice(others, n, replace=False)] = True
        found.append(one)
    return found


def draw_random_circuit(
    graph: Graph, chosen: EdgeMask, *, generator: np.random.Generator
) -> EdgeMask:
    """Return a mask of random edges: as many between any two layers as the circuit ``chosen`` has there."""
    _, writers, readers = graph.ends
    first = np.array([writer.layer for writer in graph.writers])[writers] + 1
    second = np.array([reader.layer for reader in graph.readers])[readers]
    stratum = first * (graph.n_layers + 2) + second
    order = generator.permutation(len(chosen))
    order = order[np.argsort(stratum[order], kind="stable")]
    sizes = np.bincount(stratum, minlength=int(stratum.max()) + 1)
    wanted = np.bincount(stratum[chosen], minlength=len(sizes))
    rank = np.arange(len(order)) - np.concatenate([[0], np.cumsum(sizes)[:-1]])[stratum[order]]
    found = np.zeros(len(chosen), dtype=bool)
    found[order[rank < wanted[stratum[order]]]] = True
    return found
