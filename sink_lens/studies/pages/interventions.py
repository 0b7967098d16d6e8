"""The pages of single interventions: isolation and amplification."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sink_lens.chain.page import figures
from sink_lens.records import Result, Run
from sink_lens.report.page import Drawn, Listed, Page, PageTable, ci_texts, page_table, table_reader
from sink_lens.report.style import (
    BLUE,
    ORANGE,
    legend,
    new_figure,
    panel,
    set_integer_ticks,
    without_formulas,
)
from sink_lens.schema import NORM_ALONE
from sink_lens.text import as_text, percent, safe_line, signed_change
from sink_lens.text import interval_text as bounds

_MASSES = ["baseline_target_mass", "target_mass", "baseline_sink_mass", "sink_mass", "outcome", "read_layers"]
_LINES = (
    ("baseline_target_mass", "there, before", BLUE, "--", ""),
    ("target_mass", "there, edited", BLUE, "-", "o"),
    ("baseline_sink_mass", "at the sink position, before", ORANGE, "--", ""),
    ("sink_mass", "at the sink position, edited", ORANGE, "-", "s"),
)
_HEADS = {
    "target_position": "target position",
    "centre": "centre",
    "factor": "factor",
    "layers": "in layers",
    "times": "times",
    "read_layers": "read in layers",
    "baseline_target_mass": "there, before",
    "target_mass": "there, edited",
    "baseline_sink_mass": "sink position, before",
    "sink_mass": "sink position, edited",
    "outcome": "the sink is",
    "loss_change_nats": "loss change, nats",
    "interval": "95%",
}


def _edit_text(row: dict[Any, Any]) -> str:
    """Return a text that names the edit that a row of ``summary`` reports."""
    if "centre" not in row:
        layers = str(row.get("layers", "all"))
        where = "all layers" if layers == "all" else f"layer{'s' * (not layers.isdecimal())} {layers}"
        return f"Position {row['target_position']} isolated in {where}"
    centre = safe_line(figures.NAMES.get(row["centre"], row["centre"]))
    how = "scaled alone, the control" if row["centre"] == "none" else f"away from the mean of the {centre}"
    return f"Factor {row['factor']:g}, {how}"


def _edit_sentence(row: dict[Any, Any]) -> str:
    """Say what the edit in a row of ``summary`` did to attention at target and sink position, and to the loss."""
    what, cost = _edit_text(row), ""
    if "times" in row:
        what += f" ({as_text(row['times'])} times the attention)"
    if "loss_change_low" in row:
        change = signed_change(row["loss_change_nats"], 3)
        over = bounds(row["loss_change_low"], row["loss_change_high"])
        cost = f"; the loss changes by {change} {over}".rstrip() + " nats"
    return (
        f"{what}: attention there {as_text(row['baseline_target_mass'])} → {as_text(row['target_mass'])}, at the sink "
        f"position {as_text(row['baseline_sink_mass'])} → {as_text(row['sink_mass'])} (layers {row['read_layers']}): "
        f"the sink is {safe_line(row['outcome'])}{cost}."
    )


def isolation_sentences(summary: pd.DataFrame) -> list[str]:
    """Say for each row of ``summary``, an isolated position, what became of attention, sink and loss."""
    return [_edit_sentence(row) for row in summary.to_dict("records")]


def amplification_sentences(summary: pd.DataFrame) -> list[str]:
    """Say for each centre in the table ``summary`` what the strongest factor did to attention, sink and loss."""
    sentences = []
    for centre in figures.CENTRES:
        part = summary.loc[summary["centre"] == centre]
        if len(part):
            best = _row_with_most_attention(part)
            sentences.append(_edit_sentence(best))
            if centre == "none" and best["times"] >= NORM_ALONE:
                sentences.append("So the norm alone raises the attention too, which arXiv 2605.06611 does not expect.")
    return sentences


def _row_with_most_attention(rows: pd.DataFrame) -> dict[Any, Any]:
    """Return the row of ``summary`` with the most attention to the target position after the edit."""
    return rows.sort_values("target_mass", key=abs, ascending=False, kind="stable").to_dict("records")[0]


def _title(run: Run) -> str:
    """Return the title for a run of isolation or amplification: its strongest edit, and what becomes of the sink."""
    place = run.config.get("amplify_target_position")
    table = run.optional("summary", columns=_MASSES)
    if table is None or not len(table):
        return "A position isolated by the attention mask" if place is None else f"Position {place} amplified"
    if place is None:
        row, others = _row_with_most_attention(table), ""
        if len(table) > 1:
            others = f"; of {len(table)}, one at a time, it then gets the most attention"
        what = f"{_edit_text(row)} (it attends to itself alone{others})"
    else:
        moved = table.loc[table["centre"].ne("none")]
        row = _row_with_most_attention(moved if len(moved) else table)
        what = f"Position {place} amplified, f{_edit_text(row)[1:]}"
    return (
        f"{what}: the sink is {safe_line(row['outcome'])}; attention there goes from "
        f"{percent(row['baseline_target_mass'])} to {percent(row['target_mass'])}, at the sink position from "
        f"{percent(row['baseline_sink_mass'])} to {percent(row['sink_mass'])}"
    )


def _layer_figure(run: Run) -> tuple[str, Figure]:
    """Plot, by layer, how much attention the edited position and the sink position get; return caption and figure."""
    layers = run.need("layers", columns=["layer", *(name for name, *_ in _LINES)])
    first = layers.drop_duplicates("layer").sort_values("layer", kind="stable")
    which = f"position {first['target_position'].iloc[0]}" if "target_position" in first.columns else "the position"
    see = (
        f"Attention to {which} and to the sink position, layer by layer: dashed without the edit, solid with it. "
        "A sink that moves leaves its own position; one that is shared leaves part of it."
    )
    figure = new_figure(width=7.4, height=3.2)
    axes = panel(figure, xlabel="layer", ylabel="attention")
    for name, label, colour, style, mark in _LINES:
        axes.plot(first["layer"], first[name], color=colour, linestyle=style, marker=mark, markersize=3.5, label=label)
    axes.set_ylim(bottom=0)
    set_integer_ticks(axes, y=False)
    legend(axes, columns=2)
    return see, without_formulas(figure)


def _factor_figure(run: Run) -> tuple[str, Figure]:
    """Draw the attention to the target that amplification adds, by factor and centre; return caption and figure."""
    table = run.need("summary", columns=["centre", "factor", "baseline_target_mass", "target_mass"])
    see = (
        "Attention added at the position, by factor; one line for each mean that its aggregated values are moved from. "
        "The norm-only line is the control: scaling alone should bring no sink."
    )
    names = {"target_mass": "mass", "baseline_target_mass": "baseline_mass"}
    return see, figures.draw_amplification(table.rename(columns=names))


def _summary_table(run: Run) -> tuple[str, PageTable]:
    """Return the caption and a run's table of the summary: a row per edit."""
    table = run.need("summary", columns=[])
    if {"loss_change_low", "loss_change_high"} <= set(table.columns):
        table = table.assign(interval=ci_texts(table, "loss_change_low", "loss_change_high"))
    see = "What each edit did: attention at the position and at the sink position, and the loss."
    return see, page_table(table, _HEADS)


_SUMMARY = Listed(key="summary-table", title="Summary", make=_summary_table)
ISOLATE = Page(
    title=_title,
    headline=lambda run: isolation_sentences(run.need("summary", columns=["target_position", *_MASSES])),
    figures=(Drawn(key="layers", title="Layer by layer", make=_layer_figure, data=table_reader("layers")),),
    tables=(_SUMMARY,),
)
AMPLIFY = Page(
    title=_title,
    headline=lambda run: amplification_sentences(run.need("summary", columns=["centre", "factor", "times", *_MASSES])),
    figures=(
        Drawn(key="factors", title="Does variance make a sink?", make=_factor_figure, data=table_reader("summary")),
    ),
    tables=(_SUMMARY,),
)


def show(found: Result) -> Iterator[str | pd.DataFrame]:
    """Yield the terminal output of isolation or amplification: the headline and the main columns of the summary."""
    yield found.headline
    yield found.frame.filter(items=("target_position", "centre", "factor", "times", *_MASSES[:-1], "loss_change_nats"))


def answer(found: Result) -> dict[str, Any]:
    """Return the ``--json`` answer: the headline, and the rows of ``summary``."""
    return {"sentence": found.headline, "rows": found.tables["summary"]}
