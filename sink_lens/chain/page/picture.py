"""The chain of a trace as a picture, which reads from left to right, or downwards if it is narrow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon
from matplotlib.transforms import Bbox

from ...errors import InputError, RunError
from ...report.diagram import Style, fill_lines
from ...report.style import (
    BLUE,
    BOX,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    new_figure,
    without_formulas,
)
from ...schema import VERDICTS
from ...text import percent, plural, safe_line
from ..links.words import PLAIN, WORDS, change_texts

LINES: Mapping[str, tuple[str, Any]] = {
    "holds": (GREEN, "solid"),
    "in part": (BLUE, (0, (5, 1.2, 1, 1.2))),
    "fails": (ORANGE, (0, (3, 1.6))),
    "not in this basis": (ORANGE, (0, (3, 1.6, 1, 1.6))),
}
"""Colour and dashes of an arrow; every other is grey and dotted: nothing was decided."""
_DOTTED = (QUIET, (0, (1, 1.4)))
_MOST_STEPS = 6
_NARROW = 5.0
"""Inches below which the figure reads downwards."""
_WIDTHS: Mapping[str, float] = {"page": 9.0, "paper": 6.75}
_EDGE = 0.12
"""Inches around the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A node: its level along the chain, its growth step (None: all share it), and its text."""

    level: int
    row: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bond:
    """A link: its arrows, as pairs of ids of boxes, and the lines of text beside them."""

    ends: tuple[tuple[str, str], ...]
    verdict: str
    share: float
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Width in inches, size of the type in points, family of the font, and the direction of reading."""

    width: float
    size: float
    family: str
    down: bool

    @property
    def line(self) -> float:
        return 1.25 * self.size / 72

    def wrap(self, text: str, width: float, *, bold: bool = False) -> list[str]:
        """Break a text into lines of at most ``width`` inches; _TooNarrowError if a word is wider."""
        parts = [
            fill_lines(one.split(), width, family=self.family, size=self.size, bold=bold)
            for one in text.split("\n")
        ]
        if None in parts:
            raise _TooNarrowError
        return [line for part in parts for line in part or []]


class _TooNarrowError(Exception):
    """A word is wider than its place."""


def draw_chain(circuit: Any, *, style: Style, width: float | None) -> Figure:
    """Draw in the largest type that fits.

    Raises:
        InputError: another style, or more than fits into the width.
    """
    if style not in _WIDTHS:
        raise InputError(f"the style is {style!r}; need one of {', '.join(_WIDTHS)}")
    width = width or _WIDTHS[style]
    boxes, bonds = _boxes_and_bonds(circuit)
    if not bonds:
        raise RunError(
            "the run has no link of a chain, so there is nothing to draw. Run again to see it"
        )
    title, says = _words_around(circuit)
    largest, family = (10.0, "sans-serif") if style == "page" else (9.0, "STIXGeneral")
    form = _Form(width=width, size=largest, family=family, down=width < _NARROW)
    while form.size >= 5:
        try:
            return _draw(boxes, bonds, title=title, says=says, form=form)
        except _TooNarrowError:
            form = replace(form, size=form.size - 0.5)
    raise InputError(
        f"the chain does not fit into {width:g} inches; need {width + 1:g} or more. Draw it wider"
    )


def _words_around(circuit: Any) -> tuple[str, str]:
    studied, model = circuit.about["studied"], safe_line(circuit.about["model"], limit=40)
    measured = f"What was measured at {studied}"
    if not circuit.about["is_sink"]:
        title = f"{measured} of {model}, which is no attention sink"
        return title, "It is no attention sink, so no link was intervened on."
    if not circuit.is_causal:
        says = "No link of this run was intervened on. To test the links, trace again and leave interventions on."
        return f"{measured}, the attention sink of {model}", says
    says = "Number: the share of the sink that the link's intervention removes, or makes elsewhere; its 95% interval."
    steps = len(set(circuit.nodes["step"].dropna()))
    if circuit.about.get("value_average"):
        says += (
            " Size, direction and distance: what the sink loses if its average of values has the ordinary one (in "
            "brackets: the most with a random direction)."
        )
    if steps > 1:
        says += (
            f" The {steps} growth steps stand side by side; a number is of all of them together."
        )
    if steps > _MOST_STEPS:
        says += f" {steps - _MOST_STEPS} more growth steps are not drawn."
    return f"What makes {studied} the attention sink of {model}", says


