"""The result of a trace in the terminal: where the sink is, what makes it, which links hold, what else carries it."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..schema import ALL_STEPS, ANOTHER_PATH, QUESTIONS, RESCALED, SPAN
from ..text import capital, listed, named_parts, neuron_name, number, percent, plural, span, words
from ..text import interval as interval_text
from .config import TraceConfig, TraceView
from .links import LINKS
from .locate import Location
from .makers import ALL, GOALS
from .page.words import beyond_chance, curve_text, first_parts, remarks, shown_set, views_text, why_undecided
from .summary import too_short

if TYPE_CHECKING:
    from .trace import Trace

_STYLES = {"holds": "green", "fails": "red", "undecided": "yellow"}
"""Verdict -> its colour; every other is grey."""
_ARROWS = {link.name: link.arrow for link in LINKS}
_MARKS = {"holds": "+", "fails": "x", "undecided": "?", "present, not tested": "o"}
"""Verdict -> its mark; every other has a dash."""
_WIDTHS, _FEW = (24, 17, 15, 15, 15), 3
"""Columns of the lines of the links: 71 and the last word fit into 80; and how many there are without interventions."""


def show(trace: "Trace", view: TraceView) -> Iterator[RenderableType]:
    """Terminal output: the answer; every table too, if asked for."""
    from ..report.html import conclusion

    yield brief(trace, conclusion=conclusion(trace.folder))
    yield Group("", short_table(trace), "") if view.verbose else "\n(tables: on the page, or with --verbose)"


def answer(trace: "Trace", _: TraceView) -> dict[str, Any]:
    """Answer of ``--json``: the conclusion, the links with their answers, the summary, the sets that make the sink."""
    from ..report.html import conclusion

    tables = {"links": trace.links.query("is_primary"), "summary": trace.tables["summary"]}
    makers = trace.tables.get("maker_sets")
    if makers is not None:
        tables["makers"] = makers.loc[makers["control_of"] == ""]
    return {"sentence": conclusion(trace.folder), **tables}


def short_table(trace: "Trace") -> RenderableType:
    """The result for a terminal: where the sink is, what makes it, and which links hold."""
    frames, config, location = trace.tables, trace.config, trace.location
    values = frames["summary"].set_index("quantity")
    parts: list[RenderableType] = [_headline(values, frames, config=config, location=location)]
    if len(frames["growth_steps"]):
        parts.append(_steps(frames))
    if len(frames.get("maker_sets", ())):
        parts.append(Group(makers_table(frames["maker_sets"]), Text(views_text(frames).capitalize())))
    parts.append(_links(frames, sink_position=location.sink_position))
    parts += causal_parts(frames)
    if len(frames["conditions"]) > 1:
        parts.append(_conditions(frames["conditions"]))
    return Group(parts[0], *(Padding(part, (0, 0, 1, 0)) for part in parts[1:-1]), *parts[1:][-1:])


def brief(trace: "Trace", *, conclusion: str) -> RenderableType:
    """The answer in at most 30 lines of 80 characters: the conclusion, the sink, its makers, a line per link."""
    frames, config, location = trace.tables, trace.config, trace.location
    values = frames["summary"].set_index("quantity")
    parts: list[RenderableType] = [
        Text(f"{conclusion}.\n", style="bold"),
        _headline(values, frames, config=config, location=location),
    ]
    if len(sets := frames.get("maker_sets", pd.DataFrame())):
        found = sets.loc[sets["control_of"].eq("") & sets["set"].isin([*GOALS, ALL])].drop_duplicates("parts")
        parts += [_makers_line(row) for row in _rows(found)[:2]]
        parts.append(Text())
    parts += _verdicts(frames, sink_position=location.sink_position)
    if len(frames.get("effects", ())):
        parts.append(Text(f"\n{_bound_to(frames)}"))
    return Group(*parts)


def _bound_to(frames: Mapping[str, pd.DataFrame]) -> str:
    """Say what the sink is bound to."""
    (row,) = _rows(frames["summary"].loc[frames["summary"]["quantity"].eq("sink_bound_to")])
    return f"Position or token? {row['value']}: {row['note']}"


def _makers_line(row: Mapping[Any, Any]) -> Text:
    """Say in a line what a set of makers removes."""
    named, size = first_parts(named_parts(row["parts"]), most=3), int(row["size"])
    chance = "" if beyond_chance(row) else ", no more than chance"
    of = "" if row["target"] == "sink" else f" of the {row['target']}"
    share = f"{percent(row['removed'])} {_percent_bounds(row)}{of}{chance}"
    return Text(f"Switching off {plural(size, 'part')} removes {share}: {named}")


def _verdicts(frames: Mapping[str, pd.DataFrame], *, sink_position: int) -> list[RenderableType]:
    """A line per link: its verdict, what its intervention makes or removes of the sink; what left some undecided."""
    links, effects = frames["links"], frames.get("effects")
    intervened = {} if effects is None else {row["link"]: row for row in _rows(effects) if row["is_primary"]}
    table = _table("Links, and the sink that breaking each makes or removes")
    for name in ("link", "verdict", "intervention", "controls"):
        table.add_column(name, no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for link in dict.fromkeys(links["link"]):
        verdict = str(next(row["verdict"] for row in _rows(links) if row["link"] == link and row["is_primary"]))
        did, control, why = "not intervened on", "", why_undecided(frames, str(link))
        if why:
            reasons.setdefault(why, []).append(_ARROWS.get(link, words(str(link))))
        if link in intervened:
            row = intervened[link]
            largest = row.get("control_largest", np.nan)
            control = "" if np.isnan(largest) else f"at most {percent(largest)}"
            makes = "makes" if row["position"] != sink_position else "removes"
            did = f"{makes} {percent(row['share'])} {_percent_bounds(row)}"
        marked = Text(f"{_MARKS.get(verdict, '-')} {verdict}", style=_STYLES.get(verdict, "dim"))
        table.add_row(_ARROWS.get(link, words(str(link))), marked, did, control)
    return [table, *(Text(f"? {listed(links)}: {why}") for why, links in reasons.items())]


def _headline(
    values: pd.DataFrame, frames: Mapping[str, pd.DataFrame], *, config: TraceConfig, location: Location
) -> Text:
    """The first lines: sink, rate, dimensions, growth steps."""
    rate = values.loc["sink_rate"]
    text = Text()
    text.append(f"{config.model}", style="bold")
    if location.sink_found:
        text.append(f": attention sink at position {location.sink_position}")
        if "sequences_with_sink" in values.index:
            count, whole = (int(values.loc[name, "value"]) for name in ("sequences_with_sink", "sequences_asked"))
            text.append(f" in {count} of {whole} sequences")
        text.append("\n")
    elif np.isnan(float(rate["value"])):
        text.append(f": {too_short(config.threshold)}\n")
    else:
        text.append(
            f": no attention sink was found, so no link is judged; position {location.sink_position} is studied\n"
        )
    if not np.isnan(float(rate["value"])):
        text.append(
            f"  sink rate at {config.threshold:g}: {float(rate['value']):.1%} of layers and heads"
            f" ({float(rate['ci_low']):.1%} to {float(rate['ci_high']):.1%})\n"
        )
    # An empty text is nan once it was written to a file and read again.
    dimensions, steps = (
        "none" if pd.isna(value) or value == "" else value
        for value in values.loc[["outlier_dimensions", "growth_steps"], "value"]
    )
    text.append(f"  outlier dimensions: {dimensions}; growth steps in layers: {steps}")
    if "slow_growth" in values.index:
        text.append(
            f"; slow growth: {float(values.loc['slow_growth', 'value']):.1f} times {values.loc['slow_growth', 'note']}"
        )
    text.append(
        f"\n  effective rank in the middle: {float(values.loc['effective_rank', 'value']):.1f} with the token, "
    )
    text.append(f"{float(values.loc['effective_rank_without', 'value']):.1f} without it\n")
    return text


def _steps(frames: Mapping[str, pd.DataFrame]) -> Table:
    table = _table("Growth steps and their super neurons (share of the layer's change)")
    for name in ("layers", "norm ratio", "dimension", "super neurons"):
        table.add_column(name, no_wrap=name != "super neurons")
    supers = [row for row in _rows(frames["neurons"]) if row["is_super"]]
    supers.sort(key=lambda row: row["contribution_share"], reverse=True)
    for step in _rows(frames["growth_steps"]):
        first, last = step["first_layer"], step["last_layer"]
        of_step = [r for r in supers if first <= r["layer"] <= last and r["sink_position"] == step["sink_position"]]
        named = [
            f"{neuron_name(row['layer'], row['neuron'])} ({_of_expert(row)}{row['contribution_share']:.0%})"
            for row in of_step[:8]
        ]
        more = f", {len(of_step) - 8} more" if len(of_step) > 8 else ""
        table.add_row(
            span(range(first, last + 1)),
            f"{step['ratio_before']:.1f} -> {step['ratio_after']:.1f}",
            str(step["outlier_dimension"]),
            ", ".join(named) + more or "none",
        )
    return table


def _of_expert(row: Mapping[Any, Any]) -> str:
    """The neuron's expert, if it has one."""
    return f"expert {row['expert']}, " if "expert" in row else ""


