"""Super neurons write the outlier dimension: a few columns of the down-projection make it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...edits.constructors import scalar
from ...measures.dimensions import dominance_ratio
from ..evidence import Evidence, Statistic, largest, nothing_to_split, ratio_of_means, weakest
from ..locate import GrowthStep, matched_random
from ..neurons import LayerSplit, super_neurons
from ..setting import Edits, Kept, Segment, Setting, random_dimensions
from .link import Freeze, Intervention, Link, Trial


def _statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Share of a step's change of its outlier dimension that its super neurons make, and the dominance after it."""
    nothing = nothing_to_split(evidence, "contribution_share")
    statistics = _shares(evidence, rng) if nothing is None else [nothing]
    return [*statistics, _dominance(evidence, rng)]


def _shares(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    panel = evidence.panel
    draws = {"draws": evidence.config.controls, "generator": evidence.generator()}
    by_step = []
    for number, step in enumerate(panel.location.steps):
        splits = [s for s in evidence.splits if s.layer in step.layers and s.position == panel.location.sink_position]
        change = torch.stack([split.change for split in splits]).sum(0)
        supers = [super_neurons(evidence.splits, layer=split.layer) for split in splits]

        def share_rows(masks: list[Tensor], splits: list[LayerSplit] = splits, change: Tensor = change) -> Tensor:
            written = torch.stack([s.terms[:, mask].sum(1) for s, mask in zip(splits, masks, strict=True)]).sum(0)
            return torch.stack([written, change], dim=1)

        random = [matched_random(mask, **draws) for mask in supers]
        controls = [ratio_of_means(share_rows(list(draw)).numpy()) for draw in zip(*random, strict=True)]
        found = evidence.interval(share_rows(supers), generator=rng, statistic=ratio_of_means)
        name, nulls = f"contribution_share_step_{number}", {"random_neurons": largest(controls)}
        by_step.append(Statistic(name=name, interval=found, nulls=nulls))
    return [weakest("contribution_share", by_step), *by_step]


def _dominance(evidence: Evidence, rng: np.random.Generator) -> Statistic:
    """Dominance ratio after the last layer of the first growth step, else at its largest."""
    panel = evidence.panel
    by_layer = torch.stack([dominance_ratio(state) for state in panel.states()[1:]])
    steps = panel.location.steps
    layer = steps[0].last_layer if steps else int(by_layer.mean(1).argmax())
    return Statistic(
        name="dominance_ratio",
        interval=evidence.interval(by_layer[layer], generator=rng),
        references={"other_positions": float(panel["dominance_elsewhere"][layer].nanmean())},
    )


def _interventions(trial: Trial) -> list[Intervention]:
    """Zero the entries of the down-projection from super neurons to outlier dimensions, against other dimensions."""
    setting, generator = trial.setting, trial.generator
    supers = {layer: mask for layer, mask in setting.super_neurons.items() if bool(mask.any())}
    if not supers:
        return []

    def edits(dimensions: Mapping[int, Sequence[int]]) -> Edits:
        return tuple(
            scalar(
                setting.lens,
                layer=layer,
                neurons=mask.nonzero().flatten().tolist(),
                dimensions=dimensions[layer],
                positions=[setting.sink_position],
            )
            for layer, mask in supers.items()
        )

    chosen = {layer: _written(setting, step) for step in setting.location.steps for layer in step.layers}
    drawn = {layer: _others(setting, dims, generator) for layer, dims in chosen.items()}
    return [
        Intervention(
            name="entries of down_proj to the outlier dimensions x 0",
            edits=edits(chosen),
            controls=tuple(edits({layer: sets[i] for layer, sets in drawn.items()}) for i in range(setting.n_controls)),
            position=setting.sink_position,
            reads=setting.late_layers,
        )
    ]


def _frozen(setting: Setting, segment: Segment, position: int, generator: torch.Generator) -> Kept | None:
    """The outlier dimensions after a growth step, against other dimensions; None without a growth step."""
    if segment.step is None:
        return None
    layer, dims = segment.step.last_layer, _written(setting, segment.step)
    controls = _others(setting, dims, generator)
    at = {"position": position, "mean": position == setting.sink_position}
    return Kept(
        edits=setting.keep_units("resid_post", {layer: dims}, label="freeze outlier dimensions", **at),
        controls=tuple(setting.keep_units("resid_post", {layer: drawn}, **at) for drawn in controls),
        size=len(dims),
    )


def _written(setting: Setting, step: GrowthStep) -> list[int]:
    """The outlier dimensions after a growth step, else its strongest dimension."""
    return list(setting.location.outliers.get(step.last_layer, ())) or [step.dimension]


def _others(setting: Setting, dims: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    return random_dimensions(dims, d_model=setting.lens.d_model, draws=setting.n_controls, generator=generator)


NEURONS_DIMENSION = Link(
    name="neurons_dimension",
    source="super neurons",
    target="outlier dimension",
    sentence="Super neurons write the outlier dimension of the sink token.",
    question="do the super neurons make the outlier dimension?",
    statistics=_statistics,
    floor=lambda config, length: 0.5,
    interventions=_interventions,
    freeze=Freeze(name="dimensions", words="the outlier dimensions", make=_frozen),
)
