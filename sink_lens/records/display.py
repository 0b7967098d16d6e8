"""How results show themselves in a notebook and how a run draws its page, through ``sink_lens.report``.

This is the only call into a higher layer. The report is imported by name when something is shown, so that no lower
package depends on it.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def html(sentences: str | Sequence[str], *parts: object, notes: Sequence[str] = (), folder: Path | None = None) -> str:
    """The HTML by which a notebook shows a result.

    Args:
        sentences: sentences at the top.
        parts: what follows, in order: data frames become tables, mappings become lists of facts, figures pictures.
        notes: small print.
        folder: the run folder, named at the end.
    """
    return _of_report("notebook", "result")(sentences, *parts, notes=notes, folder=folder)


def trace(folder: Path, *, links: Any) -> str:
    """The HTML by which a notebook shows a finished trace: its results and the verdict on every link."""
    return _of_report("notebook", "trace")(folder, links=links)


def figure(name: str, *data: Any, **options: Any) -> "Figure":
    """Draw the figure with this name in ``sink_lens.report.results``."""
    return _of_report("results", "FIGURES")[name](*data, **options)


def sentences(name: str, *data: Any, **options: Any) -> tuple[str, ...]:
    """Describe a result in words, with the function of this name in ``sink_lens.report.results``."""
    return tuple(_of_report("results", "SENTENCES")[name](*data, **options))


def image(drawn: "Figure", form: Literal["png", "svg"]) -> bytes:
    """The bytes of a figure file; equal figures give equal bytes."""
    return _of_report("style", "file_of")(drawn, form)


MOST_EDGES = 20_000
"""Largest edges that a page to explore a circuit in holds."""


def edge_graph(edges: Any, **about: Any) -> dict[str, Any]:
    """A circuit of edges as Neuronpedia's JSON."""
    return _of_report("explorer", "edge_graph")(edges, **about)


def explorer(graph: dict[str, Any], *, curve: Any = None) -> Any:
    """A page to explore a circuit in, with the curve of its faithfulness."""
    return _of_report("explorer", "explorer_of")(graph, curve=curve)


def page(folder: Path) -> Path:
    """Draw the page of a run and return the path of the page.

    Raises:
        RunError: the page cannot be written.
    """
    return _of_report("html", "render")(folder)


def _of_report(module: str, name: str) -> Any:
    """A function of the report, imported when it is needed."""
    return getattr(import_module(f"sink_lens.report.{module}"), name)
