"""The pages of single interventions: isolation, amplification, ablation."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.chain.page import figures
from sink_lens.records import Result, Run
from sink_lens.report.page import Drawn, Listed, Page, PageTable, ci_texts, page_table, rest_note, table_reader
from sink_lens.report.style import (
    BLUE,
    FONT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    QUIET,
    legend,
    new_figure,
    panel,
    set_integer_ticks,
    without_formulas,
)
from sink_lens.schema import NORM_ALONE
from sink_lens.text import as_text, label_parts, percent, plural, safe_line, signed_change
from sink_lens.text import interval_text as bounds

_MASSES = ["baseline_target_mass", "target_mass", "baseline_sink_mass", "sink_mass", "outcome", "read_layers"]
_MOST_STEPS = 24
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
_KINDS = (("set", ORANGE, "^"), ("single", BLUE, "o"), ("leave one out", GREEN, "v"), ("random", QUIET, "s"))


def removed_share_figure(ablations: pd.DataFrame) -> Figure:
    """Draw the share of the sink that each ablation removes: the set, single neurons, each left out, random sets.

    Args:
        ablations: a row for each ablation: growth step, kind, removed_share, ci_low, ci_high. If there is a column
            ``what``, ablations of only the entries to the outlier dimension (scalar) get a line of their own. Only the
            first of very many steps are drawn.
    """
    if "what" in ablations.columns:
        entries = np.array([what == "scalar" for what in ablations["what"].tolist()])
        only = [f"{kind}, outlier entries" for kind in ablations["kind"].tolist()]
        ablations = ablations.assign(kind=np.where(entries, only, ablations["kind"].tolist()))
    steps = sorted(set(ablations["step"].to_numpy(float).tolist()))[:_MOST_STEPS]
    figure = new_figure(width=7.4, height=0.6 + 2.0 * max(len(steps), 1))
    for place, step in enumerate(steps, start=1):
        rows = ablations.loc[ablations["step"] == step]
        last = place == len(steps)
        axes = panel(figure, place=(len(steps), 1, place), xlabel="share of the sink removed, %" if last else "")
        kinds = list(dict.fromkeys(rows["kind"].tolist()))
        for row, kind in enumerate(kinds):
            part = rows.loc[rows["kind"] == kind]
            colour, mark = next((style for name, *style in _KINDS if str(kind).startswith(name)), (PURPLE, "D"))
            share = 100 * part["removed_share"].to_numpy(float)
            offsets = np.linspace(-0.22, 0.22, len(part)) if len(part) > 1 else np.zeros(len(part))
            axes.hlines(
                row + offsets,
                100 * part["ci_low"].to_numpy(float),
                100 * part["ci_high"].to_numpy(float),
                color=colour,
                alpha=0.5,
            )
            axes.scatter(share, row + offsets, color=colour, marker=mark, s=22)
        axes.set_yticks(range(len(kinds)), [safe_line(kind, limit=32, counted=False) for kind in kinds])
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.axvline(0, color=QUIET, linewidth=0.8)
        axes.axvline(100, color=QUIET, linewidth=0.8, linestyle=":")
        axes.set_title(f"growth step {step:g}", fontsize=FONT, loc="left", color=INK)
    return without_formulas(figure)


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


def ablation_sentences(summary: pd.DataFrame) -> list[str]:
    """Say for each row of ``summary``, a growth step, the share of the sink that ablating its neurons removes."""
    sentences = []
    for row in summary.to_dict("records"):
        random = f"random sets of that size {percent(row['random_mean'])} (at most {percent(row['random_max'])})"
        enough, short = (
            ("removes", "is not enough: it removes")
            if int(row["size"]) == 1
            else ("together remove", "are not enough: they remove")
        )
        removes = enough if row["removes"] else short
        sentences.append(
            f"Growth step {row['step']}: {plural(int(row['size']), 'neuron')} ({label_parts(row['neurons'])}) "
            f"{removes} {percent(row['removed_share'])} of the sink in layers {row['read_layers']}; {random}."
        )
    return sentences


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


def _ablation_title(run: Run) -> str:
    """Return the title of ablation: the share of the sink that the best set removes, beside random sets."""
    table = run.optional("summary", columns=["neurons", "size", "removed_share", "random_max"])
    if table is None or not len(table):
        return "The neurons that carry the sink"
    best = table.sort_values("removed_share", ascending=False, kind="stable").to_dict("records")[0]
    return (
        f"Ablating {plural(int(best['size']), 'neuron')} ({label_parts(best['neurons'])}) removes "
        f"{percent(best['removed_share'])} of the sink; random sets of that size at most {percent(best['random_max'])}"
    )


def _ablation_figure(run: Run) -> tuple[str, Figure]:
    """Draw the share of the sink that each ablation removes; return caption and figure."""
    table = run.need("ablations", columns=["step", "kind", "removed_share", "ci_low", "ci_high"])
    see = (
        "Each mark is one ablation (zero or mean, at the sink or everywhere) with its interval over sequences. A set "
        "that carries the sink stands far right of its neurons alone and of the random sets. Leaving one neuron out "
        "shows whether all are needed; taking the outlier entries alone shows what the rest of the columns does."
    )
    if (steps := len(set(table["step"].tolist()))) > _MOST_STEPS:
        see += f" The first {_MOST_STEPS} of {steps} growth steps are drawn; the table has all."
    return see, removed_share_figure(table)


def _ablation_table(run: Run) -> tuple[str, PageTable]:
    """Return the caption and the table of all ablations of a run."""
    table = run.need("ablations", columns=["step", "kind", "removed_share", "ci_low", "ci_high"])
    heads = ("step", "kind", "neurons", "method", "what", "where", "removed_share", "interval", "loss_nats")
    shown = table.assign(interval=ci_texts(table))
    return "Every ablation." + rest_note(len(table), "ablations", most=60), page_table(shown, heads, most=60)


def _summary_table(run: Run) -> tuple[str, PageTable]:
    """Return the caption and a run's table of the summary: a row per edit, or per set of neurons."""
    table = run.need("summary", columns=[])
    if {"loss_change_low", "loss_change_high"} <= set(table.columns):
        table = table.assign(interval=ci_texts(table, "loss_change_low", "loss_change_high"))
    if "target_mass" in table.columns:
        see = "What each edit did: attention at the position and at the sink position, and the loss."
        return see, page_table(table, _HEADS)
    see = "The set of each growth step beside its best neuron alone and random sets."
    return see, page_table(table, table.columns)


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
ABLATE = Page(
    title=_ablation_title,
    headline=lambda run: ablation_sentences(
        run.need(
            "summary", columns=["step", "neurons", "size", "removes", "removed_share", "random_mean", "random_max"]
        )
    ),
    figures=(
        Drawn(key="removed", title="How much of the sink goes", make=_ablation_figure, data=table_reader("ablations")),
    ),
    tables=(_SUMMARY, Listed(key="ablation-table", title="Ablations", make=_ablation_table)),
)


