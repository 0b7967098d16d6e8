"""Figures of a trace, for 4 to 80 layers and 4 to 128 heads."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...report.patterns import layer_head_grid
from ...report.style import (
    BLUE,
    COLOURS,
    FONT,
    GREEN,
    INK,
    MARKS,
    ORANGE,
    PURPLE,
    QUIET,
    WIDTH,
    add_colour_scale,
    draw_heat_map,
    legend,
    log_scale,
    new_figure,
    panel,
    set_integer_ticks,
    without_formulas,
)
from ...schema import ALL_STEPS, FROZEN
from ...stats import sort_by_magnitude
from ...text import as_text, layers_in_words, neuron_name

_RASTER_FROM = 800
"""Scatter plots of more points are drawn as an image."""
_MOST_LABELS = 8


def draw_sink_scores(
    heads: pd.DataFrame, *, position: int, threshold: float | None = None
) -> Figure:
    grid = layer_head_grid(heads, "sink_score", position=position)
    n_layers, n_heads = grid.shape
    figure = new_figure(
        width=WIDTH + 0.055 * max(0, n_layers - 40), height=min(max(2.9, 1.1 + 0.13 * n_heads), 6.0)
    )
    axes = panel(figure, xlabel="layer", ylabel="head", grid=False)
    image = draw_heat_map(axes, grid.T)
    set_integer_ticks(axes)
    scale = add_colour_scale(figure, image, axes, label=f"sink score of position {position}")
    if threshold is not None:
        scale.axhline(threshold, color="white", linewidth=2)
        others = [place / 5 for place in range(6) if abs(place / 5 - threshold) > 0.05]
        scale.set_yticks(
            [*others, threshold], [*(f"{place:g}" for place in others), f"{threshold:g}"]
        )
        scale.get_yticklabels()[-1].set(color=ORANGE, fontweight="bold")
    return without_formulas(figure)


def onset_of_heads(heads: pd.DataFrame, *, position: int, threshold: float) -> int | None:
    means = _nan_mean(layer_head_grid(heads, "sink_score", position=position))
    return next(iter(np.flatnonzero(means > threshold).tolist()), None)


def draw_sink_mass(heads: pd.DataFrame, *, position: int, threshold: float) -> Figure:
    mass = layer_head_grid(heads, "sink_mass", position=position)
    layers = np.arange(len(mass))
    figure = new_figure()
    axes = panel(figure, xlabel="layer", ylabel=f"attention mass on position {position}")
    low = np.nan_to_num(mass, nan=np.inf).min(axis=1)
    high = np.nan_to_num(mass, nan=-np.inf).max(axis=1)
    axes.fill_between(
        layers, low, high, color=BLUE, alpha=0.18, linewidth=0, label="range over heads"
    )
    axes.plot(
        layers, _nan_mean(mass), color=BLUE, marker="o", markersize=3.5, label="mean over heads"
    )
    onset = onset_of_heads(heads, position=position, threshold=threshold)
    if onset is not None:
        axes.axvline(
            onset, color=ORANGE, linestyle="--", linewidth=1.5, label=f"onset: layer {onset}"
        )
    axes.set_ylim(0, 1.02)
    set_integer_ticks(axes, y=False)
    legend(axes, columns=3)
    return without_formulas(figure)


def draw_norm_by_layer(layers: pd.DataFrame, *, growth_steps: pd.DataFrame | None = None) -> Figure:
    layers = layers.sort_values("layer")
    layer = layers["layer"].to_numpy(float)
    figure = new_figure(height=4.1)
    top = panel(figure, place=(2, 1, 1), ylabel="norm ÷ others' median")
    top.plot(layer, layers["norm_ratio"].to_numpy(float), color=BLUE, marker="o", markersize=3.5)
    log_scale(top, axis="y")
    below = panel(figure, place=(2, 1, 2), xlabel="layer", ylabel="strongest dimension")
    below.sharex(top)
    top.tick_params(labelbottom=False)
    below.plot(
        layer, layers["outlier_value"].to_numpy(float), color=GREEN, marker="s", markersize=3
    )
    below.axhline(0, color=QUIET, linewidth=0.8)
    columns = ["first_layer", "last_layer", "ratio_before", "ratio_after"]
    steps = [] if growth_steps is None else growth_steps[columns].itertuples(index=False)
    n_layers = layer.max(initial=1) - layer.min(initial=0)
    row, last_middle = 0, -math.inf
    for first, last, before, after in steps:
        for axes in (top, below):
            axes.axvspan(first - 0.5, last + 0.5, color=ORANGE, alpha=0.22, linewidth=0)
        middle = (first + last) / 2
        row = (row + 1) % 3 if middle - last_middle < 0.2 * n_layers else 0
        last_middle = middle
        top.text(
            middle,
            1.02 + 0.21 * row,
            f"{layers_in_words(int(first), int(last))}\n×{as_text(after / before)}",
            transform=top.get_xaxis_transform(),
            ha="left" if middle < 0.1 * n_layers else "center",
            va="bottom",
            color=ORANGE,
            fontsize=FONT - 1,
        )
    set_integer_ticks(below, y=False)
    return without_formulas(figure)


def draw_variance_by_position(positions: pd.DataFrame, *, layers: Sequence[int]) -> Figure:
    """Draw S1 and S2 of z relative to their first values, beside 1 / sqrt(t); t is the position + 1."""
    figure = new_figure(width=7.4, height=3.1)
    chosen = positions.loc[positions["site"] == "z"]
    for place, (column, name) in enumerate(
        (("s1", "S1: over sequences"), ("s2", "S2: within the token")), start=1
    ):
        axes = panel(
            figure,
            place=(1, 2, place),
            xlabel="position + 1",
            ylabel="÷ first value" if place == 1 else "",
        )
        law = np.array([1.0])
        for index, layer in enumerate(layers):
            one = chosen.loc[chosen["layer"] == layer].sort_values("position")
            t, s = one["position"].to_numpy(float) + 1, one[column].to_numpy(float)
            positive = np.isfinite(s) & (s > 0)
            if positive.any():
                t, s = t[positive], s[positive]
                axes.plot(
                    t,
                    s / (s[0] * math.sqrt(t[0])),
                    color=COLOURS[index % len(COLOURS)],
                    linewidth=1.5,
                    marker=MARKS[index % len(MARKS)],
                    markersize=4,
                    markevery=0.12,
                    label=f"layer {layer}",
                )
                law = np.union1d(law, t)
        axes.plot(law, 1 / np.sqrt(law), color=INK, linestyle="--", linewidth=1.3, label="σ/√t")
        axes.set_title(name, fontsize=FONT, loc="left", color=INK)
        log_scale(axes, axis="x")
        log_scale(axes, axis="y")
    legend(figure.axes[-1], columns=len(layers) + 1, over=figure)
    return without_formulas(figure)


def draw_super_neurons(
    neurons: pd.DataFrame, *, position: int, share: float | None = None
) -> Figure:
    table = neurons.loc[neurons["sink_position"] == position]
    height = table["contribution_share"].to_numpy(float) * 100
    ranks = [table[name].to_numpy(float) for name in ("gate_norm_rank", "up_norm_rank")]
    rank = np.nan_to_num(ranks, nan=np.inf).min(axis=0)
    is_super = table["is_super"].eq(True).to_numpy()
    figure = new_figure(width=7.4, height=3.5)
    first: Axes | None = None
    spike = table["spike_ratio"].to_numpy(float)
    sides = ((spike, "activation ÷ other positions"), (rank, "weight-norm rank (1: largest)"))
    for place, (x, name) in enumerate(sides, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel=name)
        drawn = (x > 0) & np.isfinite(x) & np.isfinite(height)
        plain, chosen = drawn & ~is_super, drawn & is_super
        axes.scatter(
            x[plain],
            height[plain],
            s=9,
            color=QUIET,
            alpha=0.6,
            linewidths=0,
            rasterized=plain.sum() > _RASTER_FROM,
            label="other neurons",
        )
        axes.scatter(
            x[chosen],
            height[chosen],
            s=34,
            color=ORANGE,
            marker="^",
            linewidths=0,
            label="super neurons",
        )
        if share is not None:
            axes.axhline(
                share * 100, color=BLUE, linestyle=":", linewidth=1.3, label=f"{share:.0%}"
            )
        log_scale(axes, axis="x")
        if first is None:
            axes.set_ylabel("share of the layer's change, %", fontsize=FONT, color=INK)
            first = axes
        else:
            axes.sharey(first)
            axes.tick_params(labelleft=False)
        points = table.assign(x=x, y=height).loc[chosen]
        _write_neuron_names(axes, sort_by_magnitude(points, "y").head(_MOST_LABELS))
    legend(figure.axes[0], columns=3, over=figure)
    return without_formulas(figure)


def draw_top_dimensions(
    dimensions: pd.DataFrame, *, position: int, layer: int, most: int = 12
) -> Figure:
    here = (dimensions["sink_position"] == position) & (dimensions["layer"] == layer)
    table = sort_by_magnitude(dimensions.loc[here], "value").head(most)
    figure = new_figure(height=0.9 + 0.23 * max(len(table), 4))
    axes = panel(
        figure, xlabel=f"|value| at position {position} after layer {layer}", ylabel="dimension"
    )
    places, outlier = np.arange(len(table)), table["is_outlier"].eq(True).to_numpy()
    size = np.abs(table["value"].to_numpy(float))
    for which, colour, hatch, label in (
        (outlier, ORANGE, "//", "outlier dimension"),
        (~outlier, BLUE, "", "other dimension"),
    ):
        bars = {"color": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.6}
        axes.barh(places[which], size[which], label=label, **bars)
    axes.set_yticks(places, [f"{one:.0f}" for one in table["dimension"].to_numpy(float)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    legend(axes, columns=2)
    return without_formulas(figure)


def spread_heights(heights: Sequence[float], *, gap: float, top: float) -> list[float]:
    """Move ascending heights so that neighbours are at least ``gap`` apart and the last is at most ``top``."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], moved[index + 1] - gap if index + 1 < len(moved) else top)
    return moved


