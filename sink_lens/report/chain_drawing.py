"""The circuit of a trace as a figure for a page: growth steps in lanes, boxes with their parts, paths as arrows."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from sink_lens.report.style import BLUE, FONT, GREEN, INK, ORANGE, PAPER, QUIET, canvas, finished
from sink_lens.schema import LEAST_PATH, VERDICTS
from sink_lens.text import interval, number, percent, visible, words

_BOX, _GAP, _FAN, _EDGE = 0.98, 0.4, 0.22, 0.06
"""Inches: a box, the room between two, what is more where lanes part, the margin."""
_LINE, _BAR, _PAD = 0.165, 0.18, 0.08
"""Inches: a line of text, a bar, the room over and under the lines of a box."""
_BETWEEN = 0.36
"""Inches between two boxes of one column and lane; an arrow leads past them there."""
_THIN, _THICK = 1.2, 9.0
"""Points: an arrow that stands for nothing of the sink, and for all of it."""
_SMALL = FONT - 0.9
_NAME = 8
"""Characters of a part's name beside its number; a longer one is smaller."""
_MOST_LANES = 6
_STYLES = {"holds": (GREEN, "solid"), "fails": (ORANGE, "dashed")}
"""Verdict of a link -> colour and line; every other is grey and dotted."""
CARRIES, GROWS, UNTOLD = "raises", "lowers", "not told from 0"
"""Verdicts of paths: the sink is lost without it, it is larger without it, or neither interval nor controls tell."""
_WITH_PATHS = frozenset({"attn_out", "neurons", "dimension", "key", "heads"})
"""Kinds of nodes that paths join, so that their links are no lines."""
_OF_PATHS = {CARRIES: (GREEN, "solid"), GROWS: (ORANGE, "dashed")}
_CLAIMS = {
    ("position", "z"): "averaging lowers\nthe variance",
    ("z", "attn_out"): "that W_O\nkeeps",
    ("attn_out", "neurons"): "that fires\nneurons",
    ("neurons", "dimension"): "that write\na dimension",
    ("dimension", "key"): "that makes\nthe key",
    ("key", "heads"): "that queries\nmeet",
}
"""(kind of the first node, kind of the second) -> the label of the arrow between them. Other arrows have the name of
their link."""
_FROZEN_LINE, _INPUT_LINE = "freeze:", "all inputs:"
"""Beginnings of the lines that say what freezing a node, or all that it reads, takes away."""
CHARACTERS = 14
"""Characters that fit over a gap; into a box two fewer."""


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


