"""What results draw and say of themselves outside a page: each by the name that ``records.display`` asks for."""

import io
from collections.abc import Callable, Mapping
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure

from sink_lens.report import fingerprint, training
from sink_lens.report.edges import circuit_told, curve_figure, edge_figure, sketch
from sink_lens.report.patch import patch_map
from sink_lens.report.sweep import effect_figure

FIGURES: Mapping[str, Callable[..., Figure]] = {
    "patches": patch_map,
    "effects": effect_figure,
    "course": training.course,
    "comparison": training.comparison,
    "fingerprint": fingerprint.draw,
    "circuit": edge_figure,
    "sketch": sketch,
    "faithfulness": curve_figure,
}
SENTENCES: Mapping[str, Callable[..., tuple[str, ...]]] = {
    "fingerprint": fingerprint.sentences,
    "circuit": circuit_told,
}


def image(drawn: Figure, form: Literal["png", "svg"]) -> bytes:
    """A figure as the content of a PNG or SVG file, the same at each drawing."""
    buffer = io.BytesIO()
    if form == "png":
        drawn.savefig(buffer, format="png")
    else:
        with mpl.rc_context({"svg.hashsalt": "sink_lens", "text.parse_math": False}):
            drawn.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
