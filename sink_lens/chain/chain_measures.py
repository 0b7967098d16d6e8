"""The chain at position 0 in numbers, from one pass: what is watched in a training."""

import math

import pandas as pd
import torch
from torch import Tensor

from ..data.tokens import TokenBatch
from ..errors import InputError
from ..measures.attention import fewest_tokens, passes, uniform_mass
from ..measures.dimensions import dominance_ratio
from ..measures.table import MEASURES
from ..models.lens import LensModel
from ..schema import SINK_THRESHOLD
from .config import TraceConfig
from .locate import MeasuringPlan
from .measure import CONDITION_READINGS, measure
from .neurons import split_growth_layers, super_neurons_of_layer

THRESHOLDS = (0.05, 0.1, 0.2, SINK_THRESHOLD)
"""Sink scores at which the sink rate is given: a small run may pass only the low ones."""
_READ = CONDITION_READINGS - {"rate_by_key"} | {
    "sink_mass",
    "effective_rank",
    "neurons_at_sinks",
    "attn_out_at_sinks",
    "mlp_out_at_sinks",
}


def chain_measures(
    lens: LensModel, tokens: TokenBatch, *, threshold: float = SINK_THRESHOLD
) -> pd.DataFrame:
    """Measure the chain at position 0 in one pass: a table of measure, layer, position, threshold, value, unit.

    Sink rates are given at ``threshold`` and each of ``THRESHOLDS``; nan where all sequences or the layer's window are
    shorter than the ``fewest_tokens`` of the threshold (10 at 0.3, 44 at 0.1, 105 at 0.05). Ratios are given before
    layer 0 (layer -1) and after each layer, S2 of z by position. A row without a layer is of the whole model: a mean
    over layers, a count, the largest norm ratio, or the loss on these tokens in nats. The model is left as it was, its
    modes and the random generators included; equal inputs give equal rows.

    Raises:
        InputError: a threshold outside (0, 1), sequences shorter than 10 tokens or than ``threshold`` needs, or what
            the model cannot take.
    """
    levels = sorted({float(one) for one in (threshold, *THRESHOLDS)})
    if not all(0 < one < 1 for one in levels):
        raise InputError(
            f"the thresholds are {levels}; need numbers between 0 and 1, both excluded"
        )
    shortest = int(tokens.lengths.min())
    if shortest < 10:
        raise InputError(
            f"the shortest sequence has {shortest} tokens; need 10, since token 0 is compared with those from position "
            "8 on. Give longer ones."
        )
    if shortest < (needed := fewest_tokens(threshold=threshold)):
        raise InputError(
            f"the shortest sequence has {shortest} tokens; need {needed}, since in shorter ones even uniform attention "
            f"gives token 0 a score above {threshold:g}. Give longer ones, or a higher threshold."
        )
    config = TraceConfig(model=lens.name, threshold=levels[-1])
    # growth layers are among them
    everywhere = MeasuringPlan(sink_positions=(0,), layers=tuple(range(lens.n_layers)))
    panel = measure(lens, tokens, plan=everywhere, config=config, only=_READ)
    rows: list[tuple[object, ...]] = []

    def add(
        measure: str,
        value: Tensor | float,
        *,
        layer: int | None = None,
        position: int | None = None,
        threshold: float = math.nan,
        unit: str = "",
    ) -> None:
        unit = unit or MEASURES[measure].unit
        rows.append((measure, layer, position, threshold, float(value), unit))

    def add_layers(
        measure: str, values: Tensor, *, whole: Tensor, first: int = 0, unit: str = ""
    ) -> None:
        for layer, value in enumerate(values, start=first):
            add(measure, value, layer=layer, unit=unit)
        add(measure, whole, unit=unit)

    score, mass = panel.at_sink("sink_score", 0), panel.at_sink("sink_mass", 0)
    reaches = [lens.reach(layer) for layer in range(lens.n_layers)]
    n_seen = torch.stack([tokens.lengths.clamp(min=0, max=reach) for reach in reaches])
    for level in levels:
        long_enough = n_seen >= fewest_tokens(threshold=level)
        rates = passes(score.masked_fill(~long_enough[..., None], math.nan), threshold=level)
        for layer, value in enumerate(rates.nanmean(dim=(1, 2))):
            add("sink_rate", value, layer=layer, threshold=level)
        add("sink_rate", rates.nanmean(dim=(0, 2)).nanmean(), threshold=level)
    add_layers("sink_mass", mass.nanmean(dim=(1, 2)), whole=mass.nanmean())
    uniform = torch.full((lens.n_layers,), torch.nan, dtype=torch.float32)
    for layer in lens.attention_layers:
        uniform[layer] = uniform_mass(tokens.valid, key=0, reach=reaches[layer]).nanmean()
    unit = MEASURES["sink_mass"].unit
    add_layers("uniform_mass", uniform, whole=uniform.nanmean(), unit=unit)
    for layer, by_position in enumerate(panel["std:z"].nanmean(1)):
        for position, value in zip(panel.positions.tolist(), by_position, strict=True):
            add("s2", value, layer=layer, position=position)
    ratio = panel.std_ratio("z").nanmean(1)
    add_layers("s2_ratio", ratio, whole=ratio.nanmean(), unit="1")
    dominance = torch.stack([dominance_ratio(state).nanmean() for state in panel.sink_states()])
    add_layers("dominance_ratio", dominance, first=-1, whole=dominance[1:].nanmean())
    rank, unit = panel["effective_rank"].nanmean(1), MEASURES["effective_rank"].unit
    for index, name in enumerate(("effective_rank", "effective_rank_without")):
        add_layers(name, rank[:, index], whole=rank[:, index].nanmean(), unit=unit)
    ratio = panel.norm_ratio().nanmean(1)
    add_layers("norm_ratio", ratio, first=-1, whole=ratio.nan_to_num(-torch.inf).max(), unit="1")
    growing = panel.location.growth_layers
    add("growth_steps", len(panel.location.steps), unit="steps")
    for layer in range(lens.n_layers):
        add("growth_layer", float(layer in growing), layer=layer, unit="1 or 0")
    splits = split_growth_layers(lens, panel, super_share=config.super_share)
    counts = {layer: int(super_neurons_of_layer(splits, layer=layer).sum()) for layer in growing}
    for layer, count in counts.items():
        add("super_neurons", count, layer=layer, unit="neurons")
    add("super_neurons", sum(counts.values()), unit="neurons")
    add("loss", panel["loss"].nanmean(), unit="nats")
    columns = ["measure", "layer", "position", "threshold", "value", "unit"]
    types = {"measure": "str", "layer": "Int64", "position": "Int64", "unit": "str"}
    return pd.DataFrame(rows, columns=columns).astype(types)