def draw(*, about: Mapping[str, Any], nodes: pd.DataFrame, edges: pd.DataFrame) -> Figure:
    """The tables of a `ChainCircuit` as a figure: an arrow as wide as the share of the sink that its path carries.

    At most six growth steps are drawn, the first ones, and the strongest parts of a node; the figure says so.
    """
    steps = sorted({int(step) for step in nodes["step"].dropna()})
    lanes = steps[:_MOST_LANES]
    most = 6 if len(lanes) < 3 else 3
    lefts = _lefts(edges)
    lines = {str(node["id"]): _lines(node) for node in nodes.to_dict("records") if node["kind"] in lefts}
    bars = {name: _bars(nodes, name, most=most) for name in lines}
    tall = {name: 2 * _PAD + _LINE * len(lines[name]) + _BAR * len(bars[name]) for name in lines}
    lane_of = {step: max(_stacked(step, tall), *_alone(step, tall)) for step in lanes}
    numbers, foot = _LINE * 8.9, _LINE * 5.6
    left = max([tall[name] for name in lines if ":" not in name], default=0.0)
    left += 2 * (_BETWEEN + tall["mlps"]) if "mlps" in tall else 0.0
    body = max(sum(lane_of.values()) + _BETWEEN * len(lanes), left)
    width, height = max(lefts.values(), default=_EDGE) + _BOX + _EDGE, numbers + body + foot
    figure = canvas(width=width, height=height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), frame_on=False, xticks=[], yticks=[])
    middles, top = {}, height - numbers - (body - sum(lane_of.values()) - _BETWEEN * len(lanes)) / 2
    for step in lanes:
        middles[step] = top - lane_of[step] / 2
        top -= lane_of[step] + _BETWEEN
    centre = sum(middles.values()) / len(middles) if middles else foot + body / 2
    boxes = {}
    for name in lines:
        kind, _, step = name.partition(":")
        if step and int(step) not in middles:
            continue
        middle = middles[int(step)] if step else centre
        bottom = middle - tall[name] / 2
        if step and f"mlps:{step}" in tall and kind in ("mlps", "dimension"):
            shift = (tall[f"mlps:{step}"] - tall.get(f"dimension:{step}", 0.0)) / 2
            above = middle + shift
            bottom = above + _BETWEEN / 2 if kind == "dimension" else above - _BETWEEN / 2 - tall[name]
        elif name == "mlps":
            bottom = centre - tall.get("attn_out", 0.0) / 2 - _BETWEEN - tall[name]
        boxes[name] = _Box(left=lefts["early" if name == "mlps" else kind], bottom=bottom, height=tall[name])
    paths = edges.loc[edges["quantity"] == "path_share"]
    drawn = paths.loc[paths["value"].abs() >= LEAST_PATH]
    for edge in edges.loc[edges["quantity"] == "intervention_share"].to_dict("records"):
        kinds = {str(edge[end]).partition(":")[0] for end in ("source", "target")}
        if {edge["source"], edge["target"]} <= boxes.keys() and (paths.empty or not kinds <= _WITH_PATHS):
            _join(axes, boxes[edge["source"]], boxes[edge["target"]])
    said: list[tuple[float, float]] = []
    for edge in drawn.sort_values(by="value", key=abs, ascending=False).to_dict("records"):
        if edge["source"] in boxes and edge["target"] in boxes:
            _arrow(axes, edge, boxes=boxes, said=said)
    for name, box in boxes.items():
        _draw_box(axes, box, lines=lines[name], bars=bars[name])
    _numbers(axes, edges, top=height)
    _foot(axes, about, edges, left_out=len(steps) - len(lanes), top=foot)
    return finished(figure)


def _stacked(step: int, tall: Mapping[str, float]) -> float:
    """Height of the dimension of a step over its MLPs."""
    both = [tall[name] for name in (f"dimension:{step}", f"mlps:{step}") if name in tall]
    return sum(both) + _BETWEEN * (len(both) - 1) if both else 0.0


def _alone(step: int, tall: Mapping[str, float]) -> list[float]:
    """Heights of a step's other boxes."""
    return [value for name, value in tall.items() if name.endswith(f":{step}")]


def _lefts(edges: pd.DataFrame) -> dict[str, float]:
    """Kind of node -> where its column begins; the columns stand in the order in which the links join them."""
    links = edges.loc[edges["quantity"] == "intervention_share"]
    ends = [name for pair in zip(links["source"], links["target"], strict=True) for name in pair]
    found: dict[str, float] = {}
    fan = 0.0
    for name in ends:
        kind, _, step = name.partition(":")
        fan = _FAN if step else fan
        found.setdefault(kind, _EDGE + len(found) * (_BOX + _GAP) + fan)
    beside = found.get("dimension")
    if beside is not None and "path_share" in set(edges["quantity"]):
        found |= {"mlps": beside, "early": found.get("attn_out", _EDGE)}
    return found


def _of_step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    return table.loc[table["step"] == step]


