"""The finder of sinks: which tokens, or which positions, are sinks, by a rule with a name.

- ``attention``: the token receives many times its fair share of attention; a gap in the scores of all tokens decides.
- ``norm``: the token is large (a massive activation): its norm over its sequence's median; a gap decides.
- ``either``: one of the two. ``mean_ordinary`` leaves these out.
- ``rate``: the share of layers and heads whose sink score at the token passes a threshold (arXiv 2410.10781) is at
  least ``LEAST_RATE``. Averaged over sequences it gives the sink *positions* that a trace and a card study.

All come from one pass of the plain model without its unembedding: attention from up to 64 sampled rows of each
sequence, norms from the residual stream.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..data.given import as_given
from ..data.tokens import Prompts, TokenBatch
from ..errors import InputError
from ..measures.attention import fewest_queries, row_shares
from ..measures.reductions import mean_where
from ..measures.sink_tokens import (
    LEAST_NORM,
    LEAST_SHARE,
    ScoreGap,
    earlier_keys,
    fair_shares,
    ratios_to_median_norm,
    sampled_queries,
    score_gap,
    share_score,
)
from ..models.lens import LensModel
from ..models.load import ModelLike
from ..schema import SINK_THRESHOLD, KernelChoice
from ..text import plural
from .forward import pieces_by_length, resolve
from .record import stream_batch
from .views import LayerView, Reading

log = logging.getLogger(__name__)

Rule = Literal["attention", "norm", "either", "rate"]
LEAST: dict[Rule, float] = {"attention": LEAST_SHARE, "norm": LEAST_NORM}
"""Rule of a gap -> least median score of the marked tokens."""
LEAST_RATE = 0.05
"""By the rule ``rate`` a sink has at least this share of layers and heads."""
MOST_POSITIONS = 4
"""Most sink positions of a model that are studied."""


def sink_mask(
    model: ModelLike,
    tokens: Prompts,
    *,
    by: Rule = "attention",
    threshold: float | None = None,
    batch_size: int | None = None,
) -> Bool[Tensor, "batch position"]:
    """Mark the tokens that are sinks, where they were given; False at padding, and everywhere in a model without sinks.

    The threshold is the middle of a gap in the scores of these tokens. Without a gap nothing is marked, and a warning
    is logged: there is no sink, or these tokens do not decide it. What decided is logged as INFO. For a data set that
    is read in chunks, find the threshold once on many tokens (``score_gap(sink_scores(lens, tokens),
    least=LEAST["attention"])``) and pass it with every chunk.

    By attention, a token is judged by the later tokens of its sequence, so its last token is never marked, and
    sequences of fewer than about 16 tokens show little. Shorter texts have lower scores: a warning counts those without
    a mark that cannot be judged beside the others. The cost is one forward pass without the unembedding.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        tokens: sequences, texts, or what a tokenizer or a collator returns; a plain tensor is taken to have no padding.
        by: ``attention``, ``norm``, ``rate`` (``sink_scores`` says what each is), or ``either`` of the first two, which
            also marks two massive tokens that share a sequence's attention, of which neither has enough to be marked by
            ``attention``.
        threshold: mark tokens whose score is at least this; if None the gap decides, or ``LEAST_RATE`` for ``rate``.
        batch_size: sequences per forward pass; None takes as many as have 2,048 positions together.

    Raises:
        InputError: a threshold was given for ``either``, the model cannot take the tokens, or it is nan at one.
    """
    lens, batch = resolve(model, tokens)
    marked, said = mark_sinks(lens, batch, by=by, threshold=threshold, batch_size=batch_size)
    for text, answer in said.items():
        is_whole = answer == "marked" and _UNJUDGED not in text
        log.log(logging.INFO if is_whole else logging.WARNING, "marked as sinks %s", text)
    return as_given(marked, batch.given)


def mark_sinks(
    lens: LensModel,
    batch: TokenBatch,
    *,
    by: Rule = "attention",
    threshold: float | None = None,
    batch_size: int | None = None,
    scores: Mapping[Rule, Float[Tensor, "batch position"]] | None = None,
) -> tuple[Bool[Tensor, "batch position"], dict[str, "Answer"]]:
    """Do as ``sink_mask``, with a text a row; return the answers of the gaps by their texts, and log none.

    ``scores`` by rule are given if they were computed for these tokens before.
    """
    said: dict[str, Answer] = {}
    if by == "either" and threshold is not None:
        raise InputError(
            "a threshold was given for either; need by='attention' or by='norm', which have their own"
        )
    rules: tuple[Rule, ...] = tuple(LEAST) if by == "either" else (by,)
    marked = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    known = scores or scores_by_rule(lens, batch, rules, batch_size=batch_size)
    for rule in rules:
        limit = LEAST_RATE if threshold is None and rule == "rate" else threshold
        if limit is None:
            found = score_gap(known[rule], least=LEAST[rule])
            answer, text = gap_answer(found, known[rule], by=rule)
            said[text] = answer
            limit = math.inf if found is None else found.threshold
        marked |= known[rule] >= limit
    return marked & batch.valid.cpu(), said


def sink_scores(
    model: ModelLike, tokens: Prompts, *, by: Rule = "attention", batch_size: int | None = None
) -> Float[Tensor, "batch position"]:
    """Compute the scores that ``sink_mask`` compares with its threshold; nan at padding, about 1 at ordinary tokens.

    By ``attention``: how many times its fair share of attention the token receives, mean over layers
    (``measures.sink_tokens.share_score``). By ``norm``: its norm over the median of its sequence, in the layer where
    this is largest. By ``rate``: the share of layers and heads whose sink score at the token passes 0.3; nan where too
    few queries follow to tell. The other arguments and the errors are those of ``sink_mask``.
    """
    lens, batch = resolve(model, tokens)
    return as_given(scores_by_rule(lens, batch, (by,), batch_size=batch_size)[by], batch.given)


def scores_by_rule(
    lens: LensModel, batch: TokenBatch, rules: Sequence[Rule], *, batch_size: int | None
) -> dict[Rule, Float[Tensor, "batch position"]]:
    """Compute the scores of several rules, without ``either``, in one pass."""
    for by in rules:
        if by not in (*LEAST, "rate"):
            raise InputError(f"by is {by!r}; need attention, norm or rate, or of a mask either")
    if rules == ("rate",):
        return {"rate": sink_rates(lens, batch, batch_size=batch_size).nanmean(0)}
    scores: dict[Rule, Tensor] = {
        by: torch.full(batch.tokens.shape, math.nan, dtype=torch.float32) for by in rules
    }
    for where, part in pieces_by_length(batch, batch_size=batch_size):
        taken = {by: Received.empty(lens, part) if by == "attention" else Norms() for by in rules}
        rows = next((one.rows for one in taken.values() if isinstance(one, Received)), None)
        readings: list[Reading] = [_summing_reading(one) for one in taken.values()]
        stream_batch(
            lens, part, readings, rows=rows, batch_size=part.n_sequences, sequences=where.tolist()
        )
        for by, one in zip(rules, taken.values(), strict=True):
            scores[by][where, : part.n_positions] = one.scores(part.valid).to(scores[by].dtype)
    return scores


def _summing_reading(sums: "Received | Norms") -> Reading:
    def add(view: LayerView) -> None:
        sums.add(view)

    return Reading(name=type(sums).__name__, sites=(sums.site,), function=add)


def sink_rate_reading(threshold: float, *, shares: bool = False) -> Reading:
    """Make a reading of each token's sink rate: the share of heads whose mean attention to it passes the threshold.

    The mean is over the sampled queries from the token on whose window holds it. The rate is nan where too few queries
    see the token (``attention.fewest_queries``), and at all tokens of a sequence, or a layer, whose sampled queries
    would give the first token a score above the threshold by uniform attention. With ``shares`` each weight is divided
    by the sum of its row first.
    """

    def rate(view: LayerView) -> Tensor:
        assert view.rows is not None
        rows = view.rows.to(view["rows"].device)
        keys = torch.arange(view["rows"].shape[-1], device=rows.device)
        sees = rows[:, None] >= keys
        if view.reach is not None:
            sees = sees & (rows[:, None] < keys + view.reach)
        from_key = (view.valid.to(rows.device)[:, rows][:, :, None] & sees)[:, None]
        weights = row_shares(view["rows"]) if shares else view["rows"]
        score = mean_where(weights, where=from_key, dim=2)
        enough = from_key.sum(2) >= fewest_queries(threshold=threshold, reach=view.reach)
        of_first = from_key[..., 0]
        uniform = mean_where((1 / (rows + 1)).expand(of_first.shape), where=of_first, dim=-1)
        enough = enough & (uniform < threshold)[..., None]
        return (score > threshold).float().masked_fill(~enough, math.nan).mean(1)

    return Reading(name="rate_by_key", sites=("rows",), function=rate)


def fewest_tokens_for_rates(threshold: float) -> int:
    """Return the length from which sequences have sink rates at a threshold of ``LEAST_SINK_THRESHOLD`` or more.

    It is more than ``attention.fewest_tokens`` for thresholds below 0.074, since 64 queries are sampled: 117 at 0.05.
    """
    lengths = itertools.count(math.ceil(fewest_queries(threshold=threshold)))
    return next(n for n in lengths if (1 / (sampled_queries(n) + 1)).mean() < threshold)


def sink_rates(
    lens: LensModel,
    tokens: TokenBatch,
    *,
    threshold: float = SINK_THRESHOLD,
    kernel: KernelChoice = "auto",
    batch_size: int | None = None,
) -> Float[Tensor, "layer batch position"]:
    """Compute each token's sink rate by layer, in one pass; nan at tokens that too few queries see."""
    reading = sink_rate_reading(threshold, shares=lens.family.sigmoid)
    found: Tensor | None = None
    for where, part in pieces_by_length(tokens, batch_size=batch_size):
        rates = stream_batch(
            lens,
            part,
            [reading],
            rows=sampled_queries(part.n_positions),
            kernel=kernel,
            batch_size=part.n_sequences,
            sequences=where.tolist(),
        ).stacked("rate_by_key")
        if found is None:
            found = rates.new_full((len(rates), *tokens.tokens.shape), math.nan)
        found[:, where, : part.n_positions] = rates
    assert found is not None  # a batch has a sequence
    return found


