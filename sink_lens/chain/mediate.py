"""Mediation: put a sink at a position, freeze one link there, and read what survives.

An upstream intervention (isolation, variance amplification) puts a sink at the target position. Then a downstream
quantity *at that position* is frozen at the value of the baseline run; freezing the aggregated values ``z`` in all
layers must undo the intervention, and is there as a check. What belongs to all steps is frozen together as well: a
step's other path may be the other step. For the natural sink, the same is mean ablated at its own position.
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from ..edits.constructors import Edit
from ..edits.isolation import isolate
from ..engine.baseline_run import BaselineRun
from ..schema import LEAST_ADDED, column_names
from .config import FEW_CONTROLS
from .links import LINKS
from .links.link import Link
from .setting import FrozenQuantity, Run, Setting, mean_mass


def mediation_table(
    setting: Setting,
    *,
    amplified: Edit | None,
    links: Sequence[Link] = LINKS,
    progress: bool = False,
) -> pd.DataFrame:
    """Freeze each link under each intervention: one row per (intervention, frozen link, growth step or all steps).

    Cost: some 24 passes over the setting's sequences for each growth step and intervention.
    """
    interventions: dict[str, list[Edit]] = {"isolation": [isolate([setting.target_position])]}
    if amplified is not None:
        interventions["amplification"] = [amplified]
    interventions["natural"] = []
    freezes = [link.freeze for link in links if link.freeze is not None]
    segments = [one for one in (*setting.segments, setting.all_steps_segment) if one is not None]
    cells: list[tuple[dict[str, Any], BaselineRun, BaselineRun, list[int], FrozenQuantity]] = []
    for name, edits in interventions.items():
        position = setting.sink_position if name == "natural" else setting.target_position
        run = setting.edited_baseline_run(edits)
        few = setting.control_run(position, of=run)
        for segment in segments:
            layers = [one for one in segment.layers if one in setting.sink_layers]
            generator = setting.make_generator()
            for freeze in freezes if layers else ():
                kept = freeze.make(setting, segment, position, generator)
                if kept is not None:
                    row = {
                        "intervention": name,
                        "frozen": freeze.name,
                        "step": segment.number,
                        "position": position,
                    }
                    cells.append((row, run, few, layers, kept))
    groups = [
        [
            Run(edits=kept.edits, of=run, layers=layers),
            *(Run(edits=edits, of=few, layers=layers) for edits in kept.controls[:FEW_CONTROLS]),
        ]
        for _, run, few, layers, kept in cells
    ]
    found = setting.run_groups(groups, label="mediation" if progress else None)
    rows = []
    for (row, run, few, layers, kept), (frozen, *controls) in zip(cells, found, strict=True):
        position = row["position"]
        # the natural sink is measured over an ordinary position: the target, before anything is done to it
        baseline = mean_mass(setting.baseline, setting.target_position, layers)
        whole, survived = (mean_mass(one, position, layers) for one in (run.outcome, frozen))
        # of the controls' sequences, from as many queries behind the target as the controls have behind theirs
        few_baseline = mean_mass(
            setting.control_run(setting.target_position).outcome, setting.target_position, layers
        )
        few_whole = mean_mass(few.outcome, position, layers)
        control = torch.tensor(
            [mean_mass(one, position, layers) for one in controls], dtype=torch.float32
        )
        added, added_to_few = (
            one if one >= LEAST_ADDED else math.nan
            for one in (whole - baseline, few_whole - few_baseline)
        )
        mean = float(control.mean())  # nan without controls
        rows.append(
            row
            | {
                "layers_from": layers[0],
                "layers_to": layers[-1],
                "baseline_mass": baseline,
                "mass_without_freeze": whole,
                "mass": survived,
                "surviving_share": (survived - baseline) / added,
                "control_mean": mean + (whole - few_whole),
                "control_sd": float(control.std()) if len(control) > 1 else math.nan,
                "control_surviving_share": (mean - few_baseline) / added_to_few,
                "n_controls": len(control),
                "size": kept.size,
                "n": setting.tokens.n_sequences,
                "control_n": few.n_sequences if len(control) else 0,
            }
        )
    return pd.DataFrame(rows, columns=column_names("trace", "mediation"))
