"""A figure in another width and font, laid out until all of it can be read, or an error with the least width.

Text shrinks with the figure, not below a size; then panels are stacked, legends narrowed, labels broken, ticks thinned,
and the figure made taller, in this order and only as long as something cannot be read (``legible``).
"""

import textwrap
import warnings
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

from sink_lens.errors import InputError
from sink_lens.report.legible import faults
from sink_lens.report.style import FONT, Picture, finished, placed

NARROW = "it cannot be read"
"""How the error about a figure begins that does not fit."""
_SMALLEST = 6.0
"""Points: text of a narrower figure shrinks with it, but not below this."""
_UNREADABLE = 5.0
"""Points under which the text of a figure whose places are fixed cannot be read."""
_LEAST_AXES = 0.3
"""Inches of a panel, either way."""
_FALLBACK = "DejaVu Sans"
"""Font of the characters that another font lacks."""


def fit_figure(make: Callable[[], Figure], *, inches: float | None, font: str | None) -> Figure:
    """The figure in a width and a font, all of it legible.

    Raises:
        InputError: it does not fit; the error says the least width.
    """
    figure = make()
    if inches is None and font is None:
        placed(figure)
        return figure
    width = figure.get_figwidth() if inches is None else inches
    figure, wrong = _fit(figure, width=width, font=font)
    if not wrong:
        return figure
    least = _least(make, width=width, font=font)
    problem = f"{NARROW} at {width:g} inches ({wrong[0]})"
    raise InputError(f"{problem}; need {least:g} at least" if least else f"{problem}; need another font")


def _least(make: Callable[[], Figure], *, width: float, font: str | None) -> float | None:
    """The least width, to a quarter of an inch, at which the figure can be read; None if there is none."""
    low, high = round(width * 4), round(max(2 * width, 1.25 * make().get_figwidth()) * 4)
    if _fit(make(), width=high / 4, font=font)[1]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fit(make(), width=middle / 4, font=font)[1]:
            low = middle
        else:
            high = middle
    return high / 4


def _fit(figure: Figure, *, width: float, font: str | None) -> tuple[Figure, list[str]]:
    again = figure.at_width if isinstance(figure, Picture) else None
    if again is not None:
        try:
            figure = again(width, font)
        except InputError as error:
            return figure, [str(error)]
        return figure, _wrong(figure)
    scale = width / figure.get_figwidth()
    engine: Any = figure.get_layout_engine()
    _shrink(figure, scale=scale, font=font, fixed=engine is None)
    if engine is None:
        return figure, _wrong(figure)
    native = figure.get_figwidth() / scale
    wrong = _laid(figure, engine)
    for remedy in (_stack, _narrow_legends, _break_labels, _thin_ticks, _taller, _taller):
        if not wrong:
            break
        if remedy(figure, native / width):
            wrong = _laid(figure, engine)
    return figure, wrong


