"""A circuit that is given: of a paper, of another program, of a run.

judged = circuits.evaluate(lens, task, "ioi_heads.csv")
judged.frame           # faithfulness of the circuit, of all edges but its own, and of random ones
circuits.compare("runs/a", "runs/b").sentences
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ..configuration import make_config
from ..edits.metrics import Metric
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..patching.pairs import Sequences
from ..signatures import takes
from ..stats import Interval
from ..text import percent
from .choice import draw_random_circuit, swap_tenth
from .circuit import Circuit
from .config import OF_A_CHOICE, OF_A_RUN, CircuitConfig
from .curve import FaithfulnessJudge, compute_curve, judge_circuits
from .files import SavedCircuit, read
from .runs import run_given_pairs
from .stability import jaccard
from .tasks import Task

Given = Circuit | SavedCircuit | str | Path


@dataclass(frozen=True, kw_only=True)
class CircuitEvaluation:
    """How much of the metric a given circuit keeps, and how much is left without it."""

    frame: pd.DataFrame
    """One row per circuit: ``by`` (circuit; without, all edges but its own; random, of the same size and depth;
    swapped, the circuit with a tenth of its edges replaced by random ones between its own nodes; edges, a size of the
    curve of its file's scores), ``n``, ``connected``, ``nodes``, ``value``, ``faithfulness``, ``low``, ``high``, as in
    ``Curve.frame``."""
    gap: Interval
    """The metric of all edges less that of none."""

    @property
    def faithfulness(self) -> float:
        """Share of the metric that the circuit alone keeps: the whole model has 1, no edge 0; nan if undefined."""
        return float(self.frame["faithfulness"].iloc[0])

    @property
    def without_faithfulness(self) -> float:
        """Share of the metric that all edges outside the circuit keep.

        0 does not say that the circuit has all that the task needs: one edge that everything passes, such as that from
        the input to the first MLP, is enough to leave nothing without it.
        """
        return float(self.frame["faithfulness"].iloc[1])


@takes(CircuitConfig, leave_out=(*OF_A_RUN, *OF_A_CHOICE))
def evaluate(
    model: ModelLike,
    pairs: Task | tuple[Sequences, Sequences | None],
    circuit: Given,
    *,
    metric: Metric | None = None,
    sizes: Sequence[float] = (),
    random: int = 3,
    config: CircuitConfig | None = None,
    **fields: Any,
) -> CircuitEvaluation:
    """Compute how much of the metric a given circuit keeps on these pairs, and how much is left without it.

    Cost: two forwards, and about two for each circuit.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        pairs: a task, or clean and corrupted sequences.
        circuit: a circuit, or the path of one (``circuits.read``).
        metric: what is explained; the task's if None.
        sizes: also circuits of these shares of all edges, by the scores of the file.
        random: random circuits of the same size and depth, which hardly ever connect the input with the output, and
            as many swapped ones.
        config: the ablation, a frozen sink, spans, the seed; the default one if None.
        **fields: fields of ``CircuitConfig``, such as ``ablation="mean_ordinary"``.

    Raises:
        InputError: a circuit of another model, or an empty one; no metric; sizes without scores.
    """
    config = make_config(CircuitConfig, config, fields, where="circuits.evaluate")
    runs = run_given_pairs(model, pairs, metric=metric, config=config)
    own, graph = _as_saved_circuit(circuit, runs.lens).map_to_graph(runs.graph), runs.graph
    if not own.n_edges:
        raise InputError("the circuit has no edge; need one that is marked as in it")
    if len(sizes) and not own.scores.any():
        raise InputError(
            "sizes need scores, and the circuit has none; leave sizes out, or find a circuit of your own"
        )
    judge = FaithfulnessJudge(runs=runs, seed=config.seed)
    if own.found_on == runs.clean.hash:
        warnings.warn(
            "the circuit was found on these same pairs, which flatters it; need other pairs, such as another seed's",
            stacklevel=2,
        )
    if not judge.edges_on_paths(own.chosen).any():
        raise InputError(
            "no edge of the circuit lies on a path from the input to the metric; need one that does"
        )
    generator = np.random.default_rng([config.seed, 10])
    drawn = [draw_random_circuit(graph, own.chosen, generator=generator) for _ in range(random)]
    swapped = swap_tenth(
        graph, own.chosen, draws=random, generator=np.random.default_rng([config.seed, 11])
    )
    circuits = {"circuit": [own.chosen], "without": [~own.chosen]}
    circuits |= {"random": drawn, "swapped": swapped}
    frame = judge_circuits(judge, circuits).drop(columns=["share", "draw"])
    if len(sizes):
        asked = CircuitConfig(sizes=tuple(sizes), random=0, nodes=False)
        more = compute_curve(judge, own.scores, asked=asked).frame[list(frame.columns)]
        frame = pd.concat([frame, pd.DataFrame(more)], ignore_index=True)
    return CircuitEvaluation(frame=frame, gap=judge.gap)


def _as_saved_circuit(circuit: Given, lens: LensModel | None = None) -> SavedCircuit:
    if isinstance(circuit, Circuit):
        found_on = "" if circuit.given else circuit.runs.clean.hash
        return SavedCircuit(
            graph=circuit.graph,
            scores=circuit.mean_scores,
            chosen=circuit.chosen,
            found_on=found_on,
        )
    return circuit if isinstance(circuit, SavedCircuit) else read(circuit, model=lens)


@dataclass(frozen=True, kw_only=True)
class CircuitComparison:
    """Two circuits of one model, edge by edge."""

    frame: pd.DataFrame
    """The edges of either: ``edge``, ``one``, ``other`` (it has it), ``score_one``, ``score_other``
    (nan if it has no scores, or none by span)."""
    jaccard: float
    """Edges of both over those of either."""
    rank_correlation: float
    """Rank correlation of the magnitudes of all scores; nan if a circuit has none."""
    copies: int = 1
    """How often an edge of the second circuit counts: once in each span of the first, if the second has no spans."""
    folder: None = None
    """It is no run."""
    finished: bool = True

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences on how many edges both have, and how their scores agree."""
        one, other = (self.frame[name].to_numpy(bool) for name in ("one", "other"))
        both = int((one & other).sum())
        told = [
            f"The first circuit has {one.sum():,} edges, the second {other.sum():,}; {both:,} are in both, "
            f"{percent(self.jaccard)} of those in either."
        ]
        if self.copies > 1:
            told.append(
                f"The second names no spans, so each of its edges counts {self.copies} times: once in each span."
            )
        if np.isfinite(self.rank_correlation):
            told.append(
                f"The magnitudes of all scores have a rank correlation of {self.rank_correlation:.2f}."
            )
        return tuple(told)


def compare(one: Given, other: Given, *, model: ModelLike | None = None) -> CircuitComparison:
    """Compare two circuits of one model edge by edge.

    Args:
        one: the first circuit, or its path.
        other: the second circuit, or its path.
        model: the model; lists of edges or nodes need it.

    Raises:
        InputError: a circuit that cannot be read, or two of different models.
    """
    lens = None if model is None else as_lens(model)
    first, found = (_as_saved_circuit(circuit, lens) for circuit in (one, other))
    second = found.map_to_graph(first.graph)
    if (found.graph.spans, {*found.graph.neurons}) != (first.graph.spans, {*first.graph.neurons}):
        # its scores are sums over all positions, or of whole MLPs
        second = replace(second, scores=np.zeros(first.graph.n_edges))
    either = np.flatnonzero(first.chosen | second.chosen)
    sizes = np.abs(first.scores), np.abs(second.scores)
    order = either[np.argsort(-np.maximum(*sizes)[either], kind="stable")]
    frame = pd.DataFrame({"edge": first.graph.names[order]})
    frame["one"], frame["other"] = first.chosen[order], second.chosen[order]
    for name, own in (("score_one", first), ("score_other", second)):
        frame[name] = own.scores[order].astype(float) if own.scores.any() else np.nan
    ranked = np.ptp(first.scores) and np.ptp(second.scores)
    rank: Any = spearmanr(*sizes) if ranked else None
    return CircuitComparison(
        frame=frame,
        jaccard=jaccard(first.chosen, second.chosen),
        rank_correlation=float(rank.statistic) if ranked else np.nan,
        copies=len(first.graph.spans) if found.graph.spans == ("",) else 1,
    )
