"""A circuit on a page or in a paper: a few boxes with few words, and arrows with one number each.

Boxes stand in levels, each after all that lead to it, and in rows, so that arrows cross little.
"""

import functools
import graphlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, Polygon
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox

from ..errors import InputError, RunError
from .style import (
    BLUE,
    BOX,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    new_figure,
    without_formulas,
)

Style = Literal["page", "paper"]
MOST_WORDS = 8
_KINDS = {
    "holds": (GREEN, "solid"),
    "fails": (ORANGE, "dashed"),
    "raises": (BLUE, "solid"),
    "lowers": (ORANGE, "dashed"),
}
"""Kind of an arrow -> colour and line; every other is grey and dotted."""
_SYMBOLS = {"W_O": "$W_O$", "z": "$z$", "q": "$q$", "k": "$k$", "v": "$v$"}
"""Words that a paper sets as formulas."""
_ENDS = ("source", "target")
_OVER = 2.8
"""Height over the boxes for an arrow that leads past some and its number, by the size of the type."""
_FULL = 0.98
"""Share of a line that text may fill: letters of a few pixels are drawn a little wider than they are."""
_Point = tuple[float, float]
_Piece = tuple[_Point, _Point, _Point, _Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a diagram, such as a group of neurons."""

    id: str
    text: str
    row: float | None = None
    """Where it stands across the flow; by what it is joined to if None."""
    column: int | None = None
    """Its level, if it is not simply after all that lead to it: boxes of several rows stand under each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An arrow from one box of a diagram to another, with the number beside it."""

    source: str
    target: str
    label: str
    share: float
    """From 0 to 1: how wide it is; nan is the thinnest."""
    kind: str
    """One of ``holds``, ``fails``, ``raises``, ``lowers``; another word is drawn dotted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """A circuit to draw: boxes, arrows, and the words around them."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    title: str = ""
    says: str = ""
    """What the numbers are, in a sentence or two."""
    key: Mapping[str, str] = field(default_factory=dict)
    """Kind of an arrow -> its meaning, for those that need one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Sizes and fonts of a diagram: width in inches, font sizes in points."""

    width: float
    size: int
    smallest: int
    family: str
    down: bool
    """True if it is read from top to bottom."""
    bold: bool

    @property
    def em(self) -> float:
        return self.size / 72

    @property
    def edge(self) -> float:
        return 0.25 * self.width / 13.33 + 0.04

    @property
    def small(self) -> float:
        if self.bold:
            return max(self.size * 0.62, self.smallest * 0.9, 5.0)
        return max(self.size * 0.9, self.smallest)

    def text_width(self, text: str, *, bold: bool = False) -> float:
        return _text_width(text, family=self.family, size=self.size, bold=bold)


WIDTHS: Mapping[str, float] = {"page": 9.0, "paper": 6.75}
"""Style -> width of its figure in inches; a single column of a paper is 3.25."""


def draw_diagram(diagram: Diagram, *, style: Style, width: float | None = None) -> Figure:
    """Draw a diagram as a figure, in the largest type that fits.

    The style ``page`` is for a report and for slides, ``paper`` has serifs, and is as wide as one column or two.
    ``width`` is in inches; a figure for a paper that is narrower than 5 is read from top to bottom.

    Raises:
        InputError: another style, or more than fits into the width.
        RunError: the arrows lead in a circle, or there is no box.
    """
    if style not in WIDTHS:
        raise InputError(f"the style is {style!r}; need one of {', '.join(WIDTHS)}")
    if not diagram.boxes:
        raise RunError(
            "the circuit has no node, so there is nothing to draw. Run again with other settings to see one"
        )
    width, levels = width or WIDTHS[style], _boxes_by_level(diagram)
    form = _Form(width=width, family="sans-serif", down=False, bold=True, size=11, smallest=7)
    if style == "paper":
        down = width < 5 and len(levels) > 2
        form = _Form(width=width, family="STIXGeneral", down=down, bold=False, size=9, smallest=6)
    # what is too wide is read from top to bottom
    forms = [form] if form.down else [form, replace(form, down=True)]
    for one, size in itertools.product(forms, range(form.size, form.smallest - 1, -1)):
        sized = replace(one, size=size)
        for room in (1.5, 1.1):  # arrows as long as so many numbers
            placed = _lay_out_diagram(diagram, levels, form=sized, room_for=room)
            if placed is not None:
                return _draw_placed(diagram, placed, form=sized)
    said = f"{len(levels)} levels of boxes do not fit into {form.width:g} inches at {form.smallest} points"
    widest = max((len(word) for box in diagram.boxes for word in box.text.split()), default=1)
    least = len(levels) * (0.55 * widest + 3) * form.smallest / 72
    raise InputError(
        f"{said}; need about {max(least, form.width + 0.5):.1f}. Draw it wider, or with fewer nodes"
    )


def _boxes_by_level(diagram: Diagram) -> list[list[Box]]:
    """Return the boxes of each level. A level is a box's column; if a box has none, arrows lead to later levels."""
    if all(box.column is not None for box in diagram.boxes):
        columns = sorted({box.column for box in diagram.boxes if box.column is not None})
        return [[box for box in diagram.boxes if box.column == column] for column in columns]
    into: dict[str, list[str]] = {box.id: [] for box in diagram.boxes}
    out: dict[str, list[str]] = {box.id: [] for box in diagram.boxes}
    for arrow in diagram.arrows:
        into[arrow.target].append(arrow.source)
        out[arrow.source].append(arrow.target)
    level: dict[str, int] = {}
    try:
        for one in graphlib.TopologicalSorter(into).static_order():
            level[one] = max((level[other] + 1 for other in into[one]), default=0)
    except graphlib.CycleError as error:
        said = "the arrows of the circuit lead in a circle, so it has no first node; need one without circles"
        raise RunError(said) from error
    for one in into:
        if not into[one] and out[one]:
            level[one] = min(level[other] for other in out[one]) - 1
    first = min(level.values())
    levels: list[list[Box]] = [[] for _ in range(max(level.values()) - first + 1)]
    for box in diagram.boxes:
        levels[level[box.id] - first].append(box)
    if any(box.row is not None for box in diagram.boxes):
        return levels
    place = {box.id: at - (len(level) - 1) / 2 for level in levels for at, box in enumerate(level)}
    for joined, some in [(into, levels), (out, levels[::-1])] * 3:
        for boxes in some:  # they go near those that they are joined to
            near = {
                box.id: np.mean([place[one] for one in joined[box.id]] or [place[box.id]])
                for box in boxes
            }
            boxes.sort(key=lambda box, near=near: float(near[box.id]))
            place |= {box.id: at - (len(boxes) - 1) / 2 for at, box in enumerate(boxes)}
    return levels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    height: float
    boxes: dict[str, Bbox]
    lines: dict[str, list[str]]
    at: dict[str, int]
    """Box -> its level."""
    title: list[str]
    foot: list[str]
    foot_top: float
    """Where the words below the boxes end."""


def _lay_out_diagram(
    diagram: Diagram, levels: list[list[Box]], *, form: _Form, room_for: float
) -> _Placed | None:
    """Compute where boxes and texts stand; None if they do not fit into the width of ``form``.

    The shortest arrow is ``room_for`` times as long as the widest number beside an arrow.
    """
    em, edge, small = form.em, form.edge, form.small
    pad, line = 0.45 * em, 1.22 * em
    room = form.width - 2 * edge
    title = _wrap_text(diagram.title, room, form=form, bold=True)
    foot = fill_lines(diagram.says.split(), room, family=form.family, size=small, bold=False)
    if title is None or foot is None or len(title) > 2 or len(foot) > 4:
        return None
    numbers = (form.text_width(arrow.label, bold=True) for arrow in diagram.arrows)
    label = max(numbers, default=0.0)
    above = len(title) * line + (0.5 * em if title else 0) + edge
    n_lines = len(foot) + len(_legend_lines(diagram, form=form))
    below = n_lines * 1.35 * small / 72 + 0.4 * em + edge
    rows, tallest = _places_across(levels)
    natural = max(form.text_width(box.text) for box in diagram.boxes) / _FULL + 2 * pad
    at = {box.id: place for place, level in enumerate(levels) for box in level}
    skips = any(at[arrow.target] - at[arrow.source] > 1 for arrow in diagram.arrows)
    beside = 0.0
    if form.down:
        across = room / tallest - (0.35 * em if tallest > 1 else 0)
        beside = skips * (label + 1.9 * em)
        wide = min(natural, across - beside * (1 if tallest > 1 else 2))
    else:
        gap = max(room_for * label + 0.2 * em, 1.8 * em, 0.25 * room if len(levels) == 2 else 0.0)
        wide = min(natural, (room - gap * (len(levels) - 1)) / len(levels))
    lines: dict[str, list[str]] = {}
    for box in diagram.boxes:
        of = _wrap_text(box.text, wide - 2 * pad, form=form)
        if of is None or len(of) > 4:
            return None
        lines[box.id] = of
    tall = {name: len(of) * line + 2 * pad * 0.8 for name, of in lines.items()}
    if not form.down:
        for end in _ENDS:  # a side is as long as its arrows need beside each other
            sides = dict.fromkeys(tall, 0.0)
            for arrow in diagram.arrows:
                sides[getattr(arrow, end)] += 0.45 * em + _arrow_width(arrow, em=em) / 72
            tall = {name: max(own, sides[name]) for name, own in tall.items()}
    most = max(tall.values())
    over = skips * _OVER * em
    if form.down:
        body = (
            sum(max(tall[box.id] for box in level) for level in levels)
            + (len(levels) - 1) * 2.4 * em
        )
    else:
        body = (tallest + 0.001) * most + (tallest - 1) * 1.6 * em + over
    height = above + below + body
    boxes, down = {}, height - above
    pitch = (room - wide) / max(len(levels) - 1, 1)
    for place, level in enumerate(levels):
        if form.down:
            deep = max(tall[box.id] for box in level)
            for box in level:
                x = form.width / 2 + rows[box.id] * room / tallest
                x -= beside / 2 if tallest > 1 else 0
                bottom = down - deep / 2 - tall[box.id] / 2
                boxes[box.id] = Bbox.from_bounds(x - wide / 2, bottom, wide, tall[box.id])
            down -= deep + 2.4 * em
            continue
        x = edge + wide / 2 + place * pitch if len(levels) > 1 else form.width / 2
        for box in level:
            y = below + (body - over) / 2 - rows[box.id] * (most + 1.6 * em)
            boxes[box.id] = Bbox.from_bounds(x - wide / 2, y - tall[box.id] / 2, wide, tall[box.id])
    return _Placed(
        height=height,
        boxes=boxes,
        lines=lines,
        at=at,
        title=title,
        foot=foot,
        foot_top=below - 0.4 * em,
    )


def _places_across(levels: Sequence[Sequence[Box]]) -> tuple[dict[str, float], int]:
    rows = sorted({box.row for level in levels for box in level if box.row is not None})
    if rows:
        middle = (rows[0] + rows[-1]) / 2
        boxes = itertools.chain(*levels)
        place = {box.id: (middle if box.row is None else box.row) - middle for box in boxes}
        return place, max(round(rows[-1] - rows[0]) + 1, 1)
    place = {box.id: at - (len(level) - 1) / 2 for level in levels for at, box in enumerate(level)}
    return place, max(len(level) for level in levels)


@functools.lru_cache(maxsize=4096)
def _text_width(text: str, *, family: str, size: float, bold: bool = False) -> float:
    font = FontProperties(
        family=[family, "DejaVu Sans"], size=size, weight="bold" if bold else "normal"
    )
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def _wrap_text(text: str, width: float, *, form: _Form, bold: bool = False) -> list[str] | None:
    """Break a text into lines of about equal length and at most ``width`` inches; None if a word is wider."""
    fill = functools.partial(
        fill_lines, text.split(), family=form.family, size=form.size, bold=bold
    )
    lines = fill(width)
    if lines is None:
        return None
    for share in (0.6, 0.7, 0.8, 0.9):  # the narrowest that needs no more lines
        narrower = fill(width * share)
        if narrower is not None and len(narrower) == len(lines):
            return narrower
    return lines


def fill_lines(
    words: Sequence[str], width: float, *, family: str, size: float, bold: bool
) -> list[str] | None:
    """Break words into lines as full as possible, of at most ``width`` inches; None if a word is wider."""
    lines: list[str] = []
    width *= _FULL
    for word in words:
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _text_width(longer, family=family, size=size, bold=bold) <= width:
            lines[-1] = longer
        elif _text_width(word, family=family, size=size, bold=bold) <= width:
            lines.append(word)
        else:
            return None
    return lines


def _legend_lines(diagram: Diagram, *, form: _Form) -> list[list[tuple[str, str, float]]]:
    """Return the legend's lines: each a list of (kind of arrow, meaning, left end in inches)."""
    lines: list[list[tuple[str, str, float]]] = []
    x, small, room = 0.0, form.small, form.width - 2 * form.edge
    for kind in dict.fromkeys(arrow.kind for arrow in diagram.arrows):
        if kind in diagram.key:
            wide = 2.5 * small / 72 + _text_width(diagram.key[kind], family=form.family, size=small)
            if not lines or x + wide > room:
                lines, x = [*lines, []], 0.0
            lines[-1].append((kind, diagram.key[kind], x))
            x += wide + 1.2 * small / 72
    return lines


def _draw_placed(diagram: Diagram, placed: _Placed, *, form: _Form) -> Figure:
    figure = new_figure(width=form.width, height=placed.height)
    figure.set_layout_engine("none")
    limits: dict[str, Any] = {"xlim": (0, form.width), "ylim": (0, placed.height)}
    axes = figure.add_axes((0, 0, 1, 1), frame_on=False, xticks=[], yticks=[], **limits)
    em = form.em
    curves = [_arrow_curve(arrow, placed, diagram, form=form) for arrow in diagram.arrows]
    for arrow, curve in zip(diagram.arrows, curves, strict=True):
        _draw_arrow(axes, arrow, curve, em=em)
    for name, box in placed.boxes.items():
        shape = FancyBboxPatch(
            box.p0, box.width, box.height, boxstyle=f"round,pad=0,rounding_size={0.3 * em:.3f}"
        )
        shape.set(facecolor=BOX, edgecolor=INK, linewidth=max(0.7, form.size / 14))
        axes.add_patch(shape)
        lines = placed.lines[name]
        for at, line in enumerate(lines):
            y = (box.y0 + box.y1) / 2 + ((len(lines) - 1) / 2 - at) * 1.22 * em
            _write_text(axes, (box.x0 + box.x1) / 2, y, line, form=form)
    _draw_arrow_numbers(axes, diagram, curves, placed, form=form)
    _draw_title_and_legend(axes, diagram, placed, form=form)
    without_formulas(figure)
    for text in axes.texts:
        rest = text.get_text()
        for symbol in _SYMBOLS.values():
            rest = rest.replace(symbol, "")
        # one of our symbols, and no other dollar sign
        text.set_parse_math(rest != text.get_text() and "$" not in rest)
    return figure


def _write_text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    form: _Form,
    small: bool = False,
    bold: bool = False,
    **style: Any,
) -> Text:
    """Write a text in the font of ``form``; W_O, z, q, k and v in it are drawn as symbols."""
    if not form.bold and "$" not in text:
        text = re.sub(r"\b(W_O|[zqkv])\b", lambda found: _SYMBOLS[found[0]], text)
    given: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "color": INK,
        "fontfamily": [form.family, "DejaVu Sans"],
        "math_fontfamily": "cm",
        "fontsize": form.small if small else form.size,
        "fontweight": "bold" if bold else "normal",
    }
    return axes.text(x, y, text, **given | style)