def _links(frames: Mapping[str, pd.DataFrame], *, sink_position: int) -> RenderableType:
    """A line per link: its verdict and its answers; under it what was measured, and what its intervention does."""
    links, effects = frames["links"], frames.get("effects")
    intervened = {} if effects is None else {row["link"]: row for row in _rows(effects) if row["is_primary"]}
    questions = [name for name in QUESTIONS if name in links.columns and set(links[name]) != {"not tested"}]
    moved = "; floors not calibrated" if "not calibrated" in set(links["floors"]) else ""
    heads = ["link", "verdict", *(name.partition("_")[0] for name in questions)]
    parts: list[RenderableType] = [
        Text(f"Links of the chain; under each what it measures, and the sink that its intervention moves{moved}"),
        Text(_line(heads), style="bold"),
    ]
    for link in dict.fromkeys(links["link"]):
        rows = [row for row in _rows(links) if row["link"] == link and row["is_primary"]]
        first = rows[0]
        verdict = str(first["verdict"])
        line = [_ARROWS.get(link, words(str(link))), f"{_MARKS.get(verdict, '-')} {verdict}"]
        line += [str(first[name]) for name in questions]
        parts.append(Text(_line(line), style=_STYLES.get(verdict, "dim")))
        nulls = [f"{words(row['null_name'])} {number(row['null_value'])}" for row in rows if row["null_name"] != "none"]
        bounds = interval_text(first["ci_low"], first["ci_high"])
        over = f" (layers {first['layers']})" if first.get("layers") else ""
        measured = f"{words(str(first['statistic']))}{over} {number(first['value'])} {bounds}".rstrip()
        said = [", ".join([measured, *nulls])]
        if verdict == "not applicable":
            said.append(f"measured: {first['measured']}")
        if link in intervened:
            said.append(intervention_text(intervened[link], sink_position=sink_position))
        said += [f"{capital(one)}." for one in remarks(frames, str(link))]
        parts += [Padding(Text(one), (0, 0, 0, 2)) for one in said]
    return Group(*parts)


