"""``isolate``: does a sink come where tokens see only themselves, and what becomes of the model's own?"""

import pandas as pd

from ..chain.setting import Setting
from ..edits.effects import layer_table
from ..edits.isolation import isolate as isolating
from ..text import span
from .config import IsolateConfig
from .study import Measured, study, summary_row


@study(IsolateConfig)
def isolate(setting: Setting, *, config: IsolateConfig, progress: bool) -> Measured:
    """Isolate positions by the attention mask, all at once, and see whether a sink comes there.

    Raises:
        InputError: a position or layer that does not exist, or sequences too short.
        SiteError: a model whose attention cannot be edited.
        RunError: the folder is in use, or holds another run.
    """
    from .pages.interventions import isolated

    chosen = list(config.target_positions) or [setting.target_position]
    positions = tuple(dict.fromkeys([*chosen, setting.sink_position]))
    layers = config.layers
    edit = isolating(chosen, layers=layers)
    baseline_run = setting.reading(positions)
    baseline = baseline_run.outcome
    edited = setting.run([edit], loss=True, of=baseline_run, label="isolation" if progress else None)
    sink, by_layer, summary = setting.sink_position, [], []
    for target in chosen:
        table = layer_table(baseline, edited, target_position=target, sink_position=sink)
        by_layer.append(table.assign(target_position=target))
        row = {"target_position": target, "layers": "all" if layers is None else span(layers)}
        summary.append(row | summary_row(setting, baseline, edited, target_position=target, reads=setting.late_layers))
    frames = {"layers": pd.concat(by_layer, ignore_index=True), "summary": pd.DataFrame(summary)}
    headline = "\n".join(isolated(frames["summary"]))
    if mixing := setting.lens.mixer_layers:
        headline += f"\nisolation masks attention alone: the mixers of layers {span(mixing)} still bring earlier tokens"
    options = {"target_positions": chosen, "layers": None if layers is None else list(layers)}
    return Measured(frames=frames, headline=headline, asked=options)