def _arrow_curve(arrow: Arrow, placed: _Placed, diagram: Diagram, *, form: _Form) -> np.ndarray:
    """Return the points of an arrow's curve around other boxes, one row (x, y) per point."""
    parts = _arrow_pieces(arrow, placed, diagram, form=form)
    tip, before = np.array(parts[-1][3]), np.array(parts[-1][2])
    along = (tip - before) / (np.hypot(*(tip - before)) or 1.0)
    whole = float(np.hypot(*(tip - np.array(parts[-1][0]))))
    long = min(_arrow_head_size(arrow, em=form.em)[0], 0.6 * whole)
    parts[-1] = (*parts[-1][:3], tuple(tip - along * long))
    t = np.linspace(0, 1, 60)[:, None]
    weights = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    return np.vstack([*(weights @ np.array(part) for part in parts), tip])


def _arrow_pieces(arrow: Arrow, placed: _Placed, diagram: Diagram, *, form: _Form) -> list[_Piece]:
    em, source, target = form.em, placed.boxes[arrow.source], placed.boxes[arrow.target]
    from_level, to_level = placed.at[arrow.source], placed.at[arrow.target]
    if form.down and to_level - from_level > 1:  # beside the boxes, on the right
        right = max(source.x1, target.x1) + 1.3 * em
        start = (source.x1, (source.y0 + source.y1) / 2)
        end = (target.x1, (target.y0 + target.y1) / 2)
        return [(start, (right, start[1]), (right, end[1]), end)]
    if from_level == to_level and not form.down:  # between rows
        x = (source.x0 + source.x1) / 2
        if source.y0 > target.y0:
            return [_straight_piece((x, source.y0), (x, target.y1))]
        return [_straight_piece((x, source.y1), (x, target.y0))]
    if from_level == to_level:
        y = (source.y0 + source.y1) / 2
        if source.x0 < target.x0:
            return [_straight_piece((source.x1, y), (target.x0, y))]
        return [_straight_piece((source.x0, y), (target.x1, y))]
    ends = [
        _arrow_end_coordinate(arrow, diagram, placed, out=out, down=form.down)
        for out in (True, False)
    ]
    if form.down:
        start, end = (ends[0], source.y0), (ends[1], target.y1)
        middle = (start[1] + end[1]) / 2
        return [(start, (start[0], middle), (end[0], middle), end)]
    between = [[] for _ in range(to_level - from_level - 1)]
    for name, box in placed.boxes.items():
        if from_level < placed.at[name] < to_level:
            between[placed.at[name] - from_level - 1].append(box)
    level_with = [
        box
        for box in itertools.chain(*between)
        if abs(box.y0 + box.y1 - source.y0 - source.y1) < 0.1 * em
    ]
    straight = abs(source.y0 + source.y1 - target.y0 - target.y1) < 0.1 * em
    if level_with and len(level_with) == len(between) and straight:
        top = max(box.y1 for box in (*level_with, source, target)) + 1.2 * em
        start = (source.x0 + 0.7 * source.width, source.y1)
        end = (target.x0 + 0.3 * target.width, target.y1)
        high = top + (top - max(start[1], end[1])) / 3
        return [(start, (start[0], high), (end[0], high), end)]
    points = [(source.x1, ends[0])]
    for at, some in enumerate(between, start=1):
        y = ends[0] + (ends[1] - ends[0]) * at / (len(between) + 1)
        ordered = sorted(some, key=lambda box: box.y0)
        places = [ordered[0].y0 - em, ordered[-1].y1 + em]
        places += [(one.y1 + other.y0) / 2 for one, other in itertools.pairwise(ordered)]
        free = min(places, key=lambda one, y=y: abs(one - y))  # where the arrow passes the level
        points += [(min(box.x0 for box in some), free), (max(box.x1 for box in some), free)]
    points.append((target.x0, ends[1]))
    pieces = []
    for one, other in itertools.pairwise(points):
        middle = (one[0] + other[0]) / 2
        pieces.append((one, (middle, one[1]), (middle, other[1]), other))
    return pieces


