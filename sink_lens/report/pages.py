"""The page of each kind of run, found by the kind's name, and what the frame asks of it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RunError
from ..kinds import all_kinds
from ..lazy import import_object
from ..records import Result, Run, read_run
from ..text import plural, safe_line
from .drawable import Drawable
from .page import Drawn, Listed, Page, PageTable, page_table, run_label, try_make

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page_of_kind(kind: str) -> Page | None:
    found = all_kinds().get(kind)
    return import_object(found.page) if found else None


def page_of_run(run: Run) -> Page:
    """Return the page of a run's kind; of an unknown kind, a page that shows all tables."""
    if found := page_of_kind(run.kind):
        return found
    listed = tuple(
        Listed(key=f"{name}-table", title=name, make=partial(_whole_table, name))
        for name in run.tables
    )
    return Page(
        title=lambda run: f"A run of {safe_line(run.kind)}",
        headline=lambda _: [],
        figures=(),
        tables=listed,
    )


def is_on_page(run: Run, one: Drawn | Listed) -> bool:
    """Check whether it belongs on a run's page; True also if a damaged table leaves that open."""
    return try_make(run, lambda: one.when(run))[0] is not False


def _whole_table(name: str, run: Run) -> tuple[str, PageTable]:
    frame = run.tables[name]
    headings = {str(column): str(column) for column in frame}
    return f"{plural(len(frame), 'row')}.", page_table(frame, headings)


def first_figure(run: Run) -> "Figure":
    why = ""
    for drawn in page_of_run(run).figures:
        if is_on_page(run, drawn):
            made, missing = try_make(run, lambda drawn=drawn: drawn.make(run))
            if made is not None:
                return made[1]
            why = why or missing
    raise RunError(f"{run_label(run)}, which has no figure" + (f": {why}" if why else ""))


def circuit_of(source: Run | Result | str | Path) -> Drawable:
    """Return the circuit of a run of ``trace`` or ``circuit``, which is given as a result, a run, or its folder.

    Raises:
        RunError: the run is of another kind, or lacks what a circuit needs.
    """
    if isinstance(source, Result):
        source = source.run
    run = source if isinstance(source, Run) else read_run(source)
    circuit = page_of_run(run).circuit
    if circuit is None:
        raise RunError(
            f"{run_label(run)}, which has no circuit; need one of sink-lens circuit or sink-lens trace"
        )
    return circuit(run)
