"""The baseline run and the source run of a sweep of patches, and the metric under every patch."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..arguments import value_in_words
from ..configuration import make_config
from ..data.tokens import TokenBatch, positions_in_all, refuse_bos_of_ids, warn_of_copies
from ..edits.constructors import Edit
from ..edits.hooks import Applied, edits_for_model, edits_in_texts
from ..edits.metrics import Metric, as_metric, check_per_sequence, evaluate, logit_difference
from ..edits.named_metrics import refuse_unread_metric_fields
from ..edits.outcome import Outcome
from ..edits.part import Part, Where, replace_full_axes_by_none
from ..edits.references import References
from ..engine.forward import baseline_logits, run_checked_edits
from ..engine.needs import Needs
from ..errors import InputError
from ..models.lens import LensModel
from ..models.sites import SITES, site_key
from .carried import UNLIKE, unlike_text
from .config import PatchConfig, refuse_equal_tokens
from .pair_file import read_pairs
from .pairs import PromptPair, Sequences, batch_of_prompts, pair_prompts
from .parts import make_put_spec, parts_to_patch, select_part

MakesEdit = Callable[..., Edit]
"""Makes an edit from a site and its part, such as ``edits.zero``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """The two runs of a sweep of patches: the baseline run is patched with values of the source run."""

    lens: LensModel
    run: TokenBatch
    """The sequences that are patched."""
    other: TokenBatch
    site: str
    metric: Metric
    baseline: Float[Tensor, " sample"]
    source: Float[Tensor, " sample"]
    """The metric of both runs."""
    held: Mapping[tuple[str, int], Tensor]
    """The site in the baseline run."""
    given: Mapping[tuple[str, int], Tensor]
    """The site in the source run."""
    edits: tuple[Edit, ...]
    """Edits of both runs, and beside every patch."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the site's axes, such as (positions, heads, width)."""
        return tuple(next(iter(self.held.values())).shape[1:])

    def can_change(self, part: Part) -> bool:
        """Check whether the runs differ in a part that the metric is computed after."""
        return self.is_before_metric(part) and self.has_difference(part)

    def is_before_metric(self, part: Part) -> bool:
        first, read = min(part.layers or (0,)), self.metric.read_layers(self.lens.n_layers)
        return self.metric.reads_past_layers or max(read) >= first

    def has_difference(self, part: Part) -> bool:
        """Check whether the runs differ in a part, in a sequence that has it."""
        lengths, having = self.run.lengths.tolist(), ~self._are_short(part)
        for key in {site_key(part.site, layer) for layer in part.layers or ()}:
            own, other = (select_part(part, one[key], lengths) for one in (self.held, self.given))
            if not torch.equal(*((own, other) if having.all() else (own[having], other[having]))):
                return True
        return False

    def unlike_places(self, part: Part, labels: Mapping[int, str]) -> list[int]:
        """Return the positions and keys of a part that are not one place in all pairs; none if it has all of them."""
        own = replace_full_axes_by_none(part, sizes=self.sizes)
        places = (*(own.positions or ()), *(own.keys or ()))
        return [one for one in places if labels.get(one) == UNLIKE]

    def nan_where_short(
        self, part: Part, values: Float[Tensor, " sample"]
    ) -> Float[Tensor, " sample"]:
        short = self._are_short(part)
        return values.masked_fill(short.any() if self.metric.whole_batch else short, torch.nan)

    def _are_short(self, part: Part) -> Bool[Tensor, " sample"]:
        whole = replace_full_axes_by_none(part, sizes=self.sizes)
        return self.run.lengths.cpu() < whole.n_tokens_needed

    def edit_maker(self, config: PatchConfig) -> MakesEdit | None:
        if callable(config.put):
            return config.put
        if config.put == "source":
            return None
        references = References(self.lens, self.run, known=self.held)

        def make_put_edit(site: str, **where: Unpack[Where]) -> Edit:
            return make_put_spec(config, Part.of_site(site, where)).make_edit(references)

        return make_put_edit


def run_batches(
    lens: LensModel, batches: Sequence[TokenBatch], needs: Needs, *, edits: Sequence[Edit] = ()
) -> list[Outcome]:
    """Run batches of one shape with these edits, in shared forwards; return what ``needs`` lists."""
    runs = []
    for batch in batches:
        given = edits_for_model(lens, edits, n_positions=batch.n_positions)
        runs.append((batch, Applied(lens=lens, edits=given, n_sequences=batch.n_sequences)))
    found = run_checked_edits(lens, runs, needs)
    for _, applied in runs:
        applied.warn_of_edits_without_effect()
    return found


