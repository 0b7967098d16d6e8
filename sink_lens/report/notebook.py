"""A result in a notebook: its sentences, a short table, the verdicts. HTML with everything escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ..records import PAGE_FILE
from ..text import as_text, safe_line
from .page import Headings, page_table

QUIET = "#777777"
CELL = "padding: .15em .8em .15em 0; vertical-align: top;"


def notebook_html(
    sentences: str | Iterable[str],
    *parts: object,
    notes: Sequence[str] = (),
    folder: Path | None = None,
) -> str:
    """Return a result as HTML for a notebook: sentences, parts, notes, and the path of its page or run folder.

    Each part is a data frame, a mapping of names to values, a figure, or a text of HTML.
    """
    lines = sentences.split("\n") if isinstance(sentences, str) else list(sentences)
    paragraphs = "".join(
        f"<p style='margin: .2em 0; max-width: 60em'>{_text_html(line)}</p>"
        for line in lines
        if line
    )
    small = [f"Note: {_text_html(note)}" for note in notes]
    if folder is not None:
        report = folder / PAGE_FILE
        small.append(f"In <code>{_text_html(report if report.exists() else folder)}</code>")
    tail = "".join(f"<p style='margin: .2em 0; color: {QUIET}'>{line}</p>" for line in small)
    return f"<div>{paragraphs}{''.join(map(_part_html, parts))}{tail}</div>"


def _part_html(part: object) -> str:
    from .style import figure_html

    if isinstance(part, str):
        return part
    if isinstance(part, pd.DataFrame):
        return table_html(part)
    return facts_html(part) if isinstance(part, Mapping) else figure_html(cast("Any", part))


def table_html(frame: pd.DataFrame, headings: Headings | None = None, *, most: int = 20) -> str:
    """Return a frame's first ``most`` rows as an HTML table."""
    shown = page_table(frame, frame.columns if headings is None else headings, most=most)
    align = [f"{CELL} text-align: {'right' if numeric else 'left'}" for numeric in shown.numeric]
    cells = zip(shown.heads, align, strict=True)
    head = "".join(f"<th style='{style}'>{_text_html(name)}</th>" for name, style in cells)
    rows = [
        "".join(
            f"<td style='{style}'><bdi>{_text_html(cell)}</bdi></td>"
            for cell, style in zip(row, align, strict=True)
        )
        for row in shown.rows
    ]
    rest = len(frame) - len(rows)
    more = f"<p style='margin: 0; color: {QUIET}'>and {rest:,} more</p>" if rest > 0 else ""
    return _scrolling_table_html(rows, head=f"<thead><tr>{head}</tr></thead>") + more


def facts_html(values: Mapping[str, Any]) -> str:
    style = f"{CELL} text-align: left"
    rows = [
        f"<th style='{style}'>{_text_html(name)}</th><td style='{style}'>{_text_html(as_text(value))}</td>"
        for name, value in values.items()
    ]
    return _scrolling_table_html(rows)


def _text_html(text: object) -> str:
    return escape(safe_line(text, limit=400))


def _scrolling_table_html(rows: Iterable[str], *, head: str = "") -> str:
    body = f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody>"
    return f"<div style='overflow-x: auto'><table style='border-collapse: collapse'>{head}{body}</table></div>"
