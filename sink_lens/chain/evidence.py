"""What each link is measured by: its statistics with their intervals over sequences, nulls and references."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..measures.dimensions import dominance_ratio
from ..measures.variance import decay_exponent, output_preservation
from ..models.lens import LensModel
from ..models.weights import attention_weights
from ..stats import Interval, interval
from .config import TraceConfig
from .locate import matched_random
from .neurons import LayerSplit, super_neurons
from .panel import Panel
from .readings import OTHERS_FROM, RANDOM_SETS

_RESAMPLES_OF_TAU = 100
_RESAMPLES_OF_SLOPE = 200
_TAU_DIMENSIONS = 64
_FEWEST_FOR_TAU = 8
_NO_SPREAD = 1e-4
_LARGEST_RATIO = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the links are measured on: one model's panel and what belongs to it."""

    lens: LensModel
    panel: Panel
    splits: list[LayerSplit]
    config: TraceConfig
    n_resamples: int = 2000
    """Draws of an interval; statistics that take long to compute have fewer."""

    def interval(
        self, values: Tensor, *, generator: np.random.Generator, most: int | None = None, **options: Any
    ) -> Interval:
        """The interval over sequences, their axis in front."""
        n_resamples = min(self.n_resamples, most or self.n_resamples)
        return interval(values.numpy(), generator=generator, n_resamples=n_resamples, **options)


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
    absent: bool = False
    """It is undefined because what it would be measured on was looked for and is not there."""


