"""A result in a notebook: its sentences, a short table, the verdicts. HTML with everything escaped.

A class of results gives it as its ``_repr_html_``. Nothing is fetched, and no script runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from sink_lens.records import PAGE_FILE
from sink_lens.report.page import page_table
from sink_lens.text import as_text, safe_line

QUIET = "#777777"
CELL = "padding: .15em .8em .15em 0; vertical-align: top;"


def result_html(
    sentences: str | Iterable[str],
    *parts: object,
    notes: Sequence[str] = (),
    folder: Path | None = None,
) -> str:
    """Return a result as HTML for a notebook: sentences, parts, notes, and the path of its page or run folder.

    Each part is a data frame, a mapping of names to values, a figure, or a text of HTML.
    """
    lines = sentences.split("\n") if isinstance(sentences, str) else list(sentences)
    paragraphs = "".join(f"<p style='margin: .2em 0; max-width: 60em'>{text_html(line)}</p>" for line in lines if line)
    small = [f"Note: {text_html(note)}" for note in notes]
    if folder is not None:
        report = folder / PAGE_FILE
        small.append(f"In <code>{text_html(report if report.exists() else folder)}</code>")
    tail = "".join(f"<p style='margin: .2em 0; color: {QUIET}'>{line}</p>" for line in small)
    return f"<div>{paragraphs}{''.join(map(_part_html, parts))}{tail}</div>"


def _part_html(part: object) -> str:
    """Return a part of a result (a data frame, mapping or figure; HTML stays as it is) as HTML."""
    if isinstance(part, str):
        return part
    if isinstance(part, pd.DataFrame):
        return table_html(part)
    return facts_html(part) if isinstance(part, Mapping) else image_html(part)


def table_html(frame: pd.DataFrame, heads: Mapping[str, str] | Sequence[str] | None = None, *, most: int = 20) -> str:
    """Return the first ``most`` rows of a data frame as an HTML table; ``heads`` chooses columns, or renames them."""
    shown = page_table(frame, frame.columns if heads is None else heads, most=most)
    align = [f"{CELL} text-align: {'right' if numeric else 'left'}" for numeric in shown.numeric]
    cells = zip(shown.heads, align, strict=True)
    head = "".join(f"<th style='{style}'>{text_html(name)}</th>" for name, style in cells)
    rows = [
        "".join(
            f"<td style='{style}'><bdi>{text_html(cell)}</bdi></td>" for cell, style in zip(row, align, strict=True)
        )
        for row in shown.rows
    ]
    rest = len(frame) - len(rows)
    more = f"<p style='margin: 0; color: {QUIET}'>and {rest:,} more</p>" if rest > 0 else ""
    return scrolling_table_html(f"<thead><tr>{head}</tr></thead><tbody>{rows_html(rows)}</tbody>") + more


def facts_html(values: Mapping[str, Any]) -> str:
    """Return a mapping as an HTML table, one name and value per row."""
    style = f"{CELL} text-align: left"
    rows = [
        f"<th style='{style}'>{text_html(name)}</th><td style='{style}'>{text_html(as_text(value))}</td>"
        for name, value in values.items()
    ]
    return scrolling_table_html(f"<tbody>{rows_html(rows)}</tbody>")


def image_html(figure: Any) -> str:
    """Return a figure as an HTML image that holds its own data."""
    from sink_lens.report.style import figure_html

    return figure_html(figure)


def text_html(text: object) -> str:
    """Escape a text for HTML, cut to 400 characters."""
    return escape(safe_line(text, limit=400))


def rows_html(rows: Iterable[str]) -> str:
    """Return table rows as HTML: each of the given rows (the HTML of its cells) in a ``tr`` element."""
    return "".join(f"<tr>{row}</tr>" for row in rows)


def scrolling_table_html(inside: str) -> str:
    """Return an HTML table that scrolls sideways, with the given rows (HTML) inside."""
    return f"<div style='overflow-x: auto'><table style='border-collapse: collapse'>{inside}</table></div>"
