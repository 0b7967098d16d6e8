"""The baseline run and the source run of a sweep of patches, and the metric under every patch."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from ..arguments import value_in_words
from ..configuration import make_config
from ..data.tokens import TokenBatch, positions_in_all, refuse_bos_of_ids
from ..edits.constructors import Edit
from ..edits.hooks import edits_in_texts
from ..edits.metrics import Metric, as_metric, check_per_sequence, evaluate, logit_difference
from ..edits.outcome import Outcome
from ..edits.part import Part, Where, replace_full_axes_by_none
from ..edits.references import References
from ..engine.forward import baseline_logits, run_with
from ..errors import InputError
from ..models.lens import LensModel
from ..models.sites import SITES, site_key
from .cells import MakesEdit
from .config import PatchConfig, refuse_equal_tokens
from .pair_file import read_pairs
from .pairs import PromptPair, Sequences, batch_of_prompts, pair_prompts
from .parts import make_put_spec, parts_to_patch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """The two runs of a sweep of patches: the baseline run is patched with values of the source run."""

    lens: LensModel
    run: TokenBatch
    """The sequences that are patched."""
    other: TokenBatch
    """The sequences of the source run."""
    site: str
    metric: Metric
    baseline: Float[Tensor, " sample"]
    source: Float[Tensor, " sample"]
    """The metric of both runs."""
    held: Mapping[tuple[str, int], Tensor]
    """The site in the baseline run."""
    given: Mapping[tuple[str, int], Tensor]
    """The site in the source run."""
    edits: tuple[Edit, ...] = ()
    """What is changed in both runs, and beside every patch."""

    @classmethod
    def make(
        cls,
        lens: LensModel,
        run: TokenBatch,
        source: TokenBatch,
        *,
        site: str,
        metric: Metric,
        grid: Sequence[Part],
        edits: tuple[Edit, ...] = (),
        is_source: bool = True,
    ) -> "RunPair":
        """Run ``run``, which is patched, and ``source``, whose values are put in; keep both runs' tensors of ``site``.

        ``edits`` are made in both runs; ``grid`` has the parts of the site to patch. Warns if both runs have the same
        values there and ``is_source`` says that patches put in the source run's values: then no patch changes anything.
        """
        layers = sorted({layer for part in grid for layer in part.layers or ()})
        options: dict[str, Any] = {"layers": layers, "loss": False, "progress": False}
        options["logits"] = not SITES[site].per_layer
        one_run = metric.layers == () and not metric.sites  # the metric reads no layer, so that it may see others
        if one_run:
            options |= {"positions": metric.positions, "loss": metric.loss, "logits": metric.logits}
        runs = [run_with(lens, tokens, edits, sites=(site,), **options) for tokens in (run, source)]
        held, given = (one.tensors for one in runs)
        if not one_run:
            runs = [run_for_metric(lens, tokens, metric=metric, edits=edits) for tokens in (run, source)]
        check_per_sequence(metric, runs[0])
        baseline, wanted = (evaluate(metric, one) for one in runs)
        if is_source and all(torch.equal(held[key], given[key]) for key in given):
            warnings.warn(
                f"the clean and the corrupted run have the same {site}: patching it changes nothing", stacklevel=3
            )
        return cls(
            lens=lens,
            run=run,
            other=source,
            site=site,
            metric=metric,
            baseline=baseline,
            source=wanted,
            held=held,
            given=given,
            edits=edits,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the site's axes after the sequence axis, such as (positions, heads, width)."""
        return tuple(next(iter(self.held.values())).shape[1:])

    def can_change(self, part: Part) -> bool:
        """Check whether the runs differ in a part of the site, and the metric reads something computed after it."""
        return self.is_before_metric(part) and self.has_difference(part)

    def is_before_metric(self, part: Part) -> bool:
        """Check whether the metric reads something that is computed after a part of the site."""
        first, read = min(part.layers or (0,)), self.metric.read_layers(self.lens.n_layers)
        return self.metric.reads_past_layers or max(read) >= first

    def has_difference(self, part: Part) -> bool:
        """Check whether the two runs have different values in a part of the site."""
        keys = {site_key(part.site, layer) for layer in part.layers or ()}
        return any(not torch.equal(part.select(self.held[key]), part.select(self.given[key])) for key in keys)

    def nan_where_short(self, part: Part, values: Float[Tensor, " sample"]) -> Float[Tensor, " sample"]:
        """Return ``values``, one per sequence, with nan for each sequence that is too short to have the part."""
        short = self.run.lengths < replace_full_axes_by_none(part, sizes=self.sizes).n_tokens_needed
        return values.masked_fill(short.any() if self.metric.whole_batch else short, torch.nan)

    def edit_maker(self, config: PatchConfig) -> MakesEdit | None:
        """Return the function that makes the edit in ``config.put`` for a part; None if source values are put in."""
        if callable(config.put):
            return config.put
        if config.put == "source":
            return None
        references = References(self.lens, self.run, known=self.held)

        def make_put_edit(site: str, **where: Unpack[Where]) -> Edit:
            return make_put_spec(config, Part.of_site(site, where)).make_edit(references)

        return make_put_edit


