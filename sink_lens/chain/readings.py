"""The readings that links and tables share, and the positions that are read.

Long sequences are read at the first 32 positions and 32 more, evenly spaced in the logarithm.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..activations.record import LayerView, Reading
from ..measures import attention, dimensions, outputs, rank, variance
from ..measures.reductions import mean_where, median_where, queries_from
from ..models.family import ADDED
from ..models.lens import LensModel
from ..models.sites import sites_of
from ..models.unembedding import losses_from_states
from ..models.weights import (
    AttentionConstants,
    AttentionWeights,
    attention_constants,
    attention_weights,
    output_weights,
)
from ..schema import SINK_THRESHOLD
from .config import CONTROLS
from .locate import MeasuringPlan

Item = TypeVar("Item")
SITES_BY_POSITION = ("z", *ADDED, "resid_post")
OTHERS_FROM = 8
"""First position of other tokens."""
FIRST_LAYER = frozenset({0})
_MOST_SAMPLED = 64


@dataclass(frozen=True, kw_only=True)
class MeasuringPass:
    """The pass that a link's own readings are made for."""

    lens: LensModel
    plan: MeasuringPlan
    length: int
    controls: int
    generator: torch.Generator
    """The links draw their random controls from it in their order."""

    @functools.cached_property
    def layer_weights(self) -> Callable[[int], AttentionWeights]:
        """The weights of one layer are kept for all its readings."""
        return functools.lru_cache(maxsize=1)(
            lambda layer: attention_weights(self.lens, layer=layer)
        )

    @functools.cached_property
    def layer_constants(self) -> Callable[[int], AttentionConstants]:
        """What biases add to every token."""
        return functools.cache(lambda layer: attention_constants(self.lens, layer=layer))


def sampled_positions(
    length: int, *, sink_positions: Iterable[int] = ()
) -> Int[Tensor, " position"]:
    """Return all of ``length`` positions if few, else the first, log-spaced later ones and the sinks."""
    if length <= _MOST_SAMPLED:
        return torch.arange(length)
    half = _MOST_SAMPLED // 2
    ends = math.log10(half), math.log10(length - 1)
    late = torch.logspace(*ends, half, dtype=torch.float32).round().long()
    sinks = torch.tensor(sorted(sink_positions), dtype=torch.long)
    return torch.cat([torch.arange(half), late, sinks]).unique()


def evenly_spaced(items: Sequence[Item], most: int) -> list[Item]:
    """Pick at most ``most`` items, the first and the last included."""
    spaced = torch.linspace(0, len(items) - 1, min(most, len(items)), dtype=torch.float32)
    return [items[place] for place in spaced.round().long().tolist()]


def ratio_to_others(
    x: Float[Tensor, "*value position"], *, positions: Int[Tensor, " position"], key: int
) -> Float[Tensor, "*value"]:
    """Divide ``x`` at ``key`` by its median over other ``positions`` (from 8 on, without nan)."""
    other = (positions >= OTHERS_FROM) & (positions != key) & ~x.isnan()
    return x[..., positions == key][..., 0] / median_where(x, where=other)


def attention_readings(
    sink_positions: tuple[int, ...], *, threshold: float = SINK_THRESHOLD, sigmoid: bool = False
) -> list[Reading]:
    """Read sink score and mass at ``sink_positions``, entropy and null mass.

    The score is nan in windows and sequences too short to tell a sink at the threshold (``attention.fewest_tokens``,
    and the same for the sampled queries of ``sink_rate_reading``); so is the null mass of ``sigmoid`` attention, whose
    rows need not sum to 1.
    """
    fewest = math.ceil(attention.fewest_queries(threshold=threshold))

    def by_key(function: Callable[..., Tensor]) -> Callable[[LayerView], Tensor]:
        def read(view: LayerView) -> Tensor:
            found = [
                function(column, key=key, valid=view.valid, reach=view.reach)
                for column, key in zip(view["mass"].unbind(-1), sink_positions, strict=True)
            ]
            return torch.stack(found, dim=-1)

        return read

    def score(view: LayerView) -> Tensor:
        assert view.rows is not None
        found = by_key(functools.partial(attention.sink_score, min_queries=fewest))(view)
        n_seen = view.valid.sum(1).clamp(min=0, max=view.reach)
        can_tell = n_seen >= attention.fewest_tokens(threshold=threshold)
        can_tell = can_tell & bool((1 / (view.rows + 1)).mean() < threshold)
        return found.masked_fill(~can_tell[:, None, None].to(found.device), math.nan)

    def row_mean(function: Callable[[Tensor], Tensor]) -> Callable[[LayerView], Tensor]:
        return lambda view: attention.mean_over_rows(
            function(view["rows"]), row_valid=view.valid[:, view.rows]
        )

    def to_no_key(rows: Tensor) -> Tensor:
        # a row that sums to more than 1 is of no softmax, and neither are the others
        found = attention.null_mass(rows)
        return found.masked_fill(found.isnan().any(-1, keepdim=True) | sigmoid, math.nan)

    return [
        Reading(name="sink_score", sites=("mass",), function=score),
        Reading(name="sink_mass", sites=("mass",), function=by_key(attention.sink_mass)),
        Reading(name="entropy", sites=("rows",), function=row_mean(attention.entropy)),
        Reading(name="null_mass", sites=("rows",), function=row_mean(to_no_key)),
    ]


