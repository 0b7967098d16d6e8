"""Figures: what is drawn where, at every size of model, and nothing that a token says is obeyed."""

import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from legible import faults

from sink_lens.chain.page import figures
from sink_lens.report import style
from sink_lens.report.style import figure_svg
from sink_lens.text import token_text

from .circuits import grid


def heads(*, layers=4, n_heads=3, position=0):
    table = grid(layer=range(layers), head=range(n_heads)).assign(sink_position=position)
    return table.assign(
        sink_score=table["layer"] / 10 + table["head"] / 100, sink_mass=table["layer"] / 10
    )


def positions(*, layers=4, length=32):
    table = grid(layer=range(layers), position=range(length)).assign(site="z")
    return table.assign(s1=(table["position"] + 1) ** -0.5, s2=2 * (table["position"] + 1) ** -0.5)


def neurons(*, count=20, supers=(3,), layer=1):
    table = pd.DataFrame(
        {"layer": layer, "neuron": range(count), "sink_position": 0, "spike_ratio": 2.0}
    )
    is_super = table["neuron"].isin(supers)
    share = np.where(is_super, 0.5 + table["neuron"] / 1000, 0.001)
    rank = table["neuron"].astype("Int64") + 1
    more = {
        "contribution": share * 100,
        "contribution_share": share,
        "gate_norm_rank": rank,
        "up_norm_rank": rank,
    }
    return table.assign(is_super=is_super, **more)


def dimensions():
    values = [-900.0, 300.0, *np.linspace(9, 1, 14)]
    table = pd.DataFrame(
        {"layer": 2, "sink_position": 0, "dimension": range(100, 116), "value": values}
    )
    return table.assign(is_outlier=table["dimension"] < 102)


def layers(*, n=12):
    at = np.arange(n)
    return pd.DataFrame(
        {"layer": at, "norm_ratio": np.where(at < 3, 1.5, 40.0), "outlier_value": -10.0 * at}
    )


STEPS = pd.DataFrame(
    {"first_layer": [3], "last_layer": [4], "ratio_before": [2.0], "ratio_after": [50.0]}
)


def texts(drawn):
    return ["".join(text.itertext()) for text in ElementTree.fromstring(drawn).iter("text")]


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "length"), [(4, 4, 8), (80, 128, 2048)], ids=["small", "large"]
)
def test_every_figure_is_drawn_at_every_size(n_layers, n_heads, length):
    table = heads(layers=n_layers, n_heads=n_heads)
    for index, figure in enumerate(
        [
            figures.draw_sink_scores(table, position=0, threshold=0.3),
            figures.draw_sink_mass(table, position=0, threshold=0.3),
            figures.draw_norm_by_layer(
                layers(n=n_layers), growth_steps=STEPS.head(int(n_layers > 5))
            ),
            figures.draw_variance_by_position(
                positions(layers=n_layers, length=length), layers=[0, n_layers - 1]
            ),
            figures.draw_super_neurons(neurons(count=64 * n_heads), position=0, share=0.05),
            figures.draw_top_dimensions(dimensions(), position=0, layer=2),
        ]
    ):
        assert max(figure.get_size_inches()) < 9
        drawn = figure_svg(figure, name=f"figure-{index}")
        assert len(drawn) < 600_000
        ElementTree.fromstring(drawn)


def test_the_heat_map_has_the_scores_of_one_position_and_heads_without_a_row_are_left_empty():
    # layer 3, head 2: 3 / 10 + 2 / 100 = 0.32; the image is drawn head down, layer across
    table = pd.concat([heads().iloc[1:], heads(position=5).assign(sink_score=9.0)])
    image = figures.draw_sink_scores(table, position=0).axes[0].images[0].get_array()
    assert image is not None
    assert image.shape == (3, 4)
    assert image[2, 3] == image.max() == pytest.approx(0.32)
    grid = figures.layer_head_grid(table, "sink_score", position=0)
    assert np.argwhere(np.isnan(grid)).tolist() == [[0, 0]]