def _straight_piece(start: _Point, end: _Point) -> _Piece:
    thirds = [
        (start[0] + (end[0] - start[0]) * t, start[1] + (end[1] - start[1]) * t)
        for t in (1 / 3, 2 / 3)
    ]
    return start, thirds[0], thirds[1], end


def _arrow_end_coordinate(
    arrow: Arrow, diagram: Diagram, placed: _Placed, *, out: bool, down: bool
) -> float:
    """Return the coordinate, in inches, at which an arrow begins (``out``) or ends on the side of a box.

    Arrows at one side are in the order of their other ends, so that few cross.
    """
    own = placed.boxes[arrow.source if out else arrow.target]
    side = "source" if out else "target"
    beside = [one for one in diagram.arrows if getattr(one, side) == getattr(arrow, side)]
    # those that lead past a level, or within one, leave and enter elsewhere
    beside = [
        one for one in beside if one is arrow or placed.at[one.target] - placed.at[one.source] == 1
    ]

    def end(one: Arrow) -> float:
        box = placed.boxes[one.target if out else one.source]
        return box.x0 if down else (box.y0 + box.y1) / 2

    share = (sorted(beside, key=end).index(arrow) + 1) / (len(beside) + 1)
    return own.x0 + own.width * share if down else own.y0 + own.height * share


