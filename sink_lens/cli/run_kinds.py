"""The commands that are made from a kind of run, one of each (``sink_lens.kinds``)."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..kinds import RunKind, imported, kinds
from .console import app, columns_of, console, echo, hush, printed, render_report
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, print_cost, rows

if TYPE_CHECKING:
    from ..records import Result


def add_command(kind: RunKind) -> None:
    """Put the command of a kind of run on the app."""

    def command(
        config: Any, out: Out = None, overwrite: Overwrite = False, quiet: Quiet = False, dry_run: DryRun = False
    ) -> Answer:
        """Run it, draw its page, and print its headline and tables."""
        hush(quiet)
        if kind.check:
            imported(kind.check)(config)
        if dry_run:
            return _print_parts(imported(kind.cost)(config)) if kind.cost else print_cost(config, imported(kind.passes))
        result = imported(kind.run)(config, out=out, overwrite=overwrite, progress=not quiet)
        shown = imported(kind.shown) if kind.shown else _nothing
        answer = imported(kind.answer) if kind.answer else None
        return print_result(result, shown=shown, answer=answer, quiet=quiet)

    command.__name__, command.__doc__ = kind.name, kind.help
    app.command(epilog=f"[bold]Examples[/bold]\n\n{kind.examples}")(configured(imported(kind.config))(command))


def print_result(
    result: "Result",
    *,
    shown: Callable[["Result"], Iterable[Any]],
    answer: Callable[["Result"], dict[str, Any]] | None = None,
    quiet: bool,
) -> Answer:
    """Draw a run's page and print its headline and its tables.

    Args:
        result: the finished run.
        shown: yields what stands between the headline and the page's name.
        answer: gives what ``--json`` prints beside the run and its page; the result's decision if None.
        quiet: print the folder alone.
    """
    page = render_report(result.folder, quiet=True)
    if quiet:
        echo(result.folder)
    else:
        _print_parts((result.headline, *shown(result), f"report: {page}", f"run: {result.folder}"))
    found = dict(result.decision if answer is None else answer(result))
    return Answer(found=lambda: {"run": result.folder, "report": page, **found})


def _print_parts(parts: Iterable[Any]) -> Answer:
    """Print texts, page tables and data frames; the answer has the rows of the tables, as a dry run gives them."""
    import pandas as pd

    from ..report.page import PageTable

    frames = []
    for part in parts:
        if isinstance(part, PageTable):
            frames.append(part.numbers)
            part = printed(part)
        elif isinstance(part, pd.DataFrame):
            part = columns_of(part, list(part.columns))
        console().print(part, soft_wrap=isinstance(part, str))
    return Answer(found=lambda: {"dry_run": [row for frame in frames for row in rows(frame)]})


def _nothing(_: "Result") -> Iterable[Any]:
    """No table."""
    return ()


for _kind in kinds().values():
    if _kind.run:
        add_command(_kind)
