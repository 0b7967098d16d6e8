"""Which link carries the sink: put it at a position, freeze one link there, and read what survives.

An upstream intervention (isolation, variance amplification) puts a sink at the target position. Then a downstream
quantity *at that position* is frozen at the value of the clean run: the aggregated values ``z`` (in all layers, which
must undo the intervention entirely and is there as a check), the activations of a growth step's super neurons, the
outlier dimensions after the step, or the keys in the layers that are read. The mass that survives, in the layers
after the step and before the next, says how much of the sink goes another way. For the natural sink, the same is mean
ablated at its own position: set to the mean over other positions (from 8 on).

Each has random controls of the same size: other neurons of the same layers, other dimensions, and for ``z`` and
the key the same at another position.
"""

import math
from collections.abc import Sequence

import pandas as pd
import torch

from ..edits.constructors import Edit
from ..edits.isolation import isolate
from ..edits.outcome import Outcome
from ..engine.forward import run_with
from ..schema import LEAST_ADDED
from .config import FEW_CONTROLS
from .links import LINKS
from .links.link import Link
from .setting import Edits, Setting, bar, from_layer

COLUMNS = (
    "intervention",
    "frozen",
    "step",
    "position",
    "layers_from",
    "layers_to",
    "baseline_mass",
    "mass_without_freeze",
    "mass",
    "surviving_share",
    "control_mean",
    "control_sd",
    "control_surviving_share",
    "n_controls",
    "size",
    "n",
)


def mediation_table(
    setting: Setting, *, amplified: Edit | None, links: Sequence[Link] = LINKS, progress: bool = False
) -> pd.DataFrame:
    """One row per (intervention, frozen link, growth step); the columns are ``COLUMNS``.

    ``surviving_share`` is what survives of the mass that the intervention adds at the position: 0 where freezing
    takes it all away, 1 where it changes nothing; nan where nothing was added. TraceCost: some 24 passes of the bridge
    over the setting's sequences for each growth step and intervention.

    Args:
        setting: where.
        amplified: the amplification at the target position; None where none makes a sink.
        links: the chain.
        progress: show a bar.
    """
    rows = []
    interventions: dict[str, list[Edit]] = {"isolation": [isolate([setting.target_position])]}
    if amplified is not None:
        interventions["amplification"] = [amplified]
    interventions["natural"] = []
    freezes = [link.freeze for link in links if link.freeze is not None]
    cells = [(name, segment) for name in interventions for segment in setting.segments]
    runs = {name: (edits, _intervened(setting, edits)) for name, edits in interventions.items()}
    for name, segment in bar(cells, label="mediation", progress=progress):
        edits, run = runs[name]
        natural, layers = name == "natural", list(segment.layers)
        position = setting.sink_position if natural else setting.target_position
        # the natural sink is measured over an ordinary position: the target, before anything is done to it
        baseline = _mass(setting.baseline, setting.target_position, layers)
        whole = _mass(run, position, layers)
        generator = setting.generator()
        frozen = [(one.name, one.make(setting, segment, position, generator)) for one in freezes]
        for name_of_link, kept in frozen:
            if kept is None:
                continue
            at = {"layers": layers, "position": position}
            survived = _under(setting, kept.edits, edits=edits, run=run, **at)
            control = torch.tensor(
                [_under(setting, one, edits=edits, run=run, **at) for one in kept.controls[:FEW_CONTROLS]]
            )
            added = whole - baseline if abs(whole - baseline) >= LEAST_ADDED else math.nan
            mean = float(control.mean()) if len(control) else math.nan
            rows.append(
                {
                    "intervention": name,
                    "frozen": name_of_link,
                    "step": segment.number,
                    "position": position,
                    "layers_from": layers[0],
                    "layers_to": layers[-1],
                    "baseline_mass": baseline,
                    "mass_without_freeze": whole,
                    "mass": survived,
                    "surviving_share": (survived - baseline) / added,
                    "control_mean": mean,
                    "control_sd": float(control.std()) if len(control) > 1 else math.nan,
                    "control_surviving_share": (mean - baseline) / added,
                    "n_controls": len(control),
                    "size": kept.size,
                    "n": setting.tokens.n_sequences,
                }
            )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _under(
    setting: Setting, kept: Edits, *, edits: list[Edit], run: Outcome, layers: list[int], position: int
) -> float:
    """The mass at a position with a link frozen, beside the edits of the intervention whose run is given."""
    first = min(layer for edit in kept for layer in edit.over(setting.lens.n_layers))
    upstream = from_layer(edits, first=first, n_layers=setting.lens.n_layers)
    found = setting.run([*upstream, *kept], layers=layers, of=run, quiet=True)  # a link may be untouched
    return _mass(found, position, layers)


def _intervened(setting: Setting, edits: list[Edit]) -> Outcome:
    """The run of an intervention, with the stream after every layer."""
    if not edits:
        return setting.baseline
    positions = (setting.target_position, setting.sink_position)
    return run_with(setting.lens, setting.tokens, edits, positions=positions, sites=("resid_post",), loss=False)


def _mass(run: Outcome, position: int, layers: list[int]) -> float:
    return float(run.mass_at(position, layers=layers).nanmean())