def _lines(node: Mapping[Any, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a node, each with its style: name, layers, what was measured of it, what freezing it does."""
    kind, value, removed = node["kind"], node["value"], node["frozen_share"]
    label = str(node["label"])
    if kind in ("neurons", "dimension", "key"):
        label = "\n".join(label.rsplit(" ", 1))
    found = [(line, {"fontweight": "bold", "fontsize": FONT}) for line in label.split("\n")]
    if node["layers"]:
        found.append((str(node["layers"]), {"color": QUIET}))
    if kind in ("z", "attn_out", "dimension") and not math.isnan(value):
        found.append((f"std ×{number(value)}" if kind != "dimension" else f"{number(value)} × mean", {}))
    found += [(visible(line), {}) for line in str(node["detail"]).split("\n") if line]
    for begins, share in ((_INPUT_LINE, node["input_share"]), (_FROZEN_LINE, removed)):
        if not math.isnan(share):
            found.append((f"{begins} {percent(share)}", {"color": BLUE}))
    return found


def _bars(nodes: pd.DataFrame, name: str, *, most: int) -> list[tuple[str, float]]:
    """Name and number of the strongest parts of a node, and how many there are besides."""
    parts = nodes.loc[nodes["group"] == name]
    found = list(zip(parts["label"], parts["value"], strict=True))
    more = [(f"and {len(found) - most} more", math.nan)] if len(found) > most and name.startswith("neurons") else []
    return [*found[:most], *more]


def _text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **({"fontsize": _SMALL, "color": INK, "ha": "center", "va": "center", "zorder": 5} | style))


def _draw_box(
    axes: Axes, box: _Box, *, lines: Sequence[tuple[str, dict[str, Any]]], bars: Sequence[tuple[str, float]]
) -> None:
    """A node: its lines, and after the first of them its parts, each with its number as a bar."""
    shape = FancyBboxPatch((box.left, box.bottom), _BOX, box.height, boxstyle="round,pad=0,rounding_size=0.07")
    shape.set(facecolor=PAPER, edgecolor=QUIET, linewidth=1.0, zorder=3)
    axes.add_patch(shape)
    y = box.top - _PAD - _LINE / 2
    last = [line for line in lines if bars and line[0].startswith((_FROZEN_LINE, _INPUT_LINE))]
    for text, style in lines[: len(lines) - len(last)]:
        _text(axes, box.centre[0], y, text, **style)
        y -= _LINE
    for name, value in bars:
        if math.isnan(value):
            _text(axes, box.centre[0], y, name, color=QUIET)
        else:
            width = (_BOX - 0.1) * min(max(value, 0.0), 1.0)
            bar = Rectangle((box.left + 0.05, y - _BAR / 2 + 0.015), width, _BAR - 0.03)
            bar.set(facecolor=BLUE, alpha=0.28, linewidth=0, zorder=4)
            axes.add_patch(bar)
            font = (_SMALL - 0.6) * min(1.0, _NAME / len(name))
            _text(axes, box.left + 0.08, y, name, ha="left", fontsize=font)
            _text(axes, box.right - 0.07, y, f"{value:.2f}", ha="right", fontsize=_SMALL - 0.6)
        y -= _BAR
    for text, style in last:
        _text(axes, box.centre[0], y, text, **style)
        y -= _LINE


def _style(edge: Mapping[Any, Any]) -> tuple[str, Any, float]:
    """Colour, dashes, and width in points of an arrow."""
    colour, line = _OF_PATHS.get(edge["verdict"], (QUIET, "dotted"))
    width = _THIN + (_THICK - _THIN) * min(abs(edge["value"]), 1.0)
    unit = max(width, 2.0)
    dashes = {"solid": "solid", "dashed": (0, (6 / unit, 3.5 / unit)), "dotted": (0, (2.2 / unit, 2.2 / unit))}
    return colour, dashes[line], width


def _join(axes: Axes, source: _Box, target: _Box) -> None:
    """A thin line from a box to the next, which no path was measured for."""
    t = np.linspace(0, 1, 40)
    x = source.right + 0.02 + (target.left - source.right - 0.04) * t
    y = source.centre[1] + (target.centre[1] - source.centre[1]) * t * t * (3 - 2 * t)
    axes.plot(x, y, color=QUIET, linewidth=_THIN)


def _arrow(axes: Axes, edge: Mapping[Any, Any], *, boxes: Mapping[str, _Box], said: list[tuple[float, float]]) -> None:
    """A path from a box to another, with its share where neither a box nor another share is."""
    source, target = boxes[edge["source"]], boxes[edge["target"]]
    colour, dashes, width = _style(edge)
    point, half = _point(width), 0.045 + width / 100
    (begin, first), (end, last) = _ends(str(edge["source"]), str(edge["target"]), source=source, target=target)
    tip = np.array(end)
    back = tip - point * np.array(last)
    reach = max(0.25, 0.5 * float(np.linalg.norm(tip - np.array(begin))))
    controls = np.array([begin, np.array(begin) + reach * np.array(first), back - reach * np.array(last), back])
    t = np.linspace(0, 1, 60)[:, None]
    weights = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    x, y = (weights @ controls).T
    axes.plot(x, y, color=colour, linewidth=width, linestyle=dashes, solid_capstyle="butt", dash_capstyle="butt")
    side = np.array([-last[1], last[0]])
    corners = [tuple(tip), tuple(back + half * side), tuple(back - half * side)]
    axes.add_patch(Polygon(corners, facecolor=colour, linewidth=0))
    tries = sorted(range(4, 50, 2), key=lambda one: abs(one - 27))
    able = [one for one in tries if _free(x[one], y[one], boxes=boxes, said=said)]
    able += [one for one in tries if _free(x[one], y[one], boxes=boxes, said=())]
    middle = able[0] if able else 27
    said.append((x[middle], y[middle]))
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    _text(axes, x[middle], y[middle], percent(edge["value"]), color=colour, bbox=behind, fontsize=_SMALL - 0.4)


def _free(x: float, y: float, *, boxes: Mapping[str, _Box], said: Sequence[tuple[float, float]]) -> bool:
    """Check whether a share fits here."""
    wide, tall = 0.1, 0.08
    inside = any(
        box.left - wide < x < box.right + wide and box.bottom - tall < y < box.top + tall for box in boxes.values()
    )
    return not inside and all(abs(x - a) > 3 * wide or abs(y - b) > 2 * tall for a, b in said)


def _ends(
    source_name: str, target_name: str, *, source: _Box, target: _Box
) -> tuple[tuple[tuple[float, float], tuple[float, float]], tuple[tuple[float, float], tuple[float, float]]]:
    """Where an arrow begins and ends, and its directions there."""
    right, up, down = (1.0, 0.0), (0.0, 1.0), (0.0, -1.0)
    begins, ends = source_name.partition(":")[0], target_name.partition(":")[0]
    into = {"position": 0.3, "attn_out": 0.1, "mlps": -0.12, "dimension": 0.14}.get(begins, 0.0)
    end = (target.left - 0.02, target.centre[1] + into * min(1.0, target.height))
    if begins == ends:  # neurons of one step to those of the next
        x = source.left + _BOX / 2
        return ((x, source.bottom - 0.02), down), ((x, target.top + 0.02), down)
    if begins == "position":
        over = target.centre[1] >= source.centre[1]
        edge = source.top + 0.02 if over else source.bottom - 0.02
        return ((source.centre[0], edge), up if over else down), (end, right)
    if begins == "mlps" and target.left < source.left:  # to the neurons of the next step
        x = target.right - 0.15
        return ((source.left + 0.15, source.bottom - 0.02), down), ((x, target.top + 0.02), down)
    outof = {"dimension": 0.14, "mlps": -0.16}.get(ends, 0.0) if begins == "neurons" else 0.0
    return ((source.right + 0.02, source.centre[1] + outof), right), (end, right)


def _point(width: float) -> float:
    """Inches: the length of the head of an arrow."""
    return 0.07 + width / 110


def _numbers(axes: Axes, edges: pd.DataFrame, *, top: float) -> None:
    """Over each gap: what the link says, its verdict, the statistic, the intervention, its interval, the controls."""
    lefts = _lefts(edges)
    links = edges.loc[edges["quantity"] == "intervention_share"].drop_duplicates("link")
    for index, edge in enumerate(links.to_dict("records")):
        source, target = (str(edge[end]).partition(":")[0] for end in ("source", "target"))
        claim = _CLAIMS.get((source, target)) or textwrap.fill(visible(edge["link"]).replace("_", " "), CHARACTERS)
        x = (lefts[source] + _BOX + lefts[target]) / 2
        colour = _STYLES.get(edge["verdict"], (QUIET, ""))[0]
        verdict = f"{VERDICTS.get(edge['verdict'], '?')} {visible(edge['verdict'])}"
        said = [(line, {}) for line in claim.split("\n")]
        said.append((verdict, {"color": colour, "fontweight": "bold", "fontsize": FONT}))
        if not math.isnan(edge["statistic_value"]):
            name = words(visible(edge["statistic"])).replace(", nats", "")
            said.append((name, {"color": QUIET}))
            said.append((f"{number(edge['statistic_value'])}{_sign(edge['measured'])}", {"color": QUIET}))
        said += _effect_texts(edge, first=index == 0)
        for place, (text, style) in enumerate(said):
            _text(axes, x, top - _LINE * (place + 0.7), text, **style)


def _effect_texts(edge: Mapping[Any, Any], *, first: bool) -> list[tuple[str, dict[str, Any]]]:
    """The share of the sink that a link's intervention moves, its interval and controls, each with its style."""
    if math.isnan(edge["value"]):
        return [("no intervention", {"color": QUIET})]
    colour = _STYLES.get(edge["verdict"], (QUIET, ""))[0]
    what = f"{'makes' if first else 'removes'} {percent(edge['value'])}{_sign(edge['intervened'])}"
    said: list[tuple[str, dict[str, Any]]] = [(what, {"color": colour, "fontsize": FONT})]
    if bounds := interval(edge["ci_low"], edge["ci_high"], shown=percent):
        said.append((bounds, {"color": QUIET}))
    if not math.isnan(edge["control"]):
        said.append((f"controls {percent(edge['control'])}", {"color": QUIET}))
    return said


def _sign(verdict: str) -> str:
    """Say what the measurement, or the intervention, says by itself."""
    return f" {VERDICTS[verdict]}" if verdict in VERDICTS else ""


def _foot(axes: Axes, about: Mapping[str, Any], edges: pd.DataFrame, *, left_out: int, top: float) -> None:
    """Explain the arrows and numbers below the drawing."""
    lines = [
        "Arrow: a path. As wide as the share of the sink that is lost if its end alone reads the stream without what "
        "its beginning wrote.",
        "Green: more than 0 and than the controls. Dotted: not told. Orange, dashed: the sink grows without it. Under "
        f"{percent(LEAST_PATH)}: not drawn.",
        "All inputs: what is lost if all that a node reads is as on ordinary tokens. Freeze: if the node itself is.",
        "Bars: a neuron's share of its layer's change of the dimension; a head's sink score.",
        "On top: each link of the chain, its statistic, and what its intervention makes (the first) or removes.",
    ]
    if "path_share" not in set(edges["quantity"]):
        lines[:2] = ["No path was measured in this run, so there are lines and no arrows."]
    if "not applicable" in edges["verdict"].tolist():
        lines[:2] = ["No position is a sink, so no link is judged and there are no paths."]
    if left_out > 0:
        lines[-1] += f" {left_out} more growth steps are not drawn."
    for place, line in enumerate(lines):
        _text(axes, _EDGE, top - _LINE * (place + 0.6), line, ha="left", color=QUIET)
