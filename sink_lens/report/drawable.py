"""Base of every circuit that a page draws: it becomes a file, and shows itself in a notebook."""

from pathlib import Path
from typing import Any, cast

from sink_lens.errors import InputError
from sink_lens.records import refuse_file_of_run
from sink_lens.report.diagram import Style
from sink_lens.report.style import figure_bytes, save_figure


class Drawable:
    """A circuit that is drawn (``draw``), can be JSON (``to_json``) and a page to explore (``explore``)."""

    __slots__ = ()

    def save(self, path: str | Path, *, style: Style | None = None, width: float | None = None) -> Path:
        """Write the circuit as its ending says: .html to explore, .json, or a figure as .png, .svg or .pdf.

        Args:
            path: the file; folders are made.
            style: see ``draw``; None for its default.
            width: see ``draw``.

        Raises:
            InputError: another ending, a file that belongs to a run, or as for ``draw``.
        """
        path, own = Path(path), cast("Any", self)
        if path.suffix.lower() in (".html", ".htm"):
            return own.explore().save(path)
        if path.suffix.lower() == ".json":
            refuse_file_of_run(path, replaceable=(".json",))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(own.to_json(), encoding="utf-8")
            return path
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            endings = ".html, .json, .png, .svg or .pdf"
            raise InputError(f"{path} ends with {path.suffix or 'nothing'}; need {endings} for a circuit")
        return save_figure(own.draw(**({} if style is None else {"style": style}), width=width), path)

    def _repr_png_(self) -> bytes:
        return figure_bytes(cast("Any", self).draw(), "png")