def _arrow_width(arrow: Arrow, *, em: float) -> float:
    share = 0.0 if math.isnan(arrow.share) else min(max(abs(arrow.share), 0.0), 1.0)
    return 72 * em * (0.09 + 0.6 * share)


def _arrow_head_size(arrow: Arrow, *, em: float) -> tuple[float, float]:
    width = _arrow_width(arrow, em=em)
    return 0.35 * em + width / 90, 0.2 * em + width / 95


def _draw_arrow(axes: Axes, arrow: Arrow, curve: np.ndarray, *, em: float) -> None:
    colour, line = _KINDS.get(arrow.kind, (QUIET, "dotted"))
    width = _arrow_width(arrow, em=em)
    unit = max(width, 1.0)
    dashes: dict[str, Any] = {
        "solid": "solid",
        "dashed": (0, (max(1.0, 7.0 / unit), max(0.6, 4.0 / unit))),
        "dotted": (0, (2.4 / unit, 2.8 / unit)),
    }
    style = {"solid_capstyle": "butt", "dash_capstyle": "butt", "zorder": 1}
    axes.plot(*curve[:-1].T, color=colour, linewidth=width, linestyle=dashes[line], **style)
    base, tip = curve[-2], curve[-1]
    along = (tip - base) / (np.hypot(*(tip - base)) or 1.0)
    across = np.array([-along[1], along[0]]) * _arrow_head_size(arrow, em=em)[1]
    axes.add_patch(
        Polygon([tip, base + across, base - across], facecolor=colour, linewidth=0, zorder=1)
    )


