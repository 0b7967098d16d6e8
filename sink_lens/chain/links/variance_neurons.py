"""The variance discrepancy makes super neurons fire, at the sink token only."""

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...schema import ALL_STEPS
from ...text import plural
from ..evidence import (
    Evidence,
    Statistic,
    largest_control,
    steps_of_neurons,
    undefined_statistic,
    undefined_without_growth_step,
    weakest_statistic,
)
from ..neurons import neurons_of_same_experts, super_units_of_layer
from ..setting import FrozenQuantity, Segment, Setting, draw_other_indices, marked_units
from .link import Freeze, Intervention, Link, Trial, make_mean_ablation

_LARGEST_RATIO = 1e6
_SILENT = 0.01
"""A neuron is silent if its activation is at most this share of the strongest super neuron's."""


def _compute_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Return the spike ratio of the super neurons: the lowest of all growth steps, then one per step.

    Random neurons are of other experts, since a router or gate multiplies all neurons of an expert alike.
    """
    panel = evidence.panel
    nothing = undefined_without_growth_step(evidence, "spike_ratio")
    if nothing is not None:
        return [nothing]
    generator, draws = evidence.make_generator(), evidence.config.controls
    index = panel.sink_positions.index(panel.location.sink_position)
    by_step = []
    for number, step in steps_of_neurons(evidence):
        chosen, random = [], []
        for layer in step.layers:
            at_sink = panel.at_layer("neurons_at_sinks", layer)[:, index].abs()
            both = torch.stack([at_sink, panel.at_layer("neurons_elsewhere", layer)], dim=1)[
                evidence.tested_sequences
            ]
            supers = super_units_of_layer(evidence.splits, layer=layer)
            mates = neurons_of_same_experts(evidence.lens, supers, layer=layer)
            others = [
                draw_other_indices(supers, n=both.shape[-1], generator=generator, without=mates)
                for _ in range(draws)
            ]
            chosen.append(both[..., supers])  # sequence, where, neuron
            random.append([both[..., sorted(some)] for some in others])
        at_step = torch.cat(chosen, dim=-1)
        if not at_step.shape[-1]:
            return [
                undefined_statistic(
                    "spike_ratio", f"no super neuron in growth step {number}", absent=True
                )
            ]
        ratio = functools.partial(
            _spike_ratio, least=float(at_step[:, 0].mean(0).max()) / _LARGEST_RATIO
        )
        found = evidence.interval(at_step, generator=rng, statistic=ratio)
        drawn = [torch.cat(draw, dim=-1) for draw in zip(*random, strict=True)]
        controls = [values[~values.isnan().flatten(1).any(1)].numpy() for values in drawn]
        nulls = {"random_neurons": largest_control(ratio(rows) for rows in controls if len(rows))}
        by_step.append(Statistic(name=f"spike_ratio_step_{number}", interval=found, nulls=nulls))
    return [weakest_statistic("spike_ratio", by_step), *by_step]


def _spike_ratio(rows: np.ndarray, *, least: float) -> float:
    """Divide activation at the sink by that elsewhere, geometric mean over the neurons that are not silent.

    ``rows`` are magnitudes: sequence x (at the sink, at other tokens) x neuron. A neuron may be silent at other tokens,
    and counts as ``least`` there.
    """
    at_sink, elsewhere = rows.mean(0)
    fires = at_sink > _SILENT * at_sink.max(initial=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (at_sink[fires] / np.maximum(elsewhere[fires], least)).clip(1 / _LARGEST_RATIO)
    return float(np.exp(np.log(ratios).mean())) if len(ratios) else math.nan


def _make_interventions(trial: Trial) -> list[Intervention]:
    setting, position = trial.setting, trial.setting.sink_position
    kept = _freeze_masks(
        setting, setting.super_neurons, position=position, generator=trial.generator
    )
    if kept is None:
        return []
    added = f" and {plural(setting.n_added, 'other maker')}" if setting.n_added else ""
    name = f"mean ablation of {plural(kept.size - setting.n_added, 'super neuron')}{added}"
    return [make_mean_ablation(kept, setting=setting, name=name)]


def _freeze_neurons(
    setting: Setting, segment: Segment, position: int, generator: torch.Generator
) -> FrozenQuantity | None:
    known = setting.super_neurons
    grown = [layer for step in segment.steps for layer in step.layers]
    layers = known if segment.number == ALL_STEPS else grown  # makers may stand in other layers
    masks = {layer: known[layer] for layer in layers if layer in known}
    return _freeze_masks(setting, masks, position=position, generator=generator)


def _freeze_masks(
    setting: Setting, masks: Mapping[int, Tensor], *, position: int, generator: torch.Generator
) -> FrozenQuantity | None:
    chosen = marked_units(masks)
    return (
        setting.freeze_units("neurons", chosen, position=position, generator=generator)
        if chosen
        else None
    )


VARIANCE_NEURONS = Link(
    name="variance_neurons",
    source="variance after W_O",
    target="super neurons",
    arrow="variance → neurons",
    sentence="The difference makes super neurons fire at the sink token only.",
    question="do the super neurons fire at the sink token only?",
    statistics=_compute_statistics,
    floor=lambda config, length, position: 10.0,
    can_start=True,
    interventions=_make_interventions,
    freeze=Freeze(name="neurons", make=_freeze_neurons),
)
