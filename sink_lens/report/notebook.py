"""How a result shows itself in a notebook: its sentences, a short table, the verdicts. HTML with everything escaped.

A class of results gives it as its ``_repr_html_``. Nothing is fetched, and no script runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from sink_lens.errors import RunError
from sink_lens.records import PAGE_FILE, read_run
from sink_lens.report.page import shown_table
from sink_lens.report.story import chain, find_story, headline, title
from sink_lens.schema import VERDICTS
from sink_lens.text import interval, number, visible

_COLOURS = {"holds": "#00795a", "fails": "#b3400a"}
_QUIET = "#777777"
_CELL = "padding: .15em .8em .15em 0; vertical-align: top;"


def result(
    sentences: str | Iterable[str],
    *parts: object,
    notes: Sequence[str] = (),
    folder: Path | None = None,
) -> str:
    """A result: its sentences, its parts, notes, and where its run folder and report are.

    A part is a data frame, a mapping of facts, a figure, or HTML.
    """
    lines = sentences.split("\n") if isinstance(sentences, str) else list(sentences)
    paragraphs = "".join(f"<p style='margin: .2em 0; max-width: 60em'>{_text(line)}</p>" for line in lines if line)
    small = [f"Note: {_text(note)}" for note in notes]
    if folder is not None:
        report = folder / PAGE_FILE
        small.append(f"In <code>{_text(report if report.exists() else folder)}</code>")
    tail = "".join(f"<p style='margin: .2em 0; color: {_QUIET}'>{line}</p>" for line in small)
    return f"<div>{paragraphs}{''.join(map(_part, parts))}{tail}</div>"


def _part(part: object) -> str:
    """A text, table, mapping or figure as HTML."""
    if isinstance(part, str):
        return part
    if isinstance(part, pd.DataFrame):
        return table(part)
    return facts(part) if isinstance(part, Mapping) else image_html(part)


def trace(folder: Path, *, links: pd.DataFrame) -> str:
    """A trace: what it found in plain words, and the verdict on every link."""
    try:
        run = read_run(folder)
        story = find_story(run)
        sentences, names = [title(run), *headline(story)], [link.name for link in chain(run)]
    except RunError:  # the folder was moved: the tables in memory still say what follows
        sentences, names = ["A finished trace"], list(links["link"].unique())
    return result(sentences, verdicts(links, names=names), folder=folder)


def table(frame: pd.DataFrame, heads: Mapping[str, str] | Sequence[str] | None = None, *, most: int = 20) -> str:
    """The first rows of a data frame, with some of its columns, under other names where they are given."""
    shown = shown_table(frame, frame.columns if heads is None else heads, most=most)
    align = [f"{_CELL} text-align: {'right' if numeric else 'left'}" for numeric in shown.numeric]
    cells = zip(shown.heads, align, strict=True)
    head = "".join(f"<th style='{style}'>{_text(name)}</th>" for name, style in cells)
    rows = [
        "".join(f"<td style='{style}'><bdi>{_text(cell)}</bdi></td>" for cell, style in zip(row, align, strict=True))
        for row in shown.rows
    ]
    rest = len(frame) - len(rows)
    more = f"<p style='margin: 0; color: {_QUIET}'>and {rest:,} more</p>" if rest > 0 else ""
    return _scrolled(f"<thead><tr>{head}</tr></thead><tbody>{_rows(rows)}</tbody>") + more


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
    head = "".join(f"<th style='{_CELL} text-align: left'>{name}</th>" for name in titles)
    return _scrolled(f"<thead><tr>{head}</tr></thead><tbody>{_rows(rows)}</tbody>")


def facts(values: Mapping[str, Any]) -> str:
    """Names and values, one per line."""
    style = f"{_CELL} text-align: left"
    rows = [
        f"<th style='{style}'>{_text(name)}</th><td style='{style}'>{_text(number(value))}</td>"
        for name, value in values.items()
    ]
    return _scrolled(f"<tbody>{_rows(rows)}</tbody>")


def image_html(figure: Any) -> str:
    """A figure as an image."""
    from sink_lens.report.style import picture

    return picture(figure)


def _text(text: object) -> str:
    """A text escaped for HTML, at most 400 characters."""
    return escape(visible(text, limit=400))


def _verdict(word: str, *, measured: str = "") -> str:
    """A verdict as HTML, with its sign and colour."""
    colour = _COLOURS.get(word, _QUIET)
    shown = f"<b style='color: {colour}; white-space: nowrap'>{VERDICTS.get(word, '?')} {_text(word)}</b>"
    return f"{shown}<br>measured: {_text(measured)}" if measured and word == "not applicable" else shown


def _row(link: str, verdict: str, *cells: str) -> str:
    """The cells of a link's row as HTML."""
    shown = [f"<b>{_text(link)}</b>", verdict, *(_text(cell) for cell in cells)]
    return "".join(f"<td style='{_CELL} text-align: left'>{cell}</td>" for cell in shown)


def _rows(rows: Iterable[str]) -> str:
    """Rows of cells as table rows."""
    return "".join(f"<tr>{row}</tr>" for row in rows)


def _scrolled(inside: str) -> str:
    """A table that scrolls sideways."""
    return f"<div style='overflow-x: auto'><table style='border-collapse: collapse'>{inside}</table></div>"
