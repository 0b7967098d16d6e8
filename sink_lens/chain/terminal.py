"""The result of a trace in the terminal: where the sink is, what makes it, which links hold, what else carries it."""

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..text import interval as interval_text
from ..text import listed, named_parts, percent, plural, words
from .config import TraceConfig
from .links import LINKS
from .locate import Location
from .makers import ALL, GOALS
from .page.words import beyond_chance, first_parts, why_undecided
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


def show(trace: "Trace") -> Iterator[RenderableType]:
    """Terminal output: the answer; the page has the tables."""
    from ..report.html import conclusion

    yield brief(trace, conclusion=conclusion(trace.folder))


def answer(trace: "Trace") -> dict[str, Any]:
    """Answer of ``--json``: the conclusion, the links with their answers, the summary, the sets that make the sink."""
    from ..report.html import conclusion

    tables = {"links": trace.links.query("is_primary"), "summary": trace.tables["summary"]}
    makers = trace.tables.get("maker_sets")
    if makers is not None:
        tables["makers"] = makers.loc[makers["control_of"] == ""]
    return {"sentence": conclusion(trace.folder), **tables}


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
    """Line that says whether the sink follows a position or a token."""
    (row,) = _rows(frames["summary"].loc[frames["summary"]["quantity"].eq("sink_bound_to")])
    return f"Position or token? {row['value']}: {row['note']}"


def _makers_line(row: Mapping[Any, Any]) -> Text:
    """Line that says how much of the sink, with its interval, switching off a set of parts removes."""
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


def _table(title: str) -> Table:
    """A table without rules, which leaves 80 columns to its cells."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def _percent_bounds(row: Mapping[Any, Any]) -> str:
    """A row's 95% interval as percentages."""
    return interval_text(row["ci_low"], row["ci_high"], shown=percent)


def _rows(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """The rows of a frame as dicts from column name to value."""
    return frame.to_dict("records")
