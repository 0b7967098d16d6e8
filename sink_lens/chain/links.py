"""The six links of the chain: what is measured, against which nulls, and by which criterion it holds.

A link holds if the interval of its primary statistic lies over a stated floor and over every null; it fails if
the interval lies under the floor or under a null, or if there is nothing on which it could be measured; else it
is undecided. The cuts of the interventions join here: a ``Link`` names what is measured, and a cut of it will be
one more statistic.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..measures import neurons as neuron_measures
from ..measures.dimensions import dominance_ratio
from ..measures.variance import decay_exponent, output_preservation
from ..models.lens import LensModel
from ..models.weights import attention_weights
from ..stats import Interval, interval
from .config import TraceConfig
from .find import matched_random
from .neurons import LayerSplit, split_layers, super_neurons
from .panel import Panel
from .readings import OTHERS_FROM, RANDOM_SETS

Verdict = Literal["holds", "fails", "undecided"]

_RESAMPLES_OF_TAU = 100
_TAU_DIMENSIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the links are measured on: one model's panel and what belongs to it."""

    lens: LensModel
    panel: Panel
    splits: list[LayerSplit]
    config: TraceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A number of a link with its interval over sequences, and its nulls."""

    name: str
    interval: Interval
    nulls: Mapping[str, float] = field(default_factory=dict)
    """Values that it must pass where it is the link's primary statistic."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Values to compare with that it need not pass."""
    note: str = ""
    """Why it is undefined, where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One arrow of the chain."""

    name: str
    question: str
    floor: Callable[[TraceConfig, int], float]
    """What the primary statistic must lie over, from the configuration and the length."""
    measure: Callable[[Evidence, np.random.Generator], list[Statistic]]
    """The statistics, the primary one first."""


def verdict(statistic: Statistic, *, floor: float) -> Verdict:
    """Holds, fails or undecided, from the interval, the floor and the nulls; see the module's docstring."""
    low, high = statistic.interval.low, statistic.interval.high
    if math.isnan(statistic.interval.estimate):
        return "fails" if statistic.note else "undecided"
    bars = [floor, *(null for null in statistic.nulls.values() if not math.isnan(null))]
    if all(low > bar for bar in bars):
        return "holds"
    if any(high < bar for bar in bars):
        return "fails"
    return "undecided"


def link_values(evidence: Evidence) -> pd.DataFrame:
    """The value of every statistic of every link: link, statistic, value. Of the random twin, these are nulls."""
    rng = np.random.default_rng(evidence.config.seed)
    rows = [(link.name, found.name, found.interval.estimate) for link in LINKS for found in link.measure(evidence, rng)]
    return pd.DataFrame(rows, columns=["link", "statistic", "value"])


def link_table(evidence: Evidence, *, twin: pd.DataFrame | None, length: int) -> pd.DataFrame:
    """One row per (link, statistic, null): value, interval, null, criterion and the link's verdict.

    The random twin's value of every statistic (``link_values``) is a row of its own. The verdict is the link's, by
    its primary statistic, and stands on all of its rows.
    """
    of_twin = {} if twin is None else twin.set_index(["link", "statistic"])["value"].to_dict()
    rng = np.random.default_rng(evidence.config.seed)
    rows = []
    for link in LINKS:
        floor = link.floor(evidence.config, length)
        found = link.measure(evidence, rng)
        primary = found[0]
        decided = verdict(primary, floor=floor)
        for statistic in found:
            nulls = {**statistic.nulls, **statistic.references}
            if (link.name, statistic.name) in of_twin:
                nulls["random_twin"] = of_twin[link.name, statistic.name]
            for null_name, null_value in (nulls or {"none": math.nan}).items():
                rows.append(
                    {
                        "link": link.name,
                        "statistic": statistic.name,
                        "value": statistic.interval.estimate,
                        "ci_low": statistic.interval.low,
                        "ci_high": statistic.interval.high,
                        "null_name": null_name,
                        "null_value": null_value,
                        "criterion": _criterion(primary, floor=floor),
                        "verdict": decided,
                        "is_primary": statistic is primary,
                        "n": statistic.interval.n,
                    }
                )
    return pd.DataFrame(rows)


