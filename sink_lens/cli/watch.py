"""``sink-lens watch``."""

from typing import TYPE_CHECKING

from ..training.config import WatchConfig
from .console import app, console, echo, render_report
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

    Checkpoints are those of a run of sink-lens train, or the subfolders of any folder whose names end in their step, as
    checkpoint-500 of the Hugging Face Trainer. Writes watch.parquet, course.png and course.svg into the run's folder.
    """
    from ..errors import RunError
    from ..training.sink_birth import births
    from ..training.watching import watch as measure
    from ..training.watching import watch_folder, write_course

    run, threshold = watch_folder(config), config.threshold
    frame = measure(config, progress=not quiet)
    if bool(frame["error"].notna().all()):
        raise RunError(f"no checkpoint of {run} could be measured; need one at least. Train it again.")
    born = births(frame, threshold=threshold)
    write_course(run, frame, born=born)
    if not quiet:
        console().print(_table(frame, threshold=threshold))
    console().print(born.sentence, soft_wrap=True)
    page = render_report(run, quiet=quiet)
    if not quiet:
        echo(str(run / "course.png"))
    found = {"run": run, "report": page, "sentence": born.sentence, "table": run / "watch.parquet"}
    return Answer(found=lambda: found)


def _table(frame: "pd.DataFrame", *, threshold: float) -> "Table":
    """A checkpoint a row, the whole model's measures across."""
    import numpy as np
    import pandas as pd
    from rich.table import Table

    from ..text import number, short
    from ..training.sink_birth import whole

    title = f"sinks over {threshold:g}, mass on position 0, its ratios to other tokens, rank with and without it"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("step", "tokens", "sinks", *(title for _, title in _SHOWN)):
        table.add_column(name, justify="right", no_wrap=True)
    steps = dict(sorted(zip(frame["step"].tolist(), frame["tokens"].tolist(), strict=True)))
    rates = whole(frame, "sink_rate")
    rates = rates[np.isclose(rates["threshold"], threshold)]
    values = {measure: whole(frame, measure) for measure, _ in _SHOWN}
    for step, tokens in steps.items():
        found = {name: rows.loc[rows["step"] == step, "value"].tolist() for name, rows in values.items()}
        rate = rates.loc[rates["step"] == step, "value"].tolist()
        seen = "" if pd.isna(tokens) else short(tokens)
        if not len(rate):
            table.add_row(str(step), seen, "not measured")
            continue
        cells = [number(float(one[0])) if len(one) else "" for one in found.values()]
        table.add_row(str(step), seen, f"{rate[0]:.1%}", *cells)
    return table