def _draw_arrow_numbers(
    axes: Axes, diagram: Diagram, curves: Sequence[np.ndarray], placed: _Placed, *, form: _Form
) -> None:
    """Write each arrow's number beside the arrow, if possible where no box, arrow or other number is."""
    em = form.em
    taken = [box.padded(0.04 * em) for box in placed.boxes.values()]
    top = placed.height
    if placed.title:
        top = placed.height - 0.25 * form.width / 13.33 - 0.04 - len(placed.title) * 1.22 * em
    taken.append(Bbox.from_extents(0, top, form.width, placed.height))
    taken.append(Bbox.from_extents(0, 0, form.width, placed.foot_top))
    points = np.concatenate(curves) if curves else np.zeros((0, 2))
    of = np.repeat(np.arange(len(curves)), [len(curve) for curve in curves])
    for number, (arrow, curve) in enumerate(zip(diagram.arrows, curves, strict=True)):
        if not arrow.label:
            continue
        wide, tall = form.text_width(arrow.label, bold=True) + 0.2 * em, 1.05 * em
        best: tuple[float, float, float, Bbox] | None = None
        out, into = (
            sum(getattr(one, end) == getattr(arrow, end) for one in diagram.arrows) for end in _ENDS
        )
        # away from where the arrows meet
        middle = 0.5 if out == into else 0.34 if into > out else 0.66
        line = 2 * _arrow_head_size(arrow, em=em)[1]
        for cost, (x, y) in _number_places(curve, wide, tall, line=line, middle=middle):
            box = Bbox.from_bounds(x - wide / 2, y - tall / 2, wide, tall)
            cost += 100 * sum(box.overlaps(other) for other in taken)
            inside = (
                (points[:, 0] > box.x0)
                & (points[:, 0] < box.x1)
                & (points[:, 1] > box.y0)
                & (points[:, 1] < box.y1)
            )
            of_another = inside & (of != number)
            cost += 10 * bool(inside.any()) + 20 * bool(of_another.any())
            cost += 200 * (box.x0 < 0 or box.x1 > form.width or box.y1 > placed.height)
            if best is None or cost < best[0]:
                best = (cost, x, y, box)
        assert best is not None
        colour = _KINDS.get(arrow.kind, (QUIET, ""))[0]
        text = _write_text(axes, best[1], best[2], arrow.label, form=form, bold=True, color=colour)
        if best[0] >= 10:  # on an arrow: on paper of its own
            text.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.5})
        taken.append(best[3])