def _nan_mean(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        there = np.isfinite(values)
        return np.where(there, values, 0).sum(axis=-1) / there.sum(axis=-1)


_NAME = 0.25
"""Share of a panel's width that a neuron's name takes."""


def _write_neuron_names(axes: Axes, points: pd.DataFrame) -> None:
    low, high = axes.get_ylim()
    x_low, x_high = (math.log10(end) for end in axes.get_xlim())
    gap = 0.07 * (high - low)
    ordered = points.sort_values("y")[["layer", "neuron", "x", "y"]].to_numpy(float).tolist()
    heights = spread_heights([y for *_, y in ordered], gap=gap, top=high)
    across = [(math.log10(x) - x_low) / (x_high - x_low) for _, _, x, _ in ordered]
    for (layer, neuron, x, y), height, place in zip(ordered, heights, across, strict=True):
        near = [
            at - place
            for at, (*_, other) in zip(across, ordered, strict=True)
            if abs(other - height) < 0.6 * gap
        ]
        right = any(0 < distance < _NAME for distance in near)
        left = any(-_NAME < distance < 0 for distance in near)
        to_the_left = place > 0.7 or (right and not left)
        axes.annotate(
            neuron_name(layer, neuron),
            (x, y),
            xytext=(-9 if to_the_left else 9, height),
            textcoords=("offset points", "data"),
            ha="right" if to_the_left else "left",
            va="center",
            fontsize=FONT - 1.5,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.6},
        )


