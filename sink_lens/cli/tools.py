"""``sink-lens report``, ``cache`` and ``measures``."""

from pathlib import Path
from typing import Annotated

import typer

from ..data.config import CacheConfig
from ..errors import InputError
from ..report.config import ReportConfig
from .console import app, console, echo, say, shown_size
from .options import configured

_REPORT_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens report runs/default  [dim]again, from its tables; a run of any kind, from any machine[/dim]

sink-lens report runs/with-bos-a runs/with-bos-b --out both.html  [dim]side by side[/dim]

sink-lens report runs/default --figures figures/  [dim]every figure as PNG, SVG and PDF[/dim]
"""


@app.command(epilog=_REPORT_EXAMPLES)
@configured(ReportConfig)
def report(config: ReportConfig) -> None:
    """Render the page of a run again, or of several runs side by side, from their tables: no model is needed.

    Runs beside each other must be of one kind, on the same tokens and with the same settings.
    """
    from ..report.html import render

    if not config.runs:
        raise InputError("no run was given; need the folder of a run: sink-lens report runs/NAME")
    echo(f"report: {render(*config.runs, out=None if config.out is None else Path(config.out))}")
    if config.figures is not None:
        from ..report.export import save_figures

        files, missing = save_figures(config.runs, config.figures)
        echo(f"figures: {config.figures} ({len(files)} files)")
        for why in missing:
            say("warning", f"not drawn: {why}")


@app.command()
@configured(CacheConfig)
def cache(
    config: CacheConfig,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")] = False,
) -> None:
    """Show what was converted, fetched and packed into the cache (SINK_LENS_CACHE says where), or clear it."""
    from ..data.cache import cache_entries, cache_folder, clear_cache

    name = config.name
    if yes and not config.clear:
        raise typer.BadParameter("--yes goes with --clear")
    entries = cache_entries()
    if not entries and name is None:
        echo(f"{cache_folder()} holds nothing")
        return
    chosen = [entry for entry in entries if name in (None, entry.name, entry.kind)]
    if not config.clear:
        from rich.table import Table

        table = Table("kind", "name", "size", "state", title=f"{cache_folder()}", title_justify="left", box=None)
        for entry in chosen:
            state = "whole" if entry.complete else "unfinished or damaged"
            table.add_row(entry.kind, entry.name, shown_size(entry.bytes), state)
        console().print(table)
        return
    size = sum(entry.bytes for entry in chosen)
    what = chosen[0].name if len(chosen) == 1 else f"{len(chosen)} folders"
    if chosen and not yes:
        typer.confirm(f"Remove {what} ({shown_size(size)}) from {cache_folder()}?", abort=True)
    echo(f"freed {shown_size(clear_cache(name=name))}")


@app.command()
def measures() -> None:
    """Show every measure with its unit, range and reference."""
    from rich.table import Table

    from ..measures.table import MEASURES

    table = Table("measure", "unit", "range", "reference", "meaning", box=None, pad_edge=False)
    for measure in MEASURES.values():
        limits = f"{measure.low:g} to {measure.high:g}"
        table.add_row(measure.name, measure.unit, limits, measure.reference, measure.meaning)
    console().print(table)