def _number_places(
    curve: np.ndarray, wide: float, tall: float, *, line: float, middle: float
) -> Iterator[tuple[float, _Point]]:
    """Yield (cost, centre) of places along a curve for a number of ``wide`` by ``tall`` inches.

    ``middle`` is the share of the curve at which a place costs least, and ``line`` the width of the arrow.
    """
    for share in (0.17, 0.25, 0.34, 0.42, 0.5, 0.58, 0.66, 0.75, 0.83):
        at = round(share * (len(curve) - 1))
        along = curve[min(at + 2, len(curve) - 1)] - curve[max(at - 2, 0)]
        normal = np.array([-along[1], along[0]]) / (np.hypot(*along) or 1.0)
        away = line / 2 + abs(normal[0]) * wide / 2 + abs(normal[1]) * tall / 2 + 0.02
        for side in (1, -1):
            x, y = curve[at] + normal * side * away
            # over a level arrow, right of an upright one
            pleasant = normal[1] * side > 0.2 or normal[0] * side > 0.5
            yield 5 * abs(share - middle) + 0.6 * (not pleasant), (float(x), float(y))
        yield 5 * abs(share - middle) + 4, (float(curve[at, 0]), float(curve[at, 1]))


def _draw_title_and_legend(axes: Axes, diagram: Diagram, placed: _Placed, *, form: _Form) -> None:
    small, edge = form.small, form.edge
    step = 1.35 * small / 72
    for at, line in enumerate(placed.title):
        y = placed.height - edge - (at + 0.5) * 1.22 * form.em
        _write_text(axes, edge, y, line, form=form, bold=True, ha="left")
    keys = _legend_lines(diagram, form=form)
    print_small = functools.partial(
        _write_text, axes, form=form, small=True, ha="left", color=FAINT
    )
    for at, line in enumerate(placed.foot):
        y = edge + (len(placed.foot) - 1 - at + 0.5 + len(keys)) * step
        print_small(edge, y, line)
    sample = 2.2 * small / 72
    for at, row in enumerate(keys):
        y = edge + (len(keys) - 1 - at + 0.5) * step
        for kind, meaning, left in row:
            colour, dash = _KINDS.get(kind, (QUIET, "dotted"))
            x, width = edge + left, small / 7
            dashes = {"solid": "solid", "dashed": (0, (2.4, 1.2)), "dotted": (0, (1, 1.1))}[dash]
            axes.plot(
                [x, x + sample],
                [y, y],
                color=colour,
                linewidth=width,
                linestyle=dashes,
                solid_capstyle="butt",
            )
            print_small(x + sample + 0.3 * small / 72, y, meaning)
