"""Heat maps of sweeps: which number is drawn where."""

import itertools

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import RunError
from sink_lens.patching.page import patch_map
from sink_lens.report.style import figure_html, figure_svg


def sweep(**sizes):
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    effects = [(-1) ** number * number / 10 for number in range(len(places))]
    return pd.DataFrame(places, columns=list(sizes)).assign(effect=effects)


def images(figure):
    return [
        np.asarray(axes.images[0].get_array())
        for axes in figure.axes
        if axes.images and axes.get_label() != "<colorbar>"
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


def test_the_scale_is_even_around_zero_and_undefined_values_are_empty():
    frame = sweep(layer=2, position=2)
    frame.loc[1, "effect"] = np.nan
    figure = patch_map(frame, by=("layer", "position"))
    image = next(axes.images[0] for axes in figure.axes if axes.images)
    assert image.get_clim() == (-0.3, 0.3)
    assert np.isnan(np.ma.filled(images(figure)[0].astype(float), np.nan)[1, 0])


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_sweep_without_any_effect_is_drawn(value):
    figure = patch_map(sweep(layer=2, position=2).assign(effect=value), by=("layer", "position"))
    image = next(axes.images[0] for axes in figure.axes if axes.images)
    assert image.get_clim() == (-1.0, 1.0)
    assert np.array_equal(images(figure)[0], np.full((2, 2), value), equal_nan=True)


def test_only_chosen_layers_and_positions_are_numbered():
    frame = sweep(layer=2, position=2)
    frame["layer"] = frame["layer"].map({0: 7, 1: 12})
    axes = patch_map(frame, by=("layer", "position"), labels={0: " cat", 1: "$x$*"}).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["7", "12"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0 ·cat", "1 $x$*"]


def test_a_picture_holds_itself_and_shows_what_a_token_says():
    hostile = {0: "</svg><script>alert(1)</script>", 1: "$\\frac{"}
    drawn = figure_svg(patch_map(sweep(layer=2, position=2), by=("layer", "position"), labels=hostile), name="map")
    assert "<script" not in drawn
    shown = figure_html(patch_map(sweep(layer=2, position=2), by=("layer", "position"), title="patched", unit="logits"))
    assert shown.startswith('<img alt="" src="data:image/png;base64,')


def test_a_frame_that_cannot_be_drawn_is_refused():
    with pytest.raises(RunError, match=r"no column \['value'\]"):
        patch_map(sweep(layer=2), by=("layer",), value="value")
    with pytest.raises(RunError, match=r"by=\[\]"):
        patch_map(sweep(layer=2), by=())
