"""``sink_tokens``: for every token whether it is a sink or a massive activation, and which dimensions are large."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...activations.attention import choose_kernel
from ...activations.forward import pieces_by_length
from ...activations.record import stream_batch
from ...activations.sink_mask import LEAST, Norms, Received, Rule, gap_answer
from ...activations.views import LayerView, Reading
from ...data.tokens import TokenBatch, decode_tokens
from ...measures.dimensions import median_magnitude, residual_outliers
from ...measures.sink_tokens import ScoreGap, score_gap
from ...models.lens import LensModel
from ...progress import tqdm
from ...records import Result
from ...schema import column_names
from ...text import as_ranges
from ..study import Measured, command_of, study
from .config import TokensConfig

_BINS = 60


class SinkTokens(Result):
    """Result of ``sink-lens tokens``: its tables, which also lie in its run folder."""

    main = "sink_tokens"

    def notebook_parts(self) -> tuple[object, ...]:
        """Return what a notebook shows below the headline: how many tokens are sinks, massive, and both."""
        return (self.tables["agreement"],)


@study(TokensConfig, kind="tokens", result=SinkTokens)
def sink_tokens(
    lens: LensModel, batch: TokenBatch, *, config: TokensConfig, progress: bool
) -> Measured:
    """Find a model's sink tokens, massive activations and residual sinks, and write a run folder.

    Raises:
        InputError: a value that cannot be used, or tokens that the model cannot take.
        KernelError: ``kernel="fused"`` was requested but is not exact.
        RunError: the folder is in use, or holds another run.

    Reference: arXiv 2402.17762 (massive activations), 2601.22966 (residual sinks).
    """
    kernel = choose_kernel(lens.family, device=lens.device, asked=config.kernel)
    found = _mark_tokens(lens, batch, config=config, progress=progress)
    decoded = decode_tokens(batch, lens.tokenizer)
    special = frozenset(() if lens.tokenizer is None else lens.tokenizer.all_special_ids)
    at = (decoded["sequence"].to_numpy(), decoded["position"].to_numpy())
    every = decoded.assign(
        kind=[
            "first"
            if position == 0
            else "delimiter"
            if is_delimiter(text, token_id, special)
            else "other"
            for position, text, token_id in zip(
                decoded["position"], decoded["text"], decoded["token_id"], strict=True
            )
        ],
        sink=found.marked("attention").numpy()[at],
        massive=found.marked("norm").numpy()[at],
        norm_ratio=found.scores["norm"].numpy()[at].astype(float),
        received=found.received.nanmean(0).numpy()[at].astype(float),
        share_score=found.scores["attention"].numpy()[at].astype(float),
    )
    # the last token of a text is followed by no query that could tell
    told = every.assign(sink=every["sink"].astype(float).where(every["received"].notna()))
    frames = {
        "sink_tokens": _marked_token_rows(every, found),
        "token_ids": _token_id_rows(told),
        "positions": told.groupby("position").agg(**_RATES).reset_index(),
        "dimensions": outlier_dimension_table(found.outliers, every, coverage=config.coverage),
        "histogram": _score_histogram(found),
        "thresholds": _threshold_rows(found, config),
        "agreement": _agreement_rows(every),
    }
    return Measured(
        frames=frames, kernel=kernel, headline="\n".join(frames["thresholds"]["statement"])
    )


run = command_of(sink_tokens)


@dataclass(slots=True, kw_only=True)
class _MarkedTokens:
    """Scores of all tokens, in all and by layer, and the thresholds of sinks and massive tokens."""

    scores: dict[str, Float[Tensor, "batch position"]]
    received: Float[Tensor, "layer batch position"]
    """Mean attention of the sampled later queries, over heads."""
    shares: Float[Tensor, "layer batch position"]
    """The same in fair shares."""
    ratios: Float[Tensor, "layer batch position"]
    """Norm of each token over the median norm of the other tokens."""
    dimensions: Mapping[tuple[int, int], tuple[int, ...]]
    """(sequence, position) -> outlier dimensions where the token's norm ratio is largest."""
    outliers: pd.DataFrame
    """layer, sequence, position, dimension, value, ratio: entries over the factor."""
    gaps: dict[Rule, ScoreGap | None]
    thresholds: dict[str, float]

    def marked(self, by: Rule) -> Bool[Tensor, "batch position"]:
        return self.scores[by] >= self.thresholds[by]


