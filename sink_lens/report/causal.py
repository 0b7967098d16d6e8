"""The causal part of the page: what each cut did, which link carries the sink, and whether it is the position's."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report.columns import by_size, flags, floats, named, need, select
from sink_lens.report.drawing import (
    BLUE,
    FONT,
    GREEN,
    ORANGE,
    WIDTH,
    canvas,
    colour_scale,
    finished,
    heat_map,
    legend,
    panel,
)
from sink_lens.report.mechanism import loss_changes
from sink_lens.report.pages import Drawn, Listed
from sink_lens.report.tables import Table, shown_table
from sink_lens.report.words import interval, number

_HOLDS = ("z", "neurons", "dimensions", "key")
_ANOTHER_PATH = 0.5
CENTRES = {"values": (BLUE, "o"), "aggregated": (GREEN, "^"), "none": (ORANGE, "s")}
NAMES = {"values": "values", "aggregated": "aggregated values", "none": "norm only"}


def _cut(run: Run, name: str, columns: list[str]) -> pd.DataFrame:
    table = need(run, name, columns=columns)
    if not len(table):
        raise RunError("nothing was cut: the sequences are too short, or the attention cannot be edited.")
    return table


def amplification_curve(table: pd.DataFrame) -> Figure:
    """Attention to the amplified position by factor, one line a centre.

    Args:
        table: centre, factor, mass, baseline_mass.
    """
    figure = canvas(width=WIDTH, height=3.2)
    axes = panel(figure, xlabel="factor", ylabel="attention to the position")
    for centre, (colour, marker) in CENTRES.items():
        part = named(table, "centre", centre)
        if len(part):
            axes.plot(floats(part, "factor"), floats(part, "mass"), color=colour, marker=marker, label=NAMES[centre])
    axes.set_ylim(bottom=0)
    legend(axes, columns=3)
    return finished(figure)


def mediation_matrix(table: pd.DataFrame) -> Figure:
    """Share of the sink that survives each hold, a row for each intervention and growth step.

    Args:
        table: intervention, hold, step, layers_from, layers_to, surviving_share, control_surviving_share.
    """
    keys = list(dict.fromkeys(zip(table["intervention"], table["step"], strict=True)))
    grid, control = np.full((2, len(keys), len(_HOLDS)), np.nan)
    names = []
    for index, (intervention, step) in enumerate(keys):
        of_it = named(table, "intervention", intervention)
        part = select(of_it, floats(of_it, "step") == step)
        spans = f"{int(floats(part, 'layers_from')[0])}–{int(floats(part, 'layers_to')[0])}"
        names.append(f"{intervention}, layers {spans}")
        for column, hold in enumerate(_HOLDS):
            one = named(part, "hold", hold)
            if len(one):
                grid[index, column] = floats(one, "surviving_share")[0]
                control[index, column] = floats(one, "control_surviving_share")[0]
    figure = canvas(width=WIDTH, height=1.2 + 0.42 * len(keys))
    axes = panel(figure, xlabel="what is held", ylabel="", grid=False)
    image = heat_map(axes, np.clip(grid, 0, 1))
    axes.set_xticks(range(len(_HOLDS)), _HOLDS, fontsize=FONT - 1.5)
    axes.set_yticks(range(len(keys)), names)
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{value:.2f}" + (f" ({control[row, column]:.2f})" if np.isfinite(control[row, column]) else "")
            colour = "white" if value < 0.6 else "black"  # on the cell, whatever the page's style
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)
    colour_scale(figure, image, axes, label="share that survives")
    return finished(figure)


def _curve(run: Run) -> tuple[str, Figure]:
    table = _cut(
        run, "amplification", ["centre", "factor", "mass", "baseline_mass", "position", "read_layers", "times"]
    )
    first = table.iloc[0]
    best = by_size(select(table, np.array([name != "none" for name in table["centre"]])), "mass").iloc[0]
    see = (
        f"Position {first['position']}: its aggregated values are moved away from a mean by a factor, up to the end "
        f"of the first growth step, and its attention is read in layers {first['read_layers']}. "
        f"Most at {best['factor']:g} from the mean of {NAMES[best['centre']]}: {number(best['times'])} times. "
        "The norm-only line is the control: scaling alone should bring no sink."
    )
    return see, amplification_curve(table)


def _matrix(run: Run) -> tuple[str, Figure]:
    columns = ["intervention", "hold", "step", "layers_from", "layers_to", "surviving_share", "control_surviving_share"]
    table = _cut(run, "mediation", columns)
    shares = {hold: floats(named(table, "hold", hold), "surviving_share") for hold in _HOLDS[1:]}
    leaving = [hold for hold, found in shares.items() if np.nanmax(found, initial=0.0) > _ANOTHER_PATH]
    see = (
        "A sink is put at a position (or the model's own is taken), and one quantity there is held as if it had none. "
        "0: the hold takes the whole sink away, so the sink goes through what is held. 1: it changes nothing. "
        "In brackets, random holds of the same size. z is the check: it must undo what was done. "
    )
    if leaving:
        see += f"Another path exists beside {' and '.join(leaving)}: most of a sink survives there."
    return see, mediation_matrix(table)


def _losses(run: Run) -> tuple[str, Figure]:
    table = _cut(run, "effects", ["link", "edit", "baseline_loss_nats", "loss_nats"])
    before = floats(table, "baseline_loss_nats")[0]
    see = (
        f"What each cut costs beside the sink that it takes or makes: the uncut loss is {number(float(before))} nats. "
        "A long bar is a cut that broke the model, not only its sink."
    )
    return see, loss_changes(table)


def _effect_table(run: Run) -> tuple[str, Table]:
    table = _cut(run, "effects", ["link", "edit", "share", "ci_low", "ci_high", "control_share", "outcome"])
    bounds = zip(floats(table, "ci_low"), floats(table, "ci_high"), strict=True)
    table = table.assign(interval=[interval(low, high) for low, high in bounds])
    heads = {
        "link": "link",
        "edit": "cut",
        "layers": "in layers",
        "position": "at",
        "share": "share of the sink",
        "interval": "interval",
        "control_share": "controls",
        "baseline_mass_new": "new before",
        "sink_mass_new": "new after",
        "baseline_mass_old": "old before",
        "sink_mass_old": "old after",
        "outcome": "the sink is",
        "baseline_loss_nats": "loss before",
        "loss_nats": "loss after",
    }
    see = (
        "Each link cut: the share of the sink that the cut makes at the new position, or removes from the old one, "
        "and the attention at both, beside the same cut at matched random places."
    )
    return see, shown_table(table, heads)


def _placement_table(run: Run) -> tuple[str, Table]:
    table = _cut(run, "placement", ["position", "token", "isolated", "sink_mass", "is_sink"])
    table = table.assign(
        isolated=np.where(flags(table, "isolated"), "yes", "no"), is_sink=np.where(flags(table, "is_sink"), "yes", "no")
    )
    heads = {
        "position": "position",
        "token": "token",
        "isolated": "isolated",
        "sink_mass": "attention",
        "ordinary_mass": "of ordinary positions",
        "norm_ratio": "norm ÷ others",
        "loss_nats": "loss, nats",
        "is_sink": "a sink",
    }
    see = "Is the sink bound to position 0, or to BOS? Attention to each position and token, isolated and not."
    return see, shown_table(table, heads)


def _asked(run: Run) -> bool:
    return bool(run.config.get("cuts"))


FIGURES = (
    Drawn(
        key="mediation",
        title="Which link carries the sink",
        make=_matrix,
        data=lambda run: run.tables["mediation"],
        when=_asked,
    ),
    Drawn(
        key="amplification",
        title="Variance makes a sink",
        make=_curve,
        data=lambda run: run.tables["amplification"],
        when=_asked,
    ),
    Drawn(
        key="loss",
        title="What the cuts cost",
        make=_losses,
        data=lambda run: run.tables["effects"].filter(items=["link", "edit", "baseline_loss_nats", "loss_nats"]),
        when=_asked,
    ),
)
TABLES = (
    Listed(key="effect-table", title="The links, cut", make=_effect_table, when=_asked),
    Listed(key="placement-table", title="Position or token?", make=_placement_table, when=_asked),
)
