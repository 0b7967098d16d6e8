"""The measurements that links are judged by, and their statistics."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..models.lens import LensModel
from ..schema import OWN_RATIO
from ..stats import Interval, interval, ratio_of_means, studentised_interval
from .config import TraceConfig
from .locate import GrowthStep, own_directions
from .measure import Panel
from .neurons import LayerSplit, split_growth_layers
from .readings import OTHERS_FROM
from .setting import sequences_to_test

_MOSTLY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All readings of one model, and its growth layers by neuron."""

    lens: LensModel
    panel: Panel
    splits: list[LayerSplit]
    config: TraceConfig
    n_resamples: int = 2000
    """Draws of an interval; slow statistics have fewer."""

    def interval(
        self,
        values: Tensor,
        *,
        generator: np.random.Generator,
        most_resamples: int | None = None,
        statistic: Callable[[np.ndarray], float] | None = None,
    ) -> Interval:
        """Compute a statistic of ``values`` and its bootstrap interval over sequences, the first axis.

        The statistic is the mean, or ``statistic``. The interval is studentised for the mean and ``ratio_of_means``;
        another statistic has a percentile interval, which covers less at few sequences.
        """
        n, over = min(self.n_resamples, most_resamples or self.n_resamples), None
        if statistic is ratio_of_means:
            values, over = values[:, 0], values[:, 1].numpy()
        elif statistic is not None:
            return interval(values.numpy(), generator=generator, n_resamples=n, statistic=statistic)
        elif values.dim() > 1:
            values = values.flatten(1).mean(1)
        return studentised_interval(
            values.numpy(), over=over, generator=generator, n_resamples=max(100, n)
        )

    def splits_of(self, step: GrowthStep) -> list[LayerSplit]:
        """At the studied position."""
        at = self.panel.location.sink_position
        return [s for s in self.splits if s.layer in step.layers and s.position == at]

    @property
    def tested_sequences(self) -> list[int]:
        """Sequences on which super neurons are tested; they are chosen on others, if there are any."""
        return sequences_to_test(self.panel.n_sequences, config=self.config)

    def make_generator(self) -> torch.Generator:
        """Each call gives the same draws."""
        return torch.Generator().manual_seed(self.config.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A number measured for a link, and what it is compared with."""

    name: str
    interval: Interval
    nulls: Mapping[str, float] = field(default_factory=dict)
    """Values that it must pass if it is primary."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Values that it need not pass."""
    layers: tuple[int, ...] = ()
    """Empty if it is of steps or of all layers."""
    note: str = ""
    """Why it is undefined."""
    absent: bool = False
    """The parts to measure, such as super neurons, were searched for and not found."""
    no_source: bool = False
    """The link's source is absent, so the question has no answer."""
    asked: bool = True
    """False if no layer of the model could be asked."""


def gather_evidence(lens: LensModel, panel: Panel, *, config: TraceConfig) -> Evidence:
    """Split growth by neurons; choose super neurons on sequences that are not set aside to test them."""
    test = sequences_to_test(panel.n_sequences, config=config)
    chosen = [one for one in range(panel.n_sequences) if one not in test] or None
    splits = split_growth_layers(lens, panel, super_share=config.super_share, chosen=chosen)
    return Evidence(lens=lens, panel=panel, splits=splits, config=config)


def undefined_statistic(
    name: str, note: str, *, absent: bool = False, no_source: bool = False
) -> Statistic:
    nothing = Interval(estimate=math.nan, low=math.nan, high=math.nan, n=0)
    return Statistic(name=name, interval=nothing, note=note, absent=absent, no_source=no_source)


def not_asked_statistic(name: str) -> Statistic:
    return replace(
        undefined_statistic(name, "no layer with attention comes before the growth"), asked=False
    )


def own_direction_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Measure the sink token in ``own_directions``, where keys read it, over other tokens' typical norm.

    The result is [] in sequences too short to tell.
    """
    panel = evidence.panel
    layers = panel.sink_layers()
    ratio = panel.norm_ratio()[layers]
    if ratio.isnan().all():
        return []
    states = panel.sink_states()[layers].double()
    spans = [own_directions(state, thresholds=evidence.config) for state in states]
    shares = torch.stack(
        [(x @ span).norm(dim=1) / x.norm(dim=1) for x, span in zip(states, spans, strict=True)]
    )
    found = evidence.interval((shares * ratio).nanmean(0), generator=rng)
    return [Statistic(name=OWN_RATIO, interval=found, layers=tuple(layers))]


def why_too_short(panel: Panel) -> str:
    """Return why there are no other tokens to compare the sink token with; empty if there are."""
    none = f"the sequences have no other token at or after position {OTHERS_FROM}"
    return none if panel.norm_ratio().isnan().all() else ""


def undefined_without_growth_step(evidence: Evidence, name: str) -> Statistic | None:
    """Without a growth step no neuron is super."""
    if evidence.panel.location.steps:
        return None
    short = why_too_short(evidence.panel)
    return undefined_statistic(name, short or "no growth step was found", absent=not short)


def steps_of_neurons(evidence: Evidence) -> list[tuple[int, GrowthStep]]:
    """Return the numbered growth steps that neurons make for the most part; all if none is such."""
    location, found = evidence.panel.location, []
    for number, step in enumerate(location.steps):
        own = evidence.splits_of(step)
        written = float(sum(split.terms.sum(1).mean() for split in own))
        change = float(sum(split.change.mean() for split in own))
        if not abs(written) < _MOSTLY * abs(change):
            found.append((number, step))
    return found or list(enumerate(location.steps))


def s2_ratio_at_other_positions(std: Tensor, panel: Panel) -> float:
    """Return the 95th percentile of S2 at other positions over its median: a null of the S2 ratio."""
    values = std[..., panel.other_positions]
    if not values.shape[-1]:
        return math.nan
    ratios = values / values.nanmedian(dim=-1, keepdim=True).values
    return float(ratios.nanmean(dim=(0, 1)).nanquantile(0.95))


def weakest_statistic(name: str, by_step: list[Statistic]) -> Statistic:
    """Return the lowest under a new ``name``: a link must hold at every growth step."""

    def estimate(one: Statistic) -> float:
        return -math.inf if math.isnan(one.interval.estimate) else one.interval.estimate

    return replace(min(by_step, key=estimate), name=name)


def largest_control(controls: Iterable[float]) -> float:
    return max((control for control in controls if not math.isnan(control)), default=math.nan)
