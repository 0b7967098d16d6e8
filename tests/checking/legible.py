"""Illegible text of a figure as its renderer draws it: text outside, text on text, missing characters."""

import warnings
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

_SLACK = 1.5
"""Pixels by which text may reach out, or into another text's box, of which the outermost are empty."""


def faults(figure: Figure) -> list[str]:
    """Everything that cannot be read, in words; the figure is drawn once and laid out by its own engine, if it has one.

    Text counts as it is drawn: ticks that are left out do not, and a text that is drawn twice in one place is one.
    """
    drawn: dict[int, Text] = {}
    agg = FigureCanvasAgg(figure)
    renderer: Any = agg.get_renderer()
    real = renderer.draw_text

    def draw_text(
        gc: Any, x: float, y: float, s: str, prop: Any, angle: float, **named: Any
    ) -> None:
        text = named.get("mtext")
        if text is not None and s.strip():
            drawn[id(text)] = text
        real(gc, x, y, s, prop, angle, **named)

    renderer.draw_text = draw_text
    with (
        mpl.rc_context({"text.parse_math": False}),
        warnings.catch_warnings(record=True) as sentences,
    ):
        warnings.simplefilter("always")
        figure.draw(renderer)
        boxes = [
            (text.get_text(), Text.get_window_extent(text, renderer)) for text in drawn.values()
        ]  # no arrow
    missing = sorted(
        {
            str(one.message).partition(" missing")[0]
            for one in sentences
            if "missing from" in str(one.message)
        }
    )
    width, height = agg.get_width_height()
    return [
        *(f"the font has no character for {one}" for one in missing),
        *(
            f"{text!r} extends beyond the figure"
            for text, box in boxes
            if _outside(box, width, height)
        ),
        *_overlaps(boxes),
    ]


def _outside(box: Bbox, width: float, height: float) -> bool:
    return bool(
        box.x0 < -_SLACK or box.y0 < -_SLACK or box.x1 > width + _SLACK or box.y1 > height + _SLACK
    )


def _overlaps(boxes: list[tuple[str, Bbox]]) -> list[str]:
    """Say which pairs of texts overlap."""
    if not boxes:
        return []
    ends = np.array([box.extents for _, box in boxes])
    x0, y0, x1, y1 = ends.T
    wide = np.minimum(x1[:, None], x1) - np.maximum(x0[:, None], x0)
    tall = np.minimum(y1[:, None], y1) - np.maximum(y0[:, None], y0)
    # a box has room for letters that reach over or under the line: a fifth of it may be shared
    low = 0.2 * np.minimum((y1 - y0)[:, None], y1 - y0)
    narrow = 0.2 * np.minimum((x1 - x0)[:, None], x1 - x0)
    upright = (y1 - y0) > (x1 - x0)
    both = upright[:, None] & upright
    hit = np.where(both, (wide > narrow) & (tall > _SLACK), (wide > _SLACK) & (tall > low))
    pairs = np.argwhere(np.triu(hit, 1))
    return [f"{boxes[one][0]!r} lies on {boxes[other][0]!r}" for one, other in pairs]
