"""Scores of all edges by gradients: EAP (arXiv 2310.10348), and EAP-IG on inputs (2403.17806).

What writer w's clean output is worth to the metric m through reader r, where x_r is the stream as r alone reads it:

    score(w -> r) = sum over positions (c_w - a_w) . mean over points of dm/dx_r

Where edges have spans, the sum is over the positions of a span.

1. Take each writer's clean output c_w, and what replaces it, a_w (``runs``).
2. Place points on the line from the replaced embedding to the clean one: its clean end (``eap``, and ``gim`` with two
   of GIM's backward rules, see ``rules``), its other end (``eap-corrupted``, as TransformerLens has it), or the middles
   of n equal steps (``eap-ig``; with ``eap-ig-left`` their beginnings, as EAP-IG's code has it).
3. At each point run the model on this embedding, and take the gradient of m at every q, k, v and gate of the attention,
   MLP input and last norm.
4. Carry it back to the stream (``stream``). Check in every pass that the sum over all readers is the gradient at the
   embedding: every reader is known.
5. Average the gradients over the points, and multiply them with c_w - a_w, once.
6. With ``eap-ig``, the edges out of ``input`` sum to the difference of m between both ends of the line, but for the
   error of the sum over steps: double n for the pairs where that is above ``tolerance`` of the pairs' mean difference,
   and go to 2, up to ``most_steps``. What is then still off is kept and reported.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from ..engine.gradients import add_zero
from ..errors import InputError, ModelError
from ..models.packed import check_gradients_pass
from ..models.running import exclusive_use, freeze_parameters
from .config import TOLERANCE
from .graph import EdgeValues, Graph
from .methods import METHODS, Method, check_method
from .rules import rule_hooks
from .runs import Progress, Runs
from .stream import Tensors, hook_name_of, reader_gradients, reader_sites

_IDENTITY = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Largest difference between the embedding's gradient and the sum over all readers, relative; 0.1 in other types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The score of each edge on each pair."""

    graph: Graph
    values: Float[np.ndarray, "pair edge"] = field(repr=False)
    method: Method
    steps: Float[np.ndarray, " pair"]
    """Points at which the gradient of each pair was taken."""
    clean: Float[np.ndarray, " pair"]
    corrupted: Float[np.ndarray, " pair"]
    """The metric of the two runs of each pair."""

    @property
    def mean(self) -> EdgeValues:
        """Mean over pairs."""
        return self.values.mean(0)

    @property
    def completeness_by_pair(self) -> pd.DataFrame:
        """A table that compares, for each pair, the sum of the input's edge scores with the metric's difference.

        Columns: ``gap`` (clean - corrupted), ``attributed``, ``steps``, ``error`` (relative to the mean gap).
        """
        attributed = self.values[:, self.graph.ends[1] == 0].sum(1, dtype=np.float64)
        gap = self.clean - self.corrupted
        error = (attributed - gap) / (abs(float(gap.mean())) or np.nan)
        found = pd.DataFrame({"pair": np.arange(len(gap)), "gap": gap, "attributed": attributed})
        return found.assign(steps=self.steps, error=error)

    @property
    def completeness_ratio(self) -> float:
        """Sum of the input's edge scores divided by the metric's difference (means over pairs); 1 is complete."""
        table = self.completeness_by_pair
        gap, attributed = table["gap"].to_numpy().mean(), table["attributed"].to_numpy().mean()
        return float(attributed / gap) if gap else np.nan


