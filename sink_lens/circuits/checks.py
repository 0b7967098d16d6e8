"""Real patches beside scores: of sampled edges, of every node, and of a core as a whole.

A core edge is *confirmed* if its real patch changes the metric. Two edges that cancel pass that test though together
they do nothing. So edges of a core that share a writer or a reader, and whose effects cancel, are replaced together
too; those that can go together at no loss are not confirmed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.stats import spearmanr

from ..progress import tqdm
from . import stability
from .ablated import compute_circuit_metrics
from .choice import node_scores
from .exact import exact_node_scores, exact_scores
from .graph import EdgeMask, Graph
from .runs import Runs
from .scores import Scores

CONFIRMED = 0.01
"""An edge is confirmed if its real patch changes the metric by at least this share of what all edges do."""
NODE_EFFECT = 0.05
"""Share of what all edges do from which on a node does much."""
UNSEEN = 0.1
"""Gradients do not see a node if its edges' magnitudes sum to at most this part of its real effect."""
_CANCELS, _LOSS, _MOST_GROUPS = 0.25, 0.05, 60
"""Edges cancel if their effects sum to at most this part of the largest. They can go at no loss if without them the
metric changes by less than this part of the largest effect (between 1% and 5% of what all edges do). Groups of such
edges that are patched."""


@dataclass(frozen=True, kw_only=True)
class ScoreCheck:
    """Scores beside real patches of the same edges."""

    frame: pd.DataFrame
    """One row per sampled edge: ``edge``, ``score``, ``exact``, ``error`` (score - exact), ``drawn`` (from where)."""
    weakest: float
    """Smallest magnitude of a score in the circuit."""
    n_outside: int
    n_gates: int = 0
    """Edges outside that no patch of one edge reaches: those into a gate of a head's output."""

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of score and exact effect; nan for fewer than 3 edges or constant values."""
        one, other = self.frame["score"].to_numpy(), self.frame["exact"].to_numpy()
        if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
            return np.nan
        return float(cast("Any", spearmanr(one, other)).statistic)

    @property
    def outside_counts(self) -> tuple[int, int]:
        """Numbers of sampled edges outside the circuit: those with more effect than its weakest score, and all."""
        real = self.frame.loc[self.frame["drawn"].eq("other"), "exact"].abs()
        return int((real > self.weakest).sum()), len(real)

    @property
    def most_outside(self) -> int:
        """Upper 95% bound of the number of edges outside the circuit with more effect than its weakest score.

        All edges into gates count, since none of them was sampled.
        """
        found, sampled = self.outside_counts
        total = self.n_outside - self.n_gates
        return self.n_gates + stability.upper_bound_of_count(found, sampled=sampled, total=total)

    @property
    def missed(self) -> float:
        """Share of the effects that scores miss: sum of |score - exact| over sum of |exact|; nan if they are 0."""
        off, total = (np.abs(self.frame[name].to_numpy(float)).sum() for name in ("error", "exact"))
        return float(off / total) if total else np.nan


def check_edges(
    runs: Runs,
    scores: Scores,
    chosen: EdgeMask,
    *,
    seed: int,
    edges: int,
    pairs: int,
    progress: bool,
) -> ScoreCheck:
    generator, names = np.random.default_rng([seed, 4]), scores.graph.names
    able = patchable_edges(names)
    inside, outside = np.flatnonzero(chosen & able), np.flatnonzero(~chosen & able)
    some = generator.choice(inside, min(len(inside), edges - edges // 2), replace=False)
    rest = generator.choice(outside, min(len(outside), edges // 2), replace=False)
    numbers = np.concatenate([some, rest])
    rows, real = _patch_edges(runs, numbers, pairs=pairs, generator=generator, progress=progress)
    found = scores.values[rows][:, numbers].mean(0)
    frame = pd.DataFrame({"edge": names[numbers], "score": found.astype(float), "exact": real})
    drawn = ["circuit"] * len(some) + ["other"] * len(rest)
    return make_check(scores, chosen, frame.assign(error=found - real, drawn=drawn))


def make_check(scores: Scores, chosen: EdgeMask, frame: pd.DataFrame) -> ScoreCheck:
    inside = np.abs(scores.mean[chosen])
    outside = patchable_edges(scores.graph.names[~chosen])
    return ScoreCheck(
        frame=frame,
        weakest=float(inside.min()) if len(inside) else np.nan,
        n_outside=len(outside),
        n_gates=int((~outside).sum()),
    )


def check_nodes(
    runs: Runs, scores: Scores, *, difference: float, seed: int, pairs: int, progress: bool
) -> pd.DataFrame:
    graph, rows = scores.graph, _draw_pairs(runs, pairs, np.random.default_rng([seed, 8]))
    with _patch_bar(len(graph.writers), unit="node", progress=progress) as bar:
        exact = exact_node_scores(runs.select_pairs(rows), advance=bar.update).mean(0)
    values = scores.values[rows].mean(0)
    magnitude = node_scores(graph, np.abs(values))
    much = np.abs(exact) >= NODE_EFFECT * abs(difference)
    scored = node_scores(graph, values)
    missed = (magnitude <= UNSEEN * np.abs(exact)) | (scored * exact < 0)
    frame = pd.DataFrame({"node": [one.name for one in graph.writers], "score": scored})
    return frame.assign(magnitude=magnitude, exact=exact, unseen=much & missed)


def patch_core(
    runs: Runs,
    edges: np.ndarray,
    *,
    difference: float,
    seed: int,
    pairs: int,
    progress: bool = False,
) -> tuple[Float[np.ndarray, " sample"], Bool[np.ndarray, " sample"]]:
    """Patch each of ``edges``, a core, alone; then patch groups of them whose effects cancel.

    Cost: a run of ``pairs`` pairs, drawn by ``seed``, for each edge and group. ``difference`` is the effect of
    replacing all edges. Return the effect of each edge, and a mask of those that can go together at no loss.
    """
    rows, real = _patch_edges(
        runs, edges, pairs=pairs, generator=np.random.default_rng([seed, 7]), progress=progress
    )
    difference, runs = abs(difference), runs.select_pairs(rows)
    own = np.abs(real) >= CONFIRMED * difference
    groups = cancelling_groups(runs.graph, edges[own], real[own])
    size = np.zeros(runs.graph.n_edges)
    size[edges] = np.abs(real)

    def is_without_loss(some: Sequence[np.ndarray]) -> np.ndarray:
        kept = np.ones((len(some), runs.graph.n_edges), dtype=bool)
        for row, group in enumerate(some):
            kept[row, group] = False
        lost = runs.clean_values - compute_circuit_metrics(runs, kept)
        largest = np.array([size[group].max() for group in some])
        allowed = np.clip(_LOSS * largest, CONFIRMED * difference, _LOSS * difference)
        return np.abs(lost.mean(1).numpy()) < allowed

    gone = np.array([], dtype=int)
    alone = is_without_loss(groups) if groups else ()
    for group in (group for group, can_go in zip(groups, alone, strict=True) if can_go):
        both = np.union1d(gone, group)
        if len(both) > len(gone) and (not len(gone) or is_without_loss([both])[0]):
            gone = both
    return real, np.isin(edges, gone)


def _patch_edges(
    runs: Runs, edges: np.ndarray, *, pairs: int, generator: np.random.Generator, progress: bool
) -> tuple[list[int], Float[np.ndarray, " sample"]]:
    """Patch each edge alone on random pairs; return the pairs' indices and each mean effect."""
    rows = _draw_pairs(runs, pairs, generator)
    with _patch_bar(len(edges), unit="edge", progress=progress) as bar:
        real = exact_scores(runs.select_pairs(rows), edges.tolist(), advance=bar.update)
    return rows, real.mean(0)


