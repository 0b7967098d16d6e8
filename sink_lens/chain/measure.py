"""The passes of ``trace``: one scouts where to look, and one measures everything there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..activations.record import Reading, Streamed, stream_batch
from ..activations.sink_mask import (
    fewest_tokens_for_rates,
    sink_positions,
    sink_rate_reading,
)
from ..data.tokens import TokenBatch
from ..measures.attention import passes
from ..measures.sink_tokens import sampled_queries
from ..measures.variance import Moments
from ..models.lens import LensModel
from ..text import as_ranges
from . import readings as r
from .config import TraceConfig
from .locate import Location, MeasuringPlan, find_location

_SCOUTS, _SCOUT_LENGTH = 8, 64

CONDITION_READINGS = frozenset(
    {
        "sink_score",
        "std:z",
        "norm:resid_pre",
        "norm:resid_post",
        "state_pre",
        "state",
        "loss",
        "rate_by_key",
        "typical_pre",
        "typical",
    }
)
"""Readings that are made in the other BOS condition."""

MakesReadings = Callable[[r.MeasuringPass], list[Reading]]

TellsRates = Callable[[Float[Tensor, "layer batch position"]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """All readings of one model on one token batch."""

    streamed: Streamed
    sink_positions: tuple[int, ...]
    """In the order of the readings' last axis."""
    location: Location
    positions: Int[Tensor, " position"]
    s1: dict[tuple[str, int], Float[Tensor, " position"]]
    """(site, layer) -> standard deviation over sequences, mean over the values (S1)."""
    shortest: int
    """Tokens of the shortest sequence: later positions, which not every sequence has, are no sinks."""
    lasting: tuple[float, ...]
    """See ``LensModel.remaining_scales``."""

    @classmethod
    def unlocated(
        cls,
        streamed: Streamed,
        *,
        lens: LensModel,
        tokens: TokenBatch,
        sink_positions: tuple[int, ...],
        positions: Int[Tensor, " position"],
        sink_found: bool = False,
        moments: Mapping[tuple[str, int], Moments] | None = None,
    ) -> "Panel":
        """Leave out the growth steps and outlier dimensions, which are found in the panel."""
        return cls(
            streamed=streamed,
            sink_positions=sink_positions,
            location=Location(
                sink_positions=sink_positions, sink_found=sink_found, steps=(), outliers={}
            ),
            positions=positions,
            s1={place: moment.std().float().mean(-1) for place, moment in (moments or {}).items()},
            shortest=min(tokens.n_positions, int(tokens.lengths.min())),
            lasting=lens.remaining_scales,
        )

    @property
    def n_sequences(self) -> int:
        return self["norm:resid_post"].shape[1]

    def __contains__(self, name: str) -> bool:
        return bool(self.streamed.values.get(name))

    def __getitem__(self, name: str) -> Tensor:
        """Return a reading; its axes are layer, sequence, and its own."""
        return self.streamed.stacked(name)

    def at_layer(self, name: str, layer: int) -> Tensor:
        return self.streamed[name, layer]

    def layers(self, name: str) -> list[int]:
        return sorted(self.streamed.values.get(name, ()))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(self.layers("std:z"))

    @property
    def feeding_layers(self) -> tuple[int, ...]:
        return self.location.feeding_layers(self.attention_layers)

    def at_sink(self, name: str, position: int) -> Tensor:
        """Return a reading at a sink position; its first axes are layer and sequence."""
        return self[name][..., self.sink_positions.index(position)]

    @property
    def other_positions(self) -> Bool[Tensor, " position"]:
        return (self.positions >= r.OTHERS_FROM) & (self.positions != self.location.sink_position)

    def norm_ratio(self) -> Float[Tensor, "layer batch"]:
        """Divide the token's norm by the median of others, before layer 0 and after each layer."""
        norms = torch.cat([self["norm:resid_pre"], self["norm:resid_post"]])
        return r.ratio_to_others(norms, positions=self.positions, key=self.location.sink_position)

    def std_ratio(self, site: str) -> Float[Tensor, "layer batch"]:
        """Divide the deviation within the token by its median over others."""
        return r.ratio_to_others(
            self[f"std:{site}"], positions=self.positions, key=self.location.sink_position
        )

    def sink_states(self) -> Float[Tensor, "layer batch d_model"]:
        """Return the studied token's stream, before layer 0 and after each layer."""
        return torch.cat([self["state_pre"], self["state"]])[
            :, :, self.sink_positions.index(self.location.sink_position)
        ]

    def rescale_to_last_layer(
        self, values: Float[Tensor, "layer ..."]
    ) -> Float[Tensor, "layer ..."]:
        """Write in the unit of the last layer's stream (``LensModel.remaining_scales``)."""
        by = torch.tensor(self.lasting, dtype=values.dtype, device=values.device)
        return values * by.view(-1, *[1] * (values.dim() - 1))

    def typical_magnitudes(self) -> Float[Tensor, "layer d_model"]:
        """Return each dimension's size at a typical other token, by layer as ``sink_states``."""
        return torch.cat([self["typical_pre"], self["typical"]]).nanmean(1)

    def sink_layers(self) -> list[int]:
        """Return the layers with at least half of the attention of the strongest layer."""
        mass = (
            self.at_sink("sink_mass", self.location.sink_position)
            .nanmean(dim=(1, 2))
            .nan_to_num(0.0)
        )
        return [layer for layer in self.attention_layers if mass[layer] >= mass.max() / 2]

    @property
    def lacks_sink(self) -> bool:
        return not self.location.sink_found and self.can_tell_sinks

    @property
    def can_tell_sinks(self) -> bool:
        return not bool(self["rate_by_key"][..., : self.shortest].isnan().all())

    def find_sink_positions(self, *, min_rate: float) -> tuple[int, ...]:
        return sink_positions(self["rate_by_key"], shortest=self.shortest, min_rate=min_rate)

    def sink_rate(self, threshold: float) -> Float[Tensor, " batch"]:
        score = self.at_sink("sink_score", self.location.sink_position)
        return passes(score, threshold=threshold).nanmean(dim=(0, 2))


