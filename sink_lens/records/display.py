"""Results in a notebook and pages of runs, by the functions that ``sink_lens.kinds.FRAME`` names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..kinds import FRAME
from ..lazy import import_object
from .reading import Run


def result_html(
    sentences: str | Sequence[str],
    *parts: object,
    notes: Sequence[str] = (),
    folder: Path | None = None,
) -> str:
    """Return the HTML that a notebook shows for a result: sentences, then figures and tables, then notes.

    ``parts`` are data frames, mappings of names to values, and figures.
    """
    return import_object(FRAME["notebook"])(sentences, *parts, notes=notes, folder=folder)


def draw_result_page(run: Run | None, path: str | Path | None) -> Path:
    if run is None or (path is None and run.place is not None):
        raise InputError(
            "the run has no folder of its own; need a name for the page: report('page.html')"
        )
    return import_object(FRAME["page"])(run.folder, out=None if path is None else Path(path))


def draw_first_figure(run: Run) -> Any:
    return import_object(FRAME["first_figure"])(run)


def draw_page(folder: Path) -> Path:
    return import_object(FRAME["page"])(folder)
