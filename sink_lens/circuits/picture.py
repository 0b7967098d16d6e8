"""A circuit of edges as a picture: nodes by layer, from the input at the bottom to the logits at the top."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..records import refuse_file_of_run
from ..records.provenance import plain_json
from ..report import diagram, sketches
from ..report.diagram import Style
from ..report.drawable import Drawable
from ..report.explorer import Explorer
from ..report.style import (
    BLUE,
    FONT,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    legend,
    new_figure,
    without_formulas,
)
from ..text import node_label
from .config import MOST_DRAWN, check_save_path

_LAST = 10**6
"""The layer of the logits, in the order of nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeCircuit(Drawable):
    """A circuit that can be drawn, explored and written: the circuit of ``find``, or of a run folder."""

    edges: pd.DataFrame = field(repr=False)
    """The circuit's edges: writer, reader, score and more, the largest first."""
    read_nodes: Callable[[], pd.DataFrame] = field(repr=False)
    make_graph: Callable[[bool], dict[str, Any]] = field(repr=False)
    """Gives the circuit's edges, if True with the largest others, as Neuronpedia's JSON."""
    read_saved: Callable[[], Any] = field(repr=False)
    read_every: Callable[[], pd.DataFrame] = field(repr=False)
    """Gives the table of every edge of the model, with ``d_model`` among its ``attrs``."""
    title: str
    metric: str
    """The metric's name in words."""
    n_layers: int
    group: int
    """Heads that share a key-value head."""
    outputs: list[str]
    """The readers that the metric reads."""

    @property
    def nodes(self) -> pd.DataFrame:
        """The table of the writers (input, heads, MLPs), sorted by absolute score; RunError if the run has none."""
        return self.read_nodes()

    @property
    def drawn_edges(self) -> pd.DataFrame:
        """The edges that the picture shows: those marked ``drawn``, or the 60 largest if the table has no marks."""
        if "drawn" in self.edges:
            return self.edges.loc[self.edges["drawn"]]
        return self.edges.head(MOST_DRAWN)

    @property
    def graph(self) -> dict[str, Any]:
        """The model's largest edges as Neuronpedia's JSON; RunError if the run has no table of all edges."""
        return self.make_graph(True)

    def explore(self) -> Explorer:
        """Return an interactive page of the circuit; ``.save("c.html")`` writes it."""
        return Explorer(graphs=[self.graph])

    def draw(self, style: Style = "page", *, width: float | None = None) -> Figure:
        """Draw the strongest edges of the circuit: up to 60 in the style ``page``, fewer in ``paper``.

        Raises:
            InputError: another style, or more than fits into the width.
        """
        if style == "page":
            return draw_edges(
                self.drawn_edges, group=self.group, title=self.title, of=len(self.edges)
            )
        sketch = sketches.sketch_edges(
            self.edges,
            group=self.group,
            title=self.title,
            unit=f"of the {self.metric}",
            outputs=self.outputs,
            end="logits" if self.outputs == ["logits"] else self.metric,
        )
        return diagram.draw_diagram(sketch, style=style, width=width)

    def save(self, path: str | Path, *, style: Style = "page", width: float | None = None) -> Path:
        """Write the circuit to a file by its ending, or to a folder if the path has none, and return the path.

        The formats are those of ``Circuit.save``; pictures have this ``style`` and ``width`` in inches.

        Raises:
            InputError: another ending, a file that belongs to a run, or a graph that the format cannot hold.
            RunError: the run has no table of all edges, which files that are no pictures need.
        """
        check_save_path(path)
        path = Path(path)
        whole, ending = path.name.lower().endswith(".graph.json"), path.suffix.lower()
        if not whole and ending not in ("", ".json", ".parquet"):
            return super(EdgeCircuit, self).save(path, style=style, width=width)
        refuse_file_of_run(path, replaceable=(".json", ".parquet"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if whole:
            text = json.dumps(
                plain_json(self.make_graph(False)), allow_nan=False, ensure_ascii=False
            )
            path.write_text(text, encoding="utf-8")
        elif ending == ".parquet":
            self.read_every().to_parquet(path, index=False)
        else:
            self.read_saved().save(path)
        return path


def draw_edges(
    edges: pd.DataFrame, *, group: int = 1, title: str = "", of: int | None = None
) -> Figure:
    """Draw ``edges`` as arrows between nodes; the width of an arrow is the magnitude of the score.

    ``edges`` has the columns writer, reader and score, the largest first. An edge into a key-value head that ``group``
    heads share is divided among those heads in the picture. ``of``: number of all edges of the circuit, for the title.
    """
    if of is not None and of > len(edges):
        title = f"{title}\nThe strongest {len(edges)} of {of:,} edges".strip()
    ends = _edges_to_draw(edges, group=group)
    nodes = {one for writer, reader, _ in ends for one in (writer, reader.partition("<")[0])}
    by_row: dict[tuple[int, int], list[str]] = {}
    for node in sorted(nodes, key=place_of_node):
        by_row.setdefault(place_of_node(node)[:2], []).append(node)
    widest = max([1, *(len(some) for some in by_row.values())])
    place = {}
    for level, some in enumerate(by_row.values()):
        shift = 0.32 * (level % 3 - 1)  # neighbours of a column are not drawn over each other
        shift = shift if widest > 1 else 0.6 * shift
        for at, node in enumerate(some):
            x = (at - (len(some) - 1) / 2) * max(1.0, 0.75 * widest / len(some)) + shift
            place[node] = (x, level)
    width, height = min(4.4 + widest, 11.0), min(1.8 + 0.42 * len(by_row), 13.0)
    figure = new_figure(width=width, height=height)
    axes = figure.add_subplot()
    xs = [x for x, _ in place.values()] or [0.0]
    left, right = min(xs) - 0.9, max(xs) + 0.9
    # of one unit; names and legend take the rest
    inches = (width - 1.0) / (right - left), (height - 1.0) / len(by_row)
    largest = max([abs(score) for *_, score in ends], default=1.0) or 1.0
    shown: dict[str, str] = {}
    for writer, reader, score in reversed(ends):
        node = reader.partition("<")[0]
        (x0, y0), (x1, y1) = place[writer], place[node]
        colour, along = ORANGE if score < 0 else BLUE, (x1 - x0, y1 - y0)
        shown["lowers the metric" if score < 0 else "raises the metric"] = colour
        bend = 0.08 * (1 if x1 >= x0 else -1) * min(1.0, abs(y1 - y0) / 6)
        axes.annotate(
            "",
            xy=(x1, y1),
            xytext=(x0, y0),
            arrowprops={
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": 0.5 + 3.5 * abs(score) / largest,
                "linestyle": "--" if score < 0 else "-",
                "alpha": 0.35 + 0.6 * abs(score) / largest,
                "shrinkA": _points_to_border(writer, along, inches),
                "shrinkB": _points_to_border(node, along, inches) + 2,
                "connectionstyle": f"arc3,rad={bend:.3f}",
            },
        )
    box = {
        "boxstyle": "round,pad=0.22",
        "facecolor": PAPER,
        "edgecolor": "#999999",
        "linewidth": 0.7,
    }
    for node, (x, y) in place.items():
        axes.text(
            x,
            y,
            node_label(node),
            ha="center",
            va="center",
            fontsize=FONT * 0.85,
            color=INK,
            bbox=box,
            zorder=5,
        )
    axes.set_xlim(left, right)
    axes.set_ylim(-0.7, len(by_row) - 0.3)
    ends_of_rows = {-1: "input", _LAST: "logits"}
    names = [
        ends_of_rows.get(layer, f"{layer} {'MLP' if sublayer else 'attn'}")
        for layer, sublayer in by_row
    ]
    axes.set_yticks(range(len(by_row)), names)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT * 0.8, colors="#777777")
    for label, colour in sorted(shown.items()):
        axes.plot(
            [],
            [],
            color=colour,
            linestyle="--" if colour == ORANGE else "-",
            label=label,
            linewidth=2,
        )
    if shown:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.01),
            ncols=3,
            frameon=False,
            fontsize=FONT * 0.85,
        )
    if title:
        axes.set_title(title, fontsize=FONT, color=INK, loc="left")
    return without_formulas(figure)


