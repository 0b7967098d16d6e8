"""Base of every circuit that a page draws: it becomes a file, and shows itself in a notebook."""

import json
from pathlib import Path
from typing import Any, cast

from ..errors import InputError
from ..records import refuse_file_of_run
from ..records.provenance import plain_json
from .diagram import Style
from .style import figure_bytes, save_figure


class Drawable:
    """Base class of circuits: it adds ``save`` to their ``draw``, ``to_json`` and, for edges, ``explore``."""

    __slots__ = ()

    def save(self, path: str | Path, *, style: Style = "page", width: float | None = None) -> Path:
        """Write the circuit to a file by its ending: .json, a figure (.png, .svg, .pdf), or .html to explore edges.

        ``.graph.json`` of edges is Neuronpedia's graph. ``width`` of a figure is in inches; None for the style's own.

        Raises:
            InputError: another ending, a file that belongs to a run, or as for ``draw``.
        """
        path, own = Path(path), cast("Any", self)
        ending, explore = path.suffix.lower(), getattr(self, "explore", None)
        if ending in (".html", ".htm") and explore is not None:
            return explore().save(path)
        if ending == ".json":
            graph = None
            if path.name.lower().endswith(".graph.json"):
                graph = getattr(own, "graph", None)
            refuse_file_of_run(path, replaceable=(".json",))
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (
                own.to_json() if graph is None else json.dumps(plain_json(graph), allow_nan=False)
            )
            path.write_text(text, encoding="utf-8")
            return path
        if ending not in (".png", ".svg", ".pdf"):
            html = "" if explore is None else ".html, "
            raise InputError(
                f"{path} ends with {path.suffix or 'nothing'}; need {html}.json, .png, .svg or .pdf for a circuit"
            )
        return save_figure(own.draw(style, width=width), path)

    def _repr_png_(self) -> bytes:
        return figure_bytes(cast("Any", self).draw(), "png")
