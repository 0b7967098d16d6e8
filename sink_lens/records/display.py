"""The one arrow upwards: a result shows itself and a run draws its page through ``sink_lens.report``.

The report is imported when something is shown, and by name, so that no room below it depends on it.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def html(sentences: str | Sequence[str], *parts: object, notes: Sequence[str] = (), folder: Path | None = None) -> str:
    """A result as a notebook shows it.

    Args:
        sentences: what is said first.
        parts: shown below, in order: data frames as tables, mappings as facts, figures as pictures.
        notes: small print.
        folder: the run folder, named at the end.
    """
    return _of_report("notebook", "result")(sentences, *parts, notes=notes, folder=folder)


def trace(folder: Path, *, links: Any) -> str:
    """A finished trace as a notebook shows it: what it found, and the verdict on every link (the table ``links``)."""
    return _of_report("notebook", "trace")(folder, links=links)


def figure(name: str, *data: Any, **options: Any) -> "Figure":
    """A figure that ``sink_lens.report.results`` lists by name."""
    return _of_report("results", "FIGURES")[name](*data, **options)


def sentences(name: str, *data: Any, **options: Any) -> tuple[str, ...]:
    """A result in words, by the name of its function in ``sink_lens.report.results``."""
    return tuple(_of_report("results", "SENTENCES")[name](*data, **options))


def image(drawn: "Figure", form: Literal["png", "svg"]) -> bytes:
    """A figure as the content of a file, the same at each drawing."""
    return _of_report("results", "image")(drawn, form)


def page(folder: Path) -> Path:
    """Draw the page of a run; its path.

    Raises:
        RunError: the page cannot be written.
    """
    return _of_report("html", "render")(folder)


def _of_report(module: str, name: str) -> Any:
    return getattr(import_module(f"sink_lens.report.{module}"), name)