def _points_to_border(node: str, along: tuple[float, float], inches: tuple[float, float]) -> float:
    """Return the distance in points from a node's middle to its border; ``inches``: length of a unit of each axis."""
    size = 0.85 * FONT
    half = (0.3 * size * len(node_label(node)) + 0.22 * size, 0.6 * size + 0.22 * size)
    across, up = (abs(one) * inch for one, inch in zip(along, inches, strict=True))
    long = np.hypot(across, up) or 1.0
    return float(min(half[0] / max(across / long, 1e-6), half[1] / max(up / long, 1e-6)))


def _edges_to_draw(edges: pd.DataFrame, *, group: int) -> list[tuple[str, str, float]]:
    """Return (writer, reader, score) of each arrow."""
    rows = [
        (str(row["writer"]), str(row["reader"]), float(row["score"]))
        for row in edges.to_dict("records")
    ]
    drawn = {one for writer, reader, _ in rows for one in (writer, reader.partition("<")[0])}
    ends = []
    for writer, reader, score in rows:
        node, _, kind = reader.partition("<")
        layer, shared, head = node.partition(".kv")
        heads = [f"{layer}.h{int(head) * group + one}" for one in range(group)] if shared else []
        there = [f"{one}<{kind}" for one in heads if one in drawn]
        ends += [(writer, one, score / len(there or [reader])) for one in there or [reader]]
    return ends


