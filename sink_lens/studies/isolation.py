"""``isolate``: does a sink come where tokens see only themselves, and what becomes of the model's own?"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..chain.config import TraceConfig
from ..data.tokens import TokenBatch
from ..edits.effects import layer_table
from ..edits.isolation import isolation
from ..engine.forward import run_with
from ..models.load import ModelLike
from ..text import span
from .study import Study, prepared, sentence, summary_row, written


def isolate(
    model: ModelLike | TraceConfig,
    *,
    positions: Sequence[int] = (),
    layers: Sequence[int] | None = None,
    tokens: TokenBatch | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Study:
    """Isolate positions by the attention mask, all at once, and see whether a sink comes there.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration, which names one and its tokens.
        positions: the positions, each from 1 on; a third of the length if none is given.
        layers: in which layers; None is all.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.

    Raises:
        InputError: a position or layer that does not exist, or sequences too short.
        SiteError: a model whose attention cannot be edited.
        RunError: the folder is in use, or holds another run.
    """
    setting, config = prepared(model, tokens=tokens, position=positions[0] if positions else None)
    chosen = list(positions) or [setting.target_position]
    keys = tuple(dict.fromkeys([*chosen, setting.sink_position]))
    edit = isolation(chosen, layers=layers)
    baseline = setting.baseline if keys == setting.baseline.keys else run_with(setting.lens, setting.tokens, keys=keys)
    edited = run_with(setting.lens, setting.tokens, edit, keys=keys, progress=progress)
    sink, by_layer, summary = setting.sink_position, [], []
    for position in chosen:
        by_layer.append(layer_table(baseline, edited, new=position, old=sink).assign(position=position))
        row = {"position": position, "layers": "all" if layers is None else span(layers)}
        summary.append(row | summary_row(setting, baseline, edited, new=position, reads=setting.late_layers))
    frames = {"layers": pd.concat(by_layer, ignore_index=True), "summary": pd.DataFrame(summary)}
    headline = "\n".join(f"isolating position {row['position']}: {sentence(row, old=sink)}" for row in summary)
    asked = {"positions": chosen, "layers": None if layers is None else list(layers)}
    return written("isolate", setting, config, frames, asked=asked, out=out, overwrite=overwrite, headline=headline)