def sink_positions(
    rates: Float[Tensor, "layer batch position"],
    *,
    shortest: int | None = None,
    min_rate: float = LEAST_RATE,
) -> tuple[int, ...]:
    """Return the positions whose mean sink rate over layers and sequences is at least ``min_rate``, highest first.

    Only positions before ``shortest``, the length of the shortest sequence, can be. At most ``MOST_POSITIONS`` are
    returned.
    """
    rate = rates.nanmean(dim=(0, 1))[:shortest]
    order = rate.nan_to_num(0.0).argsort(descending=True, stable=True)
    return tuple(int(key) for key in order[:MOST_POSITIONS] if rate[key] >= min_rate)


@dataclass(slots=True, kw_only=True)
class Received:
    """Attention that tokens receive in one forward pass, in fair shares, summed over layers."""

    site: ClassVar = "rows"
    rows: Int[Tensor, " row"]
    """The positions of the sampled queries."""
    sigmoid: bool
    shares: Float[Tensor, "batch row key"] | None = None
    layers: Int[Tensor, "row key"] | None = None
    """In how many the query sees the key."""
    seen: dict[int | None, Bool[Tensor, "row key"]] = field(default_factory=dict)
    """Sliding window, or None -> which keys each row sees."""

    @classmethod
    def empty(cls, lens: LensModel, part: TokenBatch) -> "Received":
        """Begin with the sequences ``part``; refuse sequences of one token."""
        if part.n_positions < 2:
            raise InputError(
                "a sequence has a single token; need at least 2, so that a later one could attend to it"
            )
        return cls(rows=sampled_queries(part.n_positions, first=1), sigmoid=lens.family.sigmoid)

    def add(self, view: LayerView) -> Float[Tensor, "batch row key"]:
        """Add a layer's attention, and return it in fair shares."""
        rows = row_shares(view["rows"]) if self.sigmoid else view["rows"]
        assert view.rows is not None
        reach = None if view.reach is None or view.reach > rows.shape[3] else view.reach
        shares = fair_shares(rows, row_positions=view.rows, reach=reach)
        if reach not in self.seen:
            self.seen[reach] = earlier_keys(view.rows, n_keys=rows.shape[3], reach=reach)
        if self.shares is None or self.layers is None:
            self.shares, self.layers = shares, self.seen[reach].long()
        else:
            self.shares = self.shares.to(shares.device) + shares
            self.layers = self.layers.to(shares.device) + self.seen[reach]
        return shares

    def scores(self, valid: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Return each token's score; nan at padding."""
        assert self.shares is not None
        assert self.layers is not None
        valid = valid.to(self.shares.device)
        score = share_score(
            self.shares / self.layers.clamp(min=1),
            seen=self.layers > 0,
            row_positions=self.rows,
            row_valid=valid[:, self.rows],
        )
        return score.masked_fill(~valid, math.nan).cpu()


@dataclass(slots=True, kw_only=True)
class Norms:
    """For each token, the largest ratio so far of its norm to the median of its sequence."""

    site: ClassVar = "resid_post"
    largest: Float[Tensor, "batch position"] | None = None

    def add(self, view: LayerView) -> Float[Tensor, "batch position"]:
        """Update the ratios with a layer's, and return those."""
        ratio = ratios_to_median_norm(view["resid_post"].float().norm(dim=-1), valid=view.valid)
        if self.largest is None:
            self.largest = ratio
        else:
            self.largest = torch.maximum(self.largest.to(ratio.device), ratio)
        return ratio

    def scores(self, valid: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Return each token's score; nan at padding."""
        assert self.largest is not None
        return self.largest.cpu().masked_fill(~valid.cpu(), math.nan)


Answer = Literal["marked", "none", "undecided"]
"""The tokens may not decide whether there is a sink."""
_FEWEST_TOKENS = 16
"""Fewer tokens show little of what attention the first ones draw."""
_UNJUDGED = "without a mark cannot be judged"


def gap_answer(
    found: ScoreGap | None,
    scores: Float[Tensor, "batch position"],
    *,
    by: Rule,
    least: float | None = None,
) -> tuple[Answer, str]:
    """Say whether tokens are marked by the gap ``found`` in the scores of rule ``by``, and in a sentence why."""
    known, least = scores[~scores.isnan()], LEAST[by] if least is None else least
    is_short, unjudged = (~scores.isnan()).sum(-1) < _FEWEST_TOKENS, ""
    highest, limit = scores.nan_to_num(0.0).amax(-1), math.inf if found is None else found.threshold
    n_unjudged = int(((is_short | (highest >= least)) & (highest < limit)).sum())
    if by == "attention" and n_unjudged:
        why = f"fewer than {_FEWEST_TOKENS} tokens, or one at {least:g} or above"
        unjudged = f"; {plural(n_unjudged, 'text')} {_UNJUDGED}: {why}"
    what = {"attention": "fair shares of attention", "norm": "times the sequence's median norm"}[by]
    sink = {"attention": "sink", "norm": "massive activation"}[by]
    if found is not None:
        stray = f", {found.within:,} of them close to the threshold" if found.within else ""
        return "marked", (
            f"by {by}: {found.above:,} of {len(known):,} tokens are at {found.high:.3g} {what} or above, the others at "
            f"{found.low:.3g} or below{stray}; threshold {found.threshold:.3g}{unjudged}"
        )
    most = float(known.max()) if len(known) else math.nan
    largest = f"so no token is marked; the largest of {len(known):,} is {most:.3g} {what}"
    if most < least and not (by == "attention" and bool(is_short.all())):
        return (
            "none",
            f"by {by}: no {sink}, {largest}, and a {sink} has at least {least:g}{unjudged}",
        )
    return "undecided", f"by {by}: not decided, {largest}, and no gap separates them{unjudged}"
