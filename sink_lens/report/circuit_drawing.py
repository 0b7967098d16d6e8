"""The drawing of a circuit, in inches: seven columns from the token to the heads, a lane for each growth step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from sink_lens.report.circuit import KINDS, Circuit
from sink_lens.report.columns import floats, named, select
from sink_lens.report.drawing import BLUE, FONT, GREEN, INK, ORANGE, PURPLE, QUIET, canvas, finished
from sink_lens.report.words import LINKS, VERDICTS, number, visible

_BOX, _GAP, _FAN, _EDGE = 0.98, 0.4, 0.22, 0.06
"""Inches: a box, the room between two, what is more where lanes part, the margin."""
_LINE, _BAR, _PAD = 0.165, 0.18, 0.08
"""Inches: a line of text, a bar, the room over and under the lines of a box."""
_ARC = 0.5
"""Inches over a lane with arrows that lead past a node."""
_THIN, _THICK = 1.2, 9.0
"""Points: an arrow that stands for nothing of the sink, and for all of it."""
_SMALL = FONT - 0.9
_MOST_LANES = 6
_STYLES = {"holds": (GREEN, "solid"), "fails": (ORANGE, "dashed"), "another path": (PURPLE, "solid")}
"""Verdict -> colour and line; every other is grey and dotted."""
_CLAIMS = (
    "averaging makes\na spread",
    "that W_O\nkeeps",
    "that fires\nneurons",
    "that write\na dimension",
    "that makes\nthe key",
    "that queries\nmeet",
)
"""What each link says, in the few words that fit over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Where a node stands, in inches from the lower left."""

    left: float
    bottom: float
    height: float

    @property
    def right(self) -> float:
        return self.left + _BOX

    @property
    def top(self) -> float:
        return self.bottom + self.height

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + _BOX / 2, self.bottom + self.height / 2


def drawn(circuit: Circuit) -> Figure:
    """The figure of a circuit.

    Of more than six growth steps the first six are drawn, and of a node the strongest parts; the figure says so, and
    the circuit's tables hold them all.
    """
    nodes, edges = circuit.nodes, circuit.edges
    steps = sorted({int(step) for step in floats(nodes, "step") if not math.isnan(step)})
    lanes = steps[:_MOST_LANES]
    most = 6 if len(lanes) < 3 else 3
    lines = {str(node["id"]): _lines(node) for node in nodes.to_dict("records") if node["kind"] in KINDS}
    bars = {name: _parts(nodes, name, most=most) for name in lines}
    tall = {name: 2 * _PAD + _LINE * len(lines[name]) + _BAR * len(bars[name]) for name in lines}
    arcs = {step: _ARC if len(_of_step(named(edges, "verdict", "another path"), step)) else 0.0 for step in lanes}
    lane_of = {step: max(tall[f"{kind}:{step}"] for kind in KINDS[3:]) for step in lanes}
    numbers, foot = _LINE * 8.9, _LINE * 4.6
    body = sum(lane_of.values()) + sum(arcs.values()) + 0.2 * len(lanes)
    width, height = _left("heads") + _BOX + _EDGE, numbers + body + foot
    figure = canvas(width=width, height=height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), frame_on=False, xticks=[], yticks=[])
    middles, top = {}, height - numbers
    for step in lanes:
        middles[step] = top - arcs[step] - lane_of[step] / 2
        top -= arcs[step] + lane_of[step] + 0.2
    centre = sum(middles.values()) / len(middles)
    boxes = {}
    for name in lines:
        kind, _, step = name.partition(":")
        if not step or int(step) in middles:
            middle = middles[int(step)] if step else centre
            boxes[name] = _Box(left=_left(kind), bottom=middle - tall[name] / 2, height=tall[name])
    for edge in edges.to_dict("records"):
        if edge["source"] in boxes and edge["target"] in boxes:
            past = edge["verdict"] == "another path"
            (_arrow_past if past else _arrow)(axes, edge, boxes=boxes)
    for name, box in boxes.items():
        _draw_box(axes, box, lines=lines[name], bars=bars[name])
    _numbers(axes, edges, top=height)
    _foot(axes, circuit, left_out=len(steps) - len(lanes), top=foot)
    return finished(figure)


def _left(kind: str) -> float:
    place = KINDS.index(kind)
    return _EDGE + place * (_BOX + _GAP) + (_FAN if place > 2 else 0.0)


def _of_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    return select(table, floats(table, "step") == step)


def _lines(node: Mapping[Any, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The lines of text of a node, each with its style: name, layers, what was measured of it, what holding it does."""
    kind, value, held = node["kind"], node["value"], node["held_share"]
    label = str(node["label"])
    if kind in ("neurons", "dimension", "key"):
        label = "\n".join(label.rsplit(" ", 1))
    found = [(line, {"fontweight": "bold", "fontsize": FONT}) for line in label.split("\n")]
    if node["layers"]:
        found.append((str(node["layers"]), {"color": QUIET}))
    if kind in ("z", "attn_out", "dimension") and not math.isnan(value):
        found.append((f"spread ×{number(value)}" if kind != "dimension" else f"{number(value)} × mean", {}))
    found += [(visible(line), {}) for line in str(node["detail"]).split("\n") if line]
    if not math.isnan(held):
        found.append((f"held: {_signed(-held)}", {"color": BLUE}))
    return found


