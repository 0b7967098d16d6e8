"""Run folders of others: texts that XML cannot hold, and numbers that JSON cannot, take no page away."""

import re
from xml.etree import ElementTree

import pandas as pd
import pytest

from sink_lens.report.html import page_html
from sink_lens.report.style import figure_bytes, figure_svg, new_figure, panel
from sink_lens.report.views import View

from .circuits import tables, traced, write_run
from .test_pages import CONFIGS, SAYS, frames_of


def changed(frame, *, text="\x00\x1b\ufffe", number=1e308):
    """The frame with this text in each of its texts, and this number in every second row."""
    for name in frame:
        if pd.api.types.is_float_dtype(frame[name]):
            frame = frame.assign(**{name: frame[name].where(frame.index % 2 == 0, number)})
        elif pd.api.types.is_string_dtype(frame[name]) or frame[name].dtype == object:
            frame = frame.assign(
                **{name: [f"{one}{text}" if isinstance(one, str) else one for one in frame[name]]}
            )
    return frame


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("kind", SAYS)
def test_no_kind_of_run_loses_its_page(tmp_path, kind):
    frames = {name: changed(frame) for name, frame in frames_of(kind).items()}
    text = page_html(write_run(tmp_path, kind, config=CONFIGS.get(kind), **frames))
    assert "</html>" in text
    assert "\x00" not in text


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_a_trace_does_not_lose_its_page(tmp_path):
    frames = {name: changed(frame, text="") for name, frame in tables().items()}
    assert "</html>" in page_html(traced(tmp_path, frames=frames))


def test_texts_of_a_figure_may_hold_anything():
    figure = new_figure()
    panel(figure, xlabel="a\x00b\x0bc\ufffe")
    assert "a\ufffdb\ufffdc\ufffd" in figure_svg(figure, name="one")
    ElementTree.fromstring(figure_bytes(figure, "svg"))


def test_numbers_of_a_view_may_be_infinite():
    view = View(kind="A", props={"values": [0.5, 1e309, -1e309]}, height=1)
    assert re.search(r"\[0\.5,null,null\]", view.html)
