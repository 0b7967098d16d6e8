"""Sink positions, growth steps and outlier dimensions of a model, found in what was measured.

Nothing is typed in: coordinates do not transfer between models, not even between seeds of one.
"""

import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import RunError
from ..measures.dimensions import dominance_ratio, outlier_dimensions, random_energy_share
from .config import TraceConfig

_WRITTEN, _LEAST_WRITTEN = 0.1, 0.05
_LEFT_OF_RANDOM, _OVER_RANDOM = 0.25, 2.0
_COMMON = 0.5
"""Share of the token's magnitude at a typical other token from which a dimension is every token's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthStep:
    """Consecutive layers in each of which the sink token grows.

    In each, the norm ratio at least doubles; or in all of them an outlier dimension is written
    (``mark_writing_layers``), and together they raise the ratio by the root of that factor.
    """

    first_layer: int
    last_layer: int
    ratio_before: float
    ratio_after: float
    """Norm ratios before the first and after the last layer."""
    dimension: int
    """The dimension with the most of the sink token's energy after the last layer."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringPlan:
    """What a measuring pass reads, fixed before anything is measured."""

    sink_positions: tuple[int, ...]
    """The studied one first."""
    layers: tuple[int, ...] = ()
    """The growth layers, whose neurons are read."""
    dimensions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> dimensions of the stream that it reads, whose part in the studied key is read."""

    @property
    def sink_position(self) -> int:
        return self.sink_positions[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Sink positions, growth steps and outlier dimensions, as found."""

    sink_positions: tuple[int, ...]
    """The studied one first; position 0 where no sink was found."""
    sink_found: bool
    """The studied position is a sink position."""
    steps: tuple[GrowthStep, ...]
    outliers: Mapping[int, tuple[int, ...]]
    """Layer -> outlier dimensions of the studied token after it, if any; -1 is before layer 0."""

    @property
    def sink_position(self) -> int:
        return self.sink_positions[0]

    @property
    def growth_layers(self) -> tuple[int, ...]:
        return tuple(layer for step in self.steps for layer in step.layers)

    @property
    def lasting_and_brief_dimensions(self) -> tuple[list[int], list[int]]:
        """Outlier dimensions of two or more layers, most layers first, and those of a single layer.

        All are in the first list if none is in two layers. The embedding does not count as a layer.
        """
        counts = Counter(
            one
            for layer, found in sorted(self.outliers.items())
            if layer >= 0
            for one in sorted(found)
        )
        lasting = [
            one
            for one, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
            if count > 1
        ]
        brief = sorted(one for one, count in counts.items() if count == 1)
        return (lasting, brief) if lasting else (brief, [])

    def feeding_layers(self, attention: Sequence[int]) -> tuple[int, ...]:
        """Return the layers whose attention comes before the growth, of those with ``attention``."""
        return feeding_layers(self.growth_layers, attention=attention)

    def entering_dimensions(self, layer: int) -> tuple[int, ...]:
        return self.outliers.get(layer - 1, ())

    def measuring_plan(self, attention: Iterable[int]) -> MeasuringPlan:
        """Plan to measure at this location; ``attention`` are the layers with attention."""
        entering = {layer: self.entering_dimensions(layer) for layer in attention}
        return MeasuringPlan(
            sink_positions=self.sink_positions,
            layers=self.growth_layers,
            dimensions={layer: dimensions for layer, dimensions in entering.items() if dimensions},
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def parse_location(text: str) -> Location:
    """Read what ``Location.as_json`` wrote.

    Raises:
        RunError: the text is something else.
    """
    try:
        found = json.loads(text)
        return Location(
            sink_positions=tuple(map(operator.index, found["sink_positions"])),
            sink_found=bool(found["sink_found"]),
            steps=tuple(GrowthStep(**step) for step in found["steps"]),
            outliers={
                int(layer): tuple(map(operator.index, dims))
                for layer, dims in found["outliers"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"the sink's location in the run folder cannot be read ({type(error).__name__}: {error}); need the "
            "file that trace wrote. Run again into another folder."
        ) from error


def feeding_layers(growth: tuple[int, ...], *, attention: Sequence[int]) -> tuple[int, ...]:
    """Return the layers with ``attention`` up to the first of ``growth``: it comes before the growth.

    Without growth, they are the first quarter. A hybrid may have none.
    """
    if growth:
        return tuple(layer for layer in attention if layer <= growth[0])
    return tuple(attention[: max(1, len(attention) // 4)])


def find_growth_steps(ratio: Float[Tensor, " layer"], *, factor: float) -> list[tuple[int, int]]:
    """Find growth steps (first layer, last layer), in which each layer multiplies the norm ratio by ``factor``.

    ``ratio[0]`` is before layer 0, ``ratio[l + 1]`` after layer l. A step must leave the token above the others
    (ratio over 1), so that the recovery of a small norm is no growth.
    """
    steps = _consecutive_runs(
        layer for layer, does in enumerate((ratio[1:] >= factor * ratio[:-1]).tolist()) if does
    )
    return [step for step in steps if ratio[step[1] + 1] > 1]


def mark_writing_layers(
    values: Float[Tensor, "sample dimension"],
) -> Bool[Tensor, "layer dimension"]:
    """Mark the layers in which a dimension's magnitude grows by a tenth or more.

    Changes under a twentieth of its largest value do not count. ``values`` are before layer 0 and after each layer.
    """
    size = values.abs()
    so_far, change = size.cummax(0).values[1:], size[1:] - size[:-1]
    return (
        (change >= _WRITTEN * so_far)
        & (change > 0)
        & (change >= _LEAST_WRITTEN * size.max(0).values)
    )


def onset_layer(mass: Float[Tensor, " layer"], *, threshold: float) -> int | None:
    over = (mass > threshold).nonzero()
    return int(over[0]) if len(over) else None


def find_outlier_dimensions(
    state: Float[Tensor, "batch d_model"],
    *,
    thresholds: TraceConfig,
    typical: Float[Tensor, " d_model"] | None = None,
) -> tuple[int, ...]:
    """Find the outlier dimensions of a token in its stream (``state``), the strongest first.

    They are the fewest dimensions with ``energy_frac`` of its energy, if they are at most ``max_outliers`` and
    dominate: the token's mean dominance ratio over sequences reaches ``dominance_threshold``, or they leave at most a
    quarter of the energy that as many of the largest dimensions of a random token leave, and each holds at least twice
    what the largest of these holds (``random_energy_share``; in a narrow model no token reaches a high ratio).
    Dimensions that are large at a ``typical`` other token are set to 0 first.
    """
    width = state.shape[1]
    while True:
        energy = state.double().square().mean(0)
        found = outlier_dimensions(energy, energy_frac=thresholds.energy_frac)
        dominates = bool(dominance_ratio(state).mean() >= thresholds.dominance_threshold)
        shares = (energy[found] / energy.sum()).tolist()
        nearly_all = 1 - sum(shares) <= _LEFT_OF_RANDOM * (
            1 - random_energy_share(len(found), width=width)
        )
        dominates |= nearly_all and min(shares, default=0) >= _OVER_RANDOM * random_energy_share(
            1, width=width
        )
        if not dominates or len(found) > thresholds.max_outliers:
            return ()
        common = (
            []
            if typical is None
            else found[_mark_common_dimensions(state, typical)[found]].tolist()
        )
        if not common:
            return tuple(found.tolist())
        state = state.clone()
        state[:, common] = 0.0


def _mark_common_dimensions(
    state: Float[Tensor, "batch d_model"], typical: Float[Tensor, " d_model"]
) -> Bool[Tensor, " d_model"]:
    return typical >= _COMMON * state.abs().mean(0)


def find_location(
    *,
    positions: tuple[int, ...],
    sink_found: bool,
    ratio: Float[Tensor, " layer"],
    states: Float[Tensor, "layer batch d_model"],
    thresholds: TraceConfig,
    typical: Float[Tensor, "layer d_model"] | None = None,
    forced: tuple[tuple[int, int], ...] | None = None,
) -> Location:
    """Find the growth steps and outlier dimensions of the studied token, from its norm and its stream by layer.

    ``ratio``, ``states`` and ``typical``, the magnitudes at a typical other token, are before layer 0, then after each
    layer. ``forced`` are growth steps to take instead, for the random-init baseline; each layer's strongest dimension
    is then its outlier dimension.
    """
    own = [None] * len(states) if typical is None or forced is not None else list(typical)
    if forced is not None:
        outliers = {index - 1: (_strongest_dimension(state),) for index, state in enumerate(states)}
        spans = list(forced)
    else:
        pairs = enumerate(zip(states, own, strict=True), start=-1)
        found = {
            at: find_outlier_dimensions(state, thresholds=thresholds, typical=one)
            for at, (state, one) in pairs
        }
        outliers = {layer: dimensions for layer, dimensions in found.items() if dimensions}
        factor = thresholds.growth_factor
        spans = find_growth_steps(ratio, factor=factor)
        more = _find_runs_of_writing_layers(
            states, ratio=ratio, factor=factor**0.5, outliers=outliers, taken=spans
        )
        spans = sorted([*spans, *more])
    steps = tuple(
        GrowthStep(
            first_layer=first,
            last_layer=last,
            ratio_before=float(ratio[first]),
            ratio_after=float(ratio[last + 1]),
            dimension=_strongest_dimension(states[last + 1], typical=own[last + 1]),
        )
        for first, last in spans
    )
    return Location(sink_positions=positions, sink_found=sink_found, steps=steps, outliers=outliers)


def own_directions(
    state: Float[Tensor, "batch d_model"], *, thresholds: TraceConfig
) -> Float[Tensor, "d_model sample"]:
    """Return the fewest principal directions with ``energy_frac`` of its energy; none if over ``max_outliers``."""
    _, sizes, rows = torch.linalg.svd(state.double(), full_matrices=False)
    held = sizes.square().cumsum(0)
    n = int((held < thresholds.energy_frac * held[-1]).sum()) + 1
    return rows[: n if n <= thresholds.max_outliers else 0].T


def _consecutive_runs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Group ascending ``layers`` into runs, each as (first, last)."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer - 1:
            found[-1] = (found[-1][0], layer)
        else:
            found.append((layer, layer))
    return found


def _find_runs_of_writing_layers(
    states: Float[Tensor, "layer batch d_model"],
    *,
    ratio: Float[Tensor, " layer"],
    factor: float,
    outliers: Mapping[int, tuple[int, ...]],
    taken: list[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Find runs of layers that write an outlier dimension and are in no step of ``taken``.

    The ratio rises by at least ``factor`` over the run, to above 1. A dimension that comes back after an erasure, or is
    written while the token shrinks, does not count.
    """
    dims = sorted({one for layer, found in outliers.items() if layer >= 0 for one in found})
    if not dims:
        return []
    size = states.double().mean(1)[:, dims].abs()
    is_outlier = torch.zeros(len(states) - 1, len(dims), dtype=torch.bool)
    for layer, found in outliers.items():
        if layer >= 0:  # it counts in this layer and all before it
            is_outlier[: layer + 1] |= torch.tensor([one in found for one in dims])
    grows = mark_writing_layers(size) & is_outlier & (size[1:] > size.cummax(0).values[:-1])
    covered = {layer for first, last in taken for layer in range(first, last + 1)}
    rises = ~(ratio[1:] < (1 - _LEAST_WRITTEN) * ratio[:-1]) & grows.any(
        1
    )  # nan: nothing to compare with
    spans = _consecutive_runs(
        layer for layer in rises.nonzero().flatten().tolist() if layer not in covered
    )
    return [(a, b) for a, b in spans if not (ratio[b + 1] <= 1 or ratio[b + 1] < factor * ratio[a])]


def _strongest_dimension(
    state: Float[Tensor, "batch d_model"], *, typical: Float[Tensor, " d_model"] | None = None
) -> int:
    """Return the dimension with most energy, if possible one that is small at a ``typical`` token."""
    energy = state.double().square().mean(0)
    if typical is not None and not bool((common := _mark_common_dimensions(state, typical)).all()):
        energy = energy.masked_fill(common, -1.0)
    return int(energy.argmax())
