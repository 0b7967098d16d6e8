"""Super neurons write the outlier dimension: a few columns of the down-projection make it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...edits.constructors import At, edit, scalar
from ...measures.dimensions import dominance_ratio
from ...models.weights import mlp_weights, norm_weights
from ...schema import OWN, PATH, RESCALED, SPAN, WRITTEN
from ...stats import ratio_of_means
from ..evidence import (
    Evidence,
    Statistic,
    largest_control,
    own_direction_statistics,
    steps_of_neurons,
    undefined_statistic,
    undefined_without_growth_step,
    weakest_statistic,
)
from ..locate import own_directions
from ..neurons import LayerSplit, super_units_of_layer
from ..paths import KEY, SUPER, End, Path, Writings
from ..setting import (
    WHOLE,
    Edits,
    FrozenQuantity,
    Segment,
    Setting,
    Units,
    draw_other_indices,
    marked_units,
)
from .link import Freeze, Intervention, Link, Trial, make_mean_ablation

_MOST_DIRECTIONS = 32
_LEAST_CHANGED = 0.05
"""Share of what stands there after a step that it must change, to write its dimension."""
_WRITES = 0.1
"""Share of a column's energy that must lie in the outlier dimensions for its neuron to write them."""


def _compute_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """The dominance ratio is read after the first growth step; without a step, in the layer where it is largest."""
    panel, location, name = evidence.panel, evidence.panel.location, "contribution_share"
    nothing, last = (
        undefined_without_growth_step(evidence, name),
        max(location.outliers, default=-2),
    )
    own = [] if last >= 0 else own_direction_statistics(evidence, rng)
    if nothing is not None and nothing.absent:
        stands_out = any(one.interval.low > evidence.config.growth_factor for one in own)
        # without these there is nothing that neurons could write
        nothing = replace(nothing, no_source=not location.outliers and not stands_out)
    elif nothing is None and last < location.growth_layers[0]:
        note = "no dimension dominates after a growth step"
        nothing = undefined_statistic(name, note, absent=True)
    dominance = torch.stack([dominance_ratio(state) for state in panel.sink_states()[1:]])
    layer = location.steps[0].last_layer if location.steps else int(dominance.mean(1).argmax())
    statistics = _compute_share_statistics(evidence, rng) if nothing is None else [nothing]
    after = Statistic(
        name="dominance_ratio",
        interval=evidence.interval(dominance[layer], generator=rng),
        references={"other_positions": float(panel["dominance_elsewhere"][layer].nanmean())},
    )
    return [*statistics, *own, after]


def _compute_share_statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Return the lowest share of a growth step's change that super neurons write, then that of each step."""
    panel = evidence.panel
    generator = evidence.make_generator()
    by_step = []
    for number, step in steps_of_neurons(evidence):
        splits = evidence.splits_of(step)
        change = torch.stack([split.change for split in splits]).sum(0)
        # Steps of the random-init baseline are given, and grow in nothing.
        states = panel.rescale_to_last_layer(panel.sink_states())
        standing = states[step.last_layer + 1, :, step.dimension]
        grows = step.ratio_after >= evidence.config.growth_factor**0.5 * step.ratio_before
        if grows and float(change.mean().abs()) < _LEAST_CHANGED * float(standing.mean().abs()):
            note = f"growth step {number} changes nothing at the sink token: other tokens become smaller"
            return [undefined_statistic("contribution_share", note, absent=True)]
        supers = [super_units_of_layer(evidence.splits, layer=s.layer) for s in splits]

        def share_rows(
            chosen: Iterable[list[int]], splits: list[LayerSplit] = splits, change: Tensor = change
        ) -> Tensor:
            written = [s.terms[:, units].sum(1) for s, units in zip(splits, chosen, strict=True)]
            both = torch.stack([torch.stack(written).sum(0), change], dim=1)
            return both[evidence.tested_sequences]

        random = [
            [
                sorted(draw_other_indices(units, n=split.terms.shape[1], generator=generator))
                for _ in range(evidence.config.controls)
            ]
            for units, split in zip(supers, splits, strict=True)
        ]
        controls = [ratio_of_means(share_rows(draw).numpy()) for draw in zip(*random, strict=True)]
        found = evidence.interval(share_rows(supers), generator=rng, statistic=ratio_of_means)
        name = f"contribution_share_step_{number}"
        nulls = {"random_neurons": largest_control(controls)}
        by_step.append(Statistic(name=name, interval=found, nulls=nulls))
    return [weakest_statistic("contribution_share", by_step), *by_step]


