"""``sink-lens report``, ``cache`` and ``measures``."""

from pathlib import Path
from typing import Annotated

import typer

from .console import app, console, say, shown_size

_REPORT_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens report runs/default  [dim]again, from its tables; a run of any kind, from any machine[/dim]

sink-lens report runs/with-bos-a runs/with-bos-b --out both.html  [dim]side by side[/dim]

sink-lens report runs/default --figures figures/  [dim]every figure as PNG, SVG and PDF[/dim]
"""


@app.command(epilog=_REPORT_EXAMPLES)
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folder of a run; several are set side by side.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Of the page. Default: report.html in the run's folder, here for several.", metavar="FILE"),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Write the figures there too.", metavar="DIR")] = None,
) -> None:
    """Render the page of a run again, or of several runs side by side, from their tables: no model is needed.

    Runs beside each other must be of one kind, on the same tokens and with the same settings.
    """
    from ..report.html import render

    typer.echo(f"report: {render(*runs, out=out)}")
    if figures is not None:
        from ..report.export import save_figures

        files, missing = save_figures(runs, figures)
        typer.echo(f"figures: {figures} ({len(files)} files)")
        for why in missing:
            say("warning", f"not drawn: {why}")


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove it; what is needed is made again.")] = False,
    name: Annotated[
        str | None, typer.Option(help="With --clear: only this one, or this kind, as shown.", metavar="NAME")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")] = False,
) -> None:
    """Show what was converted, fetched and packed into the cache (SINK_LENS_CACHE says where), or clear it."""
    from ..data.cache import cache_entries, cache_folder, clear_cache

    if (name or yes) and not clear:
        raise typer.BadParameter("--name and --yes go with --clear")
    entries = cache_entries()
    if not entries and name is None:
        typer.echo(f"{cache_folder()} holds nothing")
        return
    if not clear:
        from rich.table import Table

        table = Table("kind", "name", "size", "state", title=f"{cache_folder()}", title_justify="left", box=None)
        for entry in entries:
            state = "whole" if entry.complete else "unfinished or damaged"
            table.add_row(entry.kind, entry.name, shown_size(entry.bytes), state)
        console().print(table)
        return
    chosen = [entry for entry in entries if name in (None, entry.name, entry.kind)]
    size = sum(entry.bytes for entry in chosen)
    what = chosen[0].name if len(chosen) == 1 else f"{len(chosen)} folders"
    if chosen and not yes:
        typer.confirm(f"Remove {what} ({shown_size(size)}) from {cache_folder()}?", abort=True)
    typer.echo(f"freed {shown_size(clear_cache(name=name))}")


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