def score_by_gradients(
    runs: Runs,
    *,
    method: Method = "eap-ig",
    steps: int = 5,
    most_steps: int = 160,
    tolerance: float = TOLERANCE,
    scale: float | None = None,
    advance: Progress = lambda done: None,
) -> Scores:
    """Score all edges by gradients: first-order estimates of what ablating each edge does to the metric.

    Cost: two forwards per pair, and a forward and a backward pass for each point. A method with several points begins
    with ``steps``, doubled up to ``most_steps`` while the error of a pair's sum is above ``tolerance``, a share of the
    mean difference of the metric (``scale``; None: that of these pairs).

    Raises:
        InputError: a method that is unknown, takes no gradient, or takes one where the stream is zero.
        ModelError: the readers do not account for the gradient, so that the graph is not the model's.
    """
    runs.check_weights()
    check_method(method, runs.ablation)
    if METHODS[method].patches:
        raise InputError(f"{method} takes no gradient; need another method, or circuits.find")
    found = zero_scores(runs, method=method)
    scale = runs.gap_size if scale is None else scale
    for rows in runs.batches(copies=3):
        values, points = _score_batch(
            runs,
            rows,
            method=method,
            steps=steps,
            most=most_steps,
            allowed=tolerance * (scale or 1.0),
        )
        found.values[rows], found.steps[rows] = values.numpy(), points.numpy()
        advance(rows.stop - rows.start)
    return found


def zero_scores(runs: Runs, *, method: Method) -> Scores:
    return Scores(
        graph=runs.graph,
        values=np.zeros((runs.n_pairs, runs.graph.n_edges), dtype=np.float32),
        method=method,
        steps=np.zeros(runs.n_pairs),
        clean=runs.clean_values.numpy(),
        corrupted=runs.corrupted_values.numpy(),
    )


def _score_batch(
    runs: Runs, rows: slice, *, method: Method, steps: int, most: int, allowed: float
) -> tuple[Tensor, Tensor]:
    """Return the scores [pair edge] of the pairs ``rows``, and each pair's number of points.

    These are ``steps``, doubled up to ``most`` while the pair's error is above ``allowed``.
    """
    how, (begin, difference) = METHODS[method], runs.output_difference(rows)
    start, end = runs.embedding_ends(rows)
    left = torch.arange(rows.start, rows.stop)
    found = torch.zeros(len(left), runs.graph.n_edges, dtype=torch.float32)
    used = torch.zeros(len(left), dtype=torch.float32)
    from_input = torch.from_numpy(runs.graph.ends[1] == 0)
    while len(left):
        own, at = runs.select_pairs(left.tolist()), left - rows.start
        points = how.points(steps)
        some = difference if len(at) == len(difference) else difference[at]
        gradients = Gradients(own, some, begin=begin, rules=how.rules, keep=len(points) > 1)
        for point in points:
            embedding = torch.lerp(start[at], end[at], point) if point != 1 else end[at]
            gradients.add_run(embedding, weight=1 / len(points))
        found[at] = gradients.edge_scores()
        used[at] = len(points)
        steps *= 2
        if not how.doubles or steps > most:
            break
        off = (found[at][:, from_input].double().sum(1) - runs.gap[left]).abs() > allowed
        left = left[off]
    return found, used


