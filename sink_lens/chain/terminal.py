"""The result of a trace in the terminal."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..text import capitalise, name_in_words, percent
from .links import LINKS
from .links.words import change_texts
from .page.story import find_story
from .page.words import link_remarks
from .summary import too_short_sentence

if TYPE_CHECKING:
    from .trace import Trace

_STYLES = {"holds": "green", "in part": "blue", "fails": "red", "undecided": "yellow"}
"""Every other verdict is grey."""
_ARROWS = {link.name: link.arrow for link in LINKS}
_MARKS = {"holds": "+", "in part": "~", "fails": "x", "undecided": "?", "present, not tested": "o"}
"""Every other verdict has a dash."""
_CLAIMED = ("holds", "in part", "present, not tested")
"""Verdicts below which the link's own sentence stands as it is."""


def show_trace(trace: "Trace") -> Iterator[RenderableType]:
    yield brief_answer(trace)


def answer_of_trace(trace: "Trace") -> dict[str, Any]:
    """Return the answer of ``--json``."""
    tables = {"links": trace.links.query("is_primary"), "summary": trace.tables["summary"]}
    makers = trace.tables.get("maker_sets")
    if makers is not None:
        tables["makers"] = makers.loc[makers["control_of"] == ""]
    return {"sentence": trace.sentences[0].removesuffix("."), **tables}


def brief_answer(trace: "Trace") -> RenderableType:
    said = [Text(f"{trace.sentences[0]}\n", style="bold")]
    if find_story(trace.run).sink_rate is None:
        said.append(Text(f"{capitalise(too_short_sentence(trace.config.threshold))}.\n"))
    return Group(*said, *_link_lines(trace.tables, sink_position=trace.location.sink_position))


def _link_lines(frames: Mapping[str, pd.DataFrame], *, sink_position: int) -> list[RenderableType]:
    links, effects = frames["links"], frames.get("effects")
    made = (
        []
        if effects is None
        else effects.loc[effects["is_primary"].astype(bool)].to_dict("records")
    )
    intervened = {row["link"]: row for row in made}
    claims = dict(zip(frames["chain"]["link"], frames["chain"]["sentence"], strict=True))
    primary = (
        links.loc[links["is_primary"].astype(bool)]
        .drop_duplicates("link")
        .set_index("link")["verdict"]
    )
    rows: list[tuple[str, str, str, str, str]] = []
    for link, verdict in primary.items():
        did = control = ""
        if link in intervened:
            row = intervened[link]
            largest = row["control_largest"]
            control = "" if np.isnan(largest) else f"its controls at most {percent(largest)}"
            does = "make" if row["position"] != sink_position else "remove"
            did = " ".join(change_texts(row["share"], row["ci_low"], row["ci_high"], does=does))
        claim = claims.get(link, "")
        if claim and verdict not in _CLAIMED:
            claim = f"this was not shown: {claim[:1].lower()}{claim[1:]}"
        sentence = next(iter(link_remarks(frames, str(link))), claim)
        named = _ARROWS.get(link, name_in_words(str(link)))
        rows.append(
            (f"{_MARKS.get(verdict, '-')} {verdict}", named, did, control, capitalise(sentence))
        )
    wide = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    shown: list[RenderableType] = []
    for row in rows:
        verdict, named, did = (cell.ljust(width) for cell, width in zip(row, wide, strict=False))
        style = _STYLES.get(row[0].partition(" ")[2], "dim")
        shown.append(
            Text.assemble((verdict, style), "  ", (named, "bold"), "  ", did, "  ", row[3])
        )
        shown.append(Padding(Text(f"{row[4].removesuffix('.')}.", style="dim"), (0, 0, 0, 4)))
    return shown
