"""Results in a notebook and pages of runs, through ``sink_lens.report``.

This is the only call into a higher layer. The report is imported by name when something is shown, so that no lower
package depends on it.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def result_html(
    sentences: str | Sequence[str], *parts: object, notes: Sequence[str] = (), folder: Path | None = None
) -> str:
    """Return the HTML that a notebook shows for a result: sentences, then figures and tables, then notes.

    ``parts`` are data frames, mappings of names to values, and figures. ``folder``, the run's, is named at the end.
    """
    notebook = import_module("sink_lens.report.notebook")
    return notebook.notebook_html(sentences, *parts, notes=notes, folder=folder)


def draw_page(folder: Path) -> Path:
    """Draw the page of a run and return the path of the page.

    Raises:
        RunError: the page cannot be written.
    """
    return import_module("sink_lens.report.html").render(folder)
