"""Figures to hover over: the numbers of the tables at their places, offline, and harmless whatever a token says."""

import re

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import RunError
from sink_lens.report import interactive

from .test_figures import heads

HOSTILE = "<img src=x onerror=alert(1)></script>$x$" + "a" * 10_000
SWEPT = pd.DataFrame({"layer": [0, 0, 1, 1], "position": [0, 1, 0, 1], "effect": [0.0, -0.1, 0.2, np.nan]})


def everything(*, n_layers=6, n_heads=4):
    yield interactive.sink_scores(heads(layers=n_layers, n_heads=n_heads), position=0, threshold=0.3)
    yield interactive.patch_map(SWEPT, by=("layer", "position"), labels={0: HOSTILE}, title=HOSTILE[:60])
    swept = SWEPT.assign(kind=HOSTILE, site="z")
    yield interactive.effect_figure(swept, title=HOSTILE[:60])


def test_a_score_stands_at_its_layer_and_head_and_the_threshold_on_the_scale():
    table = heads(layers=5, n_heads=3)
    found = interactive.sink_scores(table, position=0, threshold=0.3)
    (scores,) = found.data
    assert np.array(scores.z).T.ravel().tolist() == table["sink_score"].tolist()
    assert "<b>0.3</b>" in scores.colorbar.ticktext
    assert (found.layout.xaxis.title.text, found.layout.yaxis.title.text) == ("layer", "head")


def test_a_map_of_patches_has_each_number_at_its_place_on_an_even_scale():
    found = interactive.patch_map(SWEPT, by=("layer", "position"), labels={1: " cat"}, unit="logits")
    (drawn,) = found.data
    assert np.array(drawn.z, dtype=float)[:, 0].tolist() == [0.0, -0.1]
    assert drawn.z[0][1] == 0.2
    assert np.isnan(drawn.z[1][1])
    assert (list(drawn.x), list(drawn.y)) == (["0", "1"], ["0", "1  cat"])
    colours = found.layout.coloraxis
    assert (colours.cmin, colours.cmax, colours.colorbar.title.text) == (-0.2, 0.2, "effect (logits)")


def test_a_sweep_has_a_map_for_each_kind_of_edit_and_the_strongest_where_cells_share_a_place():
    grid = pd.MultiIndex.from_product([[0, 1], [0, 1, 2], [1.0, 2.0]], names=["layer", "head", "factor"])
    rows = grid.to_frame(index=False).assign(kind="scale", site="z", effect=np.arange(12) * 0.1)
    rows.loc[1, "effect"] = -0.9
    line = pd.DataFrame({"layer": [0, 1], "kind": "zero", "site": "neurons", "effect": [0.5, 0.25]})
    first, second = interactive.effect_figure(pd.concat([rows, line])).data
    assert np.array(first.z, dtype=float)[0].tolist() == pytest.approx([-0.9, 0.3, 0.5])
    assert np.array(second.z, dtype=float)[:, 0].tolist() == [0.5, 0.25]


def test_what_was_not_swept_is_refused_as_the_drawn_figures_refuse_it():
    with pytest.raises(RunError, match=r"by=\[\]"):
        interactive.patch_map(SWEPT, by=())
    with pytest.raises(RunError, match="nothing of the kind was swept"):
        interactive.effect_figure(SWEPT.head(1))


@pytest.mark.parametrize("size", [{"n_layers": 4, "n_heads": 4}, {"n_layers": 80, "n_heads": 128}])
def test_they_show_themselves_with_nothing_fetched_and_nothing_hostile(size, tmp_path):
    for number, figure in enumerate(everything(**size)):
        page = figure.page
        assert page.count("<script>") == page.count("</script>") == 1
        drawn = page[page.index("Plotly.newPlot") : page.rindex("})();")]
        assert "<" not in drawn
        assert "<img" not in re.sub(r"\\u0026lt;|&lt;", "", str(figure.to_json()))
        assert "script-src 'sha256-" in page[:600]
        assert 150 <= figure.layout.height <= 2_000
        if number == 0:
            assert set(figure._repr_mimebundle_()) == {"text/html"}
            assert figure._ipython_display_ is None
            assert 'sandbox="allow-scripts"' in figure._repr_html_()
            assert figure.save(tmp_path / "figure.html").stat().st_size < 2_500_000
