"""Value aggregation makes the variance discrepancy: the mean of few values keeps more variance than that of many."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...edits.amplification import usable_centres
from ...edits.constructors import Edit, freeze
from ...edits.isolation import isolate
from ...measures.variance import decay_exponent
from ...schema import DIRECTION, DISTANCE, SIZE
from ...stats import Interval
from ..amplification import amplification_edit, best_factor
from ..evidence import (
    Evidence,
    Statistic,
    not_asked_statistic,
    s2_ratio_at_other_positions,
    why_too_short,
)
from ..setting import Edits, FrozenQuantity, Segment, Setting
from .link import Freeze, Intervention, Link, Trial

_RESAMPLES_OF_SLOPE = 200
_MOST_LAYERS = 16
"""Most layers whose ratio has its own row."""


def _compute_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel, feeding = evidence.panel, evidence.panel.feeding_layers
    if not feeding:
        return [not_asked_statistic("s2_ratio")]
    std, ratios = panel["std:z"][list(feeding)], panel.std_ratio("z")
    ratio = evidence.interval(ratios[list(feeding)].nanmean(0), generator=rng)
    by_layer = [
        Statistic(
            name=f"s2_ratio_layer_{layer}",
            interval=evidence.interval(ratios[layer], generator=rng),
            layers=(layer,),
        )
        for layer in feeding[: _MOST_LAYERS if len(feeding) > 1 else 0]
    ]
    s1 = torch.stack([panel.s1["z", layer] for layer in feeding]).mean(0).cpu()
    at = s1[panel.positions == panel.location.sink_position]
    s1_ratio = float(at / s1[panel.other_positions].nanmedian())
    over_samples = Interval(estimate=s1_ratio, low=math.nan, high=math.nan, n=std.shape[1])
    nulls = {"other_positions": s2_ratio_at_other_positions(std, panel)}
    return [
        Statistic(
            name="s2_ratio", interval=ratio, nulls=nulls, note=why_too_short(panel), layers=feeding
        ),
        _position_decay_statistic(std.nanmean(0), evidence, rng),
        Statistic(name="s1_ratio", interval=over_samples, layers=feeding),
        *by_layer,
    ]


def _position_decay_statistic(
    std: Tensor, evidence: Evidence, rng: np.random.Generator
) -> Statistic:
    """Compute the slope of log S2 on log position from the studied position on; uniform attention: -1/2.

    A position has the mean over the sequences that reach it.
    """
    panel = evidence.panel
    later = panel.positions >= panel.location.sink_position
    after = (panel.positions[later] - panel.location.sink_position).tolist()

    def slope(rows: np.ndarray) -> float:
        curve = torch.full((after[-1] + 1,), math.nan, dtype=torch.float32)
        reach = rows >= 0
        with np.errstate(invalid="ignore"):  # a position that no drawn sequence reaches is nan
            mean = np.where(reach, rows, 0.0).sum(axis=0) / reach.sum(axis=0)
        curve[after] = torch.from_numpy(mean).float()
        return float(decay_exponent(curve))

    found = evidence.interval(
        std[:, later].nan_to_num(-1.0),  # a sequence with a nan would be left out
        generator=rng,
        statistic=slope,
        most_resamples=_RESAMPLES_OF_SLOPE,
    )
    law = {"uniform_law": -0.5}
    return Statistic(
        name="s2_decay_exponent", interval=found, references=law, layers=panel.feeding_layers
    )


def _make_interventions(trial: Trial) -> list[Intervention]:
    setting, position = trial.setting, trial.setting.target_position
    if not setting.feeding_layers:
        return []
    found = [
        Intervention(
            name="isolation",
            edits=(isolate([position]),),
            controls=tuple((isolate([other]),) for other in setting.control_positions(position)),
            position=position,
            reads=setting.sink_layers,
        )
    ]
    found += _make_ordinary(setting)
    norms: dict[float, Edit] = {}  # two centres with the same factor have the same control
    for centre in usable_centres(setting.lens) if len(trial.curve) else ():
        factor = best_factor(trial.curve, centre=centre)
        if centre == "none" or factor == 1:
            continue
        one, norm = (
            amplification_edit(setting, centre=name, factor=factor, means=trial.means)
            for name in (centre, "none")
        )
        norm = norms.setdefault(factor, norm)
        beside = {
            "position": position,
            "reads": setting.layers_right_after_growth,
            "is_primary": False,
        }
        found.append(Intervention(name=one.label, edits=(one,), **beside))
        found.append(Intervention(name=norm.label, edits=(norm,), control_of=one.label, **beside))
    return found


def _make_ordinary(setting: Setting) -> list[Intervention]:
    """Give the sink's value averages an ordinary size, direction or distance: the mean over ordinary tokens.

    All heads of a layer together are one vector; the distance is that from its mean over ordinary tokens. The controls
    of the direction have a random one, at the same length; those of size and distance move the vector by as much in a
    random direction.
    """
    site, position = setting.lens.family.aggregated_site, setting.sink_position
    baseline = setting.baseline_tensors(site, layers=setting.layers_until_sink(site))
    own = {layer: z[:, [position]].float() for layer, z in baseline.items()}
    moved: dict[str, dict[int, Tensor]] = {SIZE: {}, DIRECTION: {}, DISTANCE: {}}
    for layer, z in baseline.items():
        mean = setting.mean_ordinary(z).float()
        over, size = own[layer] - mean, _length(own[layer])
        moved[SIZE][layer] = own[layer] * (setting.mean_ordinary(_length(z.float())) / size)
        moved[DIRECTION][layer] = mean * (size / _length(mean))
        moved[DISTANCE][layer] = mean + over * (
            setting.mean_ordinary(_length(z.float() - mean)) / _length(over)
        )

    def edit_to(values: Mapping[int, Tensor], label: str) -> Edits:
        return (freeze(site, values, positions=[position], label=label),)

    found = []
    for name, values in moved.items():
        generator, controls = setting.make_generator(), []
        for _ in range(setting.config.controls):
            drawn = {
                layer: torch.randn(z.shape[2:], generator=generator, dtype=torch.float32)
                for layer, z in baseline.items()
            }
            nulls = {}
            for layer, one in drawn.items():
                unit = (one / one.norm()).to(own[layer].device)
                step = unit * _length(values[layer] - own[layer])
                nulls[layer] = (
                    unit * _length(own[layer]) if name == DIRECTION else own[layer] + step
                )
            controls.append(edit_to(nulls, "value averages in random directions"))
        found.append(
            Intervention(
                name=name,
                edits=edit_to(values, name),
                controls=tuple(controls),
                position=position,
                reads=setting.sink_layers,
                is_primary=False,
                carries=name == DISTANCE,
            )
        )
    return found


def _length(z: Tensor) -> Tensor:
    """Return the length of the vectors of all heads together, above 0; axes stay, with size 1."""
    return z.flatten(2).norm(dim=-1).clamp(min=1e-9)[..., None, None]


def _freeze_values(
    setting: Setting, segment: Segment, position: int, _: torch.Generator
) -> FrozenQuantity:
    site = setting.lens.family.aggregated_site
    layers = setting.layers_having(site, range(segment.layers[-1] + 1))
    return setting.freeze_site(site, layers=layers, position=position)


AGGREGATION_VARIANCE = Link(
    name="aggregation_variance",
    source="value aggregation",
    target="variance discrepancy",
    arrow="aggregation → variance",
    sentence="Averaging over more tokens lowers the variance of what attention reads, so the first token keeps the "
    "most.",
    question="does the sink token's aggregated value have a larger standard deviation than that of other tokens?",
    statistics=_compute_statistics,
    floor=lambda config, length, position: 1.25,
    interventions=_make_interventions,
    freeze=Freeze(name="z", make=_freeze_values),
)
