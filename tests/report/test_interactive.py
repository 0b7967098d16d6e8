"""Interactive figures: the same names, arguments and numbers as the drawn ones, offline, and harmless."""

import inspect
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from sink_lens.errors import InputError
from sink_lens.records import read_run
from sink_lens.report import (
    causal,
    figures,
    heatmap,
    identity_figures,
    interactive,
    mechanism,
    studies,
    sweeps,
    training,
)
from sink_lens.report.circuit import circuit_of, draw
from sink_lens.report.drawing import canvas, colour_scale, heat_map, panel

from .circuits import traced
from .test_figures import STEPS, dimensions, heads, layers, neurons, positions

HOSTILE = "<img src=x onerror=alert(1)></script>$x$" + "a" * 10_000
AMPLIFIED = pd.DataFrame({"centre": ["values", "values", "none"], "factor": [1.0, 5.0, 5.0], "mass": [0.1, 0.4, 0.0]})
MEDIATION = pd.DataFrame(
    {
        "intervention": HOSTILE[:40],
        "hold": ["z", "neurons", "dimensions", "key"],
        "step": 0,
        "layers_from": 3,
        "layers_to": 7,
        "surviving_share": [0.0, 0.1, 0.8, np.nan],
        "control_surviving_share": 1.0,
    }
)
SWEPT = pd.DataFrame({"layer": [0, 0, 1, 1], "pos": [0, 1, 0, 1], "effect": [0.0, -0.1, 0.2, np.nan]})
EFFECTS = pd.DataFrame({"link": "x", "edit": [HOSTILE, "b"], "baseline_loss_nats": 1.0, "loss_nats": [1.5, 0.75]})


def everything(*, n_layers=6, n_heads=4):
    table = heads(layers=n_layers, n_heads=n_heads)
    yield interactive.sink_scores(table, position=0, threshold=0.3)
    yield interactive.sink_mass(table, position=0, threshold=0.1)
    yield interactive.norm_by_layer(layers(n=n_layers), growth_steps=STEPS)
    yield interactive.variance_by_position(positions(layers=n_layers), layers=[0, n_layers - 1])
    if n_layers == 80:  # the others are of the same size whatever the model's
        return
    yield interactive.super_neurons(neurons(), position=0, share=0.05)
    yield interactive.top_dimensions(dimensions(), position=0, layer=2)
    few = np.full((5, 8, 8), 255, dtype=np.uint8)
    yield interactive.attention_patterns(few, titles=[HOSTILE[:60]] * 5, tokens=[HOSTILE] * 8)
    yield interactive.amplification_curve(AMPLIFIED)
    yield interactive.mediation_matrix(MEDIATION)
    yield interactive.loss_changes(EFFECTS)
    yield interactive.patch_map(SWEPT, by=("layer", "pos"), labels={0: HOSTILE}, title=HOSTILE[:60])
    yield interactive.effect_figure(SWEPT.rename(columns={"pos": "position"}), title=HOSTILE[:60])


def test_every_drawn_figure_has_its_twin_of_the_same_name_and_arguments():
    for module in (figures, mechanism, causal, studies, heatmap, sweeps, training, identity_figures):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            public = function.__module__ == module.__name__ and not name.startswith("_")
            if public and inspect.signature(function, eval_str=True).return_annotation is Figure:
                twin = getattr(interactive, name)
                assert list(inspect.signature(twin).parameters) == list(inspect.signature(function).parameters), name


def test_the_numbers_are_those_of_the_tables():
    table = heads(layers=5, n_heads=3)
    (scores,) = interactive.sink_scores(table, position=0).data
    assert np.array(scores.z).T.ravel().tolist() == table["sink_score"].tolist()
    curve = interactive.norm_by_layer(layers(), growth_steps=STEPS)
    assert list(curve.data[0].y) == layers()["norm_ratio"].tolist()
    assert list(curve.data[1].y) == layers()["outlier_value"].tolist()
    assert (curve.layout.yaxis.type, curve.layout.yaxis2.type) == ("log", "linear")
    assert curve.layout.annotations[0].text == "layers 3 to 4<br>×25"
    band = next(shape for shape in curve.layout.shapes if shape.type == "path")
    assert (band.xref, band.yref) == ("x", "y domain")
    assert sorted(set(re.findall(r"[\d.]+(?=,)", band.path))) == ["2.5", "4.5"]
    points = interactive.super_neurons(neurons(), position=0, share=0.05)
    supers = [trace for trace in points.data if trace.name == "super neurons"]
    assert [list(trace.text) for trace in supers] == [["1.3"], ["1.3"]]
    assert supers[0].y[0] == pytest.approx(50.3)
    bars, rest = interactive.top_dimensions(dimensions(), position=0, layer=2).data
    assert (list(bars.x), len(rest.x)) == ([900, 300], 10)
    (held,) = interactive.mediation_matrix(MEDIATION).data
    assert held.z[0][:3].tolist() == [0.0, 0.1, 0.8]
    assert np.isnan(held.z[0][3])
    lines = interactive.amplification_curve(AMPLIFIED).data
    assert [(line.name, list(line.y)) for line in lines] == [("values", [0.1, 0.4]), ("norm only", [0.0])]
    assert list(interactive.loss_changes(EFFECTS).data[0].x) == [0.5, -0.25]