def scout(
    lens: LensModel,
    tokens: TokenBatch,
    *,
    config: TraceConfig,
    position: int | None = None,
    forced: tuple[tuple[int, int], ...] | None = None,
    tell: TellsRates | None = None,
) -> Location:
    """Locate the sink from the first 64 positions of eight sequences, to aim the measuring pass.

    At a low threshold it takes more positions (``fewest_tokens_for_rates``). If ``position`` is given, no sink rates
    are read; else ``tell`` is called with them.
    """
    length = max(_SCOUT_LENGTH, fewest_tokens_for_rates(config.threshold), (position or 0) + 1)
    few = tokens[:_SCOUTS].cut(length)

    def read(sinks: tuple[int, ...], *rates: Reading) -> Panel:
        sites = r.sampled_positions(few.n_positions, sink_positions=sinks)
        streamed = stream_batch(
            lens,
            few,
            [*r.location_readings(sinks, positions=sites), *rates],
            rows=sampled_queries(few.n_positions) if rates else None,
            kernel=config.kernel,
            batch_size=config.batch_size,
        )
        return Panel.unlocated(
            streamed,
            lens=lens,
            tokens=few,
            sink_positions=sinks,
            positions=sites,
            sink_found=True,
        )

    if position is not None:
        panel = read((position,))
    else:
        panel = read((0,), sink_rate_reading(config.threshold, shares=lens.family.sigmoid))
        rates = panel["rate_by_key"]
        shortest = min(few.n_positions, int(tokens.lengths.min()))
        if tell is not None:
            tell(rates[:, :, :shortest])
        found = sink_positions(rates, shortest=shortest, min_rate=config.min_sink_rate)
        if found not in {(), (0,)}:
            panel = read(found)
    return locate_in_panel(panel, config=config, forced=forced)


def locate_in_panel(
    panel: Panel,
    *,
    config: TraceConfig,
    forced: tuple[tuple[int, int], ...] | None = None,
) -> Location:
    """Find which of a panel's positions are sinks, its growth steps and outlier dimensions.

    If none of them is a sink, the first one is studied, which ``scout_and_measure`` makes position 0.
    """
    positions, sink_found = panel.sink_positions, panel.location.sink_found
    if "rate_by_key" in panel:
        found = tuple(
            p
            for p in panel.find_sink_positions(min_rate=config.min_sink_rate)
            if p in panel.sink_positions
        )
        positions, sink_found = found or panel.sink_positions[:1], bool(found)
    panel = replace(panel, location=replace(panel.location, sink_positions=positions))
    return find_location(
        positions=positions,
        sink_found=sink_found,
        ratio=panel.norm_ratio().nanmean(1),
        states=panel.rescale_to_last_layer(panel.sink_states()),
        typical=panel.rescale_to_last_layer(panel.typical_magnitudes()),
        thresholds=config,
        forced=forced,
    )


