"""``sink-lens watch``."""

from typing import TYPE_CHECKING

from ..training.config import WatchConfig
from .console import app, console, echo, render_report, table_of
from .options import Answer, Quiet, configured

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

_SHOWN = (
    ("sink_mass", "mass"),
    ("s2_ratio", "S2"),
    ("norm_ratio", "norm"),
    ("dominance_ratio", "dominance"),
    ("effective_rank", "rank"),
    ("effective_rank_without", "w/o 0"),
    ("growth_steps", "growth"),
    ("super_neurons", "neurons"),
)
"""Measure of the whole model -> its column; with the first three they fit into 80."""

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens watch runs/headnorm-0  [dim]again after an interruption, or after more training: it goes on[/dim]

sink-lens watch output/ --step-tokens 65536  [dim]checkpoint-500, checkpoint-1000, ... of your own trainer[/dim]

sink-lens watch runs/headnorm-0 --threshold 0.1 --again  [dim]a small model's sink may be weak[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(WatchConfig)
def watch(config: WatchConfig, quiet: Quiet = False) -> Answer:
    """Measure the chain on every checkpoint of a training: when is the sink born?

    Checkpoints are those of a run of sink-lens train, or the subfolders of any folder whose names end in their step,
    such as checkpoint-500 of the Hugging Face Trainer. Writes watch.parquet into the folder.
    """
    from ..errors import RunError
    from ..training.sink_birth import births
    from ..training.watch import watch as measure
    from ..training.watch import watch_folder

    run, threshold = watch_folder(config), config.threshold
    frame = measure(config, progress=not quiet)
    if bool(frame["error"].notna().all()):
        raise RunError(f"no checkpoint of {run} could be measured; need one at least. Train it again.")
    born = births(frame, threshold=threshold)
    if not quiet:
        console().print(_table(frame, threshold=threshold))
    console().print(born.sentence, soft_wrap=True)
    page = render_report(run, quiet=quiet)
    if not quiet:
        echo(str(run))
    answer = {"run": run, "report": page, "sentence": born.sentence, "table": run / "watch.parquet"}
    return Answer(found=lambda: answer)


def _table(frame: "pd.DataFrame", *, threshold: float) -> "Table":
    """One row per checkpoint: the whole model's measures."""
    import numpy as np
    import pandas as pd

    from ..text import number, short
    from ..training.sink_birth import whole

    title = f"sinks above {threshold:g}, mass on position 0, its ratios to other tokens, rank with and without it"
    lines = []
    steps = dict(sorted(zip(frame["step"].tolist(), frame["tokens"].tolist(), strict=True)))
    rates = whole(frame, "sink_rate")
    rates = rates[np.isclose(rates["threshold"], threshold)]
    values = {measure: whole(frame, measure) for measure, _ in _SHOWN}
    for step, tokens in steps.items():
        by_measure = {name: rows.loc[rows["step"] == step, "value"].tolist() for name, rows in values.items()}
        rate = rates.loc[rates["step"] == step, "value"].tolist()
        seen = "" if pd.isna(tokens) else short(tokens)
        if not len(rate):
            lines.append((str(step), seen, "not measured"))
            continue
        cells = [number(float(value[0])) if len(value) else "" for value in by_measure.values()]
        lines.append((str(step), seen, f"{rate[0]:.1%}", *cells))
    heads = ("step", "tokens", "sinks", *(head for _, head in _SHOWN))
    return table_of(heads, lines, title=title, texts=0)
