"""``isolate``: does a sink come where tokens see only themselves, and what becomes of the model's own?"""

from pathlib import Path
from typing import Any

import pandas as pd

from ..chain.config import Question
from ..data.tokens import TokenBatch
from ..edits.effects import layer_table
from ..edits.isolation import isolate as isolating
from ..models.load import ModelLike
from ..records import check_free
from ..text import span
from .config import IsolateConfig
from .study import Study, inputs, prepare, sentence, summary_row, write_study


def isolate(
    model: ModelLike | Question,
    *,
    config: IsolateConfig | None = None,
    tokens: TokenBatch | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Study:
    """Isolate positions by the attention mask, all at once, and see whether a sink comes there.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration, which names one and its tokens.
        config: the study's configuration; the default one if None.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of ``IsolateConfig``, such as ``sequences=8``; they win over those of ``config``.

    Raises:
        InputError: a position or layer that does not exist, or sequences too short.
        SiteError: a model whose attention cannot be edited.
        RunError: the folder is in use, or holds another run.
    """
    check_free(out, overwrite=overwrite)
    config, lens, batch = inputs(IsolateConfig, model, config=config, tokens=tokens, fields=fields, every_layer=False)
    targets, layers = config.target_positions, config.layers
    setting, question = prepare(config, lens, batch, target_position=targets[0] if targets else None)
    chosen = list(targets) or [setting.target_position]
    positions = tuple(dict.fromkeys([*chosen, setting.sink_position]))
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
    headline = "\n".join(
        f"isolating position {row['target_position']}: {sentence(row, sink_position=sink)}" for row in summary
    )
    options = {"target_positions": chosen, "layers": None if layers is None else list(layers)}
    return write_study(
        "isolate",
        lens,
        setting.tokens,
        question,
        frames,
        kernel="eager",
        headline=headline,
        asked=options,
        out=out,
        overwrite=overwrite,
    )
