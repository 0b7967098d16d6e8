"""Style of the figures: palette (after Okabe and Ito), panels, scales, and a figure's form in an HTML page."""

import base64
import contextlib
import io
import itertools
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.collections import Collection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ..errors import InputError, RunError
from ..records import refuse_file_of_run
from ..text import token_text

INK, QUIET, GRID = "#222222", "#777777", "#cccccc"
PAPER = "#fefefe"
"""What boxes and numbers stand on: in a page it is the page's own."""
BOX, FAINT = "#f3f5f8", "#555555"
BLUE, ORANGE, GREEN, PURPLE, OCHRE = "#0072b2", "#d55e00", "#009e73", "#a8507f", "#8a6d00"
WIDTH, FONT = 5.0, 9.5
"""Inches and points of an ordinary figure."""
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, OCHRE, QUIET)
LINES = ListedColormap(mpl.colormaps["viridis"](np.linspace(0.35, 0.85, 256)))
"""Colours of lines by layer: the part of viridis that is seen on a light page and on a dark one."""
MARKS = ("o", "s", "^", "D", "v", "P")

_NO_GLYPH = r"Glyph \d+ .* missing from font"
_IN_PAGE = {
    INK: "currentColor",
    QUIET: "var(--quiet)",
    GRID: "var(--line)",
    PAPER: "var(--card)",
    BOX: "var(--card)",
    FAINT: "var(--quiet)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    OCHRE: "var(--ochre)",
}
"""Colour of a printed figure -> the CSS variable that replaces it in a page, where light and dark styles set it."""
_AROUND = (Axis, Legend, Text)
"""What may stick out of its panel, so that the layout leaves room for it."""

_SIGNED = "RdBu_r"
WORDS = {"layer": "layer", "position": "position", "head": "head", "key": "key position"}
UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that neither XML nor a page can hold."""
_MOST_LABELS = 40
"""More positions than these are numbered, not spelled out."""
_MOST_POINTS = 20_000
"""Points of all lines of a figure, above which they are thinned."""
_MOST_CELLS = 4_000_000


F = TypeVar("F", bound=Figure)


class Picture(Figure):
    """A figure that a notebook shows without pyplot, and that ``save`` writes to a file."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure to a .png, .svg or .pdf file that belongs to no run; missing folders are made."""
        return save_figure(self, path)

    def _repr_png_(self) -> bytes:
        return figure_bytes(self, "png")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a .png, .svg or .pdf file; equal figures give equal files.

    Raises:
        InputError: another ending, or a file that belongs to a run.
    """
    path = Path(path)
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise InputError(
            f"{path} ends with {path.suffix or 'nothing'}; need .png, .svg or .pdf for a figure"
        )
    refuse_file_of_run(path, replaceable=[f".{one}" for one in FORMATS])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(figure_bytes(figure, form))
    return path


def figure_bytes(
    figure: Figure, form: str, *, salt: str = "sink_lens", dpi: int | None = None
) -> bytes:
    """Return the bytes of a figure as a png, svg or pdf file (``form``); equal figures give equal bytes.

    ``salt`` makes the ids in an svg file, and ``dpi`` is the resolution of pixels.
    """
    buffer = io.BytesIO()
    date, fonts = FORMATS[form], logging.getLogger("fontTools")
    level = fonts.level
    with _drawing({"svg.hashsalt": salt, "pdf.fonttype": 42}):
        fonts.setLevel(logging.ERROR)  # it warns of the dates in a PDF's fonts
        try:
            figure.savefig(
                buffer, format=form, dpi=dpi or "figure", metadata={date: None} if date else None
            )
        finally:
            fonts.setLevel(level)
    content = buffer.getvalue()
    return UNWRITABLE.sub("\ufffd", content.decode()).encode() if form == "svg" else content


FORMATS = {"png": "", "svg": "Date", "pdf": "CreationDate"}
"""Format -> what it calls the date, which is left out."""


def new_figure(*, width: float = WIDTH, height: float = 2.9) -> Picture:
    return Picture(figsize=(width, height), dpi=150, layout="constrained")


def panel(
    figure: Figure,
    *,
    place: tuple[int, int, int] = (1, 1, 1),
    xlabel: str = "",
    ylabel: str = "",
    grid: bool = True,
) -> Axes:
    """Add axes in this library's style to a figure; ``place`` is (rows, columns, number from 1)."""
    return style_axes(figure.add_subplot(*place), xlabel=xlabel, ylabel=ylabel, grid=grid)