class Gradients:
    """Gradients of every reader, averaged over several runs, and their products with the change of each writer.

    Products are taken after the last run; with ``keep=False``, for a single run, place by place, which needs less
    memory.
    """

    def __init__(
        self,
        runs: Runs,
        difference: Float[Tensor, "pair writer position d_model"],
        *,
        begin: int,
        rules: bool = False,
        keep: bool = True,
    ) -> None:
        """Begin with no run; ``difference`` is each writer's output minus its replacement, from ``begin`` on."""
        self.runs, self.difference, self.begin = runs, difference, begin
        self.rules, self.keep = rules, keep
        self._sums: dict[tuple[str, int], Float[Tensor, "pair reader position d_model"]] = {}
        self._scores: Float[Tensor, "pair span writer reader"] = difference.new_zeros(
            len(difference), *runs.graph.shape
        )
        self._masks = runs.span_masks(slice(0, len(difference)), begin=begin)

    def add_run(self, embedding: Float[Tensor, "pair position d_model"], *, weight: float) -> None:
        """Run the pairs from ``embedding`` on and back; add ``weight`` times the readers' gradients to the mean."""
        runs, lens, graph = self.runs, self.runs.lens, self.runs.graph
        zeros: Tensors = {}
        kept: Tensors = {}
        key, last = ("resid_pre", 0), graph.n_layers - 1
        name = hook_name_of(lens, *key)
        at: list[Any] = [(name, lambda x, hook: embedding.to(x.device))]
        at.append((name, partial(add_zero, into=zeros, key=key)))
        at += rule_hooks(lens, runs.weights) if self.rules else []
        streams = [
            (site, layer) for layer in range(graph.n_layers) for site in ("resid_pre", "attn_out")
        ]
        at += [
            runs.keeping_hook(one, into=kept, begin=self.begin)
            for one in (*streams, ("resid_post", last))
        ]
        for place, layer in graph.places:
            for site in reader_sites((place, layer), graph):
                own = partial(add_zero, into=zeros, key=(site, layer))
                at.append((hook_name_of(lens, site, 0 if site == "final" else layer), own))
        check_gradients_pass(lens.plain)
        with exclusive_use(lens), torch.enable_grad(), freeze_parameters(lens.plain):
            values = runs.metric_values(runs.run_hooked(slice(0, runs.n_pairs), at))
            if not values.requires_grad:
                raise InputError(
                    f"the metric {runs.metric.name!r} has no gradient; need one made of the run's tensors by "
                    "differentiable operations, or the method exact"
                )
            found = torch.autograd.grad(values.sum(), list(zeros.values()), allow_unused=True)
        dtype = runs.weights.dtype
        gradients = {
            key: (torch.zeros_like(zero) if one is None else one.detach())[:, self.begin :].to(
                dtype
            )
            for (key, zero), one in zip(zeros.items(), found, strict=True)
        }
        total = torch.zeros_like(gradients[key])
        for place in graph.places:
            name, layer = place
            needed = {(site, layer) for site in reader_sites(place, graph)}
            if needed - {("gate", layer), ("up", layer)} - gradients.keys():
                continue  # behind everything that the metric reads
            x = kept["resid_post", last] if name == "logits" else kept["resid_pre", layer]
            x = x + kept["attn_out", layer] if name == "mlp" and not graph.parallel else x
            one = reader_gradients(
                place,
                graph=graph,
                weights=runs.weights,
                gradients=gradients,
                x=x.to(dtype),
                held=self.rules,
            )
            total += one.sum(1)
            if not self.keep:
                self._add_products(place, one * weight)
            elif place in self._sums:
                self._sums[place].add_(one, alpha=weight)
            else:
                self._sums[place] = one * weight
        off = float((total - gradients[key]).norm()) / max(float(gradients[key].norm()), 1e-30)
        if not off <= _IDENTITY.get(lens.dtype, 0.1):
            raise ModelError(
                f"the readers of {lens.name} account for all but {off:.2g} of the gradient of {runs.metric.name} at "
                "the embedding: something else reads the stream. Need a metric of logits, loss or attention, and a "
                "model whose readers are all known"
            )

    def edge_scores(self) -> Float[Tensor, "pair edge"]:
        """Return each edge's score: its writer's change times its reader's mean gradient, summed over its span."""
        for place, gradient in self._sums.items():
            self._add_products(place, gradient)
        self._sums.clear()
        spans, writers, readers = self.runs.graph.ends
        return self._scores[:, spans, writers, readers].float().cpu()

    def _add_products(
        self, place: tuple[str, int], gradient: Float[Tensor, "pair reader position d_model"]
    ) -> None:
        index = list(self.runs.graph.places[place])
        first = self.runs.graph.n_writers_before(index[0])
        for span, mask in enumerate(self._masks):
            self._scores[:, span, :first, index[0] : index[-1] + 1] += einsum(
                self.difference[:, :first],
                gradient * mask[:, None, :, None],
                "pair writer position d_model, pair reader position d_model -> pair writer reader",
            )