def draw_key_split(split: pd.DataFrame) -> Figure:
    split = split.set_index("layer").sort_index()
    layers = split.index.to_numpy(int)
    split = split.reindex(range(layers[0], layers[-1] + 1))  # no line where nothing was measured
    layer = split.index.to_numpy(float)
    figure = new_figure(width=7.4, height=3.3)
    of_key = (
        ("key_cosine_sink", "sink's key", ORANGE, "^"),
        ("key_cosine_other_positions", "other keys", BLUE, "o"),
        ("key_cosine_random_dimensions", "random dimensions", QUIET, "s"),
    )
    of_logit = (
        ("logit_advantage_sink", "over other keys", PURPLE, "D"),
        ("dimension", "outlier dimensions", ORANGE, "^"),
        ("rest", "all other dimensions", GREEN, "v"),
        ("random_dimensions", "random dimensions", QUIET, "s"),
    )
    sides = (
        ("cosine with what outlier dimensions make", of_key),
        ("logit of the sink's key, nats", of_logit),
    )
    for place, (ylabel, lines) in enumerate(sides, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="layer", ylabel=ylabel)
        for name, label, colour, mark in lines:
            values = split[name].to_numpy(float) if name in split.columns else np.array([np.nan])
            if np.isfinite(values).any():
                axes.plot(
                    layer,
                    values,
                    color=colour,
                    marker=mark,
                    markersize=3.5,
                    linewidth=1.5,
                    label=label,
                )
        axes.axhline(0, color=QUIET, linewidth=0.8)
        set_integer_ticks(axes, y=False)
        legend(axes, columns=2)
    return without_formulas(figure)