def draw_curve(curve: pd.DataFrame) -> Figure:
    figure = new_figure(width=6.4, height=3.6)
    axes = figure.add_subplot()
    styles = {"edges": ("#2b6cb0", "o", "edges"), "nodes": ("#2e8b57", "s", "whole nodes")}
    for by, (colour, marker, label) in styles.items():
        own = curve.loc[curve["by"].eq(by)].sort_values(by="share")
        if len(own):
            share, f, low, high = (
                own[name].to_numpy(float) for name in ("share", "faithfulness", "low", "high")
            )
            axes.fill_between(share, low, high, color=colour, alpha=0.15)
            axes.plot(
                share, f, color=colour, marker=marker, markersize=4, linewidth=1.5, label=label
            )
    points = {
        "random": ("#888888", "x", 5, 2, "random, same size and depth"),
        "swapped": (PURPLE, "+", 7, 2, "a tenth swapped"),
        "circuit": (ORANGE, "*", 13, 4, "this circuit"),
    }
    for by, (colour, marker, size, order, label) in points.items():
        own = curve.loc[curve["by"].eq(by)]
        if len(own):
            axes.plot(
                own["share"],
                own["faithfulness"],
                linestyle="none",
                color=colour,
                marker=marker,
                markersize=size,
                zorder=order,
                label=label,
            )
    for level in (1.0, 0.0):
        axes.axhline(level, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_xlabel("share of all edges, or of all nodes", fontsize=FONT)
    axes.set_ylabel("faithfulness", fontsize=FONT)
    values = curve["faithfulness"].to_numpy(float)
    values = values[np.isfinite(values)]
    if len(values):
        ends = curve.loc[curve["by"].isin(list(styles)), ["low", "high"]].to_numpy(float)
        # wider bands are cut, so that the lines stay apart
        values = np.concatenate([values, ends[np.isfinite(ends)].clip(-1, 2)])
        axes.set_ylim(min(-0.15, float(values.min()) - 0.1), max(1.15, float(values.max()) + 0.1))
    legend(axes, columns=4)
    return without_formulas(figure)


def place_of_node(node: str) -> tuple[int, int, int]:
    if node in ("input", "logits"):
        return (-1 if node == "input" else _LAST, 0, 0)
    layer, number = re.match(r"[am](\d+)", node), re.search(r"\.(?:h|kv)(\d+)", node)
    return (int(layer[1]) if layer else 0, int(node[0] != "a"), int(number[1]) if number else 0)