def _line(cells: Sequence[str]) -> str:
    """Cells of a line of the links; without interventions verdicts are longer, and one question is asked."""
    widths = _WIDTHS if len(cells) > _FEW else (24, 24, 15)
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()


def _conditions(conditions: pd.DataFrame) -> Table:
    table = _table("With and without BOS (* traced): where the sink is, and the loss in nats")
    for name in ("BOS", "position", "rate", "S2 ratio", "dimensions", "growth steps", "loss"):
        table.add_column(name)
    for row in _rows(conditions):
        table.add_row(
            f"{row['condition']}{'*' * bool(row['chosen'])}",
            str(row["sink_position"]),
            f"{row['sink_rate']:.1%}",
            f"{row['s2_ratio']:.2f}",
            row["outlier_dimensions"] or "none",
            row["growth_steps"] or "none",
            f"{row['loss_nats']:.3f}",
        )
    return table


def causal_parts(frames: Mapping[str, pd.DataFrame]) -> list[RenderableType]:
    """The causal half of the terminal's result; nothing without interventions."""
    if not len(frames.get("effects", ())):
        return []
    return [
        Text(_bound_to(frames)),
        *([Text(said)] if (said := direction_text(frames["effects"])) else []),
        *([Text(said)] if (said := mean_text(frames["effects"])) else []),
        *([Text(curve_text(frames["amplification"]))] if len(frames["amplification"]) else []),
        *([_matrix(frames["mediation"])] if len(frames["mediation"]) else []),
        Text(_paths(frames)),
    ]


