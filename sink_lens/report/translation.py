"""Any drawn figure as an interactive one: the numbers of its lines, points, bars and maps, read back from it.

Written for what the figures of this package are made of; a mark that it does not know is refused, not left out.
Needs plotly: ``pip install 'sink-lens[interactive]'``. A figure shows itself in a notebook in a frame that holds the
whole of plotly.js (2 MB), since plotly's own way asks a server for MathJax.
"""

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox

from sink_lens.errors import InputError
from sink_lens.report import frame
from sink_lens.report.drawing import GRID, INK
from sink_lens.report.words import visible

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise InputError(
        "interactive figures need plotly, not installed here. pip install 'sink-lens[interactive]'"
    ) from error

_PIXELS = 96
"""A drawn inch."""
_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot", "None": "solid"}
_MARKS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "D": "diamond",
    "P": "cross",
    "x": "x",
}
_MARKS |= {".": "circle", "_": "line-ew-open", "|": "line-ns-open"}


class Interactive(go.Figure):
    """A plotly figure that a notebook or a file shows with nothing fetched."""

    _ipython_display_: Any = None  # type: ignore[assignment]  # plotly's own, which would come first

    @property
    def page(self) -> str:
        """A whole page with the figure, which opens with no network."""
        drawn = str(self.to_json()).replace("<", "\\u003c")
        config = json.dumps({"responsive": True, "displaylogo": False, "typesetMath": False})
        then = f'Plotly.newPlot("figure", {{...{drawn}, config: {config}}});'
        code = frame.script(get_plotlyjs(), name="Plotly", then=then)
        return frame.page('<div id="figure"></div>', code=code, bundle=get_plotlyjs(), title="Figure")

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(path)
        path.write_text(self.page, encoding="utf-8")
        return path

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, str]:
        return {"text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        return frame.framed(self.page, height=int(self.layout.height or 420) + 30, title="Figure")


def interactive_of(figure: Figure) -> Interactive:
    """A drawn figure to hover over and zoom, panel by panel where it stands.

    Raises:
        InputError: it holds a kind of mark that no figure of this package has.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # where the panels stand, and their ticks and texts
    found = Interactive()
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    scales = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    named: set[str] = set()
    shapes: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for index, axes in enumerate(panels):
        number = str(index + 1) if index else ""  # as plotly numbers them
        on = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        marks = [*_lines(axes), *_collections(axes), *_bars(axes)]
        for mark in marks:
            label = str(mark.pop("label", ""))
            shown = bool(label) and not label.startswith("_") and label not in named
            named |= {label} if shown else set()
            kind = mark.pop("of", go.Scatter)
            hover = _hover(axes, "%{x:.4g}", "%{y:.4g}")
            style = {"name": escaped(label), "legendgroup": escaped(label), "showlegend": shown, "hovertemplate": hover}
            found.add_trace(kind(**style, **mark, **on))
        for image in axes.images:
            with_scale = bool(scales) and index == 0
            label = scales[0].get_ylabel() if scales else ""
            hover = _hover(axes, "%{x}", "%{y}", "%{z:.4g}")
            place = scales[0].get_position() if scales else axes.get_position()
            found.add_trace(_map(image, label=label, shown=with_scale, place=place, hovertemplate=hover, **on))
        shapes += _shapes(axes, number)
        texts += _texts(axes, number, drawing=canvas.get_renderer())
        found.update_layout({f"xaxis{number}": _axis(axes, x=True, number=number)})
        found.update_layout({f"yaxis{number}": _axis(axes, x=False, number=number)})
    found.update_layout(shapes=shapes, annotations=texts)
    title = figure.get_suptitle()
    size = figure.get_size_inches()
    found.update_layout(template="none", height=int(size[1] * _PIXELS) + 40, font={"color": INK, "size": 12})
    found.update_layout(
        title_text=escaped(title) or None, hovermode="closest", margin={"l": 20, "r": 20, "t": 40, "b": 10}
    )
    found.update_layout(legend={"orientation": "h", "y": 1.01, "yanchor": "bottom"})
    return found


def _lines(axes: Axes) -> list[dict[str, Any]]:
    """Lines in the numbers of the axes; those across a whole panel are shapes."""
    found = []
    for line in axes.lines:
        if line.get_transform() == axes.transData:
            marker = str(line.get_marker())
            drawn, marked = line.get_linestyle() != "None", marker not in ("None", "")
            colour = to_hex(line.get_color())
            mode = "+".join(["lines"] * drawn + ["markers"] * marked) or "lines"
            style = {
                "color": colour,
                "width": line.get_linewidth(),
                "dash": _DASHES.get(str(line.get_linestyle()), "dash"),
            }
            marks = {"color": colour, "symbol": _MARKS.get(marker, "circle"), "size": 1.4 * line.get_markersize()}
            if marks["symbol"].startswith("line"):
                marks["line"] = {"width": line.get_markeredgewidth()}
            values = {"x": _plain(line.get_xdata()), "y": _plain(line.get_ydata())}
            found.append(values | {"mode": mode, "line": style, "marker": marks, "label": line.get_label()})
    return found


def _collections(axes: Axes) -> list[dict[str, Any]]:
    """Points, bands and intervals."""
    found = []
    for one in axes.collections:
        label = {"label": one.get_label()}
        faces: Any = one.get_facecolor()
        edges: Any = one.get_edgecolor()
        if isinstance(one, PathCollection):
            x, y = np.asarray(one.get_offsets(), dtype=float).T
            colour = [to_hex(face) for face in faces] or [INK]
            marks = {
                "color": colour if len(colour) > 1 else colour[0],
                "size": 1.3 * float(np.sqrt(one.get_sizes()[0])),
            }
            found.append({"x": x, "y": y, "mode": "markers", "marker": marks} | label)
        elif isinstance(one, PolyCollection):
            red, green, blue, alpha = to_rgba(faces[0])
            fill = f"rgba({red * 255:.0f},{green * 255:.0f},{blue * 255:.0f},{alpha:.3f})"
            for path in one.get_paths():
                x, y = np.asarray(path.vertices, dtype=float).T
                found.append({"x": x, "y": y, "mode": "none", "fill": "toself", "fillcolor": fill} | label)
        elif isinstance(one, LineCollection):
            ends = [np.vstack([segment, [[np.nan, np.nan]]]) for segment in one.get_segments()]
            x, y = np.vstack(ends).T if ends else np.empty((2, 0))
            found.append({"x": x, "y": y, "mode": "lines", "line": {"color": to_hex(edges[0])}} | label)
        else:
            raise InputError(
                f"{type(one).__name__} is no mark that can be made interactive; need a figure of this package"
            )
    return found


def _bars(axes: Axes) -> list[dict[str, Any]]:
    found = []
    for container in axes.containers:
        if isinstance(container, BarContainer) and len(container):
            bars, across = list(container.patches), container.orientation == "horizontal"
            centres = [
                bar.get_y() + bar.get_height() / 2 if across else bar.get_x() + bar.get_width() / 2 for bar in bars
            ]
            sizes = [bar.get_width() if across else bar.get_height() for bar in bars]
            values = {"x": sizes, "y": centres} if across else {"x": centres, "y": sizes}
            colours = {"color": [to_hex(bar.get_facecolor()) for bar in bars], "line": {"color": INK, "width": 0.6}}
            way = {"orientation": "h" if across else "v", "of": go.Bar, "label": container.get_label()}
            found.append(values | way | {"marker": colours, "width": [0.8] * len(bars)})
    return found


def _map(image: AxesImage, *, label: str, shown: bool, place: Bbox, **on: str) -> go.Heatmap:
    """A heat map in the colours that it is drawn in, its scale at its place; what is undefined is left empty."""
    values = np.ma.filled(np.ma.masked_invalid(np.asarray(image.get_array(), dtype=float)), np.nan)
    places = np.linspace(0, 1, 33)
    colours = [[float(place), to_hex(image.get_cmap()(place))] for place in places]
    low, high = image.get_clim()
    bar: dict[str, Any] = {"title": {"text": escaped(label), "side": "right"}, "xpad": 0, "ypad": 0, "thickness": 18}
    bar |= {"x": place.x0, "xanchor": "left", "y": (place.y0 + place.y1) / 2, "len": place.height}
    style = {
        "colorscale": colours,
        "zmin": low,
        "zmax": high,
        "showscale": shown,
        "colorbar": bar,
        "hoverongaps": False,
    }
    return go.Heatmap(z=values, **style, **on)


def _hover(axes: Axes, x: str, y: str, *value: str) -> str:
    """What is shown under the mouse: the axes' words and the numbers."""
    said = [f"{escaped(axes.get_xlabel())} {x}", f"{escaped(axes.get_ylabel())} {y}", *value]
    return "<br>".join(said) + "<extra>%{fullData.name}</extra>"


def _shapes(axes: Axes, number: str) -> list[dict[str, Any]]:
    """Lines and bands across a whole panel, and outlines that are no bars."""
    found = []
    bars = {id(patch) for container in axes.containers for patch in getattr(container, "patches", ())}
    lines = [line for line in axes.lines if line.get_transform() != axes.transData]
    patches = [patch for patch in axes.patches if id(patch) not in bars]
    for mark in [*lines, *patches]:
        across = mark.get_transform().contains_branch_seperately(axes.transData)
        refs = [f"{name}{number}" + " domain" * (not of_data) for name, of_data in zip("xy", across, strict=True)]
        place: dict[str, Any] = {"xref": refs[0], "yref": refs[1], "layer": "below"}
        if isinstance(mark, Line2D):
            (x0, y0), (x1, y1) = np.asarray(mark.get_xydata(), dtype=float)
            dash = _DASHES.get(str(mark.get_linestyle()), "dash")
            style = {"color": to_hex(mark.get_color()), "width": mark.get_linewidth(), "dash": dash}
            found.append({"type": "line", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": style} | place)
            continue
        face, edge = to_rgba(mark.get_facecolor()), to_rgba(mark.get_edgecolor())
        line = {"color": to_hex(edge), "width": mark.get_linewidth() if edge[3] else 0}
        style = {"line": line, "fillcolor": to_hex(face) if face[3] else None, "opacity": face[3] or 1}
        outlines = mark.get_patch_transform().transform_path(mark.get_path()).to_polygons(closed_only=False)
        path = "".join("M" + "L".join(f"{x:.6g},{y:.6g}" for x, y in outline) + "Z" for outline in outlines)
        found.append({"type": "path", "path": path} | style | place)
    return found


def _texts(axes: Axes, number: str, *, drawing: Any) -> list[dict[str, Any]]:
    """Titles, and what is written beside marks, where it stands in its panel."""
    titles = [axes.title, axes._left_title, axes._right_title]  # type: ignore[attr-defined]  # they have no other name
    found = []
    for text in [*axes.texts, *titles]:
        if text.get_text():
            box = text.get_window_extent(drawing)
            side = text.get_horizontalalignment()
            at = {"left": box.x0, "right": box.x1}.get(side, (box.x0 + box.x1) / 2)
            x, y = axes.transAxes.inverted().transform((at, (box.y0 + box.y1) / 2))
            place = {"x": float(x), "y": float(y), "xref": f"x{number} domain", "yref": f"y{number} domain"}
            style = {"color": to_hex(text.get_color()), "size": 1.25 * float(text.get_fontsize())}
            found.append({"text": escaped(text.get_text()), "font": style, "showarrow": False, "xanchor": side} | place)
    return found


def _axis(axes: Axes, *, x: bool, number: str) -> dict[str, Any]:
    """The numbers, ticks and words of an axis, and where it stands."""
    one, limits = (axes.xaxis, axes.get_xlim()) if x else (axes.yaxis, axes.get_ylim())
    box = axes.get_position()
    logarithmic = one.get_scale() == "log"
    ticks = [place for place in one.get_majorticklocs() if min(limits) <= place <= max(limits)]
    found = {
        "domain": [box.x0, box.x1] if x else [box.y0, box.y1],
        "anchor": f"{'y' if x else 'x'}{number}",
        "type": "log" if logarithmic else "linear",
        "range": [float(np.log10(end)) for end in limits] if logarithmic else [float(end) for end in limits],
        "title": {"text": escaped(one.get_label_text()), "standoff": 4},
        "gridcolor": GRID,
        "zeroline": False,
        "showgrid": not axes.images,
        "tickangle": 0 if x and not axes.images else None,
        "nticks": 0 if logarithmic else 1 + len(ticks),
    }
    if isinstance(one.get_major_locator(), FixedLocator):  # words, or numbers that are names
        labels = [escaped(text.get_text()) for text in one.get_ticklabels()]
        found |= {"tickvals": list(one.get_ticklocs()), "ticktext": labels}
    return found


def escaped(text: object) -> str:
    """Lines of text as plotly shows them: what it reads as markup, escaped."""
    return "<br>".join(html.escape(visible(line, limit=160), quote=False) for line in str(text).split("\n"))


def _plain(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=float)
