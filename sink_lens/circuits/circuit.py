"""``find``: score every edge, choose a circuit, and keep what is needed to judge, save and draw it.

circuit = circuits.find(lens, circuits.task(lens, "ioi", pairs=64))
circuit.evaluate().frame        # faithfulness by size, on pairs that chose no edge
circuit.save("circuit.json")    # EAP-IG's format; .svg, .png, .pdf, graph JSON and folders too
circuit.draw()
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from ..configuration import make_config
from ..data.tokens import count_copies
from ..edits.metrics import Metric
from ..edits.outcome import Outcome
from ..engine.answers import answers
from ..errors import InputError
from ..files import refuse_tilde
from ..models.load import ModelLike
from ..patching.config import refuse_equal_tokens
from ..patching.pairs import Sequences
from ..progress import tqdm
from ..records import display
from ..signatures import takes
from ..stats import ROUNDING, Interval
from ..text import name_in_words
from . import checks, stability
from .ablated import compute_circuit_metrics
from .checks import ScoreCheck
from .choice import choose_edges, connected_edges, output_readers, strongest_edges
from .config import EDGES, MOST_DRAWN, OF_A_RUN, SIZES, Choice, CircuitConfig
from .curve import (
    Curve,
    FaithfulnessJudge,
    compute_curve,
    faithfulness_fields,
    smallest_faithful_share,
)
from .files import SavedCircuit
from .graph import EdgeMask, EdgeValues, Graph
from .runs import Runs, run_given_pairs
from .scores import Scores
from .scoring import score_edges
from .tables import every_edge_table, largest_edge_table, node_table
from .tasks import Task

Rule = Literal["asked", "threshold", "smallest", "none", "unjudged", "given"]

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..report.explorer import Explorer
    from .picture import EdgeCircuit


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """A circuit that was found: the scores of all edges of a model for one metric, and the edges that were chosen."""

    runs: Runs = field(repr=False)
    scores: Scores = field(repr=False)
    chosen: EdgeMask = field(repr=False)
    """The edges of the circuit: chosen, and on a path from the input to the metric."""
    choice: Choice
    size: int
    """Edges that were taken, as many as were asked for if there are so many; those that lead nowhere were dropped."""
    rule: Rule = "asked"
    """How the size was chosen: ``asked`` or by a ``threshold``; ``smallest`` (that carries the metric) or ``none``
    (no size does); ``unjudged`` (one pair, which leaves none to judge sizes on); ``given`` (the circuit was)."""
    rows: tuple[int, ...] = field(default=(), repr=False)
    """Pairs whose scores chose the edges; all if empty."""
    templates: tuple[str, ...] = field(repr=False)
    seed: int

    @property
    def graph(self) -> Graph:
        """The graph of the model."""
        return self.scores.graph

    @property
    def n_edges(self) -> int:
        """Number of edges of the circuit."""
        return int(self.chosen.sum())

    @property
    def given(self) -> bool:
        """True if no pair chose it: all judge it, and ``rows`` choose the part that is drawn."""
        return self.rule == "given"

    def __repr__(self) -> str:
        return (
            f"Circuit({self.n_edges:,} of {self.graph.n_edges:,} edges, {self.runs.metric.name} of "
            f"{self.runs.lens.name}, {self.scores.method}, {self.runs.ablation}, {self.runs.n_pairs} pairs)"
        )

    def __str__(self) -> str:
        return "\n".join([repr(self), *self._brief_sentences()])

    def _brief_sentences(self) -> list[str]:
        from .sentences import brief_sentences

        row = self.choice_fields | {"seen": False}
        if row["judged_on"]:
            gap, rows = self.faithfulness_judge.gap, self.faithfulness_rows.to_dict("records")
            row |= {"gap": gap.estimate, "gap_low": gap.low, "gap_high": gap.high}
            for prefix, own in zip(("", "without_"), rows, strict=True):
                row |= faithfulness_fields(own, prefix)
        return brief_sentences(row)

    @property
    def choice_fields(self) -> dict[str, Any]:
        """The fields of a run's summary on how the circuit was chosen, and how many pairs judge it."""
        runs = self.runs
        return {
            "metric": runs.metric.name,
            "method": self.scores.method,
            "ablation": runs.ablation,
            "frozen": -1 if runs.frozen is None else runs.frozen,
            "pairs": runs.n_pairs,
            "chosen_on": 0 if self.given else len(self.rows),
            "judged_on": self.faithfulness_judge.runs.n_pairs if self.rows or self.given else 0,
            "rule": self.rule,
            "edges": self.n_edges,
            "asked_edges": self.size,
            "all_edges": self.graph.n_edges,
        }

    @cached_property
    def difference(self) -> float:
        """The mean over pairs of the whole model's metric minus the metric with all edges ablated.

        ``runs.gap`` is another difference: there only the input is replaced, which may change little under means.
        """
        if self.runs.corrupts_all and self.runs.masks is None:
            return float(self.runs.gap.mean())
        nothing = compute_circuit_metrics(self.runs, np.zeros((1, self.graph.n_edges), dtype=bool))
        return float((self.runs.clean_values - nothing[0]).mean())

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices of the readers that the metric depends on: the logits, or queries and keys of its layers."""
        return output_readers(self.runs.metric, self.graph)

    @cached_property
    def first_answer(self) -> tuple[str, float]:
        """The likeliest token after the first clean prompt, and its probability; "" if there are no pairs.

        Cost: one forward pass of the prompt.
        """
        if self.runs.corrupted is None:
            return "", np.nan
        self.runs.check_weights()
        likeliest = answers(self.runs.lens, self.runs.clean[:1], top=1).iloc[0]
        return str(likeliest["token"]), float(likeliest["probability"])

    @cached_property
    def faithfulness_judge(self) -> FaithfulnessJudge:
        """The judge of faithfulness, on the half of the pairs that chose no edge, or on all of a given circuit.

        Raises:
            InputError: there is one pair, and the circuit was chosen.
        """
        runs = self.runs
        if not self.given:
            if runs.n_pairs < 2:
                raise InputError(
                    "a single pair cannot both choose and judge edges; need at least 2 pairs"
                )
            runs = runs.select_pairs(self.halves[1].tolist())
        return FaithfulnessJudge(runs=runs, seed=self.seed)

    @cached_property
    def faithfulness_rows(self) -> pd.DataFrame:
        """Metric and faithfulness of the circuit, and of all edges but its own, on ``faithfulness_judge``'s pairs.

        Cost: about three forward passes of these pairs.
        """
        judge = self.faithfulness_judge
        return judge.faithfulness_table(judge.metric_values(np.stack([self.chosen, ~self.chosen])))

    @property
    def faithfulness(self) -> Interval:
        """Share of the metric that the circuit keeps, on ``n`` pairs that chose no edge; the whole model has 1.

        nan where all pairs chose it, as a single one does, or where no edge at all keeps as much as the whole model.
        """
        if not (self.rows or self.given):
            return Interval(estimate=np.nan, low=np.nan, high=np.nan, n=0)
        kept, low, high = self.faithfulness_rows[["faithfulness", "low", "high"]].iloc[0].tolist()
        return Interval(estimate=kept, low=low, high=high, n=self.faithfulness_judge.runs.n_pairs)

    @property
    def mean_scores(self) -> EdgeValues:
        """Mean score of every edge, over the pairs that chose the circuit."""
        return self.scores.values[list(self.rows)].mean(0) if self.rows else self.scores.mean

    @cached_property
    def bootstrap_weights(self) -> Float[np.ndarray, "sample pair"]:
        """Weight of each pair in each of 1,000 bootstrap samples; pairs are drawn within their template."""
        return stability.bootstrap_weights(
            self.templates, draws=1000, generator=np.random.default_rng([self.seed, 1])
        )

    @cached_property
    def inclusion(self) -> EdgeValues:
        """Share of the bootstraps in which each edge is among the ``size`` edges of largest absolute mean score."""
        return stability.inclusion_probabilities(
            self.scores.values, self.bootstrap_weights, n=self.size
        )

    @cached_property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the pairs that choose edges, and of those that judge circuits."""
        return stability.random_halves(
            self.templates, generator=np.random.default_rng([self.seed, 2])
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A table of the circuit's edges and of the next largest ones, sorted by absolute score.

        Columns: ``edge``, ``writer``, ``reader``, ``span``, ``score`` (mean over pairs), ``low``, ``high`` (95%
        interval), ``share`` (score over the mean difference of the metric), ``inclusion``, ``in_circuit``, ``drawn``
        (it is in the picture).
        """
        return largest_edge_table(
            self.every_edge,
            self.scores,
            weights=self.bootstrap_weights,
            drawn=self.strongest_edges(),
        )

    @property
    def edges(self) -> pd.DataFrame:
        """The rows of ``frame`` that are in the circuit, sorted by absolute score."""
        return self.frame.loc[self.frame["in_circuit"]].reset_index(drop=True)

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """A table of the writers (input, heads, MLPs), sorted by absolute score.

        Columns: ``node``, ``kind``, ``layer``, ``head``, ``score`` (sum of the edges out of it), ``edges_in`` and
        ``edges_out`` of the circuit, ``in_circuit``.
        """
        return node_table(self.scores, self.chosen)

    def with_size(self, n: int) -> "Circuit":
        """Choose ``n`` edges by the same scores and rule, and return the circuit of those on a path to an output.

        ``size`` is less than ``n`` where the model has fewer edges, or ``greedy`` reaches fewer.
        """
        mask = choose_edges(self.graph, self.mean_scores, n, how=self.choice, outputs=self.outputs)
        return take_edges(self, mask, rule="asked")

    def strongest_edges(self, most: int = MOST_DRAWN) -> EdgeMask:
        """Return a mask of the edges that a picture shows: the circuit's largest that lie on paths, at most ``most``.

        A path leads from the input to an output. If ``most`` edges form no path, the ``most`` largest edges are marked.
        """
        return strongest_edges(
            self.graph, self.mean_scores, self.chosen, most=most, outputs=self.outputs
        )

    def evaluate(
        self,
        sizes: Sequence[float] = SIZES,
        *,
        random: int = 3,
        nodes: bool = True,
        progress: bool = True,
    ) -> Curve:
        """Compute the faithfulness of circuits of several ``sizes`` (shares of all edges).

        They are chosen on half of the pairs and judged on the others, also for a given circuit. ``random`` random
        circuits stand beside each; with ``nodes``, circuits of whole nodes are judged too.
        """
        asked = CircuitConfig(sizes=tuple(sizes), choice=self.choice, random=random, nodes=nodes)
        found = replace(self, rule="asked") if self.given else self
        judge, mean = found.faithfulness_judge, self.scores.values[self.halves[0]].mean(0)
        total = asked.n_curve_circuits
        with tqdm(
            total=total, desc="curve", unit="circuit", disable=not progress, leave=False
        ) as bar:
            return compute_curve(judge, mean, asked=asked, advance=bar.update)

    def check(self, *, edges: int = 30, pairs: int = 8, progress: bool = True) -> ScoreCheck:
        """Compare the scores of ``edges`` sampled edges with their effects when each edge is really patched.

        Half of the edges are drawn from the circuit, half from the edges outside it (fewer where there are not so
        many). The second half bounds how many edges the circuit lacks (``ScoreCheck.most_outside``).

        Cost: one run of ``pairs`` pairs for each edge, from its reader on.
        """
        return checks.check_edges(
            self.runs,
            self.scores,
            self.chosen,
            seed=self.seed,
            edges=edges,
            pairs=pairs,
            progress=progress,
        )

    def check_nodes(self, *, pairs: int = 4, progress: bool = True) -> pd.DataFrame:
        """Compare a real patch of each node with its edges' scores, to find nodes whose effect the scores miss.

        Two parts that cancel before a threshold change together along the integral, and their edges get no score. A
        patch of one part alone crosses the threshold.

        Cost: one run of ``pairs`` pairs for each node, from its layer on.

        Returns:
            One row per writer: ``node``, ``score`` and ``magnitude`` (sums of its edges' scores and their magnitudes),
            ``exact`` (effect of its real patch) and ``unseen`` (this effect is at least 5% of the metric's difference,
            and has the other sign than the score, or ten times the magnitude).
        """
        return checks.check_nodes(
            self.runs,
            self.scores,
            difference=self.difference,
            seed=self.seed,
            pairs=pairs,
            progress=progress,
        )

    @cached_property
    def every_edge(self) -> pd.DataFrame:
        """A table of all edges of the model: score, standard error over pairs, inclusion probability."""
        return every_edge_table(self.scores, self.chosen, self.inclusion)

    def save(self, path: str | Path) -> Path:
        """Save the circuit; the ending of the path chooses the format.

        ``.json``: EAP-IG's format; a path without an ending: a folder as MIB takes it. ``.graph.json``: Neuronpedia's
        attribution graph of the circuit's edges. ``.svg``, ``.png``, ``.pdf``: the picture. ``.html``: a page to
        explore it in. ``.parquet``: every edge, one row each.

        Raises:
            InputError: another ending, or a graph that the format cannot hold.
        """
        refuse_tilde(path, what="the file of the circuit")  # before its parts are computed
        return self._shown().save(path)

    def explore(self, curve: Curve | None = None) -> "Explorer":
        """Make an interactive page of the largest edges; ``.save("c.html")`` writes it, and a notebook shows it.

        Args:
            curve: the result of ``evaluate``; with it, the page says how faithful the shown circuit is.
        """
        return self._shown(curve=curve).explore()

    def draw(
        self,
        style: Literal["page", "paper"] = "page",
        *,
        most: int = MOST_DRAWN,
        width: float | None = None,
    ) -> "Figure":
        """Draw the circuit as a matplotlib figure.

        Args:
            style: ``page`` draws the strongest edges between nodes sorted by layer; ``paper`` draws the few edges that
                matter most for the metric, each with its number.
            most: largest number of edges in the style ``page``.
            width: width in inches in the style ``paper``; a single column has 3.25.

        Raises:
            InputError: another style, or more than fits into the width.
        """
        if most < 1:
            raise InputError(f"most is {most}; need at least 1 edge to draw")
        return self._shown(most).draw(style, width=width)

    def _shown(self, most: int = MOST_DRAWN, curve: Curve | None = None) -> "EdgeCircuit":
        from ..report.explorer import answer_fields, curve_rows, edge_graph, edges_for_page
        from .picture import EdgeCircuit  # late: it loads matplotlib

        graph, runs = self.graph, self.runs
        metric = name_in_words(runs.metric.name)
        title = f"The circuit of {metric}, {runs.lens.name}"
        outputs = [graph.readers[one].name for one in self.outputs]
        drawn = graph.names[self.strongest_edges(most)].tolist()

        def make_graph(others: bool) -> dict[str, Any]:
            tokens, every = runs.first_prompt_tokens, self.every_edge
            about = {} if curve is None else {"curve": curve_rows(curve.frame)}
            return edge_graph(
                edges_for_page(every) if others else every.loc[self.chosen],
                model=runs.lens.name,
                tokens=tokens,
                **answer_fields("".join(tokens), *self.first_answer),
                n_edges=graph.n_edges,
                ablation=runs.ablation,
                outputs=outputs,
                title=title,
                n_layers=graph.n_layers,
                group=graph.heads_per_key,
                size=self.size,
                method=self.scores.method,
                **about,
            )

        def read_every() -> pd.DataFrame:
            every = self.every_edge.copy()
            every.attrs["d_model"] = graph.d_model
            return every

        return EdgeCircuit(
            edges=self.edges.assign(drawn=lambda edges: edges["edge"].isin(drawn)),
            read_nodes=lambda: self.nodes,
            make_graph=make_graph,
            read_saved=lambda: SavedCircuit(
                graph=graph, scores=self.scores.mean, chosen=self.chosen
            ),
            read_every=read_every,
            title=title,
            metric=metric,
            outputs=outputs,
            n_layers=graph.n_layers,
            group=graph.heads_per_key,
        )

    def _repr_html_(self) -> str:
        return display.result_html(
            str(self), self.draw(most=40), self.frame.head(12), notes=self.runs.lens.notes
        )


@takes(CircuitConfig, leave_out=OF_A_RUN)
def find(
    model: ModelLike,
    clean: Task | Sequences,
    corrupted: Sequences | None = None,
    *,
    metric: Metric | Callable[[Outcome], Any] | None = None,
    templates: Sequence[str] | None = None,
    config: CircuitConfig | None = None,
    progress: bool = True,
    **fields: Any,
) -> Circuit:
    """Score all edges of a model on all pairs, and choose a circuit on half of them, as ``run`` does.

    The other half judges it (``faithfulness``), and the sizes of ``SIZES`` if ``edges`` is not given: about two
    forwards for each. A single pair chooses the edges, and nothing judges them.

    Args:
        model: the model: any dense family.
        clean: a task (``circuits.task``), which has prompts and metric; or texts, token ids or a token batch.
        corrupted: the same number of sequences of the same lengths; only ``resample`` needs them.
        metric: one number per sequence that reads logits, loss or attention; the task's if None.
        templates: one name per pair; the bootstrap draws pairs within their template.
        config: how edges are scored and chosen; the default one if None.
        progress: show a progress bar.
        **fields: fields of ``CircuitConfig``, such as ``edges=100``, ``neurons=("2:15,870",)`` or
            ``spans=("sink=0",)``; they win over those of ``config``.

    Raises:
        InputError: sequences, a metric or fields that cannot be used together.
        ModelError: a mixture of experts, a hybrid, or a model that can only be measured.
    """
    config = make_config(CircuitConfig, config, fields, where="circuits.find")
    pairs = clean if isinstance(clean, Task) else (clean, corrupted)
    if isinstance(clean, Task):
        templates = templates or clean.templates
        if corrupted is not None:
            raise InputError(
                "corrupted prompts were given beside a task, which has its own; need one of them"
            )
    runs = run_given_pairs(model, pairs, metric=metric, config=config)
    if config.used_ablation == "resample" and runs.corrupted is not None:
        refuse_equal_tokens(not torch.equal(runs.clean.tokens, runs.corrupted.tokens))
    names = tuple(templates) if templates is not None else ("",) * runs.n_pairs
    if len(names) != runs.n_pairs:
        raise InputError(
            f"{len(names)} templates were given for {runs.n_pairs} pairs; need one for each"
        )
    if repeated := count_copies(*(one for one in (runs.clean, runs.corrupted) if one is not None)):
        warnings.warn(
            f"{repeated} of {runs.n_pairs} pairs are copies of another one: what chose the edges also judges them, "
            "and intervals are too narrow. Need each pair once",
            stacklevel=3,
        )
    scores = score_edges(runs, config, progress=progress)
    circuit = choose_by_scores(runs, scores, config, templates=names, halved=runs.n_pairs > 1)
    size = max(1.0, float(runs.clean_values.abs().mean()))
    if not bool(runs.gap.any()) and abs(circuit.difference) <= ROUNDING * size:
        raise InputError(
            f"{runs.metric.name} is the same in every pair if what all edges carry is replaced ({runs.ablation}): "
            "there is nothing that a circuit could explain. Need other sequences, or another ablation"
        )
    if circuit.rule == "none":
        if runs.n_pairs > 1:
            curve = circuit.evaluate(random=0, nodes=False, progress=progress).frame
            circuit = choose_size(circuit, curve)
        else:
            circuit = replace(circuit, rule="unjudged")
    if not circuit.n_edges:
        warnings.warn(
            f"the circuit is empty: of {circuit.size:,} chosen edges none lies on a path from the input to what the "
            "metric reads. Ask for more edges, or choose them with 'greedy', which keeps paths whole",
            stacklevel=3,
        )
    if circuit.rule in ("none", "unjudged"):
        warnings.warn(" ".join(circuit._brief_sentences()), stacklevel=3)
    return circuit


def find_in_runs(runs: Runs, *, config: CircuitConfig) -> Circuit:
    """Choose a circuit by the scores of all pairs, so that none judges it."""
    scores = score_edges(runs, config)
    return choose_by_scores(runs, scores, config, templates=("",) * runs.n_pairs)


def choose_by_scores(
    runs: Runs,
    scores: Scores,
    config: CircuitConfig,
    *,
    templates: tuple[str, ...],
    halved: bool = False,
) -> Circuit:
    """Choose a circuit by the scores of all pairs, or of half of them if ``halved``.

    Where the configuration has neither size nor threshold, it has the 200 largest and the rule "none".
    """
    found = Circuit(
        runs=runs,
        scores=scores,
        chosen=np.zeros(scores.graph.n_edges, dtype=bool),
        choice=config.choice,
        size=config.edges or EDGES,
        templates=templates,
        seed=config.seed,
    )
    if halved:
        found = replace(found, rows=tuple(found.halves[0].tolist()))
    if config.choice != "threshold":
        return replace(found.with_size(found.size), rule="asked" if config.edges else "none")
    return take_edges(found, np.abs(found.mean_scores) >= config.threshold, rule="threshold")


def take_edges(found: Circuit, mask: EdgeMask, *, rule: Rule) -> Circuit:
    """Return the circuit of those edges in ``mask`` that are on a path."""
    chosen = connected_edges(found.graph, mask, outputs=found.outputs)
    return replace(found, chosen=chosen, size=int(mask.sum()), rule=rule)


def choose_size(half: Circuit, curve: pd.DataFrame) -> Circuit:
    """Return ``half`` with the smallest size in ``curve`` that carries the metric, if none was asked for and one does.

    The edges of ``half`` were chosen on half of the pairs; ``curve`` judges sizes on the others.
    """
    share = smallest_faithful_share(curve)
    if half.rule != "none" or not share < 1:
        return half
    return replace(half.with_size(max(1, round(share * half.graph.n_edges))), rule="smallest")
