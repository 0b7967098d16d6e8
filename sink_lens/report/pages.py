"""The page of each kind of run, found by the kind's name, and what the frame asks of it."""

from collections.abc import Callable
from pathlib import Path

from sink_lens.errors import RunError
from sink_lens.kinds import import_object, kinds
from sink_lens.records import Run, read_run
from sink_lens.report.drawable import Drawable
from sink_lens.report.page import MAKES, Drawn, Listed, Page, PageTable, about, attempt, shown_table
from sink_lens.text import plural, visible


def page_for(kind: str) -> Page | None:
    """The page of a kind of run; None where the kind has none."""
    found = kinds().get(kind)
    return import_object(found.page) if found else None


def page_of(run: Run) -> Page:
    """The page of the run's kind; all its tables, as they are, where the kind has none."""
    if found := page_for(run.kind):
        return found
    listed = tuple(Listed(key=f"{name}-table", title=name, make=_all_columns(name)) for name in run.tables)
    return Page(title=lambda run: f"A run of {visible(run.kind)}", headline=lambda _: [], figures=(), tables=listed)


def belongs(run: Run, of: Drawn | Listed) -> bool:
    """Check whether a part stands on the run's page; where a damaged table hides that, it does, and says so there."""
    return attempt(run, lambda: of.when(run))[0] is not False


def _all_columns(name: str) -> Callable[[Run], tuple[str, PageTable]]:
    """Return a function that makes a page's table of all columns of a run's table."""

    def make(run: Run) -> tuple[str, PageTable]:
        frame = run.tables[name]
        return f"{plural(len(frame), 'row')}.", shown_table(frame, {str(column): str(column) for column in frame})

    return make


def circuit_of(source: Run | str | Path) -> Drawable:
    """The circuit of a run: of a trace, or of ``sink-lens circuit``.

    Args:
        source: a run, or its folder.

    Raises:
        RunError: the run is of another kind, or lacks what a circuit needs.
    """
    run = source if isinstance(source, Run) else read_run(source)
    circuit = page_of(run).circuit
    if circuit is None:
        raise RunError(
            f"{about(run)}, which has no circuit; need a run of trace or circuit. {MAKES['circuit']}, or with "
            "sink-lens trace"
        )
    return circuit(run)