def _metric_of_config(lens: LensModel, pair: PromptPair, *, config: PatchConfig) -> Any:
    if not isinstance(config.metric, str):  # it has its options itself
        refuse_unread_metric_fields(config, "")
        return config.metric
    if config.pairs_file is not None and config.metric == "logit_difference":
        pairs = read_pairs(
            config.pairs_file, answers_as=config.answers_as, tokenizer=lens.tokenizer
        )
        return logit_difference([one.correct for one in pairs], [one.incorrect for one in pairs])
    return config.metric_spec().make_metric(lens, partial(baseline_logits, lens, pair.clean))


def merge_patch_config(
    config: PatchConfig | None,
    *,
    lens: LensModel,
    fields: Mapping[str, Any],
    texts: tuple[Sequences | None, Sequences | None] = (None, None),
) -> PatchConfig:
    """Put ``fields`` that are not None into ``config``, and leave out prompts in whose place ``texts`` were given."""
    given = {name: value for name, value in fields.items() if value is not None}
    given |= {"model": lens.name}
    sides = zip(("clean", "corrupted"), texts, strict=True)
    given |= {name: () for name, own in sides if own is not None}
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
    """Return both runs, the parts to patch and the pair of prompts; None stands for the configuration's texts."""
    config.refuse_no_metric()
    if clean is not None and corrupted is not None:
        refuse_bos_of_ids((clean, corrupted), config.bos)
    if clean is None:
        clean = batch_of_prompts(config.prompts[0], lens, bos=config.bos)
    elif config.pairs_file is not None:
        raise InputError(
            "prompts were given beside a pairs_file, which has its own; need one of both"
        )
    if corrupted is None:
        corrupted = batch_of_prompts(config.prompts[1], lens, bos=config.bos)
    for texts in (clean, corrupted):
        if isinstance(texts, tuple) and not texts:
            raise InputError(
                "patching needs two texts with the same number of tokens; give clean and corrupted"
            )
    pair = pair_prompts(lens, clean, corrupted, bos=config.bos)
    warn_of_copies(pair.clean, pair.corrupted, what="pairs of prompts")
    is_source = config.put == "source"
    if is_source:
        refuse_equal_tokens(not pair.differences.empty)
    run, source = pair.run_and_source(config.direction)
    metric = as_metric(
        _metric_of_config(lens, pair, config=config), lens, pair.clean, pair.corrupted
    )
    chosen = config.chosen_indices
    for name in ("positions", "keys"):
        if chosen[name] is not None:
            chosen[name] = positions_in_all(chosen[name], run, of=name, own_ends=is_source)
    sizes = {"n_positions": run.n_positions, "shortest": int(run.lengths.min())}
    grid = parts_to_patch(lens, config.site, by=config.by, **sizes, **chosen)
    site, edits = config.site, edits_in_texts(config.edits, run)
    if site in lens.uneditable:
        raise lens.uneditable_error(site)
    layers = tuple(sorted({layer for part in grid for layer in part.layers or ()}))
    of_metric, last = Needs.of_metrics([metric], lens=lens), not SITES[site].per_layer
    of_site = replace(of_metric, layers=layers, sites=(site,))
    one_run = metric.layers == () and not metric.sites  # it reads no layer, and may see others
    if not one_run:
        of_site = replace(of_site, loss=False, logits=last, whole=last, positions=(-1,))
    both = run_batches(lens, (run, source), of_site, edits=edits)
    held, given = (one.tensors for one in both)
    if not one_run:
        both = run_batches(lens, (run, source), of_metric, edits=edits)
    check_per_sequence(metric, both[0])
    baseline, wanted = (evaluate(metric, one).detach() for one in both)
    runs = RunPair(
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
    if is_source and grid and not any(map(runs.has_difference, grid)):
        warnings.warn(
            f"the clean and the corrupted run have the same {site} in all that is patched: nothing changes",
            stacklevel=2,
        )
    if said := unlike_text({one for part in grid for one in runs.unlike_places(part, pair.labels)}):
        warnings.warn(said, stacklevel=3)
    return runs, grid, pair
