"""The smallest set of neurons whose joint ablation removes the sink that a growth step makes.

Several neurons write the same direction, so that removing any one changes little. The rule, for each growth step:

1. Rank the neurons of its layers by the share of the layer's change of the outlier dimension that they make.
2. Add them in this order, each set to its mean over ordinary tokens at the sink, until the attention to the sink in
   the layers after the step has lost half (``LOST_FRAC``); at most ``MOST_IN_SET`` of them.
3. Leave each one out in turn; drop the one without which the set removes most, as long as half still goes.

The set is then ablated in every other way, alone and neuron by neuron, and against random sets of the same size: of
the same layers, and of the same ranks in layers outside the growth steps.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from ..chain.locate import GrowthStep
from ..chain.neurons import mlp_contributions
from ..chain.setting import Edits, Segment, Setting, draw_other_indices
from ..edits.constructors import freeze, scalar, zero
from ..edits.effects import removed_share
from ..errors import InputError
from ..models.weights import mlp_weights
from ..progress import tqdm
from ..schema import LOST_FRAC, column_names
from .config import MOST_IN_SET

Neuron = tuple[int, int]
"""Layer and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronSet:
    """The smallest set of neurons that removes the sink of one growth step, or the largest set that was tried."""

    segment: Segment
    neurons: tuple[Neuron, ...]
    """The set, ranked; if no set removes the sink, all neurons that were tried."""
    removes: bool
    """True if the set removes the sink."""
    ranks: dict[Neuron, int]
    """Neuron of the set -> its rank by contribution within its layer, from 0."""


def rank_neurons(setting: Setting, *, layers: Sequence[int], step: GrowthStep) -> list[Neuron]:
    """Rank the neurons of the given layers, as (layer, index), by what they write to the outlier dimension at the sink.

    The dimension is that of the growth step ``step``. A neuron counts by the magnitude of its share of what its layer
    adds to the dimension; the largest comes first.
    """
    shares: list[tuple[float, Neuron]] = []
    baseline = setting.baseline_tensors("neurons", layers=layers)
    for layer in layers:
        weights = mlp_weights(setting.lens, layer=layer)
        active = baseline[layer][:, setting.sink_position].float().to(weights.w_down.device)
        terms, _ = mlp_contributions(setting.lens, weights, layer=layer, activations=active, dimension=step.dimension)
        states = setting.baseline.state_at(setting.sink_position)
        if layer:
            before = states[layer - 1]
        else:
            before = setting.baseline_tensors("resid_pre", layers=[0])[0][:, setting.sink_position].float().cpu()
        by = setting.lens.remaining_scales[layer : layer + 2]
        change = (by[1] * states[layer] - by[0] * before)[:, step.dimension].mean()
        mean = (by[0] * terms.mean(0).cpu() / change.abs().clamp(min=1e-6)).abs()
        shares += [(float(value), (layer, index)) for index, value in enumerate(mean.tolist())]
    return [neuron for _, neuron in sorted(shares, key=lambda one: (-one[0], one[1]))]


def find_smallest_sets(setting: Setting, *, progress: bool = False) -> tuple[list[NeuronSet], pd.DataFrame]:
    """Find for every growth step the smallest set of neurons whose joint ablation removes the sink.

    Also returns the table ``ablations``, with one row per ablation.

    Cost: for a step some 20 to 60 passes of the bridge over the setting's sequences.

    Raises:
        InputError: a model without a growth step.
    """
    steps = [segment for segment in setting.segments if segment.steps]
    if not steps:
        raise InputError(
            f"{setting.lens.name} has no growth step on these tokens, so there are no layers to look for neurons in; "
            "lower growth_factor, or use other tokens"
        )
    rng = np.random.default_rng(setting.config.seed)
    found, rows = [], []
    with tqdm(desc="ablating sets", unit="run", disable=not progress, leave=False) as bar:
        for segment in steps:
            one = _find_smallest_set(setting, segment, tick=bar.update)
            found.append(one)
            for row in _ablation_rows(setting, one, rng=rng):
                rows.append(row)
                bar.update()
    return found, pd.DataFrame(rows, columns=column_names("ablate", "ablations"))


def _find_smallest_set(setting: Setting, segment: Segment, *, tick: Callable[[], object]) -> NeuronSet:
    """Find the fewest neurons whose ablation removes the sink that ``segment`` makes; call ``tick`` before each run."""
    (step,) = segment.steps
    assert step is not None  # only steps are looked at
    order = rank_neurons(setting, layers=step.layers, step=step)
    places = {neuron: [n for n in order if n[0] == neuron[0]].index(neuron) for neuron in order[:MOST_IN_SET]}
    before = float(setting.baseline.mass_at(setting.sink_position, layers=segment.layers).mean())

    def removed(neurons: Sequence[Neuron]) -> float:
        tick()
        units = _group_by_layer(neurons)
        edits = setting.freeze_unit_edits("neurons", units, position=setting.sink_position, mean=True)
        run = setting.run(edits, layers=segment.layers, quiet=True)
        after = float(run.mass_at(setting.sink_position, layers=segment.layers).mean())
        return 1 - after / before if before else math.nan

    chosen: list[Neuron] = []
    for neuron in order[:MOST_IN_SET]:
        chosen.append(neuron)
        if removed(chosen) >= LOST_FRAC:
            break
    else:
        return NeuronSet(segment=segment, neurons=tuple(chosen), removes=False, ranks=places)
    while len(chosen) > 1:
        without = {neuron: removed([one for one in chosen if one != neuron]) for neuron in chosen}
        least = max(without, key=lambda neuron: without[neuron])
        if without[least] < LOST_FRAC:
            break
        chosen.remove(least)
    return NeuronSet(segment=segment, neurons=tuple(chosen), removes=True, ranks=places)


