"""Which link carries the sink: put it at a position, hold one link there, and read what survives.

An upstream intervention (isolation, variance amplification) puts a sink at an interior position. Then a downstream
quantity *at that position* is held at the value of the clean run: the aggregated values ``z`` (in all layers, which
must undo the intervention entirely and is there as a check), the activations of a growth step's super neurons, the
outlier dimensions after the step, or the keys in the layers that are read. The mass that survives, in the layers
after the step and before the next, says how much of the sink goes another way. For the natural sink, the same is held
at its own position, at the mean over other positions (from 8 on).

Each hold has five random ones of the same size: other neurons of the same layers, other dimensions, and for ``z`` and
the key the same hold at another position.
"""

import math
from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor

from ..edits.constructors import Edit
from ..edits.isolation import isolation
from ..edits.outcome import Outcome
from ..engine.forward import run_with
from .bench import Bench, Segment, bar, from_layer, generator_of
from .holds import Edits, Hold, Holder

HOLDS = ("z", "neurons", "dimensions", "key")
"""What is held, in the order of the chain."""
COLUMNS = (
    "intervention",
    "hold",
    "step",
    "position",
    "layers_from",
    "layers_to",
    "baseline_mass",
    "mass_without_hold",
    "mass",
    "surviving_share",
    "control_mean",
    "control_sd",
    "control_surviving_share",
    "n_controls",
    "size",
    "n",
)
_LITTLE = 0.02
"""Where an intervention adds less attention than this, shares of it mean nothing."""

Supers = Mapping[int, Tensor]
"""Layer -> mask of its super neurons."""


def mediation_table(bench: Bench, *, supers: Supers, amplified: Edit | None, progress: bool = False) -> pd.DataFrame:
    """One row per (intervention, hold, growth step); the columns are ``COLUMNS``.

    ``surviving_share`` is what survives of the mass that the intervention adds at the position: 0 where the hold
    takes it all away, 1 where it changes nothing; nan where nothing was added. Cost: some 24 passes of the bridge
    over the bench's sequences for each growth step and intervention.

    Args:
        bench: where.
        supers: the super neurons.
        amplified: the amplification at the new position; None where none makes a sink.
        progress: show a bar.
    """
    rows = []
    interventions: dict[str, list[Edit]] = {"isolation": [isolation([bench.new])]}
    if amplified is not None:
        interventions["amplification"] = [amplified]
    interventions["natural"] = []
    cells = [(name, segment) for name in interventions for segment in bench.segments]
    holder = Holder(bench=bench)
    runs = {name: (edits, _intervened(bench, edits)) for name, edits in interventions.items()}
    for name, segment in bar(cells, label="mediation", progress=progress):
        edits, run = runs[name]
        position = bench.old if name == "natural" else bench.new
        layers = list(segment.layers)
        baseline = _ordinary(bench, layers) if name == "natural" else _mass(bench.baseline, position, layers)
        whole = _mass(run, position, layers)
        for held in _holds(holder, segment, natural=name == "natural", supers=supers):
            at = {"layers": layers, "position": position}
            survived = _under(bench, held.edits, edits=edits, run=run, **at)
            control = torch.tensor([_under(bench, one, edits=edits, run=run, **at) for one in held.controls])
            added = whole - baseline if abs(whole - baseline) >= _LITTLE else math.nan
            mean = float(control.mean()) if len(control) else math.nan
            rows.append(
                {
                    "intervention": name,
                    "hold": held.name,
                    "step": segment.number,
                    "position": position,
                    "layers_from": layers[0],
                    "layers_to": layers[-1],
                    "baseline_mass": baseline,
                    "mass_without_hold": whole,
                    "mass": survived,
                    "surviving_share": (survived - baseline) / added,
                    "control_mean": mean,
                    "control_sd": float(control.std()) if len(control) > 1 else math.nan,
                    "control_surviving_share": (mean - baseline) / added,
                    "n_controls": len(control),
                    "size": held.size,
                    "n": bench.tokens.n_sequences,
                }
            )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _under(bench: Bench, holding: Edits, *, edits: list[Edit], run: Outcome, layers: list[int], position: int) -> float:
    """The mass at a position under a hold, beside the edits of the intervention whose run is given."""
    first = min(layer for edit in holding for layer in edit.over(bench.lens.n_layers))
    kept = from_layer(edits, first=first, n_layers=bench.lens.n_layers)
    found = bench.run([*kept, *holding], layers=layers, of=run, quiet=True)  # a link may be untouched
    return _mass(found, position, layers)


def _intervened(bench: Bench, edits: list[Edit]) -> Outcome:
    """The run of an intervention, with the stream after every layer."""
    if not edits:
        return bench.baseline
    return run_with(bench.lens, bench.tokens, edits, keys=(bench.new, bench.old), sites=("resid_post",), loss=False)


def _mass(run: Outcome, position: int, layers: list[int]) -> float:
    return float(run.mass_at(position, layers=layers).nanmean())


def _ordinary(bench: Bench, layers: list[int]) -> float:
    """The mass that an ordinary position gets in the clean run: the new one, before anything is done to it."""
    return _mass(bench.baseline, bench.new, layers)


def _holds(holder: Holder, segment: Segment, *, natural: bool, supers: Supers) -> list[Hold]:
    """The holds of a step at the position of a sink, in the order of the chain."""
    bench = holder.bench
    at = {"place": bench.old if natural else bench.new, "natural": natural}
    generator = generator_of(bench)
    layers = () if segment.step is None else segment.step.layers
    masks = {layer: supers[layer] for layer in layers if layer in supers}
    found = [
        holder.z(segment, **at),
        holder.neurons(masks, generator=generator, **at),
        holder.dimensions(segment, generator=generator, **at),
        holder.key(segment, **at),
    ]
    return [one for one in found if one is not None]
