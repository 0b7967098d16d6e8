"""The runs that scores and curves share: every pair's clean run, and the values that replace what a writer adds.

What a writer adds in the clean run is c, and a is what replaces it where its edge is ablated:

- ``resample``: what it adds on the corrupted prompt of the pair;
- ``mean_ordinary``: its mean over sequences and ordinary positions, which are neither the sink nor padding;
- ``mean_aligned``: its mean over sequences, position by position;
- ``mean_all``: its mean over sequences and all positions;
- ``zero``: nothing.

A position can be frozen: there, what replaces a writer is what it adds in the clean run, and no edge carries anything.

Positions before the first that differs are the same in both runs of a pair, because the model is causal: nothing is
computed for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from ..configuration import make_config
from ..data.tokens import TokenBatch, refuse_bos_of_ids
from ..edits.mean_ablation import tokens_to_average
from ..edits.metrics import Metric, as_metric, check_per_sequence, evaluate
from ..edits.outcome import Outcome
from ..engine.gradients import run_with_hooks
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.unchanged import TensorValues
from ..patching.pairs import Sequences, pair_prompts
from .config import REST, Ablation, CircuitConfig
from .graph import Graph
from .stream import Tensors, Weights, hook_name_of, read_weights, writer_outputs, writer_sites
from .tasks import Task

Progress = Callable[[float], object]
"""Called with the number of pairs, circuits or patches that were done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Pairs of prompts, how they are run, and the metric of both runs."""

    lens: LensModel
    graph: Graph
    weights: Weights
    metric: Metric
    clean: TokenBatch
    corrupted: TokenBatch | None
    ablation: Ablation
    masks: Bool[Tensor, "span pair position"] | None = None
    """Positions of each span in each pair; None where all positions are one."""
    frozen: int | None = None
    """The position that keeps its clean values."""
    batch_size: int | None = None
    """Pairs in a pass; None takes as many as fit into its memory."""
    means: Float[Tensor, "writer ... d_model"] | None = field(default=None, repr=False)
    """What replaces each writer, for means; one position stands for all."""
    clean_values: Float[Tensor, " pair"] = field(repr=False)
    """The metric in the clean run of each pair."""
    corrupted_values: Float[Tensor, " pair"] = field(repr=False)
    """The metric on the corrupted prompt; without one, with the input's writing replaced and all else computed."""
    values_then: TensorValues = field(repr=False)
    """The model's weights when the runs were made."""

    @classmethod
    def make(
        cls,
        lens: LensModel,
        clean: Sequences,
        corrupted: Sequences | None,
        *,
        graph: Graph,
        metric: Metric | Callable[[Outcome], Any],
        config: CircuitConfig | None = None,
        **fields: Any,
    ) -> "Runs":
        """Run every pair (``clean``, ``corrupted``) once, and compute the means that the ablation needs.

        The configuration says the ablation, a frozen position, the pairs in a pass and BOS; ``fields`` win over it.
        Ablation by means or zero needs no corrupted sequences.

        Raises:
            InputError: corrupted sequences are missing, or the metric reads the stream.
        """
        config = make_config(CircuitConfig, config, fields, where="Runs.make")
        if config.used_ablation == "resample" and corrupted is None:
            raise InputError(
                "resampling replaces what a node adds by what it adds on a corrupted prompt, and none was given; need "
                "corrupted, or ablation mean_ordinary, mean_aligned, mean_all or zero"
            )
        pair = pair_prompts(lens, clean, clean if corrupted is None else corrupted, bos=config.bos)
        if config.sink_position >= (shortest := int(pair.clean.lengths.min())):
            raise InputError(
                f"sink_position is {config.sink_position}, and a sequence has {shortest} tokens; need a position that "
                f"all have, 0 to {shortest - 1}"
            )
        read = as_metric(metric, lens, pair.clean, pair.corrupted)
        if read.whole_batch:
            raise InputError(
                f"{read.name} gives one number for all sequences; need one for each of them"
            )
        direct = [site for site in read.sites if site in ("resid_pre", "resid_post", "attn_in")]
        if direct or (read.state and read.layers != () and not read.reads_past_layers):
            _refuse_stream(read)
        empty = torch.empty(0)
        runs = cls(
            lens=lens,
            graph=graph,
            weights=read_weights(lens, graph),
            metric=read,
            clean=pair.clean,
            corrupted=None if corrupted is None else pair.corrupted,
            ablation=config.used_ablation,
            frozen=config.sink_position if config.freeze else None,
            batch_size=config.batch_size,
            clean_values=empty,
            corrupted_values=empty,
            values_then=lens.state.unchanged.record_values(),
        )
        return runs._with_metric_values()

    @property
    def n_pairs(self) -> int:
        return self.clean.n_sequences

    @property
    def first_prompt_tokens(self) -> list[str]:
        return [
            self.token_text(one)
            for one in self.clean.tokens[0, : int(self.clean.lengths[0])].tolist()
        ]

    def token_text(self, token: int) -> str:
        tokenizer = self.lens.tokenizer
        return str(token) if tokenizer is None else str(tokenizer.decode([token]))

    @property
    def gap(self) -> Float[Tensor, " pair"]:
        """Clean minus corrupted metric of each pair."""
        return self.clean_values - self.corrupted_values

    @property
    def gap_size(self) -> float:
        return abs(float(self.gap.mean()))

    @property
    def corrupts_all(self) -> bool:
        """True if the run without any edge is the corrupted prompts': under resample, and no change is frozen."""
        return self.ablation == "resample" and (
            self.frozen is None or self.frozen < self.first_difference(slice(None))
        )

    def check_weights(self) -> None:
        self.values_then.check("runs and scores")

    def select_pairs(self, rows: Sequence[int]) -> "Runs":
        index = torch.as_tensor(list(rows))
        return replace(
            self,
            clean=self.clean[index],
            corrupted=None if self.corrupted is None else self.corrupted[index],
            metric=_metric_of_rows(self.metric, index),
            masks=None if self.masks is None else self.masks[:, index],
            clean_values=self.clean_values[index],
            corrupted_values=self.corrupted_values[index],
        )

    def batches(self, *, copies: int = 1) -> Iterator[slice]:
        """Yield slices of ``batch_size`` pairs; if that is None, of as many as fit with ``copies`` of all outputs."""
        late = self.clean.n_positions - self.first_difference(slice(None))
        fit = self.graph.n_pairs_per_pass(
            n_positions=late, itemsize=self.weights.dtype.itemsize, copies=copies
        )
        step = self.batch_size or fit
        for start in range(0, self.n_pairs, step):
            yield slice(start, min(start + step, self.n_pairs))

    def first_difference(self, rows: slice) -> int:
        """Return the first position at which both runs of ``rows`` differ; 0 unless the ablation is resample."""
        if self.ablation != "resample" or self.corrupted is None:
            return 0
        differs = (self.clean.tokens[rows] != self.corrupted.tokens[rows]) & self.clean.valid[rows]
        at = differs.any(0).nonzero()
        return int(at[0]) if len(at) else self.clean.n_positions - 1

    def pair_tokens(self, rows: slice, *, corrupted: bool = False) -> TokenBatch:
        return (self.corrupted if corrupted and self.corrupted is not None else self.clean)[rows]

    def run_hooked(self, rows: slice, hooks: Sequence[Any], *, corrupted: bool = False) -> Outcome:
        batch = self.pair_tokens(rows, corrupted=corrupted)
        return run_with_hooks(
            self.lens, batch, metric=self.metric, hooks=list(hooks), sequences=rows
        )

    def keeping_hook(
        self, key: tuple[str, int], *, into: Tensors, begin: int
    ) -> tuple[str, Callable[..., None]]:
        """Return a hook that stores (site, layer) in ``into``, from the position ``begin`` on, without gradient."""

        def keep(x: Tensor, hook: object) -> None:
            into[key] = x.detach()[:, begin:]

        return hook_name_of(self.lens, *key), keep

    def metric_values(self, outcome: Outcome) -> Float[Tensor, " pair"]:
        found = evaluate(self.metric, outcome)
        if bool((bad := found.isnan()).any()):
            pair = outcome.indices[int(bad.nonzero()[0])]
            raise InputError(
                f"{self.metric.name} is undefined or infinite in pair {pair}; need a number in every run"
            )
        return found

    @torch.no_grad()
    def writer_outputs(
        self, rows: slice, *, corrupted: bool = False, begin: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run the pairs ``rows``; return what each writer adds [pair writer position d_model], and the metric.

        ``corrupted`` takes the corrupted prompts. Only the positions from ``begin`` on are returned.
        """
        kept: Tensors = {}
        hooks = [self.keeping_hook(key, into=kept, begin=begin) for key in writer_sites(self.graph)]
        values = self.metric_values(self.run_hooked(rows, hooks, corrupted=corrupted))
        return writer_outputs(kept, graph=self.graph, weights=self.weights), values

    def replacements(
        self, rows: slice, *, begin: int
    ) -> Float[Tensor, "#pair writer #position d_model"]:
        """Return what the ablation puts in place of each writer's output, for the pairs ``rows`` from ``begin`` on."""
        if self.ablation == "resample":
            found = self.writer_outputs(rows, corrupted=True, begin=begin)[0]
        elif self.means is None:
            found = self.weights.final_norm.gain.new_zeros(()).expand(
                1, len(self.graph.writers), 1, self.graph.d_model
            )
        else:
            found = (self.means if self.means.shape[1] == 1 else self.means[:, begin:])[None].to(
                self.lens.device
            )
        if self.frozen is None or self.frozen < begin:
            return found
        clean = self.writer_outputs(rows, begin=begin)[0]
        found, at = found.expand_as(clean).clone(), self.frozen - begin
        found[:, :, at] = clean[:, :, at]
        return found

    def output_difference(
        self, rows: slice
    ) -> tuple[int, Float[Tensor, "pair writer position d_model"]]:
        """Return ``first_difference``, and writers' outputs from there on minus their replacements."""
        begin = self.first_difference(rows)
        difference, _ = self.writer_outputs(rows, begin=begin)
        difference -= self.replacements(rows, begin=begin)
        return begin, difference

    @torch.no_grad()
    def embedding_ends(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the replaced and the clean stream before layer 0, between which gradients are integrated."""
        ends = []
        for corrupted in (True, False):
            kept: Tensors = {}
            key = ("resid_pre", 0)
            run_with_hooks(
                self.lens,
                self.pair_tokens(rows, corrupted=corrupted),
                metric=replace(self.metric, layers=(0,), logits=False, loss=False, sites=()),
                hooks=[self.keeping_hook(key, into=kept, begin=0)],
            )
            ends.append(kept[key])
        if self.ablation != "resample":
            ends[0] = self.replacements(rows, begin=0)[:, 0].to(ends[1].dtype).expand_as(ends[1])
        elif self.frozen is not None:
            ends[0] = ends[0].clone()
            ends[0][:, self.frozen] = ends[1][:, self.frozen]
        return ends[0], ends[1]

    def span_masks(self, rows: slice, *, begin: int) -> Float[Tensor, "span pair position"]:
        """Return the positions of each span in the pairs ``rows``, from ``begin`` on: 1 in the span, else 0."""
        if self.masks is None:
            return self.clean.valid[rows, begin:][None].to(self.lens.device, self.weights.dtype)
        return self.masks[:, rows, begin:].to(self.lens.device, self.weights.dtype)

    @torch.no_grad()
    def _with_metric_values(self) -> "Runs":
        found = self
        if self.ablation not in ("resample", "zero"):
            found = replace(self, means=self._compute_means())
        some = slice(0, min(self.n_pairs, max(2, next(found.batches()).stop)))
        outcome = found.run_hooked(some, [])
        check_per_sequence(self.metric, outcome)
        found = replace(found, metric=_with_what_it_reads(self.metric, outcome))
        clean, corrupted = [], []
        for rows in found.batches():
            clean.append(found.metric_values(found.run_hooked(rows, [])))
            start, _ = found.embedding_ends(rows)
            hook = (hook_name_of(self.lens, "resid_pre", 0), lambda x, hook, start=start: start)
            corrupted.append(found.metric_values(found.run_hooked(rows, [hook])))
        return replace(found, clean_values=torch.cat(clean), corrupted_values=torch.cat(corrupted))

    def _compute_means(self) -> Tensor:
        valid = self.clean.valid
        if self.ablation == "mean_ordinary":
            valid = tokens_to_average(self.lens, self.clean, "mean_ordinary").mask
        total: Tensor | int = 0
        for rows in self.batches():
            added, _ = self.writer_outputs(rows)
            weight = valid[rows].to(added.device, added.dtype)
            total = total + einsum(
                added,
                weight,
                "pair writer position d_model, pair position -> writer position d_model",
            )
        assert isinstance(total, Tensor)
        counts = valid.sum(0).to(total.device, total.dtype)
        if self.ablation == "mean_aligned":
            return total / counts.clamp(min=1)[:, None]
        return (total.sum(1) / counts.sum())[:, None]  # one position for all


def run_pairs(
    lens: LensModel,
    clean: Sequences,
    corrupted: Sequences | None,
    *,
    metric: Metric | Callable[[Outcome], Any],
    config: CircuitConfig,
    spans: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Runs:
    """Run sequences, with the configuration's spans and ``spans``, name -> positions by pair."""
    graph = Graph.of(lens, neurons=config.neurons_by_layer)
    found = Runs.make(lens, clean, corrupted, graph=graph, metric=metric, config=config)
    at: dict[str, Any] = config.positions_by_span | dict(spans or {})
    for name, positions in at.items():
        if isinstance(positions, str):
            raise InputError(
                f"the span {name} is the column {positions!r} of a file of pairs, which were not read with it; need "
                "circuits.task(lens, 'file', pairs_file=..., spans=...), or positions"
            )
    return with_spans(found, at)


def run_given_pairs(
    model: ModelLike,
    pairs: Task | tuple[Sequences, Sequences | None],
    *,
    metric: Metric | Callable[[Outcome], Any] | None,
    config: CircuitConfig,
) -> Runs:
    config.check_for_find()
    spans = None
    if isinstance(pairs, Task):
        clean, corrupted, spans = pairs.clean, pairs.corrupted, pairs.spans
        metric = pairs.metric if metric is None else metric
    else:
        clean, corrupted = pairs
    if metric is None:
        raise InputError(
            "no metric was given; need one, such as metrics.logit_difference(correct, wrong), or a task"
        )
    if not isinstance(pairs, Task) or pairs.clean.bos_condition != config.bos:
        refuse_bos_of_ids([one for one in (clean, corrupted) if one is not None], config.bos)
    return run_pairs(as_lens(model), clean, corrupted, metric=metric, config=config, spans=spans)


def with_spans(runs: Runs, spans: Mapping[str, Sequence[int] | Sequence[Sequence[int]]]) -> Runs:
    """Copy the runs so that every edge exists once per span; positions in no span form the span ``rest``.

    ``spans``: name -> positions, the same for all pairs or a list for each pair.

    Raises:
        InputError: a position does not exist or is in two spans, or the name rest is taken although positions are left.
    """
    if not spans:
        return runs
    tokens, names = runs.clean, tuple(spans)
    masks = torch.zeros(len(spans), tokens.n_sequences, tokens.n_positions, dtype=torch.bool)
    lengths = tokens.lengths.tolist()
    for mask, (name, positions) in zip(masks, spans.items(), strict=True):
        by_pair: Any = (
            positions
            if positions and not isinstance(positions[0], int)
            else [positions] * len(lengths)
        )
        if len(by_pair) != len(lengths):
            raise InputError(
                f"the span {name!r} has positions of {len(by_pair)} pairs; need those of {len(lengths)}"
            )
        for row, (own, length) in enumerate(zip(by_pair, lengths, strict=True)):
            for position in own:  # below 0 from the last real token
                if not -length <= position < length:
                    raise InputError(
                        f"position {position} of the span {name!r} is outside some sequence"
                    )
                mask[row, position % length] = True
    if bool((masks.sum(0) > 1).any()):
        raise InputError("a position is in two spans; need each position in one span at most")
    left = tokens.valid & ~masks.any(0)
    if bool(left.any()):
        if REST in spans:
            raise InputError(
                f"positions are in no span, and {REST!r} is taken; need another name, or all positions"
            )
        masks, names = torch.cat([masks, left[None]]), (*names, REST)
    return replace(runs, graph=replace(runs.graph, spans=names), masks=masks)


def _refuse_stream(metric: Metric) -> NoReturn:
    raise InputError(
        f"{metric.name} reads the residual stream, where a circuit has no node; need a metric of logits, of the "
        "loss or of attention, such as logit_difference or sink_mass"
    )


def _with_what_it_reads(metric: Metric, run: Outcome) -> Metric:
    """Return the metric without the stream, if it hangs on attention; InputError if it hangs on the stream."""
    if not (metric.state and metric.layers != ()):
        return metric

    def hangs_on(**other: Tensor) -> bool:
        values, others = (evaluate(metric, one) for one in (run, replace(run, **other)))
        return not torch.equal(values.nan_to_num(), others.nan_to_num())

    if hangs_on(state=run.state + 1):
        _refuse_stream(metric)
    return replace(metric, state=not hangs_on(mass=1 - run.mass))


def _metric_of_rows(metric: Metric, rows: Tensor) -> Metric:
    def function(run: Outcome) -> Any:
        return metric.function(replace(run, sequences=rows[run.indices]))

    return replace(metric, function=function, n_sequences=len(rows))