def run_for_metric(lens: LensModel, tokens: TokenBatch, *, metric: Metric, edits: Sequence[Edit] = ()) -> Outcome:
    """Run the model on ``tokens`` with these edits; return the outcome with the tensors that the metric reads."""
    return run_with(
        lens,
        tokens,
        edits,
        positions=metric.positions,
        layers=metric.read_layers(lens.n_layers) or (lens.n_layers - 1,),
        sites=metric.sites,
        loss=metric.loss,
        logits=metric.logits or (metric.reads_past_layers and not metric.loss),
        progress=False,
    )


def _metric_of_config(lens: LensModel, pair: PromptPair, *, config: PatchConfig) -> Metric:
    if config.pairs_file is not None and config.metric == "logit_difference":
        pairs = read_pairs(config.pairs_file, answers_as=config.answers_as, tokenizer=lens.tokenizer)
        return logit_difference([one.correct for one in pairs], [one.incorrect for one in pairs])
    return config.metric_spec().make_metric(lens, partial(baseline_logits, lens, pair.clean))


def merge_patch_config(config: PatchConfig | None, *, lens: LensModel, fields: Mapping[str, Any]) -> PatchConfig:
    """Return ``config`` (or the default one) with each of ``fields`` that is not None put in."""
    given = {name: value for name, value in fields.items() if value is not None} | {"model": lens.name}
    found = make_config(PatchConfig, config, given, where="patch")
    for one in found.edits:
        if not isinstance(one, Edit):
            raise InputError(
                f"edits have {value_in_words(one)}; need edits of sink_lens.edits, such as edits.zero('z')"
            )
    return found


def prepare_runs(
    lens: LensModel, clean: Sequences | None, corrupted: Sequences | None, *, config: PatchConfig
) -> tuple[RunPair, list[Part], PromptPair]:
    """Return the two runs, the parts to patch and the pair of prompts; None stands for the configuration's texts."""
    config.refuse_no_metric()
    if clean is not None and corrupted is not None:
        refuse_bos_of_ids((clean, corrupted), config.bos)
    if clean is None:
        clean = batch_of_prompts(config.prompts[0], lens, bos=config.bos)
    elif config.pairs_file is not None:
        raise InputError("prompts were given beside a pairs_file, which has its own; need one of both")
    corrupted = batch_of_prompts(config.prompts[1], lens, bos=config.bos) if corrupted is None else corrupted
    for texts in (clean, corrupted):
        if isinstance(texts, tuple) and not texts:
            raise InputError("patching needs two texts with the same number of tokens; give clean and corrupted")
    pair = pair_prompts(lens, clean, corrupted, bos=config.bos)
    is_source = config.put == "source"
    if is_source:
        refuse_equal_tokens(not pair.differences.empty)
    run, source = pair.run_and_source(config.direction)
    read = _metric_of_config(lens, pair, config=config) if isinstance(config.metric, str) else config.metric
    measured = as_metric(read, lens, pair.clean, pair.corrupted)
    chosen = config.chosen_indices
    for name in ("positions", "keys"):
        chosen[name] = None if chosen[name] is None else positions_in_all(chosen[name], run, of=name)
    grid = parts_to_patch(lens, config.site, by=config.by, n_positions=run.n_positions, **chosen)
    edits = edits_in_texts(config.edits, run)
    at: dict[str, Any] = {"site": config.site, "metric": measured, "grid": grid, "edits": edits}
    return RunPair.make(lens, run, source, **at, is_source=is_source), grid, pair