def test_onset_is_the_first_layer_whose_mean_score_passes_the_threshold_and_is_named():
    # mean over heads of layer l: l / 10 + 0.01, so 0.21 at layer 2 and 0.31 at layer 3
    assert figures.onset_of_heads(heads(), position=0, threshold=0.2) == 2
    assert figures.onset_of_heads(heads(), position=0, threshold=0.3) == 3
    assert figures.onset_of_heads(heads(), position=0, threshold=0.9) is None
    assert "onset: layer 2" in texts(
        figure_svg(figures.draw_sink_mass(heads(), position=0, threshold=0.2), name="mass")
    )


def test_growth_steps_are_named_with_their_factor():
    # 50 / 2 = 25
    drawn = texts(
        figure_svg(figures.draw_norm_by_layer(layers(), growth_steps=STEPS), name="norms")
    )
    assert {"layers 3 to 4", "×25"} <= {line.strip() for text in drawn for line in text.split("\n")}


def test_variance_that_follows_the_law_lies_on_it_and_zero_at_the_first_position_leaves_the_rest_in_place():
    for axes in figures.draw_variance_by_position(positions(), layers=[1]).axes:
        measured, law = axes.lines
        assert measured.get_ydata() == pytest.approx(law.get_ydata())
    # s1 is 0 at t = 1 and 1 / sqrt(t) after: over s1[t = 2] * sqrt(2) = 1 it is still the law
    table = positions()
    table.loc[table["position"] == 0, "s1"] = 0.0
    line = figures.draw_variance_by_position(table, layers=[1]).axes[0].lines[0]
    assert line.get_xydata()[0] == pytest.approx([2, 2**-0.5])


def test_super_neurons_alone_are_named_and_eight_at_most():
    drawn = texts(
        figure_svg(
            figures.draw_super_neurons(neurons(supers=(3, 7)), position=0, share=0.05),
            name="neurons",
        )
    )
    names = [text for text in drawn if re.fullmatch(r"L1\.N\d+", text)]
    assert set(names) == {"L1.N3", "L1.N7"}
    assert len(figures.draw_super_neurons(neurons(supers=range(12)), position=0).axes[0].texts) == 8


def test_dimensions_stand_in_order_of_magnitude():
    axes = figures.draw_top_dimensions(dimensions(), position=0, layer=2, most=5).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "100",
        "101",
        "102",
        "103",
        "104",
    ]
    assert sum(bar.get_hatch() == "//" for bar in axes.patches) == 2


@pytest.mark.parametrize(
    "text", ["$x$", "$\\frac{1}", "<b>&amp;", "]]>", "‮", "日本", "a" * 1000, "\x00", ""]
)
def test_a_token_at_an_axis_is_text(text):
    figure = style.new_figure()
    style.panel(figure).set_xticks(
        range(2), [token_text(one, limit=8, counted=False) for one in (text, "x")]
    )
    drawn = figure_svg(style.without_formulas(figure), name="p")
    shown = [
        found
        for found in texts(drawn)
        if found == "x" or found.startswith(text[:8].strip("‮\x00") or "⟨")
    ]
    assert len(shown) >= 2 or text == ""
    assert all(len(found) < 20 for found in texts(drawn))


def test_a_figure_in_the_page_takes_its_colours_from_the_page():
    drawn = figure_svg(figures.draw_sink_mass(heads(), position=0, threshold=0.2), name="mass")
    assert "currentColor" in drawn
    assert "var(--blue)" in drawn
    assert not set(re.findall(r"#[0-9a-f]{6}", drawn)) & {
        "#222222",
        "#0072b2",
        "#000000",
        "#ffffff",
    }
    assert "http" not in drawn


def test_figures_leave_the_settings_of_matplotlib_alone():
    before = dict(matplotlib.rcParams)
    figure_svg(figures.draw_sink_scores(heads(), position=0), name="a")
    assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_read_is_found():
    figure = style.new_figure(width=3, height=2)
    axes = style.panel(figure)
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
