"""Results in a notebook and pages of runs, through ``sink_lens.report``.

This is the only call into a higher layer. The report is imported by name when something is shown, so that no lower
package depends on it.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from .reading import Run


def result_html(
    sentences: str | Sequence[str], *parts: object, notes: Sequence[str] = (), folder: Path | None = None
) -> str:
    """Return the HTML that a notebook shows for a result: sentences, then figures and tables, then notes.

    ``parts`` are data frames, mappings of names to values, and figures. ``folder``, the run's, is named at the end.
    """
    notebook = import_module("sink_lens.report.notebook")
    return notebook.notebook_html(sentences, *parts, notes=notes, folder=folder)


def draw_result_page(run: Run | None, path: str | Path | None) -> Path:
    """Draw the page of a run at a path, by default in the run's folder unless that is temporary; return the path."""
    if run is None or (path is None and run.place is not None):
        raise InputError("the run has no folder of its own; need a name for the page: report('page.html')")
    return import_module("sink_lens.report.html").render(run.folder, out=None if path is None else Path(path))


def draw_first_figure(run: Run) -> Any:
    """Draw the first figure of a run's page."""
    return import_module("sink_lens.report.pages").first_figure(run)


def draw_page(folder: Path) -> Path:
    """Draw the page of a run and return the path of the page.

    Raises:
        RunError: the page cannot be written.
    """
    return import_module("sink_lens.report.html").render(folder)
