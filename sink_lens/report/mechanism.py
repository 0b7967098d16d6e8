"""Figures of how the links work: what super neurons write, what makes the sink's key, what the cuts cost.

Each is a function of a run's data frame that returns a matplotlib figure.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.report.columns import floats, numbers, select
from sink_lens.report.drawing import (
    BLUE,
    FONT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    QUIET,
    WIDTH,
    canvas,
    finished,
    legend,
    panel,
    whole_numbers,
)
from sink_lens.report.words import visible

_MOST_COLUMNS = 12
_MOST_CUTS = 14


def written_columns(columns: pd.DataFrame, *, outliers: tuple[int, ...] = ()) -> Figure:
    """The dimensions that super neurons write: the largest entries of each one's down-projection column.

    Args:
        columns: layer, neuron, dimension, weight; the neurons in the order in which they are drawn.
        outliers: Outlier dimensions of the sink token, told apart.
    """
    names = list(dict.fromkeys(numbers(columns, ["layer", "neuron"])))[:_MOST_COLUMNS]
    figure = canvas(height=0.9 + 0.3 * max(len(names), 3))
    axes = panel(figure, xlabel="weight of the column's entry", ylabel="neuron")
    for place, (layer, neuron) in enumerate(names):
        one = select(columns, (floats(columns, "layer") == layer) & (floats(columns, "neuron") == neuron))
        weight, dimension = floats(one, "weight"), floats(one, "dimension")
        is_outlier = np.isin(dimension, outliers)
        axes.axhline(place, color=QUIET, linewidth=0.4)
        for which, colour, mark, label in (
            (~is_outlier, BLUE, "o", "other dimensions"),
            (is_outlier, ORANGE, "^", "outlier dimensions"),
        ):
            if which.any():
                label = label if label not in axes.get_legend_handles_labels()[1] else "_"
                axes.scatter(weight[which], np.full(which.sum(), place), s=30, color=colour, marker=mark, label=label)
        largest = int(np.abs(weight).argmax())
        axes.annotate(
            f"{dimension[largest]:.0f}",
            (weight[largest], place),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=FONT - 2,
            color=INK,
        )
    axes.axvline(0, color=QUIET, linewidth=0.8)
    axes.set_yticks(range(len(names)), [f"{layer:.0f}.{neuron:.0f}" for layer, neuron in names])
    axes.set_ylim(len(names) - 0.4, -0.8)
    axes.margins(x=0.08)
    axes.grid(visible=False, axis="y")
    legend(axes, columns=2)
    return finished(figure)


def qk_split(split: pd.DataFrame) -> Figure:
    """What makes the sink's key and its logit, by layer: the outlier dimensions, the rest, and controls.

    Args:
        split: layer; key_cosine_sink, key_cosine_random_dimensions, key_cosine_other_positions; dimension, rest,
            random_dimensions, where the logit was split; logit_advantage_sink.
    """
    split = select(split, np.argsort(floats(split, "layer")))
    layer = floats(split, "layer")
    figure = canvas(width=7.4, height=3.3)
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
    sides = (("cosine with what outlier dimensions make", of_key), ("logit of the sink's key, nats", of_logit))
    for place, (ylabel, lines) in enumerate(sides, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="layer", ylabel=ylabel)
        for name, label, colour, mark in lines:
            values = floats(split, name) if name in split.columns else np.array([np.nan])
            if np.isfinite(values).any():
                axes.plot(layer, values, color=colour, marker=mark, markersize=3.5, linewidth=1.5, label=label)
        axes.axhline(0, color=QUIET, linewidth=0.8)
        whole_numbers(axes, y=False)
        legend(axes, columns=2)
    return finished(figure)


def loss_changes(effects: pd.DataFrame) -> Figure:
    """What each cut does to the loss, in nats.

    Args:
        effects: link, edit, baseline_loss_nats, loss_nats.
    """
    table = effects.head(_MOST_CUTS)
    change = floats(table, "loss_nats") - floats(table, "baseline_loss_nats")
    figure = canvas(width=WIDTH, height=0.9 + 0.34 * max(len(table), 2))
    axes = panel(figure, xlabel="loss with the cut − without, nats")
    places = np.arange(len(table))
    axes.barh(places, np.nan_to_num(change), color=np.where(change > 0, ORANGE, BLUE), edgecolor=INK, linewidth=0.6)
    for place, one in zip(places, change, strict=True):
        text = f"{one:+.2f}".replace("-", "−") if np.isfinite(one) else "undefined"
        side = "right" if one < 0 else "left"
        offset = (-4 if one < 0 else 4, 0)
        axes.annotate(
            text, (np.nan_to_num(one), place), xytext=offset, textcoords="offset points", ha=side, va="center",
            fontsize=FONT - 1.5, color=INK,
        )  # fmt: skip
    axes.set_yticks(places, [visible(edit, limit=34, counted=False) for edit in table["edit"]])
    axes.tick_params(axis="y", labelsize=FONT - 1.5)
    axes.invert_yaxis()
    axes.axvline(0, color=QUIET, linewidth=0.8)
    axes.margins(x=0.18)
    axes.grid(visible=False, axis="y")
    return finished(figure)
