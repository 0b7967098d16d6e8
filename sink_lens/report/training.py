"""Figures of training: the course of a run's measures, and arms beside each other. Data frames in, a figure out."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .columns import floats, named, select
from .drawing import (
    BLUE,
    FONT,
    GREEN,
    INK,
    OCHRE,
    ORANGE,
    PURPLE,
    QUIET,
    canvas,
    colour_scale,
    finished,
    legend,
    logarithmic,
    panel,
    whole_numbers,
)
from .words import short

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, OCHRE, QUIET)
"""Of arms and of other lines, in order."""
MARKS = ("o", "s", "^", "D", "v", "P")


def course(
    watched: pd.DataFrame,
    *,
    log: pd.DataFrame | None = None,
    threshold: float = 0.3,
    born: float | int | None = None,
    title: str = "",
) -> Figure:
    """The measures of a run's checkpoints against tokens: small multiples, layers by colour, the birth marked.

    Args:
        watched: step, tokens, measure, layer, position, threshold, value (see ``training.watching.watch``).
        log: tokens, loss and eval_loss of the run; the loss on the watched sequences alone if None.
        threshold: of the sink score: the line that is drawn thick.
        born: tokens at the sink's birth.
        title: above the figure.
    """
    figure = canvas(width=9.4, height=9.6)
    scale = _Tokens(floats(watched, "tokens"))
    places = iter(range(1, 9))

    def add(ylabel: str) -> Axes:
        place = next(places)
        return panel(figure, place=(4, 2, place), xlabel="tokens" if place > 6 else "", ylabel=ylabel)

    loss = add("loss, nats")
    _losses(loss, watched, log, scale)
    rate = add("share of heads with a sink")
    rows = _whole(watched, "sink_rate")
    for index, level in enumerate(sorted(set(floats(rows, "threshold").tolist()))):
        one = select(rows, floats(rows, "threshold") == level)
        chosen = bool(np.isclose(level, threshold))
        width = 2.4 if chosen else 1.2
        colour = COLOURS[index % len(COLOURS)]
        mark = MARKS[index % len(MARKS)]
        _line(rate, one, scale, color=colour, marker=mark, linewidth=width, label=f"over {level:g}")
    rate.set_ylim(-0.02, max(0.1, 1.05 * _most(rows)))
    legend(rate, columns=4)
    mass = add("attention to position 0")
    layers, image = _by_layer(mass, watched, "sink_mass", scale)
    uniform = _whole(watched, "uniform_mass")
    if len(uniform):
        mass.axhline(floats(uniform, "value")[0], color=QUIET, linestyle=":", linewidth=1.4, label="uniform attention")
    mass.set_ylim(0, max(0.1, mass.get_ylim()[1]))
    legend(mass, columns=1)
    by_layer = [mass]
    for measure, ylabel, level in (
        ("s2_ratio", "S2: first token ÷ others", 1.0),
        ("norm_ratio", "norm ÷ others' median", 1.0),
        ("dominance_ratio", "dominance ratio", None),
    ):
        axes = add(ylabel)
        _by_layer(axes, watched, measure, scale)
        logarithmic(axes, axis="y")
        if level is not None:
            axes.axhline(level, color=QUIET, linewidth=0.8)
        by_layer.append(axes)
    _ranks(add("effective rank, layer mean"), watched, scale)
    _counts(add("how many"), watched, scale)
    for axes in figure.axes:
        scale.on(axes)
        if born is not None:
            axes.axvline(scale.place(born), color=ORANGE, linestyle="--", linewidth=1.2)
    if layers > 1 and image is not None:
        bar = colour_scale(figure, image, by_layer, label="layer")
        bar.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if title:
        figure.suptitle(title, fontsize=FONT, color=INK, x=0.01, ha="left", wrap=True)
    return finished(figure)


def comparison(tables: Mapping[str, pd.DataFrame], *, arms: Sequence[str], by: str = "") -> Figure:
    """Arms beside each other: loss curves with intervals over seeds, differences to the baseline, the sink's course.

    Args:
        tables: ``curves``, ``bands``, ``finals`` and, where the runs were watched, ``course`` (see
            ``training.comparison.Comparison``).
        arms: their names, the baseline first.
        by: what they differ in.
    """
    bands, finals = tables["bands"], tables["finals"]
    curves = set(bands["curve"].tolist())
    curve = "evaluation" if "evaluation" in curves else "training"
    figure = canvas(width=9.4, height=6.6)
    top = panel(figure, place=(2, 2, 1), xlabel="tokens", ylabel=f"{curve} loss, nats")
    gap = panel(figure, place=(2, 2, 2), xlabel="tokens", ylabel=f"{curve} loss − baseline, nats")
    scale = _Tokens(floats(bands, "tokens"))
    for index, arm in enumerate(arms):
        colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
        of_arm = named(named(bands, "arm", arm), "curve", curve)
        label = f"{by} {arm}".lstrip()
        _band(top, named(of_arm, "quantity", "loss"), scale, label=label, colour=colour, mark=mark)
        if index:
            _band(gap, named(of_arm, "quantity", "difference"), scale, label=arm, colour=colour, mark=mark)
            _by_seed(gap, tables["curves"], arm, curve, scale, colour=colour)
    base_end = floats(named(named(finals, "arm", arms[0]), "curve", curve), "loss").mean()
    top.axhline(base_end, color=QUIET, linestyle=":", linewidth=1.2)
    gap.axhline(0, color=COLOURS[0], linewidth=1.4)
    _ends(panel(figure, place=(2, 2, 3), ylabel=f"final {curve} loss − baseline"), tables, arms, curve)
    low = panel(figure, place=(2, 2, 4), xlabel="tokens", ylabel="attention to position 0, top layer")
    scales = [(top, scale), (gap, scale)]
    if "course" in tables:
        rows = named(tables["course"], "measure", "top_mass")
        own = _Tokens(floats(rows, "tokens"))
        for index, arm in enumerate(arms):
            colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
            _band(low, named(rows, "arm", arm), own, label=arm, marks=True, colour=colour, mark=mark)
        low.set_ylim(0, max(0.1, low.get_ylim()[1]))
        scales.append((low, own))
    else:
        _nothing(low, "not watched")
    for axes, one in scales:
        one.on(axes)
    legend(top, columns=min(len(arms), 6), over=figure)
    return finished(figure)


def losses(log: pd.DataFrame) -> Figure:
    """The loss of a run against tokens, training and held out.

    Args:
        log: tokens, loss, and eval_loss where the run was evaluated.
    """
    figure = canvas(width=7.4, height=3.2)
    axes = panel(figure, xlabel="tokens", ylabel="loss, nats")
    scale = _Tokens(floats(log, "tokens"))
    _losses(axes, None, log, scale)
    scale.on(axes)
    return finished(figure)


class _Tokens:
    """Tokens on a logarithmic axis; 0 stands one step before the smallest other, and says so."""

    def __init__(self, tokens: np.ndarray) -> None:
        known = np.unique(tokens[np.isfinite(tokens)])
        positive = known[known > 0]
        self._least = float(positive[0]) if len(positive) else 1.0
        ratio = float(positive[1] / positive[0]) if len(positive) > 1 else 2.0
        self._zero = self._least / min(max(ratio, 1.5), 4.0)
        self._has_zero = bool(len(known) and known[0] <= 0)
        self._low = self._zero if self._has_zero else self._least
        self._high = float(positive[-1]) if len(positive) else 2.0

    def place(self, tokens: float | int) -> float:
        """Where a number of tokens stands."""
        return float(tokens) if tokens > 0 else self._zero

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """Where numbers of tokens stand."""
        return np.where(tokens > 0, tokens, self._zero)

    def on(self, axes: Axes) -> None:
        """Draw the axis."""
        margin = (self._high / self._low) ** 0.03 if self._high > self._low else 2.0
        axes.set_xlim(self._low / margin, self._high * margin)
        logarithmic(axes, axis="x")
        low, high = self._low / margin, self._high * margin
        ticks = [tick for tick in axes.get_xticks() if max(low, self._least * 0.99) <= tick <= high]
        names = [short(tick) for tick in ticks]
        if self._has_zero:
            ticks, names = [self._zero, *ticks], ["0", *names]
        axes.set_xticks(ticks, names)
        axes.set_xticks([], minor=True)


def _whole(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    rows = named(frame, "measure", measure)
    rows = select(rows, np.isnan(floats(rows, "layer")) & np.isnan(floats(rows, "position")))
    return rows.sort_values("tokens")


def _most(rows: pd.DataFrame) -> float:
    return float(np.nanmax(floats(rows, "value"), initial=0.0))


def _line(axes: Axes, rows: pd.DataFrame, scale: _Tokens, **style: Any) -> None:
    rows = rows.sort_values("tokens")
    style = {"markersize": 3.5, "linewidth": 1.5} | style
    axes.plot(scale.places(floats(rows, "tokens")), floats(rows, "value"), **style)


def _losses(axes: Axes, watched: pd.DataFrame | None, log: pd.DataFrame | None, scale: _Tokens) -> None:
    if log is not None and "loss" in log.columns:
        tokens, loss = floats(log, "tokens"), floats(log, "loss")
        there = np.isfinite(loss)
        axes.plot(scale.places(tokens[there]), loss[there], color=QUIET, linewidth=0.8, label="training")
    if log is not None and "eval_loss" in log.columns and np.isfinite(floats(log, "eval_loss")).any():
        tokens, loss = floats(log, "tokens"), floats(log, "eval_loss")
        there = np.isfinite(loss)
        axes.plot(scale.places(tokens[there]), loss[there], color=BLUE, marker="o", markersize=3, label="evaluation")
    if watched is not None:
        _line(axes, _whole(watched, "loss"), scale, color=INK, marker="x", linestyle=":", label="watched sequences")
    legend(axes, columns=3)


def _by_layer(axes: Axes, watched: pd.DataFrame, measure: str, scale: _Tokens) -> tuple[int, ScalarMappable | None]:
    """A line a layer, dark to light; how many layers, and the scale."""
    rows = named(watched, "measure", measure)
    layer = floats(rows, "layer")
    layers = [int(one) for one in np.unique(layer[np.isfinite(layer)]) if one >= 0]
    if not layers:
        return 0, None
    image: Any = ScalarMappable(norm=Normalize(0, max(layers[-1], 1)), cmap=mpl.colormaps["viridis"])
    for one in layers:
        mark = {"marker": "o"} if len(layers) == 1 else {"marker": "."}
        _line(axes, select(rows, layer == one), scale, color=image.to_rgba(one), linewidth=1.3, **mark)
    return len(layers), image


def _ranks(axes: Axes, watched: pd.DataFrame, scale: _Tokens) -> None:
    for measure, label, colour, mark in (
        ("effective_rank", "with token 0", BLUE, "o"),
        ("effective_rank_without", "without", ORANGE, "s"),
    ):
        _line(axes, _whole(watched, measure), scale, color=colour, marker=mark, label=label)
    axes.set_ylim(bottom=0)
    legend(axes, columns=2)


def _counts(axes: Axes, watched: pd.DataFrame, scale: _Tokens) -> None:
    for measure, label, colour, mark in (
        ("growth_steps", "growth steps", GREEN, "^"),
        ("super_neurons", "super neurons", PURPLE, "D"),
    ):
        rows = _whole(watched, measure)
        if len(rows):
            _line(axes, rows, scale, color=colour, marker=mark, label=label)
    axes.set_ylim(bottom=-0.1, top=max(1.5, axes.get_ylim()[1]))
    whole_numbers(axes)
    legend(axes, columns=2)


def _band(
    axes: Axes, rows: pd.DataFrame, scale: _Tokens, *, label: str, colour: str, mark: str, marks: bool = False
) -> None:
    """A mean with its interval; marked at its points where there are few."""
    rows = rows.sort_values("tokens")
    x, mean, low, high = scale.places(floats(rows, "tokens")), *(floats(rows, name) for name in ("mean", "low", "high"))
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    marker = mark if marks or len(x) <= 30 else None
    axes.plot(x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.6, label=label)


def _by_seed(axes: Axes, curves: pd.DataFrame, arm: str, curve: str, scale: _Tokens, *, colour: str) -> None:
    rows = named(named(curves, "arm", arm), "curve", curve)
    for seed in sorted(set(rows["seed"].tolist())):
        one = select(rows, floats(rows, "seed") == seed)
        axes.plot(
            scale.places(floats(one, "tokens")), floats(one, "difference"), color=colour, linewidth=0.6, alpha=0.7
        )


def _ends(axes: Axes, tables: Mapping[str, pd.DataFrame], arms: Sequence[str], curve: str) -> None:
    """Each seed's difference as a dot, the mean and its interval as a line."""
    for place, arm in enumerate(arms[1:]):
        colour, mark = COLOURS[(place + 1) % len(COLOURS)], MARKS[(place + 1) % len(MARKS)]
        dots = floats(named(named(tables["finals"], "arm", arm), "curve", curve), "difference")
        axes.scatter(np.full(len(dots), place - 0.12), dots, color=colour, marker=mark, s=22, label="one seed")
        found = named(named(tables["differences"], "arm", arm), "curve", curve)
        mean, low, high = (float(floats(found, name)[0]) for name in ("mean", "low", "high"))
        if np.isfinite([low, high]).all():
            axes.vlines(place + 0.12, low, high, color=colour, linewidth=2)
        axes.plot([place + 0.12], [mean], color=colour, marker="_", markersize=14, markeredgewidth=2)
    axes.axhline(0, color=COLOURS[0], linewidth=1.4)
    axes.set_xlim(-0.6, len(arms) - 1.4)
    axes.set_xticks(range(len(arms) - 1), list(arms[1:]))
    axes.grid(visible=False, axis="x")


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=QUIET, fontsize=FONT)
    axes.set_xticks([])
    axes.set_yticks([])
