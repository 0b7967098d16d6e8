"""Three figures to hover over and zoom: sink scores, the effects of a sweep, a sweep of patches, as plotly figures.

Needs plotly: ``pip install 'sink-lens[interactive]'``. A figure shows itself in a notebook in a frame that holds the
whole of plotly.js (2 MB), since plotly's own way asks a server for MathJax.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sink_lens.errors import InputError
from sink_lens.report import views
from sink_lens.report.figures import by_layer_and_head
from sink_lens.report.patch import patch_pairs, value_label
from sink_lens.report.style import INK, WORDS, signed_grid
from sink_lens.report.sweep import mapped_pair, swept_panels
from sink_lens.text import visible

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ImportError as error:
    raise InputError(
        "interactive figures need plotly, not installed here. pip install 'sink-lens[interactive]'"
    ) from error

_PANEL = 340
"""Pixels of a panel's height."""


class Interactive(go.Figure):
    """A plotly figure that a notebook or a file shows with nothing fetched."""

    _ipython_display_: Any = None  # type: ignore[assignment]  # plotly's own, which would come first

    @property
    def page(self) -> str:
        """A whole page with the figure, which opens with no network."""
        drawn = str(self.to_json()).replace("<", "\\u003c")
        config = json.dumps({"responsive": True, "displaylogo": False, "typesetMath": False})
        then = f'Plotly.newPlot("figure", {{...{drawn}, config: {config}}});'
        code = views.unpacking(get_plotlyjs(), name="Plotly", then=then)
        return views.closed_page('<div id="figure"></div>', code=code, bundle=get_plotlyjs(), title="Figure")

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(path)
        path.write_text(self.page, encoding="utf-8")
        return path

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, str]:
        return {"text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        return views.framed(self.page, height=int(self.layout.height or 420) + 30, title="Figure")


def sink_scores(heads: pd.DataFrame, *, position: int, threshold: float | None = None) -> Interactive:
    """Heat map of the sink score of a position, layer by head; the threshold is marked on the scale.

    Args:
        heads: layer, head, position, sink_score.
        position: The key.
        threshold: The threshold of the sink score.
    """
    grid = by_layer_and_head(heads, "sink_score", position=position).T
    ticks = sorted({0.0, 0.2, 0.4, 0.6, 0.8, 1.0} | ({threshold} if threshold is not None else set()))
    names = [f"<b>{tick:g}</b>" if tick == threshold else f"{tick:g}" for tick in ticks]
    scale = {"title": {"text": f"sink score of position {position}", "side": "right"}}
    found = Interactive(
        go.Heatmap(
            z=grid,
            zmin=0,
            zmax=1,
            colorscale="Viridis",
            colorbar=scale | {"tickvals": ticks, "ticktext": names},
            hoverongaps=False,
            hovertemplate="layer %{x}<br>head %{y}<br>sink score %{z:.4g}<extra></extra>",
        )
    )
    found.update_yaxes(autorange="reversed", title="head").update_xaxes(title="layer")
    return _finished(found, height=max(_PANEL, 60 + 12 * len(grid)))


def effect_figure(frame: pd.DataFrame, *, value: str = "effect", title: str = "") -> Interactive:
    """A heat map for each kind of edit and site of a sweep, over one or two of its axes; red is above 0, blue below.

    Args:
        frame: one metric's rows of a sweep.
        value: which column is drawn.
        title: above the figure.

    Raises:
        RunError: nothing was swept over numbers, or the frame has no such column.
    """
    drawn = [(name, rows, mapped_pair(rows, axes)) for name, rows, axes in swept_panels(frame, value=value)]
    return _maps(drawn, value=value, label=value.replace("_", " "), title=title)


def patch_map(
    frame: pd.DataFrame,
    *,
    by: Sequence[str],
    value: str = "effect",
    labels: Mapping[int, str] | None = None,
    title: str = "",
    unit: str = "",
) -> Interactive:
    """A column of a sweep of patches as heat maps over pairs of its swept columns: see ``patch.patch_map``.

    Args:
        frame: the columns of ``by``, and the value's.
        by: the swept columns, one at least.
        value: which column is drawn; nan is left empty.
        labels: position -> the text beside its number.
        title: above the figure.
        unit: of the value.

    Raises:
        RunError: the frame lacks a column, or nothing was swept.
    """
    drawn = [("", frame, pair) for pair in patch_pairs(frame, by=by, value=value)]
    return _maps(drawn, value=value, label=value_label(value, unit=unit), title=title, labels=labels)


def _maps(
    drawn: Sequence[tuple[str, pd.DataFrame, tuple[str, str | None]]],
    *,
    value: str,
    label: str,
    title: str,
    labels: Mapping[int, str] | None = None,
) -> Interactive:
    """Heat maps under each other on one scale that is even around 0; a tick says the number that was swept."""
    limit = max(float(np.nanmax(np.abs(rows[value].to_numpy(float)), initial=0.0)) for _, rows, _ in drawn) or 1.0
    found = Interactive(make_subplots(len(drawn), 1, subplot_titles=[escaped(name) for name, *_ in drawn]))
    for place, (_, rows, (down, across)) in enumerate(drawn, start=1):
        grid, at_rows, at_columns, crowded = signed_grid(rows, (down, across), value=value)
        y_word, x_word = (WORDS.get(str(name), str(name)) for name in (down, across))
        named = [_named(one, down, labels or {}) for one in at_rows]
        beside = [_named(one, across, labels or {}) for one in at_columns] if across is not None else [""]
        over = f"<br>{escaped(x_word)} %{{x}}" if across is not None else ""
        hover = f"{escaped(y_word)} %{{y}}{over}<br>%{{z:.4g}}<extra></extra>"
        scale = {"coloraxis": "coloraxis", "hoverongaps": False, "hovertemplate": hover}
        found.add_trace(go.Heatmap(z=grid, x=beside, y=named, **scale), row=place, col=1)
        found.update_xaxes(title=escaped(x_word) if across is not None else None, type="category", row=place, col=1)
        strongest = ", strongest" if crowded else ""
        found.update_yaxes(title=escaped(y_word) + strongest, type="category", autorange="reversed", row=place, col=1)
    colours = {"colorscale": "RdBu_r", "cmin": -limit, "cmax": limit, "colorbar": {"title": escaped(label)}}
    found.update_layout(coloraxis=colours, title_text=escaped(title) or None)
    return _finished(found, height=_PANEL * len(drawn))


def _named(place: object, axis: str | None, labels: Mapping[int, str]) -> str:
    """A swept number, and the token there."""
    text = labels.get(int(place), "") if axis == "position" and isinstance(place, (int, float)) else ""
    return escaped(f"{place:g}" if isinstance(place, (int, float)) else place) + (f" {escaped(text)}" if text else "")


def _finished(figure: Interactive, *, height: int) -> Interactive:
    figure.update_layout(template="none", height=height + 40, font={"color": INK, "size": 12}, hovermode="closest")
    figure.update_layout(margin={"l": 60, "r": 20, "t": 40, "b": 50})
    return figure


def escaped(text: object) -> str:
    """Text as plotly shows it: what it reads as markup, escaped."""
    return html.escape(visible(text, limit=60, counted=False), quote=False)