def _patch_bar(total: int, *, unit: str, progress: bool) -> tqdm:
    return tqdm(total=total, desc="real patches", unit=unit, disable=not progress, leave=False)


def _draw_pairs(runs: Runs, pairs: int, generator: np.random.Generator) -> list[int]:
    return np.sort(generator.choice(runs.n_pairs, min(pairs, runs.n_pairs), replace=False)).tolist()


def patchable_edges(names: np.ndarray) -> EdgeMask:
    """Return a mask of the edges that can be patched alone: all but those into a gate of a head's output (``<g>``)."""
    return np.array(["<g>" not in name for name in names], dtype=bool)


def cancelling_groups(
    graph: Graph, edges: np.ndarray, effects: Float[np.ndarray, " sample"]
) -> list[np.ndarray]:
    """Return at most 60 groups of ``edges`` that share a writer or reader, and whose ``effects`` sum to nearly 0."""
    spans, writers, readers = (one[edges] for one in graph.ends)
    found: dict[tuple[int, ...], float] = {}

    def keep_if_cancelling(rows: np.ndarray) -> None:
        largest = float(np.abs(effects[rows]).max())
        if abs(float(effects[rows].sum())) <= _CANCELS * largest:
            found[tuple(sorted(edges[rows].tolist()))] = largest

    for ends in (writers, readers):
        keys = np.stack([spans, ends])
        for key in np.unique(keys, axis=1).T:
            rows = np.flatnonzero((keys == key[:, None]).all(0))
            up, down = rows[effects[rows] > 0], rows[effects[rows] < 0]
            for one in up:
                for other in down:
                    keep_if_cancelling(np.array([one, other]))
            if len(up) and len(down):
                keep_if_cancelling(rows)
    largest_first = sorted(found, key=lambda group: -found[group])
    return [np.array(group) for group in largest_first[:_MOST_GROUPS]]