def position_readings(
    one: MeasuringPass,
    positions: Int[Tensor, " position"],
    *,
    moments: dict[tuple[str, int], variance.Moments],
) -> list[Reading]:
    """Read the standard deviation in a token (S2) and the norm at each site; sums for S1 go to ``moments``.

    The constants that biases add to every token are taken off before the deviation.
    """
    readings = []

    def without_constant(x: Tensor, site: str, layer: int) -> Tensor:
        alike = getattr(one.layer_constants(layer), site) if site in ("z", "attn_out") else None
        return x if alike is None or not bool(alike.any()) else x - alike.flatten()

    for site in SITES_BY_POSITION:
        if site not in sites_of(one.lens.family):
            continue

        def std(view: LayerView, site: str = site) -> Tensor:
            x, valid = _sampled_vectors(view, site, positions)
            place = (site, view.layer)
            if place not in moments:
                moments[place] = variance.Moments.empty(
                    n_positions=x.shape[1], n_values=x.shape[2], device=x.device
                )
            moments[place].update(x, valid=valid)
            return variance.token_std(without_constant(x, site, view.layer)).masked_fill(
                ~valid, math.nan
            )

        readings.append(Reading(name=f"std:{site}", sites=(site,), function=std))
        readings.append(norm_reading(site, positions=positions))

    return readings


def norm_reading(
    site: str, *, positions: Int[Tensor, " position"], layers: frozenset[int] | None = None
) -> Reading:

    def norm(view: LayerView) -> Tensor:
        x, valid = _sampled_vectors(view, site, positions)
        return x.norm(dim=-1).masked_fill(~valid, math.nan)

    return Reading(name=f"norm:{site}", sites=(site,), function=norm, layers=layers)


def state_readings(
    sink_positions: tuple[int, ...], *, positions: Int[Tensor, " position"]
) -> list[Reading]:
    """Read states at sink positions, and the effective rank with and without sinks."""

    def ranks(view: LayerView) -> Tensor:
        x, valid = _sampled_vectors(view, "resid_post", positions)
        places = [int((positions == sink).nonzero()) for sink in sink_positions]
        return rank.effective_ranks(x, valid=valid, without=((), places))

    return [
        _reading_at("state_pre", "resid_pre", sink_positions, layers=FIRST_LAYER),
        _reading_at("state", "resid_post", sink_positions),
        Reading(name="effective_rank", sites=("resid_post",), function=ranks),
    ]


def _reading_at(
    name: str, site: str, positions: Sequence[int], *, layers: frozenset[int] | None = None
) -> Reading:
    def values(view: LayerView) -> Tensor:
        return view[site][:, list(positions)].float()

    return Reading(name=name, sites=(site,), function=values, layers=layers)


def typical_token_readings(
    sink_positions: tuple[int, ...], *, positions: Int[Tensor, " position"]
) -> list[Reading]:
    """Read each dimension's median magnitude over ``positions`` >= 8 but the sinks."""
    others = (positions >= OTHERS_FROM) & ~torch.isin(positions, torch.tensor(sink_positions))

    def typical(name: str, site: str, layers: frozenset[int] | None) -> Reading:
        def medians(view: LayerView) -> Tensor:
            x, valid = _sampled_vectors(view, site, positions)
            return median_where(x.abs().mT, where=(valid & others.to(valid.device))[:, None])

        return Reading(name=name, sites=(site,), function=medians, layers=layers)

    return [
        typical("typical_pre", "resid_pre", FIRST_LAYER),
        typical("typical", "resid_post", None),
    ]


def location_readings(
    sink_positions: tuple[int, ...], *, positions: Int[Tensor, " position"]
) -> list[Reading]:
    return [
        norm_reading("resid_pre", positions=positions, layers=FIRST_LAYER),
        norm_reading("resid_post", positions=positions),
        *state_readings(sink_positions, positions=positions)[:2],
        *typical_token_readings(sink_positions, positions=positions),
    ]