def _parts(nodes: pd.DataFrame, name: str, *, most: int) -> list[tuple[str, float]]:
    """Name and number of the strongest parts of a node, and how many there are besides."""
    parts = named(nodes, "group", name)
    found = list(zip(parts["label"].astype(str), floats(parts, "value").tolist(), strict=True))
    more = [(f"and {len(found) - most} more", math.nan)] if len(found) > most and name.startswith("neurons") else []
    return [*found[:most], *more]


def _text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **({"fontsize": _SMALL, "color": INK, "ha": "center", "va": "center"} | style))


def _draw_box(
    axes: Axes, box: _Box, *, lines: Sequence[tuple[str, dict[str, Any]]], bars: Sequence[tuple[str, float]]
) -> None:
    """A node: its lines, and after the first of them its parts, each with its number as a bar."""
    shape = FancyBboxPatch((box.left, box.bottom), _BOX, box.height, boxstyle="round,pad=0,rounding_size=0.07")
    shape.set(facecolor="none", edgecolor=QUIET, linewidth=1.0)
    axes.add_patch(shape)
    y = box.top - _PAD - _LINE / 2
    last = lines[-1:] if bars and lines[-1][0].startswith("held") else []
    for text, style in lines[: len(lines) - len(last)]:
        _text(axes, box.centre[0], y, text, **style)
        y -= _LINE
    for name, value in bars:
        if math.isnan(value):
            _text(axes, box.centre[0], y, name, color=QUIET)
        else:
            width = (_BOX - 0.1) * min(max(value, 0.0), 1.0)
            bar = Rectangle((box.left + 0.05, y - _BAR / 2 + 0.015), width, _BAR - 0.03)
            bar.set(facecolor=BLUE, alpha=0.28, linewidth=0)
            axes.add_patch(bar)
            _text(axes, box.left + 0.08, y, name, ha="left", fontsize=_SMALL - 0.6)
            _text(axes, box.right - 0.07, y, f"{value:.2f}", ha="right", fontsize=_SMALL - 0.6)
        y -= _BAR
    for text, style in last:
        _text(axes, box.centre[0], y, text, **style)


def _signed(share: float) -> str:
    """A share of the sink as a signed percentage."""
    return f"{100 * share:+.0f}%".replace("-", "−") if abs(share) >= 0.005 else "0%"


def _style(edge: Mapping[Any, Any]) -> tuple[str, Any, float]:
    """Colour, dashes, and width in points of an arrow."""
    colour, line = _STYLES.get(edge["verdict"], (QUIET, "dotted"))
    share = edge["value"]
    width = _THIN if math.isnan(share) else _THIN + (_THICK - _THIN) * min(max(share, 0.0), 1.0)
    unit = max(width, 2.0)
    dashes = {"solid": "solid", "dashed": (0, (6 / unit, 3.5 / unit)), "dotted": (0, (2.2 / unit, 2.2 / unit))}
    return colour, dashes[line], width


def _arrow(axes: Axes, edge: Mapping[Any, Any], *, boxes: Mapping[str, _Box]) -> None:
    """From the right of a box to the left of the next; in an S where they stand at different heights."""
    source, target = boxes[edge["source"]], boxes[edge["target"]]
    colour, dashes, width = _style(edge)
    tip = (target.left - 0.02, target.centre[1])
    point = _point(width)
    t = np.linspace(0, 1, 40)
    x = source.right + 0.02 + (tip[0] - point + 0.01 - source.right - 0.02) * t
    y = source.centre[1] + (tip[1] - source.centre[1]) * t * t * (3 - 2 * t)
    axes.plot(x, y, color=colour, linewidth=width, linestyle=dashes, solid_capstyle="butt", dash_capstyle="butt")
    half = 0.045 + width / 100
    corners = [tip, (tip[0] - point, tip[1] + half), (tip[0] - point, tip[1] - half)]
    axes.add_patch(Polygon(corners, facecolor=colour, linewidth=0))


