"""The first screen of a trace's page."""

import re
from collections.abc import Sequence
from pathlib import Path

from sink_lens.chain.links.words import MEANINGS
from sink_lens.chain.page.story import (
    LinkRow,
    headline_numbers,
    link_rows,
    named_links,
    title,
    verdict_counts_text,
)
from sink_lens.records import Run
from sink_lens.report.offline import template_environment
from sink_lens.report.page import FirstScreen, Judged, try_make
from sink_lens.schema import ERROR_RATES, QUESTIONS, VERDICTS
from sink_lens.text import name_in_words


def first_screen(run: Run) -> FirstScreen:
    """Make the first screen; a piece of it is empty if the run lacks the tables for it."""
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
    rows = {row.link: row for row in reversed(links) if row.primary}
    judged = []
    for link in named_links(run):
        row = rows.get(link.name)
        verdict, why = "not measured", ""
        if row is not None:
            moved = (
                f"; intervention {row.intervention_share} {row.intervention_interval}"
                if row.intervention
                else ""
            )
            measured = f": {row.statistic} {row.value} {row.interval}" if row.statistic else ""
            verdict, why = row.verdict, f"{measured}{moved}".rstrip()
        judged.append(Judged(key=link.name, name=link.in_words, verdict=verdict, why=why))
    return tuple(judged)
