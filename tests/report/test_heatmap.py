"""Heat maps of sweeps: which number is drawn where."""

import numpy as np
import pytest

from sink_lens.errors import RunError
from sink_lens.patching.page import patch_map
from sink_lens.report.style import figure_html, figure_svg

from .circuits import grid


def sweep(**sizes):
    places = grid(**{name: range(size) for name, size in sizes.items()})
    return places.assign(effect=[(-1) ** number * number / 10 for number in range(len(places))])


def images(figure):
    return [
        np.asarray(axes.images[0].get_array())
        for axes in figure.axes
        if axes.get_label() != "<colorbar>"
    ]


def test_columns_are_drawn_as_panels():
    (drawn,) = images(patch_map(sweep(layer=3, position=4), by=("layer", "position")))
    assert drawn.shape == (4, 3)
    assert drawn[1, 0] == -0.1
    assert drawn[0, 1] == 0.4
    (drawn,) = images(patch_map(sweep(layer=5), by=("layer",)))
    assert drawn[:, 0].tolist() == [0.0, -0.1, 0.2, -0.3, 0.4]


def test_over_three_columns_the_strongest_is_drawn_with_its_sign():
    frame = sweep(layer=2, position=3, head=2)
    positions, heads = images(patch_map(frame, by=("layer", "position", "head")))
    assert positions.shape == (3, 2)
    assert heads.shape == (2, 2)
    assert positions[0, 0] == -0.1
    assert positions[2, 1] == -1.1
    assert heads[0, 1] == 1.0


@pytest.mark.parametrize(
    ("effects", "limit"), [([0.0, np.nan, 0.2, -0.3], 0.3), ([0.0] * 4, 1.0), ([np.nan] * 4, 1.0)]
)
def test_the_scale_is_even_around_zero_and_undefined_values_are_empty(effects, limit):
    figure = patch_map(sweep(layer=2, position=2).assign(effect=effects), by=("layer", "position"))
    assert next(axes.images[0] for axes in figure.axes if axes.images).get_clim() == (-limit, limit)
    drawn = np.ma.filled(images(figure)[0].astype(float), np.nan)
    assert np.array_equal(drawn, np.reshape(effects, (2, 2)).T, equal_nan=True)


def test_chosen_layers_and_positions_are_numbered_and_what_a_token_says_is_shown():
    frame, hostile = sweep(layer=2, position=2), "</svg><script>alert(1)</script>"
    figure = patch_map(
        frame.assign(layer=[7, 7, 12, 12]),
        by=("layer", "position"),
        labels={0: hostile, 1: "$x$\\frac{"},
    )
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["7", "12"]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "0 </svg><script>al…",
        "1 $x$\\frac{",
    ]
    assert "<script" not in figure_svg(figure, name="map")
    shown = figure_html(patch_map(frame, by=("layer", "position"), title="patched", unit="logits"))
    assert shown.startswith('<img alt="" src="data:image/png;base64,')


def test_a_frame_that_cannot_be_drawn_is_refused():
    with pytest.raises(RunError, match=r"no column \['value'\]"):
        patch_map(sweep(layer=2), by=("layer",), value="value")
    with pytest.raises(RunError, match=r"by=\[\]"):
        patch_map(sweep(layer=2), by=())
