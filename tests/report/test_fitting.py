"""Figures at the widths of columns, in both fonts: all of their text can be read, or an error says the least width."""

import itertools
import re

import matplotlib.patches
import pytest

from sink_lens.errors import InputError
from sink_lens.records import read_run
from sink_lens.report.fitting import fit_figure
from sink_lens.report.html import belongs, page_of
from sink_lens.report.legible import faults
from sink_lens.report.style import canvas, legend, panel

from .circuits import traced
from .test_figures import everything
from .test_pages import a_run

SIZES = [(3.25, "serif"), (5.5, "sans-serif"), (6.75, "serif")]


def check(make, name):
    """The figure can be read at every width, or says the width from which it can."""
    for width, font in SIZES:
        said = ""
        try:
            figure = fit_figure(make, inches=width, font=font)
        except InputError as error:
            said = str(error)
        if said:
            found = re.search(r"need ([\d.]+) at least", said)
            assert found, (name, width, font, said)
            width = float(found[1])
            figure = fit_figure(make, inches=width, font=font)
        assert figure.get_figwidth() == pytest.approx(width)
        assert faults(figure) == [], (name, width, font)


def test_the_figures_of_a_trace_can_be_read_at_every_width():
    size = {"n_layers": 12, "n_heads": 8, "length": 32}
    for at in range(len(list(everything(**size)))):
        check(lambda at=at: next(itertools.islice(everything(**size), at, None)), at)


@pytest.mark.parametrize("kind", ["patch", "sweep", "train", "quantise"])
def test_the_figures_of_other_runs_can_be_read_at_every_width(kind, tmp_path):
    run = read_run(a_run(tmp_path / "run", kind))
    for drawn in page_of(run).figures:
        if belongs(run, drawn):
            check(lambda drawn=drawn: drawn.make(run)[1], f"{kind}: {drawn.key}")


def test_a_circuit_names_its_least_width_and_the_papers_one_fits(tmp_path):
    run = read_run(traced(tmp_path / "run"))
    made = {drawn.key: drawn.make for drawn in page_of(run).figures}
    with pytest.raises(InputError, match=r"cannot be read at 2 inches .* need \d[\d.]* at least"):
        fit_figure(lambda: made["circuit"](run)[1], inches=2.0, font="serif")
    for width, font in SIZES:
        assert fit_figure(lambda: made["circuit-paper"](run)[1], inches=width, font=font).get_figwidth() == width
    assert fit_figure(lambda: made["circuit-talk"](run)[1], inches=13.33, font="sans-serif").get_figwidth() == 13.33


def test_a_legend_that_reaches_out_beside_long_names_goes_over_the_whole_figure():
    def make():
        figure = canvas(width=7.4, height=3.5)
        axes = panel(figure)
        axes.set_yticks([0, 1], ["zero neurons, layer 11, unit 1229,1487", "zero MLP output, layer 0"])
        axes.plot([0, 1], [0, 1], label="no more than chance and controls")
        legend(axes, columns=2)
        return figure

    assert faults(fit_figure(make, inches=3.25, font="serif")) == []


def test_what_cannot_be_read_is_found():
    figure = canvas(width=3, height=2)
    axes = panel(figure)
    axes.add_patch(matplotlib.patches.Rectangle((0, 0), 1, 1))
    assert faults(figure) == []
    axes.text(0.5, 0.5, "one text", fontsize=12)
    axes.text(0.52, 0.52, "another text", fontsize=12)
    axes.text(0.99, 0.1, "a text that is too long for its place", fontsize=12, in_layout=False)
    axes.text(0.1, 0.8, "\ue0f0", fontsize=12)
    found = faults(figure)
    assert [one for one in found if "lies on" in one] == ["'one text' lies on 'another text'"]
    assert any("too long for its place' extends beyond the figure" in one for one in found)
    assert any(one.startswith("the font has no character for Glyph 57584") for one in found)
