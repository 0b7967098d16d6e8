"""What a result shows in a notebook: sentences, a short table, verdicts; everything escaped, nothing fetched."""

from pathlib import Path

import pandas as pd
import pytest

from sink_lens.chain.page import figures
from sink_lens.chain.trace import Trace
from sink_lens.records import read_run
from sink_lens.report import notebook
from sink_lens.report.style import new_figure

from .circuits import tables, traced
from .test_figures import heads
from .test_page import Page

HOSTILE = "<img src=x onerror=alert(1)></script>\u202e" + "a" * 10_000


def test_a_trace_says_what_it_found_and_every_verdict(tmp_path):
    folder = traced(tmp_path / "run")
    (folder / "report.html").write_text("")
    found = Trace(
        folder=folder,
        tables=tables(),
        headline="Position 0 is the sink.",
        config=None,
        location=None,
    )
    shown = Page(found._repr_html_())
    for text in ("Position 0 is the sink.", "holds", "fails", "undecided", "of_key_sink", "2.5"):
        assert text in shown.text
    assert str(folder / "report.html") in shown.text


def test_a_long_table_is_cut_and_counted():
    shown = Page(
        notebook.table_html(pd.DataFrame({"a_b": range(1200), "c": None}), ["a_b"], most=3)
    )
    assert shown.text.replace(" ", "") == "ab012and1,197more"


def test_hostile_text_is_text():
    frame = pd.DataFrame({HOSTILE: [HOSTILE], "x": [1.0]})
    parts = notebook.table_html(frame), notebook.facts_html({HOSTILE: HOSTILE})
    found = notebook.notebook_html([HOSTILE], *parts, notes=[HOSTILE], folder=Path("<b>"))
    shown = Page(found)
    tags = {tag for tag, _ in shown.elements}
    assert tags <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "bdi", "code"}
    assert "\u202e" not in shown.text
    assert "<img src=x" in shown.text
    assert len(found) < 8_000


def test_a_run_says_what_it_is_and_what_it_holds(tmp_path):
    shown = Page(read_run(traced(tmp_path / "run", without=("effects",)))._repr_html_())
    assert {tag for tag, _ in shown.elements} == {"div", "b"}
    for text in ("trace (finished)", "toy", "heads, tokens, layers", "missing effects"):
        assert text in shown.text


@pytest.mark.parametrize(
    "make", [new_figure, lambda: figures.draw_sink_scores(heads(), position=0)]
)
def test_a_figure_shows_itself_without_pyplot(make):
    from IPython.core.formatters import (
        DisplayFormatter,
    )  # here: half a second that collecting need not take

    bundle, _ = DisplayFormatter().format(make())
    assert bundle["image/png"].startswith(b"\x89PNG")
