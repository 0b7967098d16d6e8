"""``sink-lens trace``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..chain.config import TraceConfig
from .console import INTERRUPTED, app, console, echo, hush, say
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost, rows

if TYPE_CHECKING:
    from ..chain.trace import Trace

_TRACE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens trace --quick  [dim]the default model, 4 to 8 minutes on two cores; without --quick some 2.4 times that[/dim]

sink-lens trace gpt2 --sequences 8 --out runs/gpt2  [dim]a hub name, where there is a network[/dim]

sink-lens trace ./my-checkpoint --tokens random --bos without  [dim]a folder written by save_pretrained[/dim]

sink-lens trace model.gguf --prompt "Call me Ishmael." --prompt "It was the best of times"

sink-lens trace --length 1024 --dry-run  [dim]what it would cost; measures nothing[/dim]
"""


@app.command(epilog=_TRACE_EXAMPLES)
@configured(TraceConfig)
def trace(
    config: TraceConfig,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every table, not the answer alone.")] = False,
) -> Answer:
    """Find the sinks of a model and where they come from; write a run folder with tables and a report."""
    hush(quiet)
    if dry_run:
        from ..chain.passes import passes

        return print_cost(config, passes)
    from ..chain.trace import default_folder
    from ..chain.trace import trace as run_trace

    folder = out or default_folder(config.model)  # named here, so that Ctrl-C can say where things are
    try:
        result = run_trace(config, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        if not (folder / "run.json").exists():
            raise
        say("interrupted", f"what is finished is in {folder}; the same command with --out {folder} continues")
        raise typer.Exit(INTERRUPTED) from None
    if quiet:
        echo(result.report_path)
    else:
        from rich.console import Group

        from ..report.html import conclusion
        from .trace_table import brief, short_table

        console().print(brief(result, conclusion=conclusion(result.folder)))
        if verbose:
            console().print(Group("", short_table(result)))
        echo(f"\nreport: {result.report_path}" + ("" if verbose else " (tables: there, or with --verbose)"))
    return Answer(found=lambda: _json_answer(result))


def _json_answer(result: "Trace") -> dict[str, Any]:
    """The conclusion, the links with their answers, the summary and the sets that make the sink."""
    from ..report.html import conclusion

    tables = {"links": result.links.query("is_primary"), "summary": result.tables["summary"]}
    makers = result.tables.get("maker_sets")
    if makers is not None:
        tables["makers"] = makers.loc[makers["control_of"] == ""]
    return {
        "run": result.folder,
        "report": result.report_path,
        "sentence": conclusion(result.folder),
        **{name: rows(table) for name, table in tables.items()},
    }
