"""The result of a trace in the terminal: the first screen of its page, and a line for each link."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..records import read_run
from ..text import interval_text, join_and, name_in_words, percent
from .links import LINKS
from .page.story import find_story, headline, headline_numbers
from .page.words import why_undecided
from .summary import too_short_sentence

if TYPE_CHECKING:
    from .trace import Trace

_STYLES = {"holds": "green", "fails": "red", "undecided": "yellow"}
"""Verdict -> its colour; every other is grey."""
_ARROWS = {link.name: link.arrow for link in LINKS}
_MARKS = {"holds": "+", "fails": "x", "undecided": "?", "present, not tested": "o"}
"""Verdict -> its mark; every other has a dash."""


def show(trace: "Trace") -> Iterator[RenderableType]:
    """Show a trace in the terminal: its answer in brief."""
    yield brief_answer(trace)


def answer(trace: "Trace") -> dict[str, Any]:
    """Return the answer of ``--json``: conclusion, links with their answers, summary, and sets that make the sink."""
    tables = {"links": trace.links.query("is_primary"), "summary": trace.tables["summary"]}
    makers = trace.tables.get("maker_sets")
    if makers is not None:
        tables["makers"] = makers.loc[makers["control_of"] == ""]
    return {"sentence": trace.sentences[0].removesuffix("."), **tables}


def brief_answer(trace: "Trace") -> RenderableType:
    """Draw the answer in at most 30 lines: the conclusion, the page's numbers and sentences, a line per link."""
    run = read_run(trace.folder)
    story, numbers = find_story(run), [" ".join(one) for one in headline_numbers(run)]
    if story.sink_rate is None:
        numbers = [f"{too_short_sentence(trace.config.threshold)}."]
    said = [Text(f"{trace.sentences[0]}\n", style="bold"), Text("\n".join([*numbers, *headline(story)]) + "\n")]
    return Group(*said, *_verdict_lines(trace.tables, sink_position=trace.location.sink_position))


def _verdict_lines(frames: Mapping[str, pd.DataFrame], *, sink_position: int) -> list[RenderableType]:
    """Draw a line per link: its verdict, and what its intervention makes or (at ``sink_position``) removes.

    After them come the reasons why links are undecided.
    """
    links, effects = frames["links"], frames.get("effects")
    made = [] if effects is None else effects.loc[effects["is_primary"].astype(bool)].to_dict("records")
    intervened = {row["link"]: row for row in made}
    table = Table(
        title="Links, and the sink that breaking each makes or removes", title_justify="left", box=None, pad_edge=False
    )
    for name in ("link", "verdict", "intervention", "controls"):
        table.add_column(name, no_wrap=True)
    reasons: dict[str, list[str]] = {}
    primary = links.loc[links["is_primary"].astype(bool)].drop_duplicates("link").set_index("link")["verdict"]
    for link, verdict in primary.items():
        arrow = _ARROWS.get(link, name_in_words(str(link)))
        did, control, why = "not intervened on", "", why_undecided(frames, str(link))
        if why:
            reasons.setdefault(why, []).append(arrow)
        if link in intervened:
            row = intervened[link]
            largest = row.get("control_largest", np.nan)
            control = "" if np.isnan(largest) else f"at most {percent(largest)}"
            ends = interval_text(row["ci_low"], row["ci_high"], shown=percent)
            did = f"{'makes' if row['position'] != sink_position else 'removes'} {percent(row['share'])} {ends}"
        marked = Text(f"{_MARKS.get(verdict, '-')} {verdict}", style=_STYLES.get(verdict, "dim"))
        table.add_row(arrow, marked, did, control)
    return [table, *(Text(f"? {join_and(links)}: {why}") for why, links in reasons.items())]