CENTRES = {"values": (BLUE, "o"), "aggregated": (GREEN, "^"), "none": (ORANGE, "s")}
NAMES = {"values": "values", "aggregated": "aggregated values", "none": "norm only"}


def draw_amplification(table: pd.DataFrame) -> Figure:
    figure = new_figure(width=WIDTH, height=3.2)
    axes = panel(figure, xlabel="factor", ylabel="attention added at the position")
    for centre, (colour, marker) in CENTRES.items():
        part = table.loc[table["centre"] == centre]
        if len(part):
            factor, change = part["factor"].to_numpy(float), part["change"].to_numpy(float)
            low, high = part["change_low"].to_numpy(float), part["change_high"].to_numpy(float)
            axes.vlines(
                factor, low.clip(-1, 1), high.clip(-1, 1), color=colour, linewidth=1, alpha=0.5
            )
            axes.plot(factor, change, color=colour, marker=marker, label=NAMES[centre])
    axes.axhline(0, color=QUIET, linewidth=0.8)
    legend(axes, columns=3)
    return without_formulas(figure)


def draw_mediation(table: pd.DataFrame) -> Figure:
    keys = list(dict.fromkeys(zip(table["intervention"], table["step"], strict=True)))
    names = list(dict.fromkeys([*FROZEN, *table["frozen"]]))
    grid, control = np.full((2, len(keys), len(names)), np.nan)
    rows = []
    for index, (intervention, step) in enumerate(keys):
        part = table.loc[(table["intervention"] == intervention) & (table["step"] == step)]
        spans = f"{int(part['layers_from'].iloc[0])}–{int(part['layers_to'].iloc[0])}"
        of_step = ", all steps" if step == ALL_STEPS else f", step {step}" if step >= 0 else ""
        rows.append(f"{intervention}{of_step},\nlayers {spans}")
        for column, name in enumerate(names):
            cell = part.loc[part["frozen"] == name]
            if len(cell):
                grid[index, column] = cell["surviving_share"].iloc[0]
                control[index, column] = cell["control_surviving_share"].iloc[0]
    figure = new_figure(width=WIDTH, height=1.2 + 0.42 * len(keys))
    axes = panel(figure, xlabel="what is frozen", ylabel="", grid=False)
    image = draw_heat_map(axes, np.clip(grid, 0, 1))
    axes.set_xticks(range(len(names)), names, fontsize=FONT - 1.5)
    axes.set_yticks(range(len(keys)), rows)
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text, beside = f"{value:z.2f}", control[row, column]
            text += f"\n({beside:z.2f})" if np.isfinite(beside) else ""
            style = {"ha": "center", "va": "center", "fontsize": 7.5}
            colour = "white" if value < 0.6 else "black"  # on the cell, whatever the page's style
            axes.text(column, row, text.replace("-", "−"), color=colour, **style)
    add_colour_scale(figure, image, axes, label="share that survives")
    return without_formulas(figure)