def _shrink(figure: Figure, *, scale: float, font: str | None, fixed: bool) -> None:
    """Another width and font; text, lines and marks shrink with it, and heights keep their share."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if font is not None:
            text.set_fontfamily([font, _FALLBACK])
        size = float(text.get_fontsize()) * scale
        text.set_fontsize(size if fixed or scale >= 1 else max(size, min(_SMALLEST, FONT)))
    figure.set_size_inches(figure.get_figwidth() * scale, figure.get_figheight() * scale)
    for mark in figure.findobj(lambda one: isinstance(one, (Line2D, PathCollection))):
        if isinstance(mark, Line2D):
            mark.set(linewidth=mark.get_linewidth() * scale, markersize=mark.get_markersize() * scale)
        elif isinstance(mark, PathCollection):
            mark.set_sizes(mark.get_sizes() * scale**2)


def _laid(figure: Figure, engine: Any) -> list[str]:
    """Lay a figure out, and say what cannot be read."""
    figure.set_layout_engine(engine)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        placed(figure)
    return _wrong(figure)


def _wrong(figure: Figure) -> list[str]:
    """Return what is wrong with a figure: its faults, text too small to read, panels too small."""
    problems = faults(figure)
    smallest = min((float(text.get_fontsize()) for text in _texts(figure)), default=FONT)
    if smallest < _UNREADABLE - 0.01:
        problems.append(f"its smallest text has {smallest:.1f} points")
    for axes in _panels(figure):
        box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        if min(box.width, box.height) < _LEAST_AXES:
            problems.append(f"a panel is {box.width:.1f} by {box.height:.1f} inches")
    return problems


def _texts(figure: Figure) -> list[Text]:
    return [one for one in figure.findobj(Text) if isinstance(one, Text) and one.get_visible() and one.get_text()]


def _panels(figure: Figure) -> list[Axes]:
    """The axes of a figure that are no scale of colours."""
    return [axes for axes in figure.axes if axes.get_subplotspec() is not None and not hasattr(axes, "_colorbar")]


def _stack(figure: Figure, narrowing: float) -> bool:
    """Fewer panels beside each other, more over each other."""
    panels = _panels(figure)
    grid = panels[0].get_subplotspec() if panels else None
    if grid is None or len(panels) < 2:
        return False
    rows, columns = grid.get_geometry()[:2]
    few = 0.75 if panels[0].images else 0.35  # square maps may be smaller than curves
    fewer = max(1, int(columns / max(narrowing, 1.0) + few))
    if fewer >= columns or rows * columns < len(panels):
        return False
    deep = -(-len(panels) // fewer)
    height = figure.get_figheight() * min(narrowing, columns / fewer) * deep / rows * fewer / columns
    figure.set_figheight(figure.get_figheight() * deep / rows if fewer == 1 else max(height, figure.get_figheight()))
    new = GridSpec(deep, fewer, figure=figure)
    beside = panels[0].get_ylabel()
    for place, axes in enumerate(panels):
        axes.set_subplotspec(new[place // fewer, place % fewer])
        if place % fewer == 0:
            axes.tick_params(labelleft=True)
            if not axes.get_ylabel():
                axes.set_ylabel(
                    beside, fontsize=panels[0].yaxis.label.get_fontsize(), color=panels[0].yaxis.label.get_color()
                )
                axes.yaxis.label.set_fontfamily(panels[0].yaxis.label.get_fontfamily())
        else:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
    finished(figure)
    return True


def _narrow_legends(figure: Figure, _: float) -> bool:
    """Legends in fewer columns, or over the whole figure."""
    changed = False
    room = figure.get_window_extent().width
    held: list[tuple[Axes | Figure, Legend]] = [(figure, one) for one in figure.legends]
    held += [(axes, one) for axes in figure.axes if (one := axes.get_legend()) is not None]
    for owner, legend in held:
        texts = legend.get_texts()
        box = legend.get_window_extent()
        wide, out = box.width, len(figure.axes) == 1 and box.x1 > room
        owner = figure if out else owner  # room for it is over the labels of the axes too
        columns = max(1, int(getattr(legend, "_ncols", 1) * 0.95 * room / wide)) if out or wide > 0.9 * room else 0
        narrower = owner if isinstance(owner, Figure) or wide <= 0 else None
        if not columns and narrower is None and isinstance(owner, Axes):
            side = owner.get_window_extent()
            crowded = len(figure.axes) > 1 and wide > 1.1 * side.width
            columns = max(1, int(getattr(legend, "_ncols", 1) * side.width / wide)) if crowded else 0
        if not columns or (columns >= getattr(legend, "_ncols", 1) and not out):
            continue
        size, family = texts[0].get_fontsize(), texts[0].get_fontfamily()
        how: dict[str, Any] = {"ncols": columns, "fontsize": size, "frameon": False, "columnspacing": 1.0}
        if isinstance(owner, Axes):
            how |= {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.2, "handlelength": 1.6}
        else:
            how |= {"loc": "outside upper left", "handlelength": 2.0}
        handles, labels = list(legend.legend_handles), [text.get_text() for text in texts]
        legend.remove()
        new = owner.legend(handles=[one for one in handles if one is not None], labels=labels, **how)
        for text, old in zip(new.get_texts(), texts, strict=True):
            text.set(fontfamily=family, color=old.get_color(), parse_math=False)
        changed = True
    return changed


def _break_labels(figure: Figure, _: float) -> bool:
    """Titles and labels of axes in several lines where they are longer than there is room."""
    changed = False
    width, height = figure.get_window_extent().width, figure.get_window_extent().height
    for axes in figure.axes:
        side = axes.get_window_extent()
        rooms = [
            (axes.xaxis.label, max(side.width * 1.1, 0.0), width),
            (axes.yaxis.label, max(side.height, 0.0), height),
        ]
        rooms += [(title, side.width * 1.15, width) for title in (axes.title, axes._left_title)]  # type: ignore[attr-defined]
        for text, room, most in rooms:
            box = text.get_window_extent()
            upright = text.get_rotation() == 90
            long, middle = (box.height, box.y0 + box.y1) if upright else (box.width, box.x0 + box.x1)
            room = min(max(room, 0.35 * most), most)
            if text.get_horizontalalignment() == "center":  # it sticks out on both sides alike
                room = min(room, 0.97 * middle, 0.97 * (2 * most - middle))
            if text.get_text() and long > room:
                longest = max(len(line) for line in text.get_text().split("\n"))
                fits = max(8, int(longest * room / long))
                lines = [textwrap.fill(line, fits) for line in text.get_text().split("\n")]
                changed |= "\n".join(lines) != text.get_text()
                text.set_text("\n".join(lines))
    return changed


def _thin_ticks(figure: Figure, _: float) -> bool:
    """Fewer ticks; names, of which none can be left out, upright."""
    for axes in _panels(figure):
        for axis in (axes.xaxis, axes.yaxis):
            locator = axis.get_major_locator()
            if isinstance(locator, MaxNLocator):
                axis.set_major_locator(MaxNLocator(integer=axes.images != [], nbins=4, steps=[1, 2, 5, 10]))
            elif isinstance(locator, LogLocator):
                locator.set_params(subs=(1.0,), numticks=4)
            elif isinstance(locator, FixedLocator) and axis is axes.xaxis:
                names = [label.get_text() for label in axis.get_ticklabels()]
                if any(not name.replace("−", "").replace(".", "").isdigit() for name in names if name):
                    axes.tick_params(axis="x", labelrotation=90)
    return True


def _taller(figure: Figure, _: float) -> bool:
    """Make the figure 30% taller; always possible."""
    figure.set_figheight(figure.get_figheight() * 1.3)
    return True