def _boxes_and_bonds(circuit: Any) -> tuple[dict[str, _Box], list[_Bond]]:
    steps = sorted(set(circuit.nodes["step"].dropna()))
    nodes = circuit.nodes.loc[~circuit.nodes["step"].isin(steps[_MOST_STEPS:])]
    links = circuit.edges.loc[circuit.edges["quantity"] == "intervention_share"]
    links = links.loc[links["source"].isin(nodes["id"]) & links["target"].isin(nodes["id"])]
    kinds = dict(zip(nodes["id"], nodes["kind"], strict=True))
    arrows = dict.fromkeys(zip(links["source"].map(kinds), links["target"].map(kinds), strict=True))
    level = dict.fromkeys((kind for ends in arrows for kind in ends), 0)
    for _ in level:  # a chain is at most as long as it has nodes
        for source, target in arrows:
            level[target] = max(level[target], level[source] + 1)
    boxes, bonds = {}, []
    for node in nodes.loc[nodes["kind"].isin(list(level))].to_dict("records"):
        row = None if math.isnan(node["step"]) or len(steps) < 2 else steps.index(node["step"])
        boxes[node["id"]] = _Box(level=level[node["kind"]], row=row, text=_box_text(node))
    for link, rows in links.groupby("link", sort=False):
        first = rows.iloc[0]
        verdict, share = str(first["verdict"]), float(first["value"])
        texts = [f"{VERDICTS.get(verdict, '–')} {safe_line(verdict, limit=30)}"]
        if not math.isnan(share):
            does, control = WORDS.get(str(link), PLAIN).does, float(first["control_largest"])
            texts += change_texts(share, first["ci_low"], first["ci_high"], does=does)
            texts += [f"controls ≤{percent(control)}"] * (2 * control > abs(share))
        if first["source"] == "position":
            texts += [
                f"{word} {percent(one)}" + f" (≤{percent(random)})" * (not math.isnan(random))
                for word, (one, random) in circuit.about.get("value_average", {}).items()
            ]
        ends, texts = zip(rows["source"], rows["target"], strict=True), filter(None, texts)
        bonds.append(_Bond(ends=tuple(ends), verdict=verdict, share=share, texts=tuple(texts)))
    return boxes, bonds


def _box_text(node: Mapping[Any, Any]) -> str:
    kind, value, label, layers = (node[name] for name in ("kind", "value", "label", "layers"))
    over = node["detail"].partition("\n")[0]
    named = {
        "position": f"token at {label}",
        "z": "average of values",
        "attn_out": "attention output",
        "neurons": "super neurons" if math.isnan(value) else plural(int(value), "super neuron"),
        "dimension": label if "outlier" in label else f"outlier {label}",
        "heads": f"sink in {over} heads" if over else "sink",
    }.get(kind, safe_line(label.replace("\n", " "), limit=60, counted=False))
    if kind in ("neurons", "key", "heads") and layers.startswith("layer"):
        return f"{named}\n{layers}"
    return named


def _draw(
    boxes: Mapping[str, _Box], bonds: Sequence[_Bond], *, title: str, says: str, form: _Form
) -> Figure:
    """Draw at one size of type; _TooNarrowError if a word does not fit."""
    em, line, room = form.size / 72, form.line, form.width - 2 * _EDGE
    big, small = replace(form, size=form.size + 1), replace(form, size=max(form.size - 1.5, 5.0))
    n_levels = 1 + max(box.level for box in boxes.values())
    n_rows = 1 + max((box.row for box in boxes.values() if box.row is not None), default=0)
    pitch, beside = room / n_levels, 0.36 * room
    wide = (room - beside) / n_rows - 0.6 * em if form.down else 0.7 * pitch
    heads, foot = big.wrap(title, room, bold=True), small.wrap(says, room)
    lines = {name: form.wrap(box.text, wide - 0.6 * em) for name, box in boxes.items()}
    beneath = _labels_by_level(boxes, bonds, width=beside if form.down else 0.98 * pitch, form=form)
    tall = {name: len(of) * line + 0.7 * em for name, of in lines.items()}
    deep = [
        max(tall[name] for name, box in boxes.items() if box.level == level)
        for level in range(n_levels)
    ]
    above = len(heads) * big.line + 0.7 * em + _EDGE
    below = len(foot) * small.line + 0.6 * em + _EDGE
    gaps = [
        max(1.6 * line, (len(beneath.get(level, ())) + 0.3) * line) for level in range(n_levels - 1)
    ]
    row_pitch, band = max(deep) + 0.9 * em, max(map(len, beneath.values()), default=0) * line
    body = sum(deep) + sum(gaps) if form.down else n_rows * row_pitch + band
    height, places = above + below + body, {}
    for name, box in boxes.items():
        row = (n_rows - 1) / 2 if box.row is None else box.row
        x, y = _EDGE + pitch * (box.level + 0.5), height - above - row_pitch * (row + 0.5)
        if form.down:
            before = sum(deep[: box.level]) + sum(gaps[: box.level])
            x = _EDGE + (room - beside) * (row + 0.5) / n_rows
            y = height - above - before - deep[box.level] / 2
        places[name] = Bbox.from_bounds(x - wide / 2, y - tall[name] / 2, wide, tall[name])
    figure = new_figure(width=form.width, height=height)
    figure.set_layout_engine("none")
    limits: dict[str, Any] = {"xlim": (0, form.width), "ylim": (0, height)}
    axes = figure.add_axes((0, 0, 1, 1), frame_on=False, xticks=[], yticks=[], **limits)
    for bond in bonds:
        for source, target in bond.ends:
            past = boxes[target].level - boxes[source].level > 1
            _draw_arrow(axes, places[source], places[target], bond=bond, past=past, form=form)
    for name, place in places.items():
        shape = FancyBboxPatch(
            place.p0, wide, place.height, boxstyle=f"round,pad=0,rounding_size={0.3 * em:.3f}"
        )
        shape.set(facecolor=BOX, edgecolor=INK, linewidth=0.8)
        axes.add_patch(shape)
        for at, text in enumerate(lines[name]):
            y = place.y1 - 0.35 * em - (at + 0.5) * line
            _write(axes, (place.x0 + place.x1) / 2, y, text, form=form, ha="center")
    for level, labels in beneath.items():
        x, top = _EDGE + pitch * (level + 1), height - above - n_rows * row_pitch
        if form.down:
            middle = sum(deep[: level + 1]) + sum(gaps[:level]) + gaps[level] / 2
            x, top = _EDGE + room - beside + em, height - above - middle + len(labels) * line / 2
        for at, (text, colour, bold) in enumerate(labels):
            y, side = top - (at + 0.5) * line, "left" if form.down else "center"
            _write(axes, x, y, text, form=form, ha=side, color=colour, bold=bold)
    for at, text in enumerate(heads):
        _write(axes, _EDGE, height - _EDGE - (at + 0.5) * big.line, text, form=big, bold=True)
    for at, text in enumerate(foot):
        _write(
            axes, _EDGE, below - 0.4 * em - (at + 0.5) * small.line, text, form=small, color=FAINT
        )
    return without_formulas(figure)


