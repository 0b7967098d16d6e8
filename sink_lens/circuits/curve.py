"""The curve of a circuit: how much of the metric is left with only so many edges.

    faithfulness f(C) = (m(C) - m(0)) / (m(N) - m(0))

where N has every edge, 0 none, and m is the mean over pairs of the metric (MIB, arXiv 2504.13151). It is 1 for the
whole model and is not clipped: it is above 1 where the dropped edges lower the metric, and below 0 where the circuit
is worse than nothing. CPR is the area under f over the share of edges from 0 to 1, CMD the area of |1 - f|; on MIB's
linear axis half of either comes from circuits of more than half of the edges, so both are given over the logarithm of
the share too. The edges are chosen on one half of the pairs and judged on the other. A random circuit of the same
size, with as many edges between every two layers, stands beside each. Where the interval of m(N) - m(0) covers 0 there
is nothing to divide by, and f is not given.

A curve need not climb: where heads cancel, a circuit of one of them keeps too much and one of both nothing. So the
share that *carries* the metric (``steady_share``) is the smallest from which on every larger size that was run keeps at
least 80%, by the lower end of its interval, and at most 120%. Sizes are asked from the largest downwards and the first
that fails ends it, so that asking several does not make the 95% smaller.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from ..stats import Interval, interval
from .ablated import circuit_values
from .choice import (
    choose_edges,
    connected_edges,
    edges_between,
    largest_edges,
    node_scores,
    outputs_of,
    random_circuit_like,
)
from .config import AT_MOST, CARRIES, CircuitConfig
from .runs import Runs


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Gives circuits their faithfulness on some pairs."""

    runs: Runs = field(repr=False)
    """The pairs that circuits are judged on."""
    seed: int

    @cached_property
    def nothing(self) -> Float[np.ndarray, " pair"]:
        """The metric with no edge."""
        return circuit_values(self.runs, np.zeros((1, self.runs.graph.n_edges), dtype=bool))[0].numpy()

    @property
    def whole(self) -> Float[np.ndarray, " pair"]:
        """The metric of the whole model."""
        return self.runs.clean_values.double().numpy()

    @cached_property
    def gap(self) -> Interval:
        """The metric of all edges less that of none: what faithfulness is divided by."""
        return interval(self.whole - self.nothing, generator=np.random.default_rng([self.seed, 3]))

    @property
    def defined(self) -> bool:
        """True if the difference that faithfulness is divided by is told from 0."""
        return bool(self.gap.low > 0 or self.gap.high < 0)

    def on_paths(self, circuit: Bool[np.ndarray, " edge"]) -> Bool[np.ndarray, " edge"]:
        """Those edges of a circuit that are on a path from the input to the metric; only they are run, as in EAP-IG."""
        graph = self.runs.graph
        return connected_edges(graph, circuit, outputs=outputs_of(self.runs.metric, graph))

    def values(
        self, circuits: Bool[np.ndarray, "circuit edge"], *, advance: Callable[[float], object] = lambda circuits: None
    ) -> Float[np.ndarray, "circuit pair"]:
        """The metric of every circuit by pair; equal circuits are run once.

        A writer that reads no edge of the circuit computes on replaced streams, and what it makes of means, or of
        nothing, is not what replaces it. Its edges would carry that.
        """
        unlike: dict[bytes, int] = {}
        at = [unlike.setdefault(self.on_paths(one).tobytes(), len(unlike)) for one in circuits]
        different = np.stack([np.frombuffer(one, dtype=bool) for one in unlike])
        return circuit_values(self.runs, different, advance=advance).numpy()[at]

    def faithfulness_of(self, values: Float[np.ndarray, "circuit pair"]) -> pd.DataFrame:
        """``value`` (mean metric), ``faithfulness``, ``low`` and ``high`` (95%; nan for one pair) of every circuit.

        The pairs of numerator and denominator are drawn together, the same for every circuit.
        """
        n, gap = len(self.whole), self.whole - self.nothing
        f = (values.mean(1) - self.nothing.mean()) / gap.mean()
        low = high = np.full(len(f), np.nan)
        if n > 1:
            generator = np.random.default_rng([self.seed, 9])
            drawn = generator.multinomial(n, np.full(n, 1 / n), size=1000) / n
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = ((values - self.nothing[None]) @ drawn.T) / (drawn @ gap)[None]
            low, high = np.nanquantile(ratios, [0.025, 0.975], axis=1)
        frame = pd.DataFrame({"value": values.mean(1), "faithfulness": f, "low": low, "high": high})
        if not self.defined:
            frame[["faithfulness", "low", "high"]] = np.nan
        return frame


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
        """CPR and CMD, by edges and by nodes, on both axes; of random circuits too."""
        return areas_of(self.frame)