def show(found: Result) -> Iterator[str | pd.DataFrame]:
    """Yield the terminal output of isolation or amplification: the headline and the main columns of the summary."""
    yield found.headline
    yield found.frame.filter(items=("target_position", "centre", "factor", "times", *_MASSES[:-1], "loss_change_nats"))


def show_ablation(found: Result) -> Iterator[str | pd.DataFrame]:
    """Yield the terminal output of ablation: the headline, and the rows of ``ablations`` without random sets."""
    yield found.headline
    table = found.tables["ablations"]
    table = table.loc[~table["kind"].str.startswith("random")]
    what = {"column": "columns", "scalar": "outlier entries"}
    edits = zip(table["method"], table["what"], table["where"], strict=True)
    table = table.assign(
        edit=[f"{method} of {what[of]}, {where}" for method, of, where in edits],
        removed=[percent(share) for share in table["removed_share"]],
        **{"95%": ci_texts(table, shown=percent)},
    )
    yield table.filter(items=("step", "kind", "neurons", "edit", "removed", "95%"))


def answer(found: Result) -> dict[str, Any]:
    """Return the ``--json`` answer: the headline, and the rows of ``ablations`` or of ``summary``."""
    return {"sentence": found.headline, "rows": found.tables.get("ablations", found.tables["summary"])}