def _make_interventions(trial: Trial) -> list[Intervention]:
    """Take what super neurons write from the sink's key, zero their weights, ablate the dimensions and directions.

    The key alone reads the stream without it, so that nothing else in the model is damaged. The weights are zeroed at
    every position, since a neuron may make the sink by what it takes from other tokens.
    """
    setting, generator = trial.setting, trial.generator
    found, location = list[Intervention](), setting.location
    grown = location.growth_layers[0] if location.steps else 0
    by_layer = {layer: list(dims) for layer, dims in location.outliers.items() if layer >= grown}
    every = sorted({one for dims in by_layer.values() for one in dims})
    supers = _writing_neurons(setting, every)
    if supers and every:
        found += _make_path_to_key(setting, supers, generator=setting.make_generator())
        chosen = {layer: by_layer.get(layer) or every for layer in supers}

        def entries(dimensions: Units) -> Edits:
            return tuple(
                scalar(setting.lens, layer=layer, neurons=units, dimensions=dimensions[layer])
                for layer, units in supers.items()
            )

        controls = setting.draw_other_units("resid_post", chosen, generator=generator)
        found.append(
            Intervention(
                name="entries of down_proj to the outlier dimensions x 0",
                edits=entries(chosen),
                controls=tuple(map(entries, controls)),
                position=setting.sink_position,
                reads=setting.sink_layers,
                is_primary=False,
            )
        )
    if by_layer:
        kept = setting.freeze_units(
            "resid_post", by_layer, position=setting.sink_position, generator=generator
        )
        removed = make_mean_ablation(
            kept, setting=setting, name="outlier dimensions, mean ablated", is_primary=False
        )
        later = tuple(layer for layer in setting.sink_layers if layer > min(by_layer))
        found.append(replace(removed, reads=later or setting.sink_layers))
    else:
        found += [*_make_path_of_all(setting), *_ablate_own_directions(setting, first=grown)]
    return [*found, *span_interventions(setting, generator=generator)]


def _make_path_to_key(
    setting: Setting, supers: Units, *, generator: torch.Generator
) -> list[Intervention]:
    """Take what ``supers`` write into the outlier dimensions from the sink's key alone."""
    entering = {
        layer: list(setting.location.entering_dimensions(layer))
        for layer in setting.lens.key_layers(setting.sink_layers)
        if layer > min(supers)
    }
    through = {layer: dims for layer, dims in entering.items() if dims}
    if not through:
        return []
    drawn = setting.draw_other_units("resid_post", through, generator=generator)
    cuts = [_cut_from_key(setting, supers, through, through=one) for one in (through, *drawn)]
    return [_intervene_on_key(setting, PATH, cuts, keys=through, is_primary=True)]


def _make_path_of_all(setting: Setting) -> list[Intervention]:
    """Take all that super neurons write from the key."""
    units = marked_units(setting.super_neurons)
    keys = [
        layer
        for layer in setting.lens.key_layers(setting.sink_layers)
        if layer > min(units, default=layer)
    ]
    if not keys:
        return []
    drawn = setting.draw_other_units("neurons", units, generator=setting.make_generator())
    cuts = [_cut_from_key(setting, one, keys) for one in (units, *drawn)]
    return [_intervene_on_key(setting, WRITTEN, cuts, keys=keys, is_primary=False)]


def _cut_from_key(
    setting: Setting, units: Units, keys: Iterable[int], *, through: Units | None = None
) -> Edits:
    source, target = End(name=SUPER, units=units), End(name=KEY, layers=tuple(keys))
    path = Path(source=source, target=target, through=through, position=setting.sink_position)
    return Writings(setting=setting, units=units).cut_edits(path)


def _intervene_on_key(
    setting: Setting, name: str, cuts: list[Edits], *, keys: Collection[int], is_primary: bool
) -> Intervention:
    return Intervention(
        name=name,
        edits=cuts[0],
        controls=tuple(cuts[1:]),
        position=setting.sink_position,
        reads=setting.sink_layers_with_keys_of(keys),
        is_primary=is_primary,
    )


def _ablate_own_directions(setting: Setting, *, first: int) -> list[Intervention]:
    """Mean ablate the token's own directions after each layer from ``first`` on."""
    layers = range(first, setting.lens.n_layers)
    means = _ordinary_states(setting, layers)
    spans = {
        layer: own_directions(
            x[:, setting.sink_position] - means[layer], thresholds=setting.config
        ).float()
        for layer, x in setting.baseline_tensors("resid_post", layers=layers).items()
    }
    later = tuple(layer for layer in setting.sink_layers if layer > first)
    if not later or not any(span.numel() for span in spans.values()):
        return []
    drawn = draw_spans(setting, spans, generator=setting.make_generator())
    return [_ablate_spans(setting, OWN, [spans, *drawn], means=means, reads=later)]


def _ordinary_states(setting: Setting, layers: Sequence[int]) -> dict[int, Tensor]:
    states = setting.baseline_tensors("resid_post", layers=layers)
    return {layer: setting.mean_ordinary(x)[0, 0] for layer, x in states.items()}


def _without_span(x: Tensor, span: Tensor, mean: Tensor) -> Tensor:
    span = span.to(x.device, x.dtype)
    return x - (x - mean.to(x.device, x.dtype)) @ span @ span.T


