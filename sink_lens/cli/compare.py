"""``sink-lens compare``."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..training.config import CompareConfig
from .console import app, console, echo, print_conclusion, printed, render_report, say, table_of
from .options import Answer, Out, Overwrite, Quiet, configured, rows

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from ..training.compare import Comparison

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens compare runs/softmax-0 runs/softmax-1 runs/softmax-2 runs/headnorm-0 runs/headnorm-1 runs/headnorm-2

sink-lens compare runs/lr-* --by lr --baseline 0.001  [dim]any field of the configuration[/dim]
"""


@app.command(epilog=_EXAMPLES)
@configured(CompareConfig)
def compare(config: CompareConfig, out: Out = None, overwrite: Overwrite = False, quiet: Quiet = False) -> Answer:
    """Compare training runs, seed by seed: who is ahead, how sure, and what became of the sink.

    All runs must have the same data in the same order; variants differ in one thing, and have the same seeds.
    """
    from datetime import datetime

    from ..training.compare import compare as made
    from ..training.compare import write

    comparison = made(config)
    folder = Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}" if out is None else out
    write(comparison, folder, overwrite=overwrite)
    if not quiet:
        print_conclusion(folder)
    for sentence in comparison.sentences:
        console().print(sentence, soft_wrap=True)
    if not quiet:
        measures = [_sides(comparison.tables["measures"])] if "measures" in comparison.tables else []
        for table in (_losses(comparison), *measures):
            console().print()
            console().print(table)
    for note in comparison.notes:
        say("warning", note)
    page = render_report(folder, quiet=quiet)
    echo(str(folder))
    answer = {"run": folder, "report": page, "sentences": comparison.sentences, "notes": comparison.notes}
    shown = ("finals", "measures")
    return Answer(
        found=lambda: answer | {name: rows(comparison.tables[name]) for name in shown if name in comparison.tables}
    )


def _losses(found: "Comparison") -> "Table":
    """One row per run: where it ended, and when it reached where the baseline of its seed ended."""
    import math

    from ..text import short

    heads = ("curve", "variant", "seed", "loss", "difference", "reaches the baseline's end after", "times as fast")
    lines = []
    for row in found.tables["finals"].to_dict("records"):
        is_base = row["variant"] == found.baseline
        at, ratio = float(row["reached"]), float(row["acceleration"])
        never = math.isnan(at)
        when = "" if is_base else "not reached" if never else f"{short(at)} tokens"
        speed = "" if is_base or never else f"{ratio:.2f}"
        gap = "" if is_base else f"{row['difference']:+.4f}"
        which = (str(row[name]) for name in ("curve", "variant", "seed"))
        lines.append((*which, f"{row['loss']:.4f}", gap, when, speed))
    return table_of(heads, lines, title="final losses, nats", texts=2, wrapped=heads[2:])


def _sides(measures: "pd.DataFrame") -> "Table":
    from ..training.pages.training import measures_side_by_side

    title = f"step {measures['step'].iloc[0]}, mean over seeds [95%]"
    return printed(measures_side_by_side(measures), title=title)