def aggregation_variance(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """S2 of the aggregated value at the sink over that of others, how S2 falls with position, and S1's ratio."""
    panel = evidence.panel
    feeding = list(panel.finding.feeding(evidence.lens.n_layers))
    std = panel["std:z"][feeding]
    ratio = evidence.interval(panel.std_ratio("z")[feeding].nanmean(0), generator=rng)
    s1 = torch.stack([panel.s1["z", layer] for layer in feeding]).mean(0).cpu()
    others = (panel.positions >= OTHERS_FROM) & (panel.positions != panel.finding.position)
    at, median = s1[panel.positions == panel.finding.position], s1[others].nanmedian()
    over_samples = Interval(estimate=float(at / median), low=math.nan, high=math.nan, n=std.shape[1])
    return [
        Statistic(
            name="s2_ratio",
            interval=ratio,
            nulls={"other_positions": _other_positions(std, panel)},
            note=_too_short(panel),
        ),
        _exponent("s2_decay_exponent", std.nanmean(0), evidence, rng),
        Statistic(name="s1_ratio", interval=over_samples),
    ]


def variance_preserved(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Kendall tau between W_O's weights and the sink's spread by input, and the S2 ratio after W_O."""
    lens, panel = evidence.lens, evidence.panel
    feeding = list(panel.finding.feeding(lens.n_layers))
    some = torch.linspace(0, lens.d_model - 1, min(_TAU_DIMENSIONS, lens.d_model)).round().long().unique()
    values = torch.stack([panel.at("z_at", layer) for layer in feeding], dim=1)  # sequence, layer, place, value
    matrices = [attention_weights(lens, layer=layer).w_o.flatten(0, 1).T.float().cpu() for layer in feeding]

    def tau(vectors: Tensor, per_dimension: Tensor | None) -> float:
        found = [
            output_preservation(matrix, first_std=one, per_dimension=per_dimension).nanmean()
            for matrix, one in zip(matrices, vectors.std(dim=0), strict=True)
        ]
        return float(torch.stack(found).nanmean())

    at_sink, *at_others = (one[~one.isnan().flatten(1).any(1)] for one in values.unbind(2))
    ratio = evidence.interval(panel.std_ratio("attn_out")[feeding].nanmean(0), generator=rng)
    beside = {"other_positions": _other_positions(panel["std:attn_out"][feeding], panel)}
    after = Statistic(name="s2_ratio_after_w_o", interval=ratio, references=beside)
    if len(at_sink) < 2:
        return [_undefined("kendall_tau", "one sequence has no spread over sequences"), after]
    if at_sink.std(dim=0).max() <= _NO_SPREAD * at_sink.abs().max():  # BOS: rounding is all that is left
        return [_undefined("kendall_tau", "the token and those before it are the same in every sequence"), after]
    estimate, low, high = tau(at_sink, None), math.nan, math.nan
    if len(at_sink) >= _FEWEST_FOR_TAU:  # of fewer, many a draw holds next to nothing but copies of one
        drawn = evidence.interval(
            at_sink,
            generator=rng,
            statistic=lambda rows: tau(torch.from_numpy(rows), some),
            most=_RESAMPLES_OF_TAU,
        )
        # The interval is drawn on a sample of output dimensions; it is moved to the estimate on all of them.
        low, high = (bound + estimate - drawn.estimate for bound in (drawn.low, drawn.high))
    found = Interval(estimate=estimate, low=low, high=high, n=len(at_sink))
    others = [tau(one, some) for one in at_others if len(one) > 1]
    nulls = {"other_positions": float(np.mean(others))} if others else {}
    return [Statistic(name="kendall_tau", interval=found, nulls=nulls), after]


def variance_neurons(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Geometric mean over a step's super neurons of mean |activation| at the sink over that elsewhere.

    Ratios are cut at a million, for a neuron may be silent elsewhere; one that is silent everywhere is left out.
    """
    panel = evidence.panel
    nothing = _nothing_to_split(evidence, "spike_ratio")
    if nothing is not None:
        return [nothing]
    generator = torch.Generator().manual_seed(evidence.config.seed)
    index = panel.keys.index(panel.finding.position)

    def spike(rows: np.ndarray) -> float:
        at_key, elsewhere = rows.mean(0)
        fires = (at_key > 0) | (elsewhere > 0)
        with np.errstate(divide="ignore"):
            ratios = np.clip(at_key[fires] / elsewhere[fires], 1 / _LARGEST_RATIO, _LARGEST_RATIO)
        return float(np.exp(np.log(ratios).mean())) if len(ratios) else math.nan

    by_step = []
    for number, step in enumerate(panel.finding.steps):
        chosen, random = [], []
        for layer in step.layers:
            at_key, elsewhere = panel.at("neurons_at_keys", layer)[:, index].abs(), panel.at("neurons_elsewhere", layer)
            both = torch.stack([at_key, elsewhere], dim=1)  # sequence, where, neuron
            supers = super_neurons(evidence.splits, layer=layer)
            chosen.append(both[..., supers])
            random.append([both[..., some] for some in matched_random(supers, draws=RANDOM_SETS, generator=generator)])
        at_step = torch.cat(chosen, dim=-1)
        if not at_step.shape[-1]:
            return [_undefined("spike_ratio", f"no super neuron in growth step {number}", absent=True)]
        found = evidence.interval(at_step, generator=rng, statistic=spike)
        controls = [_defined_rows(torch.cat(draw, dim=-1)) for draw in zip(*random, strict=True)]
        largest = _largest(spike(rows) for rows in controls if len(rows))
        name = f"spike_ratio_step_{number}"
        by_step.append(Statistic(name=name, interval=found, nulls={"random_neurons": largest}))
    return [_weakest("spike_ratio", by_step), *by_step]


def neurons_dimension(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Share of a step's change of its outlier dimension that its super neurons make, and the dominance after it."""
    nothing = _nothing_to_split(evidence, "contribution_share")
    statistics = _shares(evidence, rng) if nothing is None else [nothing]
    return [*statistics, _dominance(evidence, rng)]


def dimension_key(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Cosine of the sink's key with what its outlier dimensions alone would make, and their share of its logits."""
    panel = evidence.panel
    if "key_cosine" not in panel:
        return [_undefined("key_cosine", "no outlier dimension enters any layer", absent=True)]
    cosine = panel["key_cosine"].mean(dim=(0, 2))  # sequence, what
    nulls = {"random_dimensions": float(cosine[:, 1].nanmean()), "other_positions": float(cosine[:, 2].nanmean())}
    found = evidence.interval(cosine[:, 0], generator=rng)
    statistics = [Statistic(name="key_cosine", interval=found, nulls=nulls)]
    if "logit_split" in panel:
        parts = panel["logit_split"].mean(dim=(0, 2))
        whole = parts[:, :3].sum(-1)
        found = evidence.interval(torch.stack([parts[:, 0], whole], dim=1), generator=rng, statistic=_ratio_of_means)
        control = _ratio_of_means(torch.stack([parts[:, 3], whole], dim=1).numpy())
        references = {"random_dimensions": control}
        statistics.append(Statistic(name="dimension_share_of_logit", interval=found, references=references))
    return statistics


def key_sink(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """The sink key's logit over the mean of the others', the share of positive products, and the mass it takes."""
    panel = evidence.panel
    if "logit_advantage" not in panel:
        return [_undefined("logit_advantage_nats", "no outlier dimension enters any layer", absent=True)]
    advantage = panel["logit_advantage"].mean(dim=(0, 2))
    layers = panel.layers("logit_advantage")
    positive, mass = (
        panel.at_key(name, panel.finding.position)[layers].nanmean(dim=(0, 2))
        for name in ("positive_share", "sink_mass")
    )
    return [
        Statistic(
            name="logit_advantage_nats",
            interval=evidence.interval(advantage[:, 0], generator=rng),
            nulls={"other_positions": float(advantage[:, 1].nanmean())},
        ),
        Statistic(
            name="positive_share", interval=evidence.interval(positive, generator=rng), references={"chance": 0.5}
        ),
        Statistic(name="sink_mass", interval=evidence.interval(mass, generator=rng)),
    ]


def _undefined(name: str, note: str, *, absent: bool = False) -> Statistic:
    nothing = Interval(estimate=math.nan, low=math.nan, high=math.nan, n=0)
    return Statistic(name=name, interval=nothing, note=note, absent=absent)


def _too_short(panel: Panel) -> str:
    """Why nothing can be compared with other tokens, where that is so."""
    if panel.norm_ratio().isnan().all():
        return f"the sequences have no other token at or after position {OTHERS_FROM}"
    return ""


def _nothing_to_split(evidence: Evidence, name: str) -> Statistic | None:
    """A statistic that says why there are no neurons to look at, or None where there are."""
    if evidence.lens.family.down is None:
        return _undefined(name, "the neurons of a mixture of experts have no site")
    if evidence.panel.finding.steps:
        return None
    short = _too_short(evidence.panel)
    return _undefined(name, short or "no growth step was found", absent=not short)


def _other_positions(std: Tensor, panel: Panel) -> float:
    """The 95th percentile over other positions of the same ratio there."""
    others = (panel.positions >= OTHERS_FROM) & (panel.positions != panel.finding.position)
    if not others.any():
        return math.nan
    values = std[..., others]
    ratios = (values / values.nanmedian(dim=-1, keepdim=True).values).nanmean(dim=(0, 1))
    return float(ratios.nanquantile(0.95))


def _exponent(name: str, std: Tensor, evidence: Evidence, rng: np.random.Generator) -> Statistic:
    """Slope of log spread on log position from the studied position on, beside the uniform law's -1/2.

    Of the sequences that reach the last position.
    """
    panel = evidence.panel
    later = panel.positions >= panel.finding.position
    places = (panel.positions[later] - panel.finding.position).tolist()

    def slope(rows: np.ndarray) -> float:
        curve = torch.full((places[-1] + 1,), math.nan)
        curve[places] = torch.from_numpy(rows.mean(axis=0)).float()
        return float(decay_exponent(curve))

    found = evidence.interval(std[:, later], generator=rng, statistic=slope, most=_RESAMPLES_OF_SLOPE)
    return Statistic(name=name, interval=found, references={"uniform_law": -0.5})


def _shares(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    generator = torch.Generator().manual_seed(evidence.config.seed)
    by_step = []
    for number, step in enumerate(panel.finding.steps):
        splits = [s for s in evidence.splits if s.layer in step.layers and s.position == panel.finding.position]
        change = torch.stack([split.change for split in splits]).sum(0)
        supers = [super_neurons(evidence.splits, layer=split.layer) for split in splits]

        def share_rows(masks: list[Tensor], splits: list[LayerSplit] = splits, change: Tensor = change) -> Tensor:
            written = torch.stack([s.terms[:, mask].sum(1) for s, mask in zip(splits, masks, strict=True)]).sum(0)
            return torch.stack([written, change], dim=1)

        random = [matched_random(mask, draws=RANDOM_SETS, generator=generator) for mask in supers]
        controls = [_ratio_of_means(share_rows(list(draw)).numpy()) for draw in zip(*random, strict=True)]
        found = evidence.interval(share_rows(supers), generator=rng, statistic=_ratio_of_means)
        name, nulls = f"contribution_share_step_{number}", {"random_neurons": _largest(controls)}
        by_step.append(Statistic(name=name, interval=found, nulls=nulls))
    return [_weakest("contribution_share", by_step), *by_step]


def _dominance(evidence: Evidence, rng: np.random.Generator) -> Statistic:
    """Dominance ratio after the last layer of the first growth step, else at its largest."""
    panel = evidence.panel
    by_layer = torch.stack([dominance_ratio(state) for state in panel.states()[1:]])
    steps = panel.finding.steps
    layer = steps[0].last_layer if steps else int(by_layer.mean(1).argmax())
    return Statistic(
        name="dominance_ratio",
        interval=evidence.interval(by_layer[layer], generator=rng),
        references={"other_positions": float(panel["dominance_elsewhere"][layer].nanmean())},
    )


def _weakest(name: str, by_step: list[Statistic]) -> Statistic:
    """The step that shows a link least, under the link's own name: a link must hold at every step."""
    estimates = [statistic.interval.estimate for statistic in by_step]
    weakest = by_step[int(np.argmin([-math.inf if math.isnan(value) else value for value in estimates]))]
    return Statistic(name=name, interval=weakest.interval, nulls=weakest.nulls)


def _ratio_of_means(rows: np.ndarray) -> float:
    """Mean of the first column over the mean of the second; nan where that is 0."""
    below = rows[:, 1].mean()
    return float(rows[:, 0].mean() / below) if below else math.nan


def _largest(controls: Iterable[float]) -> float:
    """The largest control that is defined."""
    return max((control for control in controls if not math.isnan(control)), default=math.nan)


def _defined_rows(values: Tensor) -> np.ndarray:
    return values[~values.isnan().flatten(1).any(1)].numpy()
