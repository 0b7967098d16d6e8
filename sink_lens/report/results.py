"""What results draw and say of themselves outside a page: each by the name that ``records.display`` asks for."""

from collections.abc import Callable, Mapping

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
