"""W_O preserves the variance discrepancy: it reads most from the inputs in which the sink token varies."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...activations.record import LayerView, Reading
from ...measures.variance import output_preservation
from ...models.lens import LensModel
from ...models.weights import output_weights
from ...stats import Interval
from ..evidence import (
    Evidence,
    Statistic,
    not_asked_statistic,
    s2_ratio_at_other_positions,
    undefined_statistic,
    why_too_short,
)
from ..locate import feeding_layers
from ..readings import MeasuringPass, control_positions, evenly_spaced
from .link import Intervention, Link, Trial, make_mean_ablation

_RESAMPLES_OF_TAU = 100
_TAU_DIMENSIONS = 64
_FEWEST_FOR_TAU = 8
_NO_SPREAD = 1e-4


def _make_readings(one: MeasuringPass) -> list[Reading]:
    sink = one.plan.sink_position
    positions = [sink, *control_positions(one.length, key=sink, controls=one.controls)]

    def z_at(view: LayerView) -> Tensor:
        return (
            view["z"][:, positions]
            .flatten(2)
            .float()
            .masked_fill(~view.valid[:, positions, None], math.nan)
        )

    layers = frozenset(_last_feeding_layers(one.plan.layers, one.lens))
    return [Reading(name="z_at", sites=("z",), function=z_at, layers=layers)]


def _compute_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Compute the S2 ratio of the output of W_O, and Kendall's tau of W_O with its inputs.

    Tau is high if W_O reads most from the inputs that vary over sequences at the sink; undefined if the sink is BOS.
    """
    lens, panel = evidence.lens, evidence.panel
    feeding = _last_feeding_layers(panel.location.growth_layers, lens)
    if not feeding:
        return [not_asked_statistic("s2_ratio_after_w_o")]
    some = torch.tensor(evenly_spaced(range(lens.d_model), _TAU_DIMENSIONS))
    matrices = [
        output_weights(lens, layer=layer)[0].flatten(0, 1).T.float().cpu() for layer in feeding
    ]
    widths = [matrix.shape[1] for matrix in matrices]
    values = torch.cat(
        [panel.at_layer("z_at", layer) for layer in feeding], dim=-1
    )  # sequence, place, value

    def tau(vectors: Tensor, per_dimension: Tensor | None) -> float:
        found = [
            output_preservation(matrix, first_std=one, per_dimension=per_dimension).nanmean()
            for matrix, one in zip(matrices, vectors.std(dim=0).split(widths), strict=True)
        ]
        return float(torch.stack(found).nanmean())

    at_sink, *at_others = (one[~one.isnan().any(1)] for one in values.unbind(1))
    after = _written_variance_statistic(evidence, rng)
    if len(at_sink) < 2:
        note = "one sequence has no standard deviation over sequences"
        return [after, undefined_statistic("kendall_tau", note)]
    # with BOS, rounding is all that is left
    if at_sink.std(dim=0).max() <= _NO_SPREAD * at_sink.abs().max():
        note = "the token and those before it are the same in every sequence"
        return [after, undefined_statistic("kendall_tau", note)]
    estimate, low, high = tau(at_sink, None), math.nan, math.nan
    # of fewer, many a draw holds next to nothing but copies of one
    if len(at_sink) >= _FEWEST_FOR_TAU:
        drawn = evidence.interval(
            at_sink,
            generator=rng,
            statistic=lambda rows: tau(torch.from_numpy(rows), some),
            most_resamples=_RESAMPLES_OF_TAU,
        )
        # The interval is drawn on a sample of output dimensions; it is moved to the estimate on all of them.
        low, high = (bound + estimate - drawn.estimate for bound in (drawn.low, drawn.high))
    found = Interval(estimate=estimate, low=low, high=high, n=len(at_sink))
    others = [tau(one, some) for one in at_others if len(one) > 1]
    references = {"other_positions": float(np.mean(others))} if others else {}
    return [
        after,
        Statistic(name="kendall_tau", interval=found, references=references, layers=tuple(feeding)),
    ]


def _last_feeding_layers(growth: tuple[int, ...], lens: LensModel) -> tuple[int, ...]:
    """Return the last two layers whose attention comes before ``growth``; without growth, all of ``feeding_layers``."""
    feeding = feeding_layers(growth, attention=lens.attention_layers)
    return feeding[-2:] if growth else feeding


def _written_variance_statistic(evidence: Evidence, rng: np.random.Generator) -> Statistic:
    """Compute the S2 ratio of the output of W_O in the first growth layer or the one before it, the larger of both.

    Without a growth step, it is not known which layer's output is read later: it is the largest of all layers, and the
    interval reaches down to the smallest.
    """
    panel, growth = evidence.panel, evidence.panel.location.growth_layers
    ratio = panel.std_ratio("attn_out")
    layers = list(_last_feeding_layers(growth, evidence.lens) if growth else panel.attention_layers)
    strongest = layers[int(ratio[layers].nanmean(1).nan_to_num(0.0).argmax())]
    found = evidence.interval(ratio[strongest], generator=rng)
    if not growth:
        weakest = layers[int(ratio[layers].nanmean(1).nan_to_num(math.inf).argmin())]
        found = replace(
            found, low=min(found.low, evidence.interval(ratio[weakest], generator=rng).low)
        )
    nulls = {
        "other_positions": s2_ratio_at_other_positions(panel["std:attn_out"][[strongest]], panel)
    }
    return Statistic(
        name="s2_ratio_after_w_o",
        interval=found,
        nulls=nulls,
        note=why_too_short(panel),
        layers=(strongest,),
    )


def _make_interventions(trial: Trial) -> list[Intervention]:
    setting = trial.setting
    if not setting.feeding_layers:
        return []
    layers = setting.layers_until_sink("attn_out")
    written = setting.freeze_site("attn_out", layers=layers, position=setting.sink_position)
    return [make_mean_ablation(written, setting=setting, name="mean ablation of attn_out")]


VARIANCE_PRESERVED = Link(
    name="variance_preserved",
    source="variance discrepancy",
    target="variance after W_O",
    arrow="variance → W_O",
    sentence="The attention output projection W_O passes that difference on.",
    question="does what attention writes at the sink token vary more than what it writes at other tokens?",
    statistics=_compute_statistics,
    floor=lambda config, length, position: 1.25,
    readings=_make_readings,
    interventions=_make_interventions,
)