def mean_text(effects: pd.DataFrame) -> str:
    """Say what mean ablation sets a part to, and how many sinks it leaves out; empty for runs of earlier versions."""
    if "sinks_left_out" not in effects:
        return ""
    n = int(effects["sinks_left_out"].iloc[0])
    left = f"{plural(n, 'sink')} left out" if n else "no sink found to leave out"
    return f"Mean ablation sets a part to mean_ordinary, its mean over tokens that are not sinks ({left})"


def makers_table(sets: pd.DataFrame) -> Table:
    """The sets of makers for the terminal."""
    target = sets["target"].iloc[0]
    shown = sets.loc[sets["control_of"] == ""]
    shown = shown.loc[~(shown["set"].isin(list(GOALS)) & shown["parts"].duplicated())]
    n_controls = int(shown["n_controls"].max()) if len(shown) else 0
    beside = f", and {n_controls} random sets at most" if n_controls else ""
    table = _table(f"Makers of the {target}: what ablating each set removes{beside}")
    for name in ("set", "removes", "95%", "random", "loss, nats", "parts"):
        table.add_column(name, no_wrap=name != "parts")
    for row in _rows(shown):
        table.add_row(
            shown_set(row),
            percent(row["removed"]),
            _percent_bounds(row),
            "-" if np.isnan(row["control_largest"]) else percent(row["control_largest"]),
            f"{row['baseline_loss_nats']:.2f} -> {row['loss_nats']:.2f}",
            first_parts(named_parts(row["parts"]), most=4),
        )
    return table


def _table(title: str) -> Table:
    """A table without rules, which leaves 80 columns to its cells."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def direction_text(effects: pd.DataFrame) -> str:
    """Sentence on the makers' direction: sink removed by ablating it, and by the loss of norm alone; else empty."""
    asked = effects.loc[effects["edit"].isin([SPAN, RESCALED])].set_index("edit")
    if set(asked.index) != {SPAN, RESCALED}:
        return ""
    shares = {name: f"{percent(row['share'])} {_percent_bounds(row)}" for name, row in asked.iterrows()}
    random = asked.loc[SPAN, "control_largest"]
    control = "" if np.isnan(random) else f", random spans at most {percent(random)}"
    return (
        f"Direction: mean ablating the span of what the makers write removes {shares[SPAN]} of the sink{control}; "
        f"rescaling to the same norm without ablating it removes {shares[RESCALED]}"
    )


def _percent_bounds(row: Mapping[Any, Any]) -> str:
    """An interval in percent."""
    return interval_text(row["ci_low"], row["ci_high"], shown=percent)


