"""``sink-lens report``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..report.config import ReportConfig
from .console import app, console, echo, frame_table, print_message
from .options import Answer, Quiet, add_config_options, json_rows

if TYPE_CHECKING:
    import pandas as pd

_REPORT_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens report runs/default  [dim]again, from its tables; a run of any kind, from any machine[/dim]

sink-lens report runs/with-bos-a runs/with-bos-b --out both.html  [dim]side by side[/dim]

sink-lens report runs/default --figures figures/  [dim]every figure as PNG, SVG and PDF, with its numbers as CSV[/dim]

sink-lens report runs/default --figures figures/ --only circuit-paper --format pdf  [dim]one figure[/dim]

sink-lens report runs/neurons --status  [dim]which shards are done, which failed, and who computes the others[/dim]
"""


@app.command(epilog=_REPORT_EXAMPLES)
@add_config_options(ReportConfig)
def report(config: ReportConfig, quiet: Quiet = False) -> Answer:
    """Render the page of a run again, or of several runs side by side, from their tables: no model is needed.

    Runs side by side must be of one kind, on the same tokens and with the same settings, but for what --group-by names.
    """
    from ..report.export import check_formats, save_figures
    from ..report.html import render

    if not config.runs:
        raise InputError("no run was given; need the folder of a run: sink-lens report runs/NAME")
    if config.status:
        run, *others = config.runs
        if others or config.out or config.group_by or config.figures:
            raise InputError(
                "--status was given; need one run, and none of --out, --group-by and --figures"
            )
        return _print_status(Path(run), quiet=quiet)
    if config.figures is not None:
        check_formats(config.format)  # before the page is written
    page = render(
        *config.runs, out=None if config.out is None else Path(config.out), group_by=config.group_by
    )
    echo(str(page) if quiet else f"report: {page}")
    for one in config.runs:
        state, _ = _progress_of(Path(one))
        if state != "finished":
            print_message("warning", f"{one} is not finished: {state}")
    files, missing = [], []
    if config.figures is not None:
        files, missing = save_figures(
            config.runs, config.figures, formats=config.format, only=config.only
        )
        if not quiet:
            echo(f"figures: {config.figures} ({len(files)} files)")
        for why in missing:
            print_message("error" if config.only else "warning", f"not drawn: {why}")

    def collect_answer() -> dict[str, Any]:
        from ..report.html import page_title

        said = {"sentence": page_title(config.runs[0])} if len(config.runs) == 1 else {}
        states = [_progress_of(Path(one))[0] for one in config.runs]
        return {
            "runs": config.runs,
            "states": states,
            "finished": all(one == "finished" for one in states),
            "report": page,
            "figures": files,
            "not_drawn": missing,
        } | said

    return Answer(found=collect_answer, exit_code=int(bool(config.only and missing)))


def _print_status(folder: Path, *, quiet: bool) -> Answer:
    from ..records import read_run

    run, (state, shards) = read_run(folder), _progress_of(folder)
    if not quiet:
        echo(f"{folder}: {run.kind}, {state}")
        if len(shards):
            console().print(frame_table(shards.astype(object).fillna(""), list(shards.columns)))
    return Answer(
        found=lambda: {
            "run": folder,
            "kind": run.kind,
            "state": state,
            "finished": run.status == "finished",
            "shards": json_rows(shards),
        }
    )


def _progress_of(folder: Path) -> tuple[str, "pd.DataFrame"]:
    """Return how far a run is, in words, and a table of its shards."""
    from ..records.shards import run_progress, shard_progress

    shards = shard_progress(folder)
    return run_progress(folder, shards), shards