def style_axes(axes: Axes, *, xlabel: str = "", ylabel: str = "", grid: bool = True) -> Axes:
    axes.set_xlabel(xlabel, fontsize=FONT, color=INK)
    axes.set_ylabel(ylabel, fontsize=FONT, color=INK)
    axes.tick_params(which="both", labelsize=FONT - 0.5, color=QUIET, labelcolor=INK)
    axes.patch.set_visible(False)
    axes.spines[:].set_color(QUIET)
    axes.set_axisbelow(True)
    if grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, color=GRID, linewidth=0.6)
    return axes


def draw_heat_map(axes: Axes, values: np.ndarray) -> ScalarMappable:
    """Draw values in [0, 1] as an image, one pixel each; nan is left empty."""
    return axes.imshow(values, cmap="viridis", vmin=0, vmax=1, interpolation="none", aspect="auto")


def _values_on_grid(
    frame: pd.DataFrame, pair: tuple[str, str | None], *, value: str
) -> tuple[np.ndarray, list[Any], list[Any], bool]:
    """Return (grid of the column ``value``, labels of its rows, labels of its columns, True if rows share a place).

    ``pair`` names the columns that are the grid's axes. At a place the value of largest magnitude is kept.

    Raises:
        RunError: the map has too many places.
    """
    down, across = pair
    rows = sorted(frame[down].unique().tolist())
    columns: list[Any] = [0] if across is None else sorted(frame[across].unique().tolist())
    if len(rows) * len(columns) > _MOST_CELLS:
        raise RunError(
            f"a map of {len(rows):,} by {len(columns):,} places is too large to be drawn; need at most "
            f"{_MOST_CELLS:,}. Draw a part of it"
        )
    grid = np.full((len(rows), len(columns)), np.nan)
    places, beside = ({one: at for at, one in enumerate(axis)} for axis in (rows, columns))
    at_row = frame[down].map(places.get)
    at_column = [0] * len(frame) if across is None else frame[across].map(beside.get)
    for row, column, number in zip(at_row, at_column, frame[value].to_numpy(float), strict=True):
        if not np.isnan(number) and not abs(grid[row, column]) >= abs(number):
            grid[row, column] = number
    return grid, rows, columns, len(frame) > grid.size


def draw_map(
    figure: Figure,
    frame: pd.DataFrame,
    pair: tuple[str, str | None],
    *,
    place: tuple[int, int, int],
    value: str,
    limit: float,
    labels: Mapping[int, str] | None = None,
) -> tuple[Axes, ScalarMappable]:
    """Draw a heat map of the column ``value`` over two columns, the ``pair``, with colours from -limit to limit.

    ``labels`` is position -> text.
    """
    down, across = pair
    grid, rows, columns, crowded = _values_on_grid(frame, pair, value=value)
    ylabel = WORDS.get(down, down) + (", strongest" if crowded else "")
    xlabel = "" if across is None else WORDS.get(across, across)
    axes = panel(figure, place=place, xlabel=xlabel, ylabel=ylabel, grid=False)
    image = axes.imshow(
        grid, cmap=_SIGNED, vmin=-limit, vmax=limit, interpolation="none", aspect="auto"
    )
    _label_ticks(axes.yaxis, rows, name=down, labels=labels or {})
    _label_ticks(axes.xaxis, columns if across else [], name=across or "", labels={})
    return axes, image