def test_the_circuit_too_can_be_zoomed(tmp_path):
    found = interactive.interactive_of(draw(circuit_of(read_run(traced(tmp_path / "run")))))
    said = [one.text for one in found.layout.annotations]
    assert "held: −75%" in said
    assert sum(shape.fillcolor is None for shape in found.layout.shapes) == 3 + 2 * 4  # the boxes


def test_names_that_are_numbers_stay_names():
    axis = interactive.top_dimensions(dimensions(), position=0, layer=2).layout.yaxis
    assert list(axis.ticktext)[:3] == ["100", "101", "102"]
    assert axis.range[0] > axis.range[1]  # the largest on top, as it is drawn


def test_a_map_of_patches_has_each_number_at_its_place():
    (drawn,) = interactive.patch_map(SWEPT, by=("layer", "pos")).data
    assert np.array(drawn.z, dtype=float)[:, 0].tolist() == [0.0, -0.1]
    assert (drawn.z[0][1], drawn.zmin, drawn.zmax) == (0.2, -0.2, 0.2)


def test_the_figures_of_untrained_models_keep_their_marks():
    models = pd.DataFrame({"model": ["a", "b", "c"], "arm": ["x", "x", "y"], "seed": [0, 1, 0]})
    pairs = pd.DataFrame({"place": "last", "a": ["a", "a"], "b": ["b", "c"], "cosine": [0.1, 0.9], "chance": 0.2})
    drawn = interactive.agreement(pairs, models).data
    assert [trace.marker.symbol for trace in drawn if trace.mode != "markers"] == ["line-ns-open"] * 2
    assert [list(trace.x) for trace in drawn if trace.mode == "markers"] == [[0.1], [0.9]]
    arms = pd.DataFrame({"measure": "m", "arm": ["x", "y"], "mean": [1.0, 2.0], "low": [0.0, 1.0], "high": [3.0, 4.0]})
    dots = interactive.dots(arms, arms.assign(value=[1.5, 2.5]), [("m", "one", False), ("m", "two", False)])
    assert [list(trace.x) for trace in dots.data if trace.mode == "lines"][:2] == [[0.0, 3.0], [1.0, 4.0]]
    assert list(dots.layout.yaxis.ticktext) == ["x", "y"]


def test_a_scale_stands_where_it_is_drawn():
    figure = canvas(width=9)
    left, right = (panel(figure, place=(1, 2, place)) for place in (1, 2))
    colour_scale(figure, heat_map(left, np.eye(3)), left, label="share")
    right.plot([0, 1], [0, 1])
    found = interactive.interactive_of(figure)
    assert found.layout.xaxis.domain[1] < found.data[0].colorbar.x < found.layout.xaxis2.domain[0]


def test_a_mark_that_is_not_known_is_refused():
    figure = canvas()
    assert isinstance(panel(figure).pcolormesh(np.ones((2, 2))), QuadMesh)
    with pytest.raises(InputError, match="QuadMesh is no mark that can be made interactive"):
        interactive.interactive_of(figure)


@pytest.mark.parametrize("size", [{"n_layers": 4, "n_heads": 4}, {"n_layers": 80, "n_heads": 128}])
def test_they_show_themselves_with_nothing_fetched_and_nothing_hostile(size, tmp_path):
    for number, figure in enumerate(everything(**size)):
        page = figure.page
        assert page.count("<script>") == page.count("</script>") == 1
        drawn = page[page.index("Plotly.newPlot") : page.rindex("})();")]
        assert "<" not in drawn
        assert "<img" not in re.sub(r"\\u0026lt;|&lt;", "", str(figure.to_json()))
        assert "script-src 'sha256-" in page[:600]
        assert 150 <= figure.layout.height <= 1_000
        if number == 0:
            assert set(figure._repr_mimebundle_()) == {"text/html"}
            assert figure._ipython_display_ is None
            assert 'sandbox="allow-scripts"' in figure._repr_html_()
            assert figure.save(tmp_path / "figure.html").stat().st_size < 2_500_000