def _arrow_past(axes: Axes, edge: Mapping[Any, Any], *, boxes: Mapping[str, _Box]) -> None:
    """Over the box that is passed, with the share that survives its being held."""
    target = boxes[edge["target"]]
    passed = boxes[f"{str(edge['link']).removeprefix('past ')}:{edge['step']:.0f}"]
    source = boxes[edge["source"]] if ":" in edge["source"] else None
    colour, dashes, width = _style(edge)
    point = _point(width)
    tip = (target.left + 0.25, target.top + 0.02)
    start = (passed.left - 0.14, passed.centre[1]) if source is None else (source.right - 0.12, source.top + 0.02)
    level = max(start[1], passed.top, tip[1] + point) + 0.3
    ends = (start, (tip[0], tip[1] + point - 0.01))
    controls = np.array([ends[0], (ends[0][0], level), (ends[1][0], level), ends[1]])
    t = np.linspace(0, 1, 60)[:, None]
    weights = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    x, y = (weights @ controls).T
    axes.plot(x, y, color=colour, linewidth=width, linestyle=dashes, solid_capstyle="butt")
    half = 0.045 + width / 100
    corners = [tip, (tip[0] - half, tip[1] + point), (tip[0] + half, tip[1] + point)]
    axes.add_patch(Polygon(corners, facecolor=colour, linewidth=0))
    label = f"{100 * edge['value']:.0f}% of the sink survives"
    _text(axes, passed.centre[0], float(y.max()) + width / 144 + 0.09, label, color=colour)


def _point(width: float) -> float:
    """Inches: the length of the head of an arrow."""
    return 0.07 + width / 110


def _numbers(axes: Axes, edges: pd.DataFrame, *, top: float) -> None:
    """Over each gap: what the link says, its verdict, the statistic, the cut, its interval, the controls."""
    for index, (link, claim) in enumerate(zip(LINKS, _CLAIMS, strict=True)):
        of_link = named(edges, "link", link).to_dict("records")
        edge = next((row for row in of_link if row["verdict"] != "part"), None)
        if edge is None:
            continue
        x = (_left(KINDS[index]) + _BOX + _left(KINDS[index + 1])) / 2
        colour = _STYLES.get(edge["verdict"], (QUIET, ""))[0]
        verdict = f"{VERDICTS.get(edge['verdict'], '?')} {visible(edge['verdict'])}"
        said = [(line, {}) for line in claim.split("\n")]
        said.append((verdict, {"color": colour, "fontweight": "bold", "fontsize": FONT}))
        if not math.isnan(edge["statistic_value"]):
            name = visible(edge["statistic"]).replace("_nats", "").replace("_", " ")
            said.append((name, {"color": QUIET}))
            said.append((f"{number(edge['statistic_value'])}{_sign(edge['measured'])}", {"color": QUIET}))
        sign = 1 if index == 0 else -1
        if math.isnan(edge["value"]):
            said.append(("not cut", {"color": QUIET}))
        else:
            said.append(
                (f"cut {_signed(sign * edge['value'])}{_sign(edge['cut'])}", {"color": colour, "fontsize": FONT})
            )
        if not math.isnan(edge["ci_low"]):
            low, high = sorted(sign * edge[name] for name in ("ci_low", "ci_high"))
            said.append((f"{_signed(low)} to {_signed(high)}", {"color": QUIET}))
        if not math.isnan(edge["control"]):
            said.append((f"controls {_signed(sign * edge['control'])}", {"color": QUIET}))
        for place, (text, style) in enumerate(said):
            _text(axes, x, top - _LINE * (place + 0.7), text, **style)


def _sign(verdict: str) -> str:
    """What measuring, or cutting, says by itself."""
    return f" {VERDICTS[verdict]}" if verdict in VERDICTS else ""


def _foot(axes: Axes, circuit: Circuit, *, left_out: int, top: float) -> None:
    """What the arrows and numbers are."""
    made = circuit.about.get("made_at")
    at = "" if made is None else f" at position {number(made)}"
    lines = [
        f"Arrow: as wide as its cut's share of the sink, which the first cut makes{at} and the others remove; all "
        "growth steps are cut together.",
        "Solid: the link holds, which needs ✓ of statistic and cut. Dashed: it fails. Dotted: undecided, or not "
        "measured.",
        "Held: what becomes of the sink when this node alone is held at what it is at other positions. Violet: what "
        "then survives.",
        "Bars: a neuron's share of its layer's change of the dimension (layer.neuron); a head's sink score.",
    ]
    if not np.isfinite(floats(named(circuit.edges, "quantity", "cut_share"), "value")).any():
        lines[0] = "No link of this run was cut, so every arrow is thin."
    if left_out > 0:
        lines[-1] += f" {left_out} more growth steps are not drawn."
    for place, line in enumerate(lines):
        _text(axes, _EDGE, top - _LINE * (place + 0.6), line, ha="left", color=QUIET)
