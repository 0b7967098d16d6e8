"""Mediation: put a sink at a position, freeze one link there, and read what survives.

An upstream intervention (isolation, variance amplification) puts a sink at the target position. Then a downstream
quantity *at that position* is frozen at the value of the baseline run: the aggregated values ``z`` (in all layers,
which must undo the intervention entirely and is there as a check), the activations of a growth step's super neurons,
the outlier dimensions after the step, or the keys in the layers that are read. The mass that survives, in the layers
after the step and before the next in which the sink is read, says how much of the sink goes another way. Where there
are several steps, what belongs to all of them is frozen together as well: a step's other path may be the other step.
For the natural sink, the same is mean ablated at its own position: set to the mean over ordinary tokens
(``mean_ordinary``).

Each has random controls of the same size: other neurons of the same layers, other dimensions, and for ``z`` and
the key the same at another position.
"""

import math
from collections.abc import Sequence

import pandas as pd
import torch

from ..edits.constructors import Edit
from ..edits.isolation import isolate
from ..progress import progress_bar
from ..schema import LEAST_ADDED, column_names
from .config import FEW_CONTROLS
from .links import LINKS
from .links.link import Link
from .setting import Setting, mean_mass


def mediation_table(
    setting: Setting, *, amplified: Edit | None, links: Sequence[Link] = LINKS, progress: bool = False
) -> pd.DataFrame:
    """Freeze each link under each intervention: one row per (intervention, frozen link, growth step or all steps).

    ``surviving_share`` is the share that is left of the mass that the intervention adds at the position: 0 if freezing
    takes it all away, 1 if it changes nothing, nan if nothing was added. ``amplified`` is the amplification at the
    target position; None if none makes a sink there. Cost: some 24 passes of the bridge over the setting's sequences
    for each growth step and intervention.
    """
    rows = []
    interventions: dict[str, list[Edit]] = {"isolation": [isolate([setting.target_position])]}
    interventions |= {} if amplified is None else {"amplification": [amplified]}
    interventions["natural"] = []
    freezes = [link.freeze for link in links if link.freeze is not None]
    segments = [*setting.segments, *([] if setting.all_steps_segment is None else [setting.all_steps_segment])]
    runs = {name: setting.edited_baseline_run(edits) for name, edits in interventions.items()}
    fewer = {name: run.with_fewer_sequences(setting.config.most_control_sequences) for name, run in runs.items()}
    cells = [(name, segment) for name in interventions for segment in segments]
    for name, segment in progress_bar(cells, label="mediation", progress=progress):
        run, few, layers = runs[name], fewer[name], [one for one in segment.layers if one in setting.sink_layers]
        if not layers:
            continue
        position = setting.sink_position if name == "natural" else setting.target_position
        # the natural sink is measured over an ordinary position: the target, before anything is done to it
        baseline = mean_mass(setting.baseline, setting.target_position, layers)
        whole = mean_mass(run.outcome, position, layers)
        # of the controls' sequences
        few_baseline = mean_mass(setting.control_baseline.outcome, setting.target_position, layers)
        few_whole = mean_mass(few.outcome, position, layers)
        read = {"layers": layers, "quiet": True}  # a link may be untouched
        generator = setting.make_generator()
        for name_of_link, kept in [(one.name, one.make(setting, segment, position, generator)) for one in freezes]:
            if kept is None:
                continue
            survived = mean_mass(setting.run(kept.edits, of=run, **read), position, layers)
            controls = setting.run_each(kept.controls[:FEW_CONTROLS], of=few, **read)
            control = torch.tensor([mean_mass(one, position, layers) for one in controls], dtype=torch.float32)
            added, added_to_few = (
                one if abs(one) >= LEAST_ADDED else math.nan for one in (whole - baseline, few_whole - few_baseline)
            )
            mean = float(control.mean())  # nan without controls
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