def areas_of(frame: pd.DataFrame) -> pd.DataFrame:
    """CPR and CMD of every kind of circuit in a curve's table, on both axes."""
    rows = []
    for by, own in frame.groupby("by", sort=False):
        f = own.groupby("share")["faithfulness"].agg(lambda draws: draws.to_numpy().mean())
        share, f = f.index.to_numpy(float), f.to_numpy(float)
        cpr, cmd = (area(share, one) for one in (f, np.abs(1 - f)))
        log_cpr, log_cmd = (area(share, one, logarithmic=True) for one in (f, np.abs(1 - f)))
        rows.append({"by": by, "cpr": cpr, "cmd": cmd, "cpr_log": log_cpr, "cmd_log": log_cmd})
    return pd.DataFrame(rows, columns=["by", "cpr", "cmd", "cpr_log", "cmd_log"])


def steady_share(frame: pd.DataFrame) -> float:
    """The share of a curve's table that carries the metric (see the module); nan if no size does."""
    own = frame.loc[frame["by"].eq("edges")].sort_values("share", ascending=False)
    holds = own["low"].ge(CARRIES).to_numpy() & own["faithfulness"].le(AT_MOST).to_numpy()
    reached = own["share"].to_numpy(float)[np.logical_and.accumulate(holds)]
    return float(reached[-1]) if len(reached) else float("nan")


def area(
    share: Float[np.ndarray, " sample"], value: Float[np.ndarray, " sample"], *, logarithmic: bool = False
) -> float:
    """Area under a curve by trapezoids: from the first share on, as MIB; over the logarithm, divided by its length."""
    if len(share) < 2:
        return float("nan")
    x = np.log(share) if logarithmic else share
    total = float(np.sum((value[1:] + value[:-1]) / 2 * np.diff(x)))
    return total / float(x[-1] - x[0]) if logarithmic else total


def curve(
    judge: Judge,
    mean: Float[np.ndarray, " edge"],
    *,
    asked: CircuitConfig,
    advance: Callable[[float], object] = lambda circuits: None,
) -> Curve:
    """Judge circuits of several sizes, whose edges scores of other pairs (``mean``) choose.

    Cost: about two forwards of the judged pairs for each circuit.
    """
    graph, generator = judge.runs.graph, np.random.default_rng([judge.seed, 3])
    outputs = outputs_of(judge.runs.metric, graph)
    of_nodes = node_scores(graph, mean)
    rows: list[dict[str, object]] = []
    masks: list[Bool[np.ndarray, " edge"]] = []

    def put(by: str, share: float, n: int, mask: Bool[np.ndarray, " edge"], draw: int = 0) -> None:
        """Add a circuit to run."""
        rows.append(size_fields(judge, mask) | {"by": by, "share": share, "n": n, "draw": draw})
        masks.append(mask)

    for share in sorted(asked.sizes):
        n = max(1, round(share * graph.n_edges))
        one = choose_edges(graph, mean, n, how=asked.choice, outputs=outputs)
        put("edges", share, n, one)
        if asked.nodes:
            wanted = max(1, round(share * len(graph.writers)))
            put("nodes", share, wanted, edges_between(graph, largest_edges(of_nodes, wanted)))
        if share < 1:
            for draw in range(asked.random):
                put("random", share, n, random_circuit_like(graph, one, generator=generator), draw)
    about = pd.DataFrame(rows)[["by", "share", "n", "connected", "nodes", "draw"]]
    judged = judge.faithfulness_of(judge.values(np.stack(masks), advance=advance))
    return Curve(frame=pd.concat([about, judged], axis=1), gap=judge.gap)


def size_fields(judge: Judge, circuit: Bool[np.ndarray, " edge"]) -> dict[str, object]:
    """Fields of a circuit's row in the curve: its edges, and the nodes that they touch."""
    connected = judge.on_paths(circuit)
    return {"connected": int(connected.sum()), "nodes": len(np.unique(judge.runs.graph.ends[1][connected])) + 1}