def _ablate_spans(
    setting: Setting,
    name: str,
    several: Sequence[Mapping[int, Tensor]],
    *,
    means: Mapping[int, Tensor],
    reads: tuple[int, ...],
) -> Intervention:
    """Mean ablate the first of ``several`` spans (layer -> d_model x direction); the others are controls."""

    def ablation(spans: Mapping[int, Tensor], label: str) -> Edits:
        return (
            edit(
                "resid_post",
                lambda x, at: _without_span(x, spans[at.layer], means[at.layer]),
                layers=tuple(spans),
                positions=[setting.sink_position],
                label=label,
            ),
        )

    return Intervention(
        name=name,
        edits=ablation(several[0], name),
        controls=tuple(ablation(spans, "random directions") for spans in several[1:]),
        position=setting.sink_position,
        reads=reads,
        is_primary=False,
    )


def draw_spans(
    setting: Setting, spans: Mapping[int, Tensor], *, generator: torch.Generator
) -> list[dict[int, Tensor]]:
    """Draw spans as wide as ``spans`` (layer -> d_model x direction), once per control."""

    def draw(span: Tensor) -> Tensor:
        return torch.linalg.qr(torch.randn(span.shape, generator=generator, dtype=torch.float32))[0]

    return [
        {layer: draw(span) for layer, span in spans.items()} for _ in range(setting.config.controls)
    ]


def _writing_neurons(setting: Setting, dimensions: Sequence[int]) -> dict[int, list[int]]:
    """Select the super neurons and makers that write any of ``dimensions``.

    Outside growth layers a maker may act through others: these must hold a tenth of the energy of its output weights.
    """
    masks = dict(setting.super_neurons)
    for layer, mask in masks.items():
        if layer not in setting.location.growth_layers:
            energy = mlp_weights(setting.lens, layer=layer).w_down.float().square().cpu()
            masks[layer] = mask & (energy[list(dimensions)].sum(0) >= _WRITES * energy.sum(0))
    return marked_units(masks)


def span_interventions(setting: Setting, *, generator: torch.Generator) -> list[Intervention]:
    """Mean ablate the span of the directions that makers write; the controls take random spans.

    That is done after every layer from the first maker on, with the directions written so far. A random span holds next
    to none of the token's energy, so a second intervention only rescales the token to the norm that it has without the
    span.
    """
    written = _written_directions(setting)
    if not written:
        return []
    layers = range(max(0, min(written)), setting.lens.n_layers)
    if not any(layer > layers[0] for layer in setting.sink_layers):
        return []
    spans = {}
    for layer in layers:
        columns = torch.cat([one for at, one in written.items() if at <= layer])
        spans[layer] = torch.linalg.qr(columns.T.double())[0].float()
    means = _ordinary_states(setting, layers)

    def rescaled(x: Tensor, at: At) -> Tensor:
        without = _without_span(x, spans[at.layer], means[at.layer])
        return x * (without.norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-9))[..., None]

    drawn, place = draw_spans(setting, spans, generator=generator), setting.sink_position
    smaller = edit("resid_post", rescaled, layers=tuple(layers), positions=[place], label=RESCALED)
    ablation = _ablate_spans(setting, SPAN, [spans, *drawn], means=means, reads=setting.sink_layers)
    return [
        ablation,
        replace(ablation, name=RESCALED, edits=(smaller,), controls=(), control_of=SPAN),
    ]


def _written_directions(setting: Setting) -> dict[int, Tensor]:
    """Collect what makers write at the sink: layer (-1: the embedding) -> maker x d_model."""
    found: dict[int, list[Tensor]] = {}
    for part in setting.makers[:_MOST_DIRECTIONS]:
        if part.kind == "neuron":
            written = mlp_weights(setting.lens, layer=part.layer).w_down[:, part.unit].float().cpu()
            norm = norm_weights(setting.lens, layer=part.layer, which="mlp_post_norm")
            written = written if norm is None else written * norm.gain.cpu()
        elif part.kind == "embedding" or part.kind in WHOLE:
            site, layer = (WHOLE[part.kind], part.layer) if part.kind in WHOLE else ("resid_pre", 0)
            whole = setting.baseline_tensors(site, layers=[layer])[layer].float().cpu()
            written = whole[:, setting.sink_position].mean(0) - setting.mean_ordinary(whole)[0, 0]
        else:
            continue
        found.setdefault(part.layer, []).append(written)
    return {layer: torch.stack(columns) for layer, columns in sorted(found.items())}


def _freeze_dimensions(
    setting: Setting, segment: Segment, position: int, generator: torch.Generator
) -> FrozenQuantity | None:
    if not segment.steps:
        return None
    outliers = setting.location.outliers
    written = {
        step.last_layer: list(outliers.get(step.last_layer, ())) or [step.dimension]
        for step in segment.steps
    }
    return setting.freeze_units("resid_post", written, position=position, generator=generator)


NEURONS_DIMENSION = Link(
    name="neurons_dimension",
    source="super neurons",
    target="outlier dimension",
    arrow="neurons → dimension",
    sentence="Super neurons write the outlier dimension of the sink token.",
    question="do the super neurons make the outlier dimension?",
    statistics=_compute_statistics,
    floor=lambda config, length, position: 0.5,
    interventions=_make_interventions,
    own_direction=(WRITTEN, OWN),
    freeze=Freeze(name="dimensions", make=_freeze_dimensions),
)