def _labels_by_level(
    boxes: Mapping[str, _Box], bonds: Sequence[_Bond], *, width: float, form: _Form
) -> dict[int, list[tuple[str, str, bool]]]:
    found: dict[int, list[tuple[str, str, bool]]] = {}
    levels = [boxes[bond.ends[0][0]].level for bond in bonds]
    for bond, level in zip(bonds, levels, strict=True):
        end, colour = boxes[bond.ends[0][1]], LINES.get(bond.verdict, _DOTTED)[0]
        named = levels.count(level) > 1 or end.level != level + 1
        texts = [f"to {end.text.partition(chr(10))[0]}:", *bond.texts] if named else bond.texts
        for text in texts:
            bold = text == bond.texts[0]
            lines = form.wrap(text, width, bold=bold)
            found.setdefault(level, []).extend(
                (one, colour if bold else INK, bold) for one in lines
            )
    return found


def _draw_arrow(
    axes: Axes, source: Bbox, target: Bbox, *, bond: _Bond, past: bool, form: _Form
) -> None:
    """An arrow that leads ``past`` a level goes around the boxes."""
    colour, dashes = LINES.get(bond.verdict, _DOTTED)
    share = 0.0 if math.isnan(bond.share) else min(max(bond.share, 0.0), 1.0)
    width = form.size * (0.16 + 0.22 * share)
    if form.down == past:  # from side to side
        start = np.array((source.x1, (source.y0 + source.y1) / 2))
        end = np.array((target.x1 if past else target.x0, (target.y0 + target.y1) / 2))
    else:
        start = np.array(((source.x0 + source.x1) / 2, source.y1 if past else source.y0))
        end = np.array(((target.x0 + target.x1) / 2, target.y1))
    bend = np.array((0.2, 0.0) if form.down else (0.0, 0.2)) * np.hypot(*(end - start)) * past
    middle = (start + end) / 2 + 2 * bend
    along = (end - middle) / (np.hypot(*(end - middle)) or 1.0)
    long = (0.45 * form.size + width) / 72
    base, t = end - along * long, np.linspace(0, 1, 40)[:, None]
    curve = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * base
    axes.plot(
        *curve.T, color=colour, linewidth=width, linestyle=dashes, dash_capstyle="butt", zorder=1
    )
    across = np.array((-along[1], along[0])) * 0.6 * long
    axes.add_patch(
        Polygon([end, base + across, base - across], facecolor=colour, linewidth=0, zorder=1)
    )


def _write(
    axes: Axes, x: float, y: float, text: str, *, form: _Form, bold: bool = False, **style: Any
) -> None:
    given: dict[str, Any] = {"ha": "left", "color": INK} | style
    weight, fonts = "bold" if bold else "normal", [form.family, "DejaVu Sans"]
    given |= {"fontsize": form.size, "fontweight": weight, "fontfamily": fonts}
    axes.text(x, y, text, va="center", **given)
