"""A trace in a notebook: its findings in plain words, and the verdict on every link."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from sink_lens.chain.page.story import chain, find_story, headline, title
from sink_lens.errors import RunError
from sink_lens.records import read_run
from sink_lens.report.notebook import CELL, QUIET, result, rows_html, scrolled, text_html
from sink_lens.schema import VERDICTS
from sink_lens.text import interval, number, visible

_COLOURS = {"holds": "#00795a", "fails": "#b3400a"}


def trace(folder: Path, *, links: pd.DataFrame) -> str:
    """A trace: what it found in plain words, and the verdict on every link."""
    try:
        run = read_run(folder)
        story = find_story(run)
        sentences, names = [title(run), *headline(story)], [link.name for link in chain(run)]
    except RunError:  # the folder was moved: the tables in memory still say what follows
        sentences, names = ["A finished trace"], list(links["link"].unique())
    return result(sentences, verdicts(links, names=names), folder=folder)


def verdicts(links: pd.DataFrame, *, names: Iterable[str]) -> str:
    """The links of a chain: the verdict, the statistic with its interval and nulls, and what the intervention did.

    Args:
        links: the table of a trace: link, statistic, value, ci_low, ci_high, null_name, null_value, is_primary,
            verdict.
        names: of the links, in their order.
    """
    rows = []
    for link in names:
        of = links.loc[links["link"] == link]
        primary = of.loc[of["is_primary"].eq(True)]
        if not len(primary):
            rows.append(_row(link, _verdict("not measured"), "", "", ""))
            continue
        first = primary.to_dict("records")[0]
        nulls = zip(primary["null_name"], primary["null_value"], strict=True)
        moved = of.loc[of["statistic"] == "intervention_share"].to_dict("records")[:1]
        rows.append(
            _row(
                link,
                _verdict(str(first["verdict"]), measured=str(first.get("measured", ""))),
                f"{visible(first['statistic'])} {number(first['value'])} {interval(first['ci_low'], first['ci_high'])}",
                "; ".join(f"{visible(name)} {number(value)}" for name, value in nulls if name != "none"),
                f"{number(moved[0]['value'])} {interval(moved[0]['ci_low'], moved[0]['ci_high'])}"
                if moved
                else "no intervention",
            )
        )
    titles = ("link", "verdict", "statistic", "beside", "share of the sink that its intervention moves")
    head = "".join(f"<th style='{CELL} text-align: left'>{name}</th>" for name in titles)
    return scrolled(f"<thead><tr>{head}</tr></thead><tbody>{rows_html(rows)}</tbody>")


def _verdict(word: str, *, measured: str = "") -> str:
    """A verdict as HTML, with its sign and colour."""
    colour = _COLOURS.get(word, QUIET)
    shown = f"<b style='color: {colour}; white-space: nowrap'>{VERDICTS.get(word, '?')} {text_html(word)}</b>"
    return f"{shown}<br>measured: {text_html(measured)}" if measured and word == "not applicable" else shown


def _row(link: str, verdict: str, *cells: str) -> str:
    """The cells of a link's row as HTML."""
    shown = [f"<b>{text_html(link)}</b>", verdict, *(text_html(cell) for cell in cells)]
    return "".join(f"<td style='{CELL} text-align: left'>{cell}</td>" for cell in shown)
