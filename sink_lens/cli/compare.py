"""``sink-lens compare``."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..training.config import CompareConfig
from .console import app, console, echo, render_report, say
from .options import Answer, Out, Overwrite, Quiet, configured, rows

if TYPE_CHECKING:
    from rich.table import Table

    from ..training.comparison import Comparison

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

    from ..training.comparison import compare as made
    from ..training.comparison import write

    found = made(config)
    folder = Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}" if out is None else out
    write(found, folder, overwrite=overwrite)
    if not quiet:
        console().print(_losses(found))
        if "measures" in found.tables:
            console().print()
            console().print(_sides(found))
        console().print()
    for sentence in found.sentences:
        console().print(sentence, soft_wrap=True)
    for note in found.notes:
        say("warning", note)
    page = render_report(folder, quiet=quiet)
    echo(str(folder))
    said = {"run": folder, "report": page, "sentences": found.sentences, "notes": found.notes}
    shown = ("finals", "measures")
    return Answer(found=lambda: said | {name: rows(found.tables[name]) for name in shown if name in found.tables})


def _losses(found: "Comparison") -> "Table":
    """A run a row: where it ended, and when it reached where the baseline of its seed ended."""
    import math

    from rich.table import Table

    from ..text import short

    table = Table(title="final losses, nats", title_justify="left", box=None, pad_edge=False)
    for name in ("curve", "variant"):
        table.add_column(name, no_wrap=True)
    for name in ("seed", "loss", "difference", "reaches the baseline's end after", "times as fast"):
        table.add_column(name, justify="right")
    for row in found.tables["finals"].to_dict("records"):
        is_base = row["variant"] == found.baseline
        at, ratio = float(row["reached"]), float(row["acceleration"])
        never = math.isnan(at)
        when = "" if is_base else "not reached" if never else f"{short(at)} tokens"
        speed = "" if is_base or never else f"{ratio:.2f}"
        gap = "" if is_base else f"{row['difference']:+.4f}"
        table.add_row(str(row["curve"]), str(row["variant"]), str(row["seed"]), f"{row['loss']:.4f}", gap, when, speed)
    return table


def _sides(found: "Comparison") -> "Table":
    """One row per measure, one column per variant, with intervals over seeds."""
    from rich.table import Table

    from ..text import interval, number

    rows = found.tables["measures"].to_dict("records")
    table = Table(
        title=f"step {rows[0]['step']}, mean over seeds [95%]", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("measure", no_wrap=True)
    for variant in found.variants.runs:
        table.add_column(variant, justify="right")
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        level = row["threshold"]
        name = _NAMES.get(str(row["measure"]), str(row["measure"]))
        name += f" over {level:g}" * (level == level)
        text = f"{number(row['mean'])} {interval(row['low'], row['high'])}".strip()
        lines.setdefault(name, {})[str(row["variant"])] = text
    for name, by_variant in lines.items():
        table.add_row(name, *(by_variant.get(variant, "") for variant in found.variants.runs))
    return table


_NAMES = {
    "sink_rate": "sink rate",
    "sink_mass": "mass on position 0",
    "top_mass": "the same, top layer",
    "dominance_ratio": "dominance ratio",
    "effective_rank": "effective rank",
    "effective_rank_without": "the same, without token 0",
    "s2_ratio": "S2 ratio",
    "norm_ratio": "norm ratio, largest",
    "growth_steps": "growth steps",
    "super_neurons": "super neurons",
}
"""Measure -> what the table calls it."""