def intervention_text(row: Mapping[Any, Any], *, sink_position: int) -> str:
    """One intervention as a line: what it made or removed of the sink, its interval, its controls, its cost."""
    inside = row["position"] != sink_position
    did = "makes" if inside else "removes"
    largest = row.get("control_largest", np.nan)
    control = "" if np.isnan(largest) else f", controls at most {percent(largest)}"
    cost = row.get("loss_nats", np.nan) - row.get("baseline_loss_nats", np.nan)
    loss = "" if np.isnan(cost) else f"; loss {cost:+.2f}"
    return f"{row['edit']} {did} {percent(row['share'])} {_percent_bounds(row)}{control}{loss}"


def _matrix(table: pd.DataFrame) -> Table:
    """Return what survives each freeze, for the terminal."""
    shown = _table("The share of the sink that survives a frozen step or all steps (random controls)")
    for name in ("sink by", "layers"):
        shown.add_column(name, no_wrap=True)
    names = dict.fromkeys([*(link.freeze.name for link in LINKS if link.freeze is not None), *table["frozen"]])
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for _, part in table.groupby(["intervention", "step"], sort=False):
        by_name = {row["frozen"]: row for row in part.to_dict("records")}
        cells = [_cell(by_name[name]) if name in by_name else "-" for name in names]
        first = part.iloc[0]
        layers = f"{first['layers_from']}-{first['layers_to']}" + (", all" if first["step"] == ALL_STEPS else "")
        shown.add_row(str(first["intervention"]), layers, *cells)
    return shown


def _cell(row: Mapping[Any, Any]) -> str:
    """A surviving share with its control."""
    if np.isnan(row["surviving_share"]):
        return "-"
    control = row["control_surviving_share"]
    return f"{row['surviving_share']:z.2f}" + ("" if np.isnan(control) else f" ({control:z.2f})")


def _paths(frames: Mapping[str, pd.DataFrame]) -> str:
    """Name the links that leave most of the sink if they are frozen in all growth steps: another path carries it.

    A link whose steps leave most alone, but not all together, has its other path in the other steps.
    """
    table = frames["mediation"]
    if table["surviving_share"].isna().to_numpy().all():
        why = "nothing adds a sink here" if len(table) else "the sink is there before the layers in which they are read"
        return f"what survives while a link is frozen was not measured: {why}"
    freezes = [link.freeze for link in LINKS if link.freeze is not None]
    words = {one.name: one.words for one in freezes}
    checks = {one.name for one in freezes if one.is_check}
    whole = table.loc[table["step"] == ALL_STEPS]
    leaves = table["surviving_share"] > ANOTHER_PATH
    several, lines = len(whole) > 0, []
    for name in dict.fromkeys([*words, *table["frozen"]]):
        if name in checks:
            continue
        beside, of_all = words.get(name, name), whole["frozen"] == name
        asked = whole.loc[of_all] if several and of_all.any() else table.loc[table["frozen"] == name]
        leaving = asked.loc[asked["surviving_share"] > ANOTHER_PATH]
        frozen = " of all growth steps together" if several and of_all.any() else ""
        if len(leaving):
            most = float(leaving["surviving_share"].max())
            share = "all" if most >= 1 else percent(most)
            sinks = listed(dict.fromkeys(leaving["intervention"]))
            lines.append(f"another path exists beside {beside}{frozen}: {share} of the sink survives ({sinks})")
        elif several and of_all.any():
            alone = table.loc[(table["frozen"] == name) & (table["step"] != ALL_STEPS) & leaves]
            if len(alone):
                steps = listed(sorted(set(alone["step"])))
                lines.append(
                    f"freezing {beside} of step {steps} alone leaves most of the sink; freezing those of all steps "
                    "together does not"
                )
    return "\n".join(lines) or "no other path: every freeze takes most of the sink away"


def _rows(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """The table's rows as dictionaries."""
    return frame.to_dict("records")