def _label_ticks(
    axis: Axis, values: Sequence[int | float], *, name: str, labels: Mapping[Any, str]
) -> None:
    if name in ("position", "key") and any(labels.values()) and len(values) <= _MOST_LABELS:
        texts = []
        for one in values:
            own = token_text(labels[one], limit=16, counted=False) if labels.get(one) else ""
            texts.append(f"{one} {own}")
        axis.set_ticks(range(len(values)), labels=texts)
        axis.set_tick_params(labelsize=FONT - 3)
    elif values and list(values) == list(range(len(values))):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    else:
        step = max(1, -(-len(values) // 16))
        axis.set_ticks(range(0, len(values), step), labels=[str(one) for one in values[::step]])


def add_colour_scale(
    figure: Figure, image: ScalarMappable, axes: Axes | list[Axes], *, label: str
) -> Axes:
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label(label, fontsize=FONT, color=INK)
    bar.ax.tick_params(labelsize=FONT - 0.5, color=QUIET, labelcolor=INK)
    bar.outline.set_edgecolor(QUIET)  # type: ignore[operator]  # matplotlib types it as what builds it
    return bar.ax


def draw_layer_lines(
    axes: Axes, rows: pd.DataFrame, *, x: Callable[[pd.DataFrame], Any]
) -> ScalarMappable | None:
    """Draw one line per layer, dark to light; the stream before layer 0 is left out.

    ``rows`` has ``layer``, ``value`` and the columns that ``x`` reads, sorted along x. Return the mapping of layers to
    colours; None if no row has a layer.
    """
    layer = rows["layer"].to_numpy(float, na_value=np.nan)
    layers = [int(number) for number in np.unique(layer[np.isfinite(layer)]) if number >= 0]
    if not layers:
        return None
    image: Any = ScalarMappable(norm=Normalize(0, max(layers[-1], 1)), cmap=LINES)
    for number in layers:
        own = rows.loc[layer == number]
        axes.plot(
            x(own),
            own["value"],
            color=image.to_rgba(number),
            marker=".",
            markersize=4,
            linewidth=1.3,
        )
    return image


def add_layer_scale(
    figure: Figure, images: Sequence[ScalarMappable | None], panels: list[Axes]
) -> None:
    """Add the colour scale of ``draw_layer_lines`` beside the panels, unless each has at most one line."""
    image = next((one for one in images if one is not None), None)
    if image is not None and any(len(axes.get_lines()) > 1 for axes in panels):
        bar = add_colour_scale(figure, image, panels, label="layer")
        bar.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def set_integer_ticks(axes: Axes, *, y: bool = True) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    if y:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def log_scale(axes: Axes, *, axis: str) -> None:
    """Make an axis (``x`` or ``y``) logarithmic, with plain numbers at its ticks instead of powers of ten."""
    if axis == "x":
        set_scale, limits, set_limits = axes.set_xscale, axes.get_xlim, axes.set_xlim
        scale = axes.xaxis
    else:
        set_scale, limits, set_limits = axes.set_yscale, axes.get_ylim, axes.set_ylim
        scale = axes.yaxis
    set_scale("log")
    low, high = limits()
    if not low > 0:  # nothing is drawn
        low, high = 0.1, 10.0
        set_limits(low, high)
    decades = math.log10(high / low)
    subs = tuple(map(float, range(1, 10)))
    if decades > 0.6:
        subs = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)
    numbers = 5 if axis == "x" and decades > 5 else None  # more would run together
    scale.set_major_locator(LogLocator(subs=subs, numticks=numbers))
    scale.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if 1e-3 <= value < 1e6 else f"{value:.0e}")
    )
    scale.set_minor_formatter(NullFormatter())
    scale.set_minor_locator(NullLocator())


def legend(axes: Axes, *, columns: int, over: Figure | None = None) -> None:
    """Add the legend of axes, in ``columns`` columns, above the axes, or above the whole figure if that is ``over``."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    style = {
        "fontsize": FONT - 1,
        "frameon": False,
        "labelcolor": INK,
        "ncols": columns,
        "columnspacing": 1.2,
    }
    if over is not None:
        over.legend(handles, labels, loc="outside upper left", handlelength=3.0, **style)
        return
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        borderaxespad=0.2,
        handlelength=1.6,
        **style,
    )


def with_serifs(figure: F) -> F:
    """Set all texts of a figure as a paper does: with serifs, and of at most 8 points."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        size = min(float(text.get_fontsize()), 8.0)
        text.set(family=["STIXGeneral", "DejaVu Sans"], fontsize=size)
    for axis in figure.findobj(Axis):  # ticks that are made later, when it is drawn
        assert isinstance(axis, Axis)
        axis.set_tick_params(
            which="both", labelsize=min(8.0, FONT - 3), labelfontfamily="STIXGeneral"
        )
    return figure