def _criterion(primary: Statistic, *, floor: float) -> str:
    text = f"holds if the interval of {primary.name} is over {floor:.3g}"
    if primary.nulls:
        text += f" and over {', '.join(primary.nulls)}"
    return f"{text} (here: {primary.note})" if primary.note else text


def _undefined(name: str, note: str) -> Statistic:
    nothing = Interval(estimate=math.nan, low=math.nan, high=math.nan, n=0)
    return Statistic(name=name, interval=nothing, note=note)


def _aggregation_variance(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    feeding = list(panel.finding.feeding(evidence.lens.n_layers))
    std = panel["std:z"][feeding]
    ratio = interval(panel.std_ratio("z")[feeding].nanmean(0).numpy(), generator=rng)
    statistics = [
        Statistic(name="s2_ratio", interval=ratio, nulls={"other_positions": _other_positions(std, panel)}),
        _exponent("s2_decay_exponent", std.nanmean(0), panel, rng),
    ]
    s1 = torch.stack([panel.s1["z", layer] for layer in feeding]).mean(0).cpu()
    at, others = s1[panel.positions == panel.finding.position], s1[panel.positions >= OTHERS_FROM]
    value = float(at / others.nanmedian()) if len(others) else math.nan
    alone = Interval(estimate=value, low=math.nan, high=math.nan, n=std.shape[1])
    return [*statistics, Statistic(name="s1_ratio", interval=alone)]


def _other_positions(std: Tensor, panel: Panel) -> float:
    """The 95th percentile over other positions of the same ratio there."""
    others = (panel.positions >= OTHERS_FROM) & (panel.positions != panel.finding.position)
    values = std[..., others]
    if not others.any():
        return math.nan
    ratios = (values / values.nanmedian(dim=-1, keepdim=True).values).nanmean(dim=(0, 1))
    return float(ratios.nanquantile(0.95))


def _exponent(name: str, std: Tensor, panel: Panel, rng: np.random.Generator) -> Statistic:
    """Slope of log spread on log position from the studied position on, beside the uniform law's -1/2."""
    later = panel.positions >= panel.finding.position
    places = (panel.positions[later] - panel.finding.position).tolist()

    def slope(rows: np.ndarray) -> float:
        curve = torch.full((places[-1] + 1,), math.nan)
        curve[places] = torch.from_numpy(np.nanmean(rows, axis=0)).float()
        return float(decay_exponent(curve))

    values = std[:, later].numpy()
    whole = values[~np.isnan(values).any(axis=1)]
    found = interval(whole, generator=rng, statistic=slope, n_resamples=200)
    return Statistic(name=name, interval=found, references={"uniform_law": -0.5})


def _variance_preserved(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    lens, panel = evidence.lens, evidence.panel
    feeding = list(panel.finding.feeding(lens.n_layers))
    some = torch.linspace(0, lens.d_model - 1, min(_TAU_DIMENSIONS, lens.d_model)).round().long().unique()
    values = torch.stack([panel.at("z_at", layer) for layer in feeding], dim=1)  # sequence, layer, place, value
    matrices = [attention_weights(lens, layer=layer).w_o.flatten(0, 1).T.float().cpu() for layer in feeding]

    def tau(vectors: Tensor, per_dimension: Tensor | None) -> float:
        spread = vectors.std(dim=0)  # layer, value
        found = [
            output_preservation(matrix, first_std=one, per_dimension=per_dimension).nanmean()
            for matrix, one in zip(matrices, spread, strict=True)
        ]
        return float(torch.stack(found).nanmean())

    real = values[~values.isnan().flatten(1).any(1)]
    if len(real) < 2:
        return [_undefined("kendall_tau", "")]
    drawn = interval(
        real[:, :, 0].numpy(),
        generator=rng,
        statistic=lambda rows: tau(torch.from_numpy(rows), some),
        n_resamples=_RESAMPLES_OF_TAU,
    )
    # The interval is drawn on a sample of output dimensions; it is moved to the estimate on all of them.
    estimate = tau(real[:, :, 0], None)
    shift = estimate - drawn.estimate
    moved = Interval(estimate=estimate, low=drawn.low + shift, high=drawn.high + shift, n=drawn.n)
    others = [tau(real[:, :, place], some) for place in range(1, real.shape[2])]
    nulls = {"other_positions": float(np.mean(others))} if others else {}
    ratio = interval(panel.std_ratio("attn_out")[feeding].nanmean(0).numpy(), generator=rng)
    beside = {"other_positions": _other_positions(panel["std:attn_out"][feeding], panel)}
    return [
        Statistic(name="kendall_tau", interval=moved, nulls=nulls),
        Statistic(name="s2_ratio_after_w_o", interval=ratio, references=beside),
    ]


def _variance_neurons(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    nothing = _no_neurons(evidence)
    if nothing is not None:
        return [_undefined("spike_ratio", nothing)]
    generator = torch.Generator().manual_seed(evidence.config.seed)
    index = panel.keys.index(panel.finding.position)
    by_step = []
    for step_index, step in enumerate(panel.finding.steps):
        chosen, random = [], []
        for layer in step.layers:
            ratios = panel.at("neurons_at_keys", layer)[:, index].abs() / panel.at("neurons_elsewhere", layer)
            logs = ratios.clamp(min=1e-12).log()
            supers = super_neurons(evidence.splits, layer=layer)
            chosen.append(logs[:, supers])
            random.append([logs[:, some] for some in matched_random(supers, draws=RANDOM_SETS, generator=generator)])
        at_step = torch.cat(chosen, dim=1)
        if not at_step.shape[1]:
            return [_undefined("spike_ratio", f"no super neuron in growth step {step_index}")]
        found = interval(at_step.mean(1).numpy(), generator=rng, statistic=lambda rows: float(np.exp(rows.mean())))
        controls = [float(torch.cat(draw, dim=1).mean().exp()) for draw in zip(*random, strict=True)]
        by_step.append(
            Statistic(name=f"spike_ratio_step_{step_index}", interval=found, nulls={"random_neurons": max(controls)})
        )
    weakest = min(by_step, key=lambda statistic: statistic.interval.estimate)
    return [Statistic(name="spike_ratio", interval=weakest.interval, nulls=weakest.nulls), *by_step]


def _no_neurons(evidence: Evidence) -> str | None:
    """Why there are no super neurons to look at, or None."""
    if evidence.lens.family.down is None:
        return "the neurons of a mixture of experts have no site"
    if not evidence.panel.finding.steps:
        return "no growth step was found"
    return None


def _neurons_dimension(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    nothing = _no_neurons(evidence)
    statistics = [_undefined("contribution_share", nothing)] if nothing is not None else _shares(evidence, rng)
    return [*statistics, _dominance(evidence, rng)]


def _shares(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    generator = torch.Generator().manual_seed(evidence.config.seed)

    def share(rows: np.ndarray) -> float:
        return float(rows[:, 0].mean() / rows[:, 1].mean())

    by_step = []
    for index, step in enumerate(panel.finding.steps):
        splits = [s for s in evidence.splits if s.layer in step.layers and s.position == panel.finding.position]
        change = torch.stack([split.change for split in splits]).sum(0)
        supers = [super_neurons(evidence.splits, layer=split.layer) for split in splits]
        written = torch.stack([s.terms[:, mask].sum(1) for s, mask in zip(splits, supers, strict=True)]).sum(0)
        random = [matched_random(mask, draws=RANDOM_SETS, generator=generator) for mask in supers]
        controls = [
            sum(float(s.terms[:, mask].sum(1).mean()) for s, mask in zip(splits, draw, strict=True))
            / float(change.mean())
            for draw in zip(*random, strict=True)
        ]
        found = interval(torch.stack([written, change], dim=1).numpy(), generator=rng, statistic=share)
        by_step.append(
            Statistic(name=f"contribution_share_step_{index}", interval=found, nulls={"random_neurons": max(controls)})
        )
    weakest = min(by_step, key=lambda statistic: statistic.interval.estimate)
    return [Statistic(name="contribution_share", interval=weakest.interval, nulls=weakest.nulls), *by_step]


def _dominance(evidence: Evidence, rng: np.random.Generator) -> Statistic:
    """Dominance ratio after the last layer of the first growth step, else at its largest."""
    panel = evidence.panel
    states = panel.states()[1:]
    by_layer = torch.stack([dominance_ratio(state) for state in states])
    steps = panel.finding.steps
    layer = steps[0].last_layer if steps else int(by_layer.mean(1).argmax())
    return Statistic(
        name="dominance_ratio",
        interval=interval(by_layer[layer].numpy(), generator=rng),
        references={"other_positions": float(panel["dominance_elsewhere"][layer].nanmean())},
    )


def _dimension_key(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    if "key_cosine" not in panel:
        return [_undefined("key_cosine", "no outlier dimension enters any layer")]
    cosine = panel["key_cosine"].mean(dim=(0, 2))  # sequence, what
    statistics = [
        Statistic(
            name="key_cosine",
            interval=interval(cosine[:, 0].numpy(), generator=rng),
            nulls={
                "random_dimensions": float(cosine[:, 1].nanmean()),
                "other_positions": float(cosine[:, 2].nanmean()),
            },
        )
    ]
    if "logit_split" in panel:
        parts = panel["logit_split"].mean(dim=(0, 2))
        logits = torch.stack([parts[:, 0], parts[:, :3].sum(-1)], dim=1)
        found = interval(
            logits.numpy(), generator=rng, statistic=lambda rows: float(rows[:, 0].mean() / rows[:, 1].mean())
        )
        control = float(parts[:, 3].mean() / parts[:, :3].sum(-1).mean())
        statistics.append(
            Statistic(name="dimension_share_of_logit", interval=found, references={"random_dimensions": control})
        )
    return statistics


def _key_sink(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    if "logit_advantage" not in panel:
        return [_undefined("logit_advantage_nats", "no outlier dimension enters any layer")]
    advantage = panel["logit_advantage"].mean(dim=(0, 2))
    layers = panel.layers("logit_advantage")
    positive = panel["positive_share"][layers].nanmean(dim=(0, 2))
    mass = panel.at_key("sink_mass", panel.finding.position)[layers].nanmean(dim=(0, 2))
    return [
        Statistic(
            name="logit_advantage_nats",
            interval=interval(advantage[:, 0].numpy(), generator=rng),
            nulls={"other_positions": float(advantage[:, 1].nanmean())},
        ),
        Statistic(
            name="positive_share", interval=interval(positive.numpy(), generator=rng), references={"chance": 0.5}
        ),
        Statistic(name="sink_mass", interval=interval(mass.numpy(), generator=rng)),
    ]


def _needed_advantage(config: TraceConfig, length: int) -> float:
    """Nats over the other keys' logit with which one key takes the threshold's mass among half the length's keys."""
    return math.log(config.threshold / (1 - config.threshold) * length / 2)


LINKS = (
    Link(
        name="aggregation_variance",
        question="is the aggregated value of the sink token more spread than that of other tokens?",
        floor=lambda config, length: 1.25,
        measure=_aggregation_variance,
    ),
    Link(
        name="variance_preserved",
        question="does W_O read most from the inputs in which the sink token is spread (Kendall tau)?",
        floor=lambda config, length: 0.1,
        measure=_variance_preserved,
    ),
    Link(
        name="variance_neurons",
        question="do the super neurons fire at the sink token only?",
        floor=lambda config, length: 10.0,
        measure=_variance_neurons,
    ),
    Link(
        name="neurons_dimension",
        question="do the super neurons make the outlier dimension?",
        floor=lambda config, length: 0.5,
        measure=_neurons_dimension,
    ),
    Link(
        name="dimension_key",
        question="does the outlier dimension make the sink's key?",
        floor=lambda config, length: 0.5,
        measure=_dimension_key,
    ),
    Link(
        name="key_sink",
        question="does every query meet that key with an advantage that makes a sink?",
        floor=_needed_advantage,
        measure=_key_sink,
    ),
)
"""The chain, in its order."""


def gather(lens: LensModel, panel: Panel, *, config: TraceConfig) -> Evidence:
    """The evidence of a panel, with its growth steps split by neurons."""
    return Evidence(
        lens=lens, panel=panel, splits=split_layers(lens, panel, super_share=config.super_share), config=config
    )