def measure(
    lens: LensModel,
    tokens: TokenBatch,
    *,
    plan: MeasuringPlan,
    config: TraceConfig,
    own: Sequence[MakesReadings] = (),
    label: str | None = None,
    only: frozenset[str] | None = None,
    forced: tuple[tuple[int, int], ...] | None = None,
) -> Panel:
    """Make all readings of every layer in one pass, at the positions, layers and dimensions of a plan, and locate.

    ``own`` makes the links' own readings, ``only`` names the readings to make. The growth steps of a model with random
    weights are ``forced``, and its loss is not read.
    """
    sinks = plan.sink_positions
    positions = r.sampled_positions(tokens.n_positions, sink_positions=sinks)
    moments: dict[tuple[str, int], Moments] = {}
    one = r.MeasuringPass(
        lens=lens,
        plan=plan,
        length=tokens.n_positions,
        controls=config.controls,
        generator=torch.Generator().manual_seed(config.seed),
    )
    readings: list[Reading] = [
        *r.attention_readings(sinks, threshold=config.threshold, sigmoid=lens.family.sigmoid),
        sink_rate_reading(config.threshold, shares=lens.family.sigmoid),
        *r.position_readings(one, positions, moments=moments),
        r.norm_reading("resid_pre", positions=positions, layers=r.FIRST_LAYER),
        *r.state_readings(sinks, positions=positions),
        *r.typical_token_readings(sinks, positions=positions),
        r.dominance_elsewhere_reading(positions),
        r.value_norm_reading(lens, sink_positions=sinks, positions=positions),
        *r.neuron_readings(lens, plan, positions=positions),
        *(reading for make in own for reading in make(one)),
        *([r.loss_reading(lens)] if forced is None else []),
    ]
    if only is not None:
        readings = [reading for reading in readings if reading.name in only]
    streamed = stream_batch(
        lens,
        tokens,
        readings,
        keys=sinks,
        rows=sampled_queries(tokens.n_positions),
        kernel=config.kernel,
        batch_size=config.batch_size,
        progress=label is not None,
        label=label or "",
    )
    panel = Panel.unlocated(
        streamed,
        lens=lens,
        tokens=tokens,
        sink_positions=sinks,
        positions=positions,
        moments=moments,
    )
    return replace(panel, location=locate_in_panel(panel, config=config, forced=forced))


def has_read_enough(aim: Location, *, at: Location, attention: Sequence[int]) -> bool:
    """Check whether a pass planned for ``aim`` read all that is needed at the location found from it."""
    same_steps = [(s.layers, s.dimension) for s in aim.steps] == [
        (s.layers, s.dimension) for s in at.steps
    ]
    same_dimensions = all(
        aim.entering_dimensions(layer) == at.entering_dimensions(layer) for layer in attention
    )
    return aim.sink_position == at.sink_position and same_steps and same_dimensions


def scout_and_measure(
    lens: LensModel,
    tokens: TokenBatch,
    *,
    config: TraceConfig,
    own: Sequence[MakesReadings] = (),
    label: str | None = None,
    only: frozenset[str] | None = None,
    position: int | None = None,
    tell: TellsRates | None = None,
    tell_repeat: Callable[[str], object] = lambda reason: None,
) -> Panel:
    """Measure again if the sink is at another location than the scout found.

    Sink positions are those of all sequences, and position 0 is studied if these have none. If a ``position`` is given,
    it alone is studied. The first scout calls ``tell``, each repeat ``tell_repeat`` with its reason.
    """
    attention = lens.layers_with("k")

    def measure_at(at: Location, *, reason: str = "") -> Panel:
        if reason:
            tell_repeat(reason)
        return measure(
            lens,
            tokens,
            plan=at.measuring_plan(attention),
            config=config,
            own=own,
            label=f"{label} again" if label and reason else label,
            only=only,
        )

    aim = scout(lens, tokens, config=config, position=position, tell=tell)
    panel = measure_at(aim)
    sinks, reason = panel.sink_positions, ""
    if position is None:
        sinks = panel.find_sink_positions(min_rate=config.min_sink_rate)
    if new := set(sinks) - set(panel.sink_positions):
        reason = f"the scout did not see the sink at {as_ranges(sorted(new))}"
    elif not sinks and panel.sink_positions != (0,):
        sinks, reason = (0,), "no position is a sink: position 0 is studied"
    if reason:
        at = panel.location
        if sinks[0] not in panel.sink_positions:
            at = scout(lens, tokens, config=config, position=sinks[0])
        aim = replace(at, sink_positions=sinks)
        panel = measure_at(aim, reason=reason)
    if only is None and not has_read_enough(aim, at=panel.location, attention=attention):
        reason = "the readings show another sink, growth step or dimension than the scout"
        panel = measure_at(panel.location, reason=reason)
    return panel