def _ablation_rows(setting: Setting, found: NeuronSet, *, rng: np.random.Generator) -> Iterator[dict[str, object]]:
    """Yield a row of ``ablations`` for each ablation of the set ``found``, of its subsets, and of random sets."""
    segment, chosen, sink = found.segment, list(found.neurons), setting.sink_position
    (step,) = segment.steps
    assert step is not None
    base = float(setting.baseline.mass_at(sink, layers=segment.layers).mean())

    def row(
        kind: str, neurons: Sequence[Neuron], *, method: str, what: str, where: str, loss: bool
    ) -> dict[str, object]:
        positions = [sink] if where == "sink" else None
        edits = _ablation_edits(setting, neurons, method=method, what=what, positions=positions, step=step)
        run = setting.run(edits, loss=loss, layers=None if loss else segment.layers, quiet=True)
        share = removed_share(setting.baseline, run, sink_position=sink, layers=segment.layers, generator=rng)
        before = setting.baseline.loss
        return {
            "step": segment.number,
            "kind": kind,
            "neurons": neuron_names(neurons),
            "size": len(neurons),
            "method": method,
            "what": what,
            "where": where,
            "layers_from": segment.layers[0],
            "layers_to": segment.layers[-1],
            "baseline_mass": base,
            "mass": float(run.mass_at(sink, layers=segment.layers).mean()),
            "removed_share": share.estimate,
            "ci_low": share.low,
            "ci_high": share.high,
            "baseline_loss_nats": math.nan if before is None else float(before.mean()),
            "loss_nats": math.nan if run.loss is None else float(run.loss.mean()),
            "n": setting.tokens.n_sequences,
        }

    usual = {"method": "mean_ordinary", "what": "column", "where": "sink"}
    for method, what, where in _WAYS:
        yield row("set", chosen, method=method, what=what, where=where, loss=True)
    if len(chosen) > 1:
        for neuron in chosen:
            yield row("single", [neuron], loss=True, **usual)
        for neuron in chosen:
            yield row("leave one out", [one for one in chosen if one != neuron], loss=False, **usual)
    generator = setting.make_generator()
    for _ in range(setting.config.controls):
        drawn = [
            (layer, unit)
            for layer, units in _group_by_layer(chosen).items()
            for unit in draw_other_indices(units, n=setting.lens.n_neurons(layer), generator=generator)
        ]
        yield row("random, same layers", drawn, loss=False, **usual)
    for draw in _draw_sets_of_equal_ranks(setting, found, generator):
        yield row("random, same ranks outside", draw, loss=False, **usual)


_WAYS = (
    ("mean_ordinary", "column", "sink"),
    ("zero", "column", "sink"),
    ("mean_ordinary", "column", "everywhere"),
    ("zero", "column", "everywhere"),
    ("zero", "scalar", "sink"),
    ("zero", "scalar", "everywhere"),
)
"""Ways in which a set is ablated: method, part of the neuron, and positions."""


def neuron_names(neurons: Sequence[Neuron]) -> str:
    """Write neurons as text, ``LAYER.INDEX``: ``11.1229, 11.1487``."""
    return ", ".join(f"{layer}.{index}" for layer, index in neurons)


def _group_by_layer(neurons: Sequence[Neuron]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, index in neurons:
        found.setdefault(layer, []).append(index)
    return found


def _ablation_edits(
    setting: Setting,
    neurons: Sequence[Neuron],
    *,
    method: str,
    what: str,
    positions: list[int] | None,
    step: GrowthStep,
) -> Edits:
    """Make the edits that ablate neurons by ``method`` at the given positions, or at all positions if None.

    If ``what`` is ``scalar``, only what they write to the outlier dimension of ``step`` is removed.
    """
    chosen = _group_by_layer(neurons)
    if what == "scalar":
        return tuple(
            scalar(setting.lens, layer=layer, neurons=units, dimensions=[step.dimension], positions=positions)
            for layer, units in chosen.items()
        )
    if method == "zero":
        return tuple(
            zero("neurons", layers=[layer], units=units, positions=positions) for layer, units in chosen.items()
        )
    baseline = setting.baseline_tensors("neurons", layers=list(chosen))
    return tuple(
        freeze("neurons", {layer: setting.mean_ordinary(baseline[layer])[..., units]}, units=units, positions=positions)
        for layer, units in chosen.items()
    )


def _draw_sets_of_equal_ranks(setting: Setting, found: NeuronSet, generator: torch.Generator) -> Iterator[list[Neuron]]:
    """Draw sets of neurons with the ranks of those of ``found``, in random layers outside all growth steps."""
    (step,) = found.segment.steps
    assert step is not None
    outside = [layer for layer in range(max(found.segment.layers)) if layer not in setting.location.growth_layers]
    if not outside:
        return
    setting.baseline_tensors("neurons", layers=outside)  # all in one pass
    order = {layer: rank_neurons(setting, layers=[layer], step=step) for layer in outside}
    for _ in range(setting.config.controls):
        drawn: dict[Neuron, None] = {}
        for neuron in found.neurons:
            layer = outside[int(torch.randint(len(outside), (), generator=generator))]
            place = found.ranks[neuron]
            while order[layer][place] in drawn:
                place += 1
            drawn[order[layer][place]] = None
        yield list(drawn)
