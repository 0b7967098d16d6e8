"""``sink-lens report``, ``status`` and ``cache``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.cache import CacheConfig
from ..errors import InputError
from ..report.config import ReportConfig
from ..text import size_text
from .console import app, console, echo, frame_table, print_message, terminal_table
from .options import Answer, Json, Quiet, add_config_options, json_rows, run_and_answer

_REPORT_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens report runs/default  [dim]again, from its tables; a run of any kind, from any machine[/dim]

sink-lens report runs/with-bos-a runs/with-bos-b --out both.html  [dim]side by side[/dim]

sink-lens report runs/default --figures figures/  [dim]every figure as PNG, SVG and PDF, with its numbers as CSV[/dim]

sink-lens report runs/default --figures figures/ --only circuit-paper --format pdf  [dim]one figure[/dim]
"""


@app.command(epilog=_REPORT_EXAMPLES)
@add_config_options(ReportConfig)
def report(config: ReportConfig, quiet: Quiet = False) -> Answer:
    """Render the page of a run again, or of several runs side by side, from their tables: no model is needed.

    Runs side by side must be of one kind, on the same tokens and with the same settings, except in what --by names.
    """
    from ..report.export import check_formats, save_figures
    from ..report.html import render

    if not config.runs:
        raise InputError("no run was given; need the folder of a run: sink-lens report runs/NAME")
    if config.figures is not None:
        check_formats(config.format)  # before the page is written
    page = render(*config.runs, out=None if config.out is None else Path(config.out), by=config.by)
    echo(str(page) if quiet else f"report: {page}")
    files, missing = [], []
    if config.figures is not None:
        files, missing = save_figures(config.runs, config.figures, formats=config.format, only=config.only)
        if not quiet:
            echo(f"figures: {config.figures} ({len(files)} files)")
        for why in missing:
            print_message("error" if config.only else "warning", f"not drawn: {why}")

    def collect_answer() -> dict[str, Any]:
        from ..report.html import page_title

        said = {"sentence": page_title(config.runs[0])} if len(config.runs) == 1 else {}
        return {"runs": config.runs, "report": page, "figures": files, "not_drawn": missing} | said

    return Answer(found=collect_answer, exit_code=int(bool(config.only and missing)))


_STATUS_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens status runs/neurons  [dim]which shards are done, which failed, and who computes the others[/dim]

sink-lens status runs/neurons --json
"""


@app.command(epilog=_STATUS_EXAMPLES)
def status(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show how far a run is: its state, and the state of each shard of a run in shards."""
    run_and_answer(ctx, lambda: _print_status(run, quiet=quiet), as_json=as_json)


def _print_status(folder: Path, *, quiet: bool) -> Answer:
    """Print the state of the run in a folder and of each of its shards; return both states for ``--json``."""
    from ..records import read_run, run_state
    from ..records.shards import shard_progress

    run, shards = read_run(folder), shard_progress(folder)
    state = run_state(folder)
    if len(shards):
        state = f"{(shards['state'] == 'finished').sum()} of {len(shards)} shards finished"
    if not quiet:
        echo(f"{folder}: {run.kind}, {state}")
        if len(shards):
            console().print(frame_table(shards.astype(object).fillna(""), list(shards.columns)))
    return Answer(found=lambda: {"run": folder, "kind": run.kind, "state": state, "shards": json_rows(shards)})


@app.command()
@add_config_options(CacheConfig)
def cache(
    config: CacheConfig,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")] = False,
    quiet: Quiet = False,
) -> Answer:
    """Show what was converted, fetched and packed into the cache (SINK_LENS_CACHE says where), or clear it."""
    from ..data.cache import cache_entries, cache_folder, clear_cache

    name = config.name
    if yes and not config.clear:
        raise typer.BadParameter("--yes goes with --clear")
    entries = cache_entries()
    chosen = [entry for entry in entries if name in (None, entry.name, entry.kind)]
    shown = [{"kind": one.kind, "name": one.name, "bytes": one.bytes, "complete": one.complete} for one in chosen]
    found: dict[str, Any] = {"folder": cache_folder(), "entries": shown}
    if not entries and name is None:
        if not quiet:
            echo(f"{cache_folder()} holds nothing")
    elif config.clear:
        n_bytes = sum(entry.bytes for entry in chosen)
        what = chosen[0].name if len(chosen) == 1 else f"{len(chosen)} folders"
        if chosen and not yes:
            typer.confirm(f"Remove {what} ({size_text(n_bytes)}) from {cache_folder()}?", abort=True)
        found["freed_bytes"] = clear_cache(name=name)
        if not quiet:
            echo(f"freed {size_text(found['freed_bytes'])}")
    elif quiet:
        echo("\n".join(entry.name for entry in chosen))
    else:
        states = {True: "whole", False: "unfinished or damaged"}
        lines = [(entry.kind, entry.name, size_text(entry.bytes), states[entry.complete]) for entry in chosen]
        heads = ("kind", "name", "size", "state")
        console().print(terminal_table(heads, lines, title=f"{cache_folder()}", texts=4, wrapped=heads))
    return Answer(found=lambda: found)
