"""The curve of a circuit: how much of the metric is left with only so many edges.

    faithfulness f(C) = (m(C) - m(0)) / (m(N) - m(0))

where N has every edge, 0 none, and m is the mean over pairs of the metric (MIB, arXiv 2504.13151). It is not clipped:
it is above 1 where the dropped edges lower the metric, and below 0 where the circuit is worse than nothing. CPR is the
area under f over the share of edges from 0 to 1, CMD the area of |1 - f|; on MIB's linear axis half of either comes
from circuits of more than half of the edges, so both are given over the logarithm of the share too. Where the interval
of m(N) - m(0) covers 0 there is nothing to divide by, and f is not given.

A curve need not climb: where heads cancel, a circuit of one of them keeps too much and one of both nothing. So the
share that *carries* the metric (``smallest_faithful_share``) is the smallest from which on every larger size that was
run keeps at least 80%, by the lower end of its interval, and at most 120%. Sizes are asked from the largest downwards
and the first that fails ends it, so that asking several does not make the 95% smaller.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from ..stats import FEWEST_DRAWN, Interval, mean_interval, studentised_interval
from .ablated import compute_circuit_metrics
from .choice import (
    choose_edges,
    connected_edges,
    draw_random_circuit,
    edges_between,
    largest_edges,
    node_scores,
    output_readers,
)
from .config import AT_MOST, CARRIES, CircuitConfig
from .graph import EdgeMask, EdgeValues
from .runs import Progress, Runs

_FIELDS = {"faithfulness": "faithfulness", "faithfulness_low": "low", "faithfulness_high": "high"}
"""Field of a summary -> column of a curve."""


def faithfulness_fields(row: Mapping[Any, Any], prefix: str) -> dict[str, float]:
    """Return the fields of a summary, their names behind ``prefix``, from the row of a curve."""
    return {prefix + field: float(row[column]) for field, column in _FIELDS.items()}


@dataclass(frozen=True, kw_only=True)
class FaithfulnessJudge:
    """Computes the metric and the faithfulness of circuits on the pairs of ``runs``."""

    runs: Runs = field(repr=False)
    seed: int

    @cached_property
    def values_without_edges(self) -> Float[np.ndarray, " pair"]:
        nothing = np.zeros((1, self.runs.graph.n_edges), dtype=bool)
        return compute_circuit_metrics(self.runs, nothing)[0].numpy()

    @property
    def values_of_model(self) -> Float[np.ndarray, " pair"]:
        return self.runs.clean_values.numpy()

    @cached_property
    def gap(self) -> Interval:
        """Mean over pairs of the whole model's metric minus the metric with all edges ablated."""
        difference = self.values_of_model - self.values_without_edges
        return mean_interval(difference, generator=np.random.default_rng([self.seed, 3]))

    def edges_on_paths(self, circuit: EdgeMask) -> EdgeMask:
        graph = self.runs.graph
        return connected_edges(graph, circuit, outputs=output_readers(self.runs.metric, graph))

    def metric_values(
        self,
        circuits: Bool[np.ndarray, "circuit edge"],
        *,
        advance: Progress = lambda done: None,
    ) -> Float[np.ndarray, "circuit pair"]:
        """Run the model with only the edges of each of ``circuits`` that are on paths; return each pair's metric."""
        unlike: dict[bytes, int] = {}
        at = [
            unlike.setdefault(self.edges_on_paths(one).tobytes(), len(unlike)) for one in circuits
        ]
        different = np.stack([np.frombuffer(one, dtype=bool) for one in unlike])
        return compute_circuit_metrics(self.runs, different, advance=advance).numpy()[at]

    def faithfulness_table(self, values: Float[np.ndarray, "circuit pair"]) -> pd.DataFrame:
        """Return a table with the faithfulness of each circuit, from ``values``, its metric on each pair.

        Columns: ``value`` (mean metric), ``faithfulness``, ``low`` and ``high`` (95% bootstrap, Student's below 8 pairs
        and nan for one). The last three are nan unless the interval of ``gap`` excludes 0.
        """
        frame, nothing = pd.DataFrame({"value": values.mean(1)}), self.values_without_edges
        if not self.gap.excludes_zero:
            return frame.assign(faithfulness=np.nan, low=np.nan, high=np.nan)
        n, gap = len(nothing), self.values_of_model - nothing
        generator = np.random.default_rng([self.seed, 9])
        if n < FEWEST_DRAWN:
            found = [
                studentised_interval(own, over=gap, generator=generator) for own in values - nothing
            ]
            bounds = pd.DataFrame(found, columns=["estimate", "low", "high"])
            return frame.join(bounds.rename(columns={"estimate": "faithfulness"}))
        drawn = generator.multinomial(n, np.full(n, 1 / n), 1000) / n
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = ((values - nothing) @ drawn.T) / (drawn @ gap)
        low, high = np.nanquantile(ratios, [0.025, 0.975], axis=1)
        f = (values.mean(1) - nothing.mean()) / gap.mean()
        return frame.assign(faithfulness=f, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Faithfulness of circuits of growing size."""

    frame: pd.DataFrame
    """One row per circuit: ``by`` (edges, nodes or random), ``share`` (of all edges, or nodes), ``n``, ``connected``
    (edges on a path from the input to the metric), ``nodes``, ``draw``, ``value`` (mean metric), ``faithfulness``,
    ``low``, ``high`` (95% interval over pairs)."""
    gap: Interval
    """The metric of the whole model less that with no edge, on the judged pairs: what faithfulness is divided by."""

    @property
    def areas(self) -> pd.DataFrame:
        """A table of CPR and CMD, each over the share of edges and its logarithm, for each kind of circuit."""
        return curve_areas(self.frame)


def curve_areas(frame: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for by, own in frame.groupby("by", sort=False):
        f = own.groupby("share")["faithfulness"].agg(lambda draws: draws.to_numpy().mean())
        share, f = f.index.to_numpy(float), f.to_numpy(float)
        ways = itertools.product((False, True), (f, np.abs(1 - f)))
        rows.append([by, *(trapezoid_area(share, one, logarithmic=log) for log, one in ways)])
    return pd.DataFrame(rows, columns=["by", "cpr", "cmd", "cpr_log", "cmd_log"])


def smallest_faithful_share(frame: pd.DataFrame) -> float:
    """Return the smallest share that carries the metric, from a curve's table; nan if none does."""
    own = frame.loc[frame["by"].eq("edges")].sort_values("share", ascending=False)
    holds = own["low"].ge(CARRIES).to_numpy() & own["faithfulness"].le(AT_MOST).to_numpy()
    reached = own["share"].to_numpy(float)[np.logical_and.accumulate(holds)]
    return float(reached[-1]) if len(reached) else np.nan


def trapezoid_area(
    share: Float[np.ndarray, " sample"],
    value: Float[np.ndarray, " sample"],
    *,
    logarithmic: bool = False,
) -> float:
    """Return the area under ``value`` over ``share``; if ``logarithmic``, the mean of ``value`` over log share."""
    if len(share) < 2:
        return np.nan
    x = np.log(share) if logarithmic else share
    total = float(np.sum((value[1:] + value[:-1]) / 2 * np.diff(x)))
    return total / float(x[-1] - x[0]) if logarithmic else total


def compute_curve(
    judge: FaithfulnessJudge,
    mean: EdgeValues,
    *,
    asked: CircuitConfig,
    advance: Progress = lambda done: None,
) -> Curve:
    """Choose a circuit of each size in ``asked`` by the edges' scores ``mean``, and compute its faithfulness.

    ``mean`` is taken over other pairs than those of ``judge``. Cost: about two forwards of these for each circuit.
    """
    graph, generator = judge.runs.graph, np.random.default_rng([judge.seed, 3])
    outputs = output_readers(judge.runs.metric, graph)
    of_nodes = node_scores(graph, mean)
    rows: list[dict[str, object]] = []
    masks: list[EdgeMask] = []

    def add_circuit(by: str, share: float, n: int, mask: np.ndarray, draw: int = 0) -> None:
        rows.append({"by": by, "share": share, "n": n, "draw": draw})
        masks.append(mask)

    for share in sorted(asked.sizes):
        n = max(1, round(share * graph.n_edges))
        own = choose_edges(graph, mean, n, how=asked.choice, outputs=outputs)
        add_circuit("edges", share, n, own)
        if asked.nodes:
            wanted = max(1, round(share * len(graph.writers)))
            nodes = largest_edges(of_nodes, wanted)
            add_circuit("nodes", share, wanted, edges_between(graph, nodes))
        for draw in range(asked.random if share < 1 else 0):
            other = draw_random_circuit(graph, own, generator=generator)
            add_circuit("random", share, n, other, draw)
    return Curve(frame=judged_rows(judge, rows, masks, advance=advance), gap=judge.gap)


def judged_rows(
    judge: FaithfulnessJudge,
    rows: Sequence[dict[str, object]],
    circuits: Sequence[EdgeMask],
    *,
    advance: Progress = lambda done: None,
) -> pd.DataFrame:
    """Return a table of ``rows``, one per circuit, with ``connected``, ``nodes``, and its faithfulness."""
    counts = [_connected_counts(judge, one) for one in circuits]
    judged = judge.faithfulness_table(judge.metric_values(np.stack(circuits), advance=advance))
    return pd.concat([pd.DataFrame(rows), pd.DataFrame(counts), judged], axis=1)


def judge_circuits(
    judge: FaithfulnessJudge, circuits: Mapping[str, Sequence[EdgeMask]]
) -> pd.DataFrame:
    """Return ``judged_rows`` of circuits by kind, such as swapped."""
    rows = [
        {"by": by, "share": mask.mean(), "n": mask.sum(), "draw": draw}
        for by, masks in circuits.items()
        for draw, mask in enumerate(masks)
    ]
    return judged_rows(judge, rows, [mask for masks in circuits.values() for mask in masks])


def _connected_counts(judge: FaithfulnessJudge, circuit: EdgeMask) -> dict[str, int]:
    graph, connected = judge.runs.graph, judge.edges_on_paths(circuit)
    writes = np.bincount(graph.ends[1][connected], minlength=len(graph.writers)) > 0
    n = int(writes.sum())
    for reader in np.unique(graph.ends[2][connected]):  # one that writes to no edge is a node too
        own = graph.reader_of_node[reader]
        n, writes = n + (not (writes & own).any()), writes | own
    return {"connected": int(connected.sum()), "nodes": n}