def value_norm_reading(
    lens: LensModel, *, sink_positions: tuple[int, ...], positions: Int[Tensor, " position"]
) -> Reading:
    """Read each sink's value norm after W_O, over the mean norm at other ``positions``."""
    places = [int((positions == sink).nonzero()) for sink in sink_positions]

    def ratios(view: LayerView) -> Tensor:
        v, valid = _sampled_values(view, "v", positions)
        factor = outputs.triangular_factor(output_weights(lens, layer=view.layer)[0])
        norms = outputs.value_norms(v, factor=factor)
        found = [outputs.value_norm_ratio(norms, valid=valid, key=place) for place in places]
        return torch.stack(found, dim=-1)

    return Reading(name="value_norm_ratio", sites=("v",), function=ratios)


def control_positions(length: int, *, key: int, controls: int = CONTROLS) -> list[int]:
    """Pick at most ``controls`` other positions than ``key``, evenly spaced from 8 on."""
    end = max(OTHERS_FROM, length - 1)
    spaced = torch.linspace(OTHERS_FROM, end, controls + 1, dtype=torch.float32)[:-1]
    places = {*spaced.round().long().tolist()} - {key}
    return sorted(place for place in places if place < length)


def neuron_readings(
    lens: LensModel, plan: MeasuringPlan, *, positions: Int[Tensor, " position"]
) -> list[Reading]:
    """Read neurons in the plan's layers, and what the sublayers add there, at the sink positions.

    Neurons are also read at ``positions``, and in the mean |activation| over other tokens.
    """
    sinks, layers = list(plan.sink_positions), frozenset(plan.layers)
    if not layers:
        return []

    def elsewhere(view: LayerView) -> Tensor:
        others = view.valid.clone()
        others[:, sinks] = False
        return mean_where(view["neurons"].abs(), where=others[..., None], dim=1)

    def by_position(site: str) -> Reading:
        def sampled(view: LayerView) -> Tensor:
            x, valid = _sampled_vectors(view, site, positions)
            return x.masked_fill(~valid[..., None], math.nan)

        return Reading(name=f"{site}_by_position", sites=(site,), function=sampled, layers=layers)

    read = ["neurons", *(site for site in ADDED if site in sites_of(lens.family))]
    return [
        *(_reading_at(f"{site}_at_sinks", site, sinks, layers=layers) for site in read),
        by_position("mlp_in"),
        by_position("neurons"),
        Reading(name="neurons_elsewhere", sites=("neurons",), function=elsewhere, layers=layers),
    ]


def token_loss_reading(lens: LensModel) -> Reading:
    """Read each token's loss in nats, nan at padding; not all logits are held at once."""

    def loss(view: LayerView) -> Tensor:
        hidden, targets = view["final"][:, :-1], view.tokens[:, 1:]
        predicted = (view.valid if view.labelled is None else view.valid & view.labelled)[:, 1:]
        found = torch.full(targets.shape, math.nan, device=hidden.device, dtype=torch.float32)
        found[predicted] = losses_from_states(lens, hidden[predicted], targets[predicted])
        return found

    return Reading(name="token_loss", sites=("final",), function=loss)


def loss_reading(lens: LensModel) -> Reading:
    by_token = token_loss_reading(lens).function

    def loss(view: LayerView) -> Tensor:
        found = by_token(view)
        assert found is not None  # it gives a tensor
        return found.nanmean(1)

    return Reading(name="loss", sites=("final",), function=loss)


def dominance_elsewhere_reading(positions: Int[Tensor, " position"]) -> Reading:
    """Read the median over ``positions`` from 8 on: a null for the studied token's ratio."""

    def median(view: LayerView) -> Tensor:
        x, valid = _sampled_vectors(view, "resid_post", positions)
        ratio = dimensions.dominance_ratio(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return median_where(ratio, where=valid & (positions.to(valid.device) >= OTHERS_FROM))

    return Reading(name="dominance_elsewhere", sites=("resid_post",), function=median)


def later_queries(view: LayerView, *, key: int) -> Bool[Tensor, "batch query"]:
    """Mark the queries after a key that can see it; padding is False."""
    return queries_from(
        view.valid, start=key + 1, end=None if view.reach is None else key + view.reach
    )


def _sampled_values(
    view: LayerView, site: str, positions: Tensor
) -> tuple[Tensor, Bool[Tensor, "batch position"]]:
    x, valid = view[site], view.valid
    if len(positions) < x.shape[1]:
        index = positions.to(x.device)
        x, valid = x[:, index], valid[:, index]
    return x, valid


def _sampled_vectors(
    view: LayerView, site: str, positions: Tensor
) -> tuple[Tensor, Bool[Tensor, "batch position"]]:
    x, valid = _sampled_values(view, site, positions)
    return x.flatten(2).float(), valid