def without_formulas(figure: F) -> F:
    """Switch off formulas in all texts of a figure, since a token may hold a dollar sign."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
    return figure


@contextlib.contextmanager
def _drawing(settings: dict[Any, Any]) -> Iterator[None]:
    settings = {"text.parse_math": False} | settings
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GLYPH)
        yield


def fix_layout(figure: Figure) -> None:
    """Compute the layout of a figure once, so that it is not computed again for each file format."""
    engine = figure.get_layout_engine()
    if engine is not None:
        marks = itertools.chain.from_iterable(axes.get_children() for axes in figure.axes)
        for mark in marks:
            if not isinstance(mark, _AROUND):
                mark.set_in_layout(False)
        with _drawing({}):
            engine.execute(figure)
        figure.set_layout_engine("none")


def figure_html(figure: Figure) -> str:
    """Return the figure as an HTML image with a PNG inside."""
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(figure_bytes(figure, "png")).decode()}">'


def thin_lines(figure: Figure) -> str:
    """Thin lines of very many points to the extremes of each stretch, and have very many marks drawn as pixels.

    Return a sentence on the thinned lines, with a space in front; "" if the figure has few points.
    """
    said = ""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    if sum(np.size(line.get_xdata()) for line in lines) > _MOST_POINTS:
        each = max(_MOST_POINTS // len(lines), 60)
        for line in lines:
            points = np.asarray(line.get_xydata(), dtype=float)
            if len(points) > each:
                line.set_data(*points[_extreme_indices(points[:, 1], most=each)].T)
        said += " Its lines show the smallest and largest value of each stretch."
    for marks in figure.findobj(Collection):
        assert isinstance(marks, Collection)
        if max(len(marks.get_paths()), np.shape(marks.get_offsets())[0]) > 3_000:  # drawn as pixels
            marks.set_rasterized(True)
    return said


def _extreme_indices(values: np.ndarray, *, most: int) -> np.ndarray:
    """Return the indices of both ends, and of the smallest and largest value in each of ``most`` / 2 stretches."""
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), max(most // 2, 1)):
        known = stretch[np.isfinite(values[stretch])]
        if len(known):
            kept |= {int(known[values[known].argmin()]), int(known[values[known].argmax()])}
    return np.array(sorted(kept))


def figure_svg(figure: Figure, *, name: str) -> str:
    """Return the figure as an SVG element for an HTML page, in the colours of the page's style.

    Text stays text. Ids begin with `name`, since ids of a page must differ.
    """
    buffer = io.StringIO()
    fix_layout(figure)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # the reader's browser has fonts that matplotlib lacks; only the space was guessed
    with _drawing({"svg.fonttype": "none", "svg.hashsalt": name}):
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support")
        for behind in (figure.patch, *(axes.patch for axes in figure.axes)):
            behind.set_visible(False)  # the page's paper
        dpi = figure.dpi
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)  # savefig would draw twice
        figure.set_dpi(dpi)
    root = ElementTree.fromstring(UNWRITABLE.sub("\ufffd", buffer.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            element.set(key.rpartition("}")[2], _rename_svg_ids(key, value, name=name))
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("style", "metadata"):
                element.remove(child)
    width = float(root.attrib["viewBox"].split()[2])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("style", f"min-width: {0.86 * width:.0f}px")
    root.set("aria-hidden", "true")
    if any(image.get_cmap().name == _SIGNED for image in figure.findobj(AxesImage)):  # type: ignore[attr-defined]
        root.set("class", "signed")  # dark pages turn its light middle dark
    return ElementTree.tostring(root, encoding="unicode")


def _rename_svg_ids(key: str, value: str, *, name: str) -> str:
    local = key.rpartition("}")[2]
    if local == "id":
        return f"{name}-{value}"
    if local == "href":
        return f"#{name}-{value[1:]}" if value.startswith("#") else re.sub(r"\s+", "", value)
    if local == "clip-path":
        return value.replace("url(#", f"url(#{name}-")
    if local in ("style", "fill", "stroke"):
        value = value.replace("url(#", f"url(#{name}-")
        return re.sub("#[0-9a-f]{6}", lambda found: _IN_PAGE.get(found[0], found[0]), value)
    return value
