"""The curve of a circuit: how much of the metric is left with only so many edges.

    faithfulness f(C) = (m(C) - m(0)) / (m(N) - m(0))

where N has every edge, 0 none, and m is the mean over pairs of the metric (MIB, arXiv 2504.13151). It is 1 for the
whole model and is not clipped: it is above 1 where the dropped edges lower the metric, and below 0 where the circuit
is worse than nothing. CPR is the area under f over the share of edges from 0 to 1, CMD the area of |1 - f|; on MIB's
linear axis half of either comes from circuits of more than half of the edges, so both are given over the logarithm of
the share too. The edges are chosen on one half of the pairs and judged on the other. A random circuit of the same
size, with as many edges between every two layers, stands beside each. Where the interval of m(N) - m(0) covers 0 there
is nothing to divide by, and f is not given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from ..errors import InputError
from ..stats import Interval, interval
from .ablated import circuit_values
from .choice import between, chosen, connected, largest, node_scores, outputs_of, random_like
from .config import SIZES, Choice
from .runs import Runs
from .scores import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Faithfulness of circuits of growing size."""

    frame: pd.DataFrame
    """One row per circuit: ``by`` (edges, nodes or random), ``share`` (of all edges, or nodes), ``n``, ``connected``
    (edges on a path from the input to the metric), ``nodes``, ``draw``, ``value`` (mean metric), ``faithfulness``,
    ``low``, ``high`` (95% interval over pairs)."""
    values: Float[np.ndarray, "circuit pair"] = field(repr=False)
    """The metric of each row by judged pair."""
    whole: Interval
    """The metric of the whole model on the judged pairs."""
    empty: Interval
    """The metric with no edge."""
    gap: Interval
    """Their difference: what faithfulness is divided by."""
    n_chosen: int
    """Pairs that the edges were chosen on."""
    n_judged: int

    @property
    def defined(self) -> bool:
        """Return whether the difference that faithfulness is divided by is told from 0."""
        return bool(self.gap.low > 0 or self.gap.high < 0)

    @property
    def areas(self) -> pd.DataFrame:
        """CPR and CMD, by edges and by nodes, on both axes; of random circuits too."""
        rows = []
        for by in dict.fromkeys(self.frame["by"].tolist()):
            own = self.frame.loc[self.frame["by"].eq(by)]
            share = np.unique(own["share"].to_numpy(float))
            f = np.array([own.loc[own["share"].eq(one), "faithfulness"].to_numpy(float).mean() for one in share])
            cpr, cmd = (area(share, one) for one in (f, np.abs(1 - f)))
            log_cpr, log_cmd = (area(share, one, logarithmic=True) for one in (f, np.abs(1 - f)))
            rows.append({"by": by, "cpr": cpr, "cmd": cmd, "cpr_log": log_cpr, "cmd_log": log_cmd})
        return pd.DataFrame(rows, columns=["by", "cpr", "cmd", "cpr_log", "cmd_log"])

    def smallest(self, *, at_least: float = 0.8, by: str = "edges") -> float:
        """The smallest share whose faithfulness reaches a value; nan if none does."""
        reached = self.frame["by"].eq(by) & self.frame["faithfulness"].ge(at_least)
        found = self.frame.loc[reached, "share"].to_numpy(float)
        return float(found.min()) if len(found) else float("nan")


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
    runs: Runs,
    scores: Scores,
    *,
    choose_on: Sequence[int],
    judge_on: Sequence[int],
    sizes: Sequence[float] = SIZES,
    choice: Choice = "top",
    random: int = 3,
    nodes: bool = True,
    generator: np.random.Generator,
    advance: Callable[[float], object] = lambda circuits: None,
) -> Curve:
    """Judge circuits of several sizes.

    Cost: about two forwards of the judged pairs for each circuit; there are (1 + nodes + random) of each size.

    Args:
        runs: all pairs.
        scores: by pair.
        choose_on: pairs whose scores choose the edges.
        judge_on: pairs on which circuits are run.
        sizes: shares of all edges, above 0 and at most 1.
        choice: ``top`` or ``greedy``.
        random: random circuits of each size below 1.
        nodes: also judge circuits of nodes: all edges between the nodes with the largest scores.
        generator: source of the random circuits and intervals.
        advance: called with the number of circuits that were finished.

    Raises:
        InputError: a size outside (0, 1].
    """
    if not sizes or min(sizes) <= 0 or max(sizes) > 1:
        raise InputError(f"sizes are {list(sizes)}; need shares of all edges, above 0 and at most 1")
    graph = scores.graph
    outputs = outputs_of(runs.metric, graph)
    mean = scores.values[list(choose_on)].mean(0)
    of_nodes = node_scores(graph, mean)
    rows: list[dict[str, object]] = []
    masks: list[Bool[np.ndarray, " edge"]] = []

    def put(by: str, share: float, n: int, mask: Bool[np.ndarray, " edge"], draw: int = 0) -> None:
        """Add a circuit to run."""
        used = connected(graph, mask, outputs=outputs)
        count = len(np.unique(graph.ends[1][used])) + 1
        rows.append({"by": by, "share": share, "n": n, "connected": int(used.sum()), "nodes": count, "draw": draw})
        masks.append(used)

    for share in sorted(sizes):
        n = max(1, round(share * graph.n_edges))
        one = chosen(graph, mean, choice=choice, n=n, outputs=outputs)
        put("edges", share, n, one)
        if nodes:
            wanted = max(1, round(share * len(graph.writers)))
            put("nodes", share, wanted, between(graph, largest(of_nodes, wanted)))
        if share < 1:
            for draw in range(random):
                put("random", share, n, random_like(graph, one, generator=generator), draw)
    judged = runs.some(judge_on)
    unlike: dict[bytes, int] = {}
    at = [unlike.setdefault(mask.tobytes(), len(unlike)) for mask in masks]
    empty = np.zeros(graph.n_edges, dtype=bool)
    different = np.stack([np.frombuffer(one, dtype=bool) for one in unlike] + [empty])
    found = circuit_values(judged, different, advance=advance).numpy()
    nothing, values = found[-1], found[at]
    whole = judged.clean_values.double().numpy()
    gap = interval(whole - nothing, generator=generator)
    result = Curve(
        frame=pd.DataFrame(rows),
        values=values,
        whole=interval(whole, generator=generator),
        empty=interval(nothing, generator=generator),
        gap=gap,
        n_chosen=len(choose_on),
        n_judged=len(judge_on),
    )
    f, low, high = _faithfulness(values, whole=whole, nothing=nothing, generator=generator)
    undefined = np.full(len(f), np.nan)
    result.frame["value"] = values.mean(1)
    for name, column in (("faithfulness", f), ("low", low), ("high", high)):
        result.frame[name] = column if result.defined else undefined
    return result


def _faithfulness(
    values: Float[np.ndarray, "circuit pair"],
    *,
    whole: Float[np.ndarray, " pair"],
    nothing: Float[np.ndarray, " pair"],
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Faithfulness with its bootstrap interval; numerator and denominator are drawn together."""
    f = (values.mean(1) - nothing.mean()) / (whole.mean() - nothing.mean())
    drawn = generator.multinomial(len(whole), np.full(len(whole), 1 / len(whole)), size=1000) / len(whole)
    below = drawn @ (whole - nothing)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = ((values - nothing[None]) @ drawn.T) / below[None]
    low, high = np.nanquantile(ratios, [0.025, 0.975], axis=1)
    return f, low, high