@dataclass(slots=True, kw_only=True)
class _PassReadings:
    """Attention received, norms and large dimensions of tokens, collected in one forward pass over some sequences."""

    config: TokensConfig
    where: Int[Tensor, " sample"]
    received: Received
    norms: Norms
    top: Tensor | None = None
    """Energy of the strongest dimensions of each token in its strongest layer, then their indices, then all energy."""
    outliers: list[pd.DataFrame] = field(default_factory=list)

    def readings(self) -> list[Reading]:
        return [
            Reading(name="attention", sites=("rows",), function=self._read_attention),
            Reading(name="state", sites=("resid_post",), function=self._read_norm_ratios),
        ]

    def _read_attention(self, view: LayerView) -> Tensor:
        """Return the mean attention that each token receives from sampled later queries, and it in fair shares."""
        shares = self.received.add(view)
        rows = self.received.rows.to(shares.device)
        reach = None if view.reach is None or view.reach > shares.shape[2] else view.reach
        seen = self.received.seen[reach] & view.valid[:, rows][:, :, None]
        count = seen.sum(1)
        visible = (rows + 1).clamp(min=1, max=reach)[:, None]
        sums = [torch.where(seen, part, 0.0).sum(1) / count for part in (shares / visible, shares)]
        return torch.stack(sums, dim=-1)

    def _read_norm_ratios(self, view: LayerView) -> Tensor:
        h = view["resid_post"].float()
        ratio = self.norms.add(view)
        energy = h.square()
        values, index = energy.topk(min(self.config.max_outliers, h.shape[-1]), dim=-1)
        found = torch.cat([values, index.to(values.dtype), energy.sum(-1, keepdim=True)], dim=-1)
        assert self.norms.largest is not None
        if self.top is not None:  # keep the layer where the token is largest so far
            better = (ratio >= self.norms.largest)[..., None]
            found = torch.where(better, found, self.top.to(found.device))
        self.top = found
        over = residual_outliers(h, valid=view.valid, factor=self.config.dimension_factor)
        at = over.nonzero(as_tuple=True)
        magnitude = h.abs()
        median = median_magnitude(magnitude)[at[:2]]
        columns = {
            "layer": view.layer,
            "sequence": self.where[at[0].cpu()].numpy(),
            "position": at[1].cpu().numpy(),
            "dimension": at[2].cpu().numpy(),
            "value": h[at].cpu().numpy().astype(float),
            "ratio": (magnitude[at] / median).cpu().numpy().astype(float),
        }
        self.outliers.append(pd.DataFrame(columns))
        return ratio[..., None]

    def outlier_dimensions(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return (sequence, position) -> the fewest dimensions that hold the share ``energy_frac`` of its squared norm.

        Tokens that need more than ``max_outliers`` are left out.
        """
        assert self.top is not None
        count = (self.top.shape[-1] - 1) // 2
        values, index, total = self.top.cpu().double().split([count, count, 1], dim=-1)
        held = values.cumsum(-1) >= self.config.energy_frac * total
        needed = held.int().argmax(-1) + 1
        return {
            (int(self.where[row]), position): tuple(
                index[row, position, : int(needed[row, position])].long().tolist()
            )
            for row, position in held.any(-1).nonzero().tolist()
        }


def _mark_tokens(
    lens: LensModel, batch: TokenBatch, *, config: TokensConfig, progress: bool
) -> _MarkedTokens:
    size = batch.tokens.shape
    scores = {by: torch.full(size, math.nan, dtype=torch.float32) for by in LEAST}
    received, shares, ratios = torch.full((3, lens.n_layers, *size), math.nan, dtype=torch.float32)
    dimensions: dict[tuple[int, int], tuple[int, ...]] = {}
    outliers = []
    with tqdm(
        total=batch.n_sequences, desc="reading", unit="seq", disable=not progress, leave=False
    ) as bar:
        for where, part in pieces_by_length(batch, batch_size=config.batch_size):
            one = _PassReadings(
                config=config, where=where, received=Received.empty(lens, part), norms=Norms()
            )
            streamed = stream_batch(
                lens,
                part,
                one.readings(),
                kernel=config.kernel,
                rows=one.received.rows,
                batch_size=part.n_sequences,
            )
            width = part.n_positions
            # a hybrid's linear layers stay nan
            for layer, values in streamed.values["attention"].items():
                received[layer, where, :width] = values[..., 0].float()
                shares[layer, where, :width] = values[..., 1].float()
            for layer, values in streamed.values["state"].items():
                ratios[layer, where, :width] = values[..., 0].float()
            scores["attention"][where, :width] = one.received.scores(part.valid)
            scores["norm"][where, :width] = one.norms.scores(part.valid)
            dimensions |= one.outlier_dimensions()
            outliers += one.outliers
            bar.update(part.n_sequences)
    least, given = config.least_scores, config.given_thresholds
    gaps: dict[Rule, ScoreGap | None] = {
        by: score_gap(scores[by], least=least[by], gap=config.gap) for by in LEAST
    }
    thresholds: dict[str, float] = {
        by: math.inf if gap is None else gap.threshold for by, gap in gaps.items()
    }
    thresholds |= {by: asked for by, asked in given.items() if asked is not None}
    return _MarkedTokens(
        scores=scores,
        received=received,
        shares=shares,
        ratios=ratios,
        dimensions=dimensions,
        outliers=pd.concat(outliers, ignore_index=True),
        gaps=gaps,
        thresholds=thresholds,
    )


def is_delimiter(text: str, token_id: int, special: frozenset[int]) -> bool:
    """Check if a token is special, or its text has no letter or digit."""
    return token_id in special or not any(character.isalnum() for character in text)


def _marked_token_rows(every: pd.DataFrame, found: _MarkedTokens) -> pd.DataFrame:
    table = every.loc[every["sink"] | every["massive"]].reset_index(drop=True)
    places = list(zip(table["sequence"].tolist(), table["position"].tolist(), strict=True))
    for name, values, by in (
        ("sink", found.shares, "attention"),
        ("massive", found.ratios, "norm"),
    ):
        high = values >= found.thresholds[by]
        layers = [as_ranges(high[:, *place].nonzero().flatten().tolist()) for place in places]
        table[f"{name}_layers"] = np.where(table[name], pd.Series(layers, dtype="object"), "")
    return table.assign(
        dimensions=[",".join(map(str, found.dimensions.get(place, ()))) for place in places]
    )


_RATES = {
    "tokens": ("sink", "size"),
    "sink_rate": ("sink", "mean"),
    "massive_rate": ("massive", "mean"),
    "median_share": ("share_score", "median"),
    "largest_share": ("share_score", "max"),
    "median_norm": ("norm_ratio", "median"),
    "largest_norm": ("norm_ratio", "max"),
}
"""Column of the rates of some tokens -> the column of tokens that it is computed from, and how."""


def _token_id_rows(every: pd.DataFrame) -> pd.DataFrame:
    by_id = every.loc[every["position"] > 0].groupby("token_id")
    table = by_id.agg(text=("text", "first"), kind=("kind", "first"), **_RATES).reset_index()
    marked = table[["sink_rate", "massive_rate"]].max(axis=1) * table["tokens"]
    order = ["marked", "largest_share"]
    table = table.assign(marked=marked).sort_values(order, ascending=False, kind="stable")
    return table.drop(columns="marked").reset_index(drop=True)


def outlier_dimension_table(
    outliers: pd.DataFrame, every: pd.DataFrame, *, coverage: float
) -> pd.DataFrame:
    """Return the dimensions that are outliers on most ordinary tokens, or on most marked ones."""
    marked = every["sink"].to_numpy(bool) | every["massive"].to_numpy(bool)
    places, of_entries = (
        pd.MultiIndex.from_arrays([table["sequence"].to_numpy(), table["position"].to_numpy()])
        for table in (every, outliers)
    )
    on_marked = of_entries.isin(places[marked])
    frames = []
    for kind, rows, tokens in (
        ("residual", outliers.loc[~on_marked], int((~marked).sum())),
        ("sink token", outliers.loc[on_marked], int(marked.sum())),
    ):
        found = rows.assign(value=rows["value"].abs()).groupby(["dimension", "layer"], sort=True)
        table = found.agg(
            on=("value", "size"), value=("value", "mean"), ratio=("ratio", "mean")
        ).reset_index()
        table["coverage"] = table["on"] / max(tokens, 1)
        widest = table.groupby("dimension")["coverage"].transform("max")
        frames.append(table.loc[widest >= coverage].assign(kind=kind, tokens=tokens))
    columns = column_names("tokens", "dimensions")
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _score_histogram(found: _MarkedTokens) -> pd.DataFrame:
    frames = []
    for by, scores in found.scores.items():
        known = scores[~scores.isnan()].numpy().astype(float)
        edges = np.geomspace(max(known.min() * 0.99, 1e-6), max(known.max(), 1.0) * 1.01, _BINS + 1)
        count, _ = np.histogram(np.maximum(known, edges[0]), bins=edges)
        frames.append(
            pd.DataFrame({"by": by, "low": edges[:-1], "high": edges[1:], "tokens": count})
        )
    return pd.concat(frames, ignore_index=True)


def _threshold_rows(found: _MarkedTokens, config: TokensConfig) -> pd.DataFrame:
    rows = []
    given, least = config.given_thresholds, config.least_scores
    for by, gap in found.gaps.items():
        scores, threshold = found.scores[by], found.thresholds[by]
        marked = int((scores >= threshold).sum())
        answer, statement = gap_answer(gap, scores, by=by, least=least[by])
        if given[by] is not None:
            statement = (
                f"by {by}: {marked:,} tokens are at {given[by]:g} or above, the given threshold"
            )
            answer = "marked" if marked else "none"
        rows.append(
            {
                "by": by,
                "threshold": threshold if math.isfinite(threshold) else math.nan,
                "asked": given[by] is not None,
                "gap": gap is not None,
                "answer": answer,
                "gap_low": math.nan if gap is None else gap.low,
                "gap_high": math.nan if gap is None else gap.high,
                "within": 0 if gap is None else gap.within,
                "marked": marked,
                "tokens": int((~scores.isnan()).sum()),
                "statement": statement,
            }
        )
    return pd.DataFrame(rows)


def _agreement_rows(every: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for kind in ("first", "delimiter", "other", "all"):
        part = every if kind == "all" else every.loc[every["kind"] == kind]
        sink, massive = part["sink"].to_numpy(bool), part["massive"].to_numpy(bool)
        both, either = int((sink & massive).sum()), int((sink | massive).sum())
        rows.append(
            {
                "kind": kind,
                "tokens": len(part),
                "sinks": int(sink.sum()),
                "massive": int(massive.sum()),
                "both": both,
                "sink_only": int((sink & ~massive).sum()),
                "massive_only": int((massive & ~sink).sum()),
                "jaccard": both / either if either else math.nan,
            }
        )
    return pd.DataFrame(rows)
