"""The first screen of a trace's page."""

import re
from collections.abc import Sequence
from pathlib import Path

from ...records import Run
from ...report.offline import template_environment
from ...report.page import FirstScreen, Judged, try_make
from ...schema import ERROR_RATES, QUESTIONS, VERDICTS
from ...text import name_in_words
from ..links.words import MEANINGS
from .story import (
    LinkRow,
    headline_numbers,
    link_rows,
    named_links,
    title,
    verdict_counts_text,
)


def first_screen(run: Run) -> FirstScreen:
    found, missing = try_make(run, lambda: link_rows(run))
    links: list[LinkRow] = found or []
    notes = []
    summary = run.optional("summary", columns=["quantity", "note"])
    if summary is not None:
        notes += summary.loc[summary["quantity"] == "rounding", "note"].tolist()
    table = run.optional("links", columns=["floors"])
    if table is not None and "not calibrated" in set(table["floors"]):
        notes.append(
            "floors not calibrated: a floor or a threshold was changed, so the verdicts' error rates do not apply"
        )
    body = ""
    if not missing:
        template = template_environment(Path(__file__).parent).get_template("verdicts.html")
        body = template.render(
            links=links,
            traced=verdict_counts_text({row.link: row.verdict for row in links}),
            signs=VERDICTS,
            questions={name_in_words(name): text for name, text in QUESTIONS.items()},
            error_rates=ERROR_RATES,
        )
    return FirstScreen(
        numbers=try_make(run, lambda: headline_numbers(run))[0] or [],
        leads=("circuit", "scores"),
        name="The chain",
        heading="The chain, link by link",
        body=body,
        missing=missing,
        judged=_judged_links(run, links),
        of=("link", "links of the chain"),
        notes=tuple(notes),
        meanings=word_meanings(try_make(run, lambda: title(run))[0] or ""),
    )


def word_meanings(text: str) -> tuple[tuple[str, str], ...]:
    found = [
        (re.search(rf"\b(?:{word})\b", text, flags=re.I), said) for word, said in MEANINGS.items()
    ]
    return tuple(
        (match[0].lower() if match[0] != "BOS" else "BOS", said)
        for match, said in found
        if match is not None
    )


def _judged_links(run: Run, links: Sequence[LinkRow]) -> tuple[Judged, ...]:
    rows, judged = {row.link: row for row in links}, []
    for link in named_links(run):
        row, verdict, why = rows.get(link.name), "not measured", ""
        if row is not None:
            verdict = row.verdict
            if row.statistic:
                why = f": {row.statistic} {row.value} {row.interval}"
            if row.intervention:
                why += f"; intervention {row.intervention_share} {row.intervention_interval}"
        judged.append(Judged(key=link.name, name=link.in_words, verdict=verdict, why=why.rstrip()))
    return tuple(judged)
