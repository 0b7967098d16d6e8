"""The table of a sweep by hand, and what a result shows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sink_lens.edits.metrics import loss
from sink_lens.engine.cells import Cell
from sink_lens.errors import InputError, RunError
from sink_lens.report.style import figure_bytes
from sink_lens.sweeps.cells import Cells
from sink_lens.sweeps.page import effect_figure, forest_plot, swept_columns
from sink_lens.sweeps.results import SweepResult, effect_tables, values_by_cell

NAN = float("nan")
PLACE = {
    "kind": "zero",
    "site": "neurons",
    "where": "",
    "layer": 0,
    "position": None,
    "head": None,
    "unit": 0,
}
PLACE |= {"key": None, "factor": None, "seed": None, "centre": None}


def cells(names, *, n=None, drawn="", controls=(), units=()):
    """Cells by number, each called by a letter; of the first n, ``controls`` has the letters of each one's controls."""
    count = len(names) if n is None else n
    places = [
        PLACE | ({"unit": units[number]} if number < len(units) else {})
        for number in range(len(names))
    ]
    return Cells(
        every=[Cell(touches=(), make=tuple)] * len(names),
        columns=places,
        n=count,
        drawn=[names.index(one) for one in drawn],
        controls=[[names.index(one) for one in own] for own in controls] or [()] * count,
    )


def numbers(values, *, metric="loss", errors=()):
    """What the blocks gave: number of a cell -> one number a sequence; those of ``errors`` failed."""
    rows = [
        {
            "cell": number,
            "sequence": place,
            "metric": metric,
            "value": value,
            "changed": True,
            "error": None,
        }
        for number, row in values.items()
        for place, value in enumerate(row)
    ]
    none = {"sequence": -1, "metric": "", "value": NAN, "changed": False}
    rows += [{"cell": number, "error": error} | none for number, error in dict(errors).items()]
    return pd.DataFrame(rows).astype({"error": "string"})


def unedited(values, *, metric="loss"):
    return pd.DataFrame({"sequence": range(len(values)), "metric": metric, "value": values})


def tabled(names, values, before, *, errors=(), **more):
    """The tables of cells called by letters, whose values stand by their letters."""
    by_number = {names.index(name): row for name, row in values.items()}
    failed = {names.index(name): error for name, error in dict(errors).items()}
    return effect_tables(
        cells(names, **more),
        numbers(by_number, errors=failed),
        unedited(before),
        metrics=[loss()],
        generator=np.random.default_rng(0),
    )


def result_of(frame, *, headline="the headline"):
    values = pd.DataFrame({"cell": [], "sequence": [], "metric": [], "value": []})
    tables = {"cells": frame, "controls": frame.iloc[:0], "values": values}
    return SweepResult(folder=Path("run"), tables=tables, headline=headline)


# --- tables


def test_a_row_is_the_paired_mean_by_hand():
    # before (1, 3), after (2, 5): baseline 2, value 3.5, effects (1, 2): mean 3/2 +- 12.706 / 2.
    frame, drawn = tabled("a", {"a": [2.0, 5.0]}, [1.0, 3.0])
    (row,) = frame.to_dict("records")
    assert (row["cell"], row["metric"], row["metric_unit"]) == (0, "loss", "nats")
    assert (row["baseline"], row["value"], row["effect"]) == (2.0, 3.5, 1.5)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((1.5 - 6.3531, 1.5 + 6.3531), abs=1e-4)
    assert (row["n"], row["changed"], row["n_controls"]) == (2, True, 0)
    assert np.isnan(
        [row[name] for name in ("control_effect", "control_sd", "over_control", "over_low")]
    ).all()
    assert pd.isna(row["error"])
    assert len(drawn) == 0


def test_controls_by_hand():
    # before (1, 3). Effects of the controls: x (0, 2): mean 1; y (2, 0): mean 1; z (4, 4): mean 4. Their mean by
    # sequence is (2, 2); the means' spread is sqrt(((1-2)^2 + (1-2)^2 + (4-2)^2) / 2) = sqrt(3). The cell's effects
    # are (1, 2): over its controls (-1, 0), mean -1/2.
    values = {"a": [2.0, 5.0], "x": [1.0, 5.0], "y": [3.0, 3.0], "z": [5.0, 7.0]}
    units = (0, 10, 11, 12)
    frame, drawn = tabled(
        "axyz", values, [1.0, 3.0], n=1, drawn="xyz", controls=["xyz"], units=units
    )
    (row,) = frame.to_dict("records")
    assert (row["n_controls"], row["control_effect"]) == (3, 2.0)
    assert row["control_sd"] == pytest.approx(3**0.5)
    assert row["over_control"] == -0.5
    assert (row["over_low"], row["over_high"]) == pytest.approx((-6.8531, 5.8531), abs=1e-4)
    assert drawn["unit"].tolist() == [10, 11, 12]
    assert drawn["effect"].tolist() == [1.0, 1.0, 4.0]
    assert drawn["n_controls"].tolist() == [0, 0, 0]


def test_a_control_that_is_also_a_cell_was_run_once_and_serves_both():
    values = {"a": [2.0], "b": [4.0]}
    frame, drawn = tabled("ab", values, [1.0], drawn="ab", controls=["b", "a"])
    assert frame["n_controls"].tolist() == [1, 1]
    assert frame["control_effect"].tolist() == [3.0, 1.0]  # each is the control of the other
    assert drawn["effect"].tolist() == [1.0, 3.0]


def test_a_failed_cell_is_nan_throughout_even_where_some_of_its_sequences_were_run_and_a_failed_control_is_none():
    values = {"a": [2.0, 5.0], "b": [2.0, 5.0], "x": [4.0, 6.0]}
    errors = {"b": "EditError: not a number", "y": "ValueError: no luck"}
    given = {"n": 2, "drawn": "xy", "controls": ["xy", "xy"]}
    frame, drawn = tabled("abxy", values, [1.0, 3.0], errors=errors, **given)
    assert drawn["error"].fillna("").tolist() == ["", "ValueError: no luck"]
    sound, failed = frame.to_dict("records")
    assert (sound["n_controls"], sound["control_effect"]) == (1, 3.0)
    assert sound["effect"] == 1.5
    assert (failed["n"], failed["baseline"], failed["error"]) == (0, 2.0, "EditError: not a number")
    assert np.isnan(
        [failed[name] for name in ("value", "effect", "ci_low", "ci_high", "over_control")]
    ).all()


def test_sequences_without_a_number_are_left_out_of_effect_and_n():
    # Undefined in the baseline run at 1 and under the edit at 2: sequences 0 and 3 remain, effects 1 and 3.
    values = {"a": [2.0, 4.0, NAN, 6.0]}
    frame, _ = tabled("a", values, [1.0, NAN, 3.0, 3.0])
    (row,) = frame.to_dict("records")
    assert (row["effect"], row["n"]) == (2.0, 2)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert row["baseline"] == 2.0
    assert row["value"] == 4.0


def test_one_sequence_or_no_defined_number_has_no_interval_and_no_warning():
    frame, _ = tabled("a", {"a": [NAN, NAN]}, [NAN, NAN])
    assert np.isnan(frame[["baseline", "value", "effect", "ci_low"]].to_numpy()).all()
    frame, _ = tabled("a", {"a": [2.0]}, [1.0])
    assert frame[["effect", "n"]].to_numpy().tolist() == [[1.0, 1]]
    assert np.isnan(frame[["ci_low", "ci_high"]].to_numpy()).all()


def test_a_cell_that_changed_something_on_any_batch_changed_something_and_axes_are_whole_numbers():
    rows = numbers({0: [2.0, 2.0]})
    rows["changed"] = [False, True]
    before = unedited([1.0, 1.0])
    frame, _ = effect_tables(
        cells("a"), rows, before, metrics=[loss()], generator=np.random.default_rng(0)
    )
    assert frame["changed"].tolist() == [True]
    frame, _ = tabled("ab", {"a": [2.0], "b": [2.0]}, [1.0], units=(0, None))
    assert str(frame["unit"].dtype) == "Int64"
    assert frame["unit"].fillna(-1).tolist() == [0, -1]


def test_numbers_by_cell_are_numbered_in_order_and_hold_no_control_and_no_failure():
    rows = numbers({1: [4.0, 5.0], 3: [9.0, 9.0], 0: [2.0, 3.0]}, errors={2: "broken"})
    found = values_by_cell(rows, n=3).to_numpy().tolist()
    assert found == [
        [0, 0, "loss", 2.0],
        [0, 1, "loss", 3.0],
        [1, 0, "loss", 4.0],
        [1, 1, "loss", 5.0],
    ]


# --- what a result shows


def swept_frame(axes, *, metric="loss", effect=None, **columns):
    """A frame over some axes, each with these values."""
    grid = np.array(np.meshgrid(*axes.values(), indexing="ij")).reshape(len(axes), -1)
    n = grid.shape[1]
    effects = np.linspace(-1, 1, n) if effect is None else np.asarray(effect, dtype=float)
    rows = {"cell": range(n), "kind": "zero", "site": "neurons", "where": "here"}
    rows |= dict(zip(axes, grid, strict=True)) | {
        "metric": metric,
        "baseline": 1.0,
        "value": effects + 1.0,
    }
    rows |= {
        "effect": effects,
        "ci_low": effects - 0.1,
        "ci_high": effects + 0.1,
        "control_effect": 0.0,
    }
    return pd.DataFrame(rows | {"error": pd.array([None] * n, dtype="string")} | columns)


@pytest.mark.parametrize("names", [["unit"], ["layer", "unit"], ["layer", "unit", "factor"]])
def test_one_two_and_three_axes_are_drawn(names):
    axes = {"layer": [0, 1, 2], "unit": [3, 5, 8, 9], "factor": [0.0, 2.0]}
    frame = swept_frame({name: axes[name] for name in names})
    assert swept_columns(frame) == names
    result = result_of(frame)
    for value in ("effect", "value"):
        assert figure_bytes(result.figure(value=value), "png").startswith(b"\x89PNG")
    assert len(result.figure().axes) == (
        1 if len(names) == 1 else 2
    )  # a map has its scale of colours
    assert '<img alt="" src="data:image/png;base64,' in result._repr_html_()


def test_each_kind_of_edit_has_its_own_panel():
    frame = pd.concat(
        [swept_frame({"layer": [0, 1]}), swept_frame({"unit": [0, 1]}, kind="mean")],
        ignore_index=True,
    )
    titles = [axes.get_title(loc="left") for axes in effect_figure(frame, title="loss").axes]
    assert titles == ["loss: zero neurons", "mean neurons"]


@pytest.mark.parametrize(("n_kinds", "n_drawn", "left_out"), [(8, 8, ""), (10, 8, "2 of 10")])
def test_a_figure_says_how_many_kinds_of_edit_it_leaves_out(n_kinds, n_drawn, left_out):
    kinds = [swept_frame({"layer": [0, 1]}, kind=f"kind {at}") for at in range(n_kinds)]
    figure = effect_figure(pd.concat(kinds, ignore_index=True))
    assert len(figure.axes) == n_drawn
    assert left_out in figure.get_supxlabel()
    assert bool(left_out) == bool(figure.get_supxlabel())


def test_axes_name_metric_and_unit_and_a_paper_s_figure_has_its_width():
    line = swept_frame({"unit": [0, 1]}, metric_unit="nats")
    assert effect_figure(line).axes[0].get_ylabel() == "effect on loss (nats)"
    assert (
        effect_figure(line.assign(effect_in_sds=1.0), value="effect_in_sds").axes[0].get_ylabel()
        == "effect in sds, loss"
    )
    figure = result_of(line).figure(style="paper")
    assert figure.get_size_inches()[0] == 3.25
    assert figure.axes[0].xaxis.label.get_family() == ["STIXGeneral", "DejaVu Sans"]
    assert result_of(line).figure(width=5).get_size_inches()[0] == 5
    assert forest_plot(line, metric="loss").axes[0].get_xlabel().startswith("effect on loss (nats)")


def test_one_outlier_does_not_flatten_a_map_and_is_marked():
    effects = np.linspace(-0.1, 0.1, 100)
    effects[37] = 5.0
    table = swept_frame({"layer": range(10), "unit": range(10)}, effect=effects)
    axes, scale = effect_figure(table).axes
    (image,), (marks,) = axes.images, axes.collections
    assert 0.09 < image.norm.vmax < 0.2
    assert marks.get_offsets().tolist() == [[7, 3]]  # unit 7 of layer 3
    assert "at most 5" in scale.get_ylabel()
    few = table.assign(
        effect=[0.3, *np.linspace(-0.1, 0.1, 20), *[NAN] * 79]
    )  # as a page blanks what may be chance
    assert effect_figure(few).axes[0].images[0].norm.vmax == 0.1
    one = table.assign(effect=np.where(effects == 5, 5.0, 0.0))  # all else changes nothing
    assert effect_figure(one).axes[0].images[0].norm.vmax == 5
    axes, scale = effect_figure(table.assign(effect=np.linspace(-1, 1, 100))).axes
    assert (axes.images[0].norm.vmax, scale.get_ylabel()) == (1.0, "effect on loss")


def test_what_all_cells_are_called_stands_once_above_them():
    frame = swept_frame({"layer": [1, 2, 3]}).assign(
        where=["layer 1, head 2", "layer 2, head 2", "layer 3, head 1"]
    )
    figure = forest_plot(frame, metric="loss")
    assert figure.get_suptitle() == "zero neurons"
    labels = [one.get_text() for one in figure.axes[0].get_yticklabels()]
    assert sorted(labels) == ["layer 1, head 2", "layer 2, head 2", "layer 3, head 1"]
    alone = forest_plot(frame.head(1), metric="loss")
    assert (alone.get_suptitle(), alone.axes[0].get_yticklabels()[0].get_text()) == (
        "zero neurons, layer 1",
        "head 2",
    )


def test_cells_that_failed_are_left_empty_in_a_line_and_in_a_map():
    line = swept_frame({"unit": [0, 1, 2]}, effect=[0.5, NAN, -0.25])
    (axes,) = effect_figure(line).axes
    assert [text.get_text() for text in axes.texts] == ["0", "2"]
    assert figure_bytes(effect_figure(line), "png").startswith(b"\x89PNG")
    table = swept_frame({"layer": [0, 1], "unit": [0, 1]}, effect=[0.5, NAN, -0.25, 0.0])
    (image,) = effect_figure(table).axes[0].images
    assert np.ma.masked_invalid(image.get_array()).mask.tolist() == [[False, True], [False, False]]
    for frame in (swept_frame({"unit": [0, 1]}, effect=[NAN, NAN]), table.assign(effect=NAN)):
        assert figure_bytes(effect_figure(frame), "png").startswith(b"\x89PNG")


def test_without_an_axis_of_numbers_there_is_no_figure_and_a_notebook_shows_the_table():
    one = swept_frame({"unit": [4]})
    apart = pd.concat(
        [swept_frame({"layer": [0]}), swept_frame({"layer": [1]}, kind="mean")], ignore_index=True
    )
    named_cells = one.assign(unit=None, name="mine")
    for frame in (
        one,
        apart,
        named_cells,
    ):  # apart: the layer differs, but between blocks of different edits
        with pytest.raises(
            RunError, match="a figure needs an axis of numbers with two values or more"
        ):
            result_of(frame).figure()
        shown = result_of(frame)._repr_html_()
        assert "<img" not in shown
        assert "the headline" in shown


def test_a_figure_of_a_column_or_metric_that_is_not_there_is_refused():
    result = result_of(swept_frame({"unit": [0, 1]}))
    with pytest.raises(RunError, match=r"no column 'size'; need one of cell, kind"):
        result.figure(value="size")
    with pytest.raises(InputError, match="the sweep has no metric 'mass'; need one of loss"):
        result.figure(metric="mass")
    with pytest.raises(InputError, match="need one of loss"):
        result.top(metric="mass")


def test_top_has_the_largest_effects_of_either_sign_of_one_metric():
    loss_rows = swept_frame({"unit": [0, 1, 2, 3]}, effect=[0.5, NAN, -2.0, 1.0])
    mass_rows = swept_frame({"unit": [0, 1, 2, 3]}, effect=[9.0, 8.0, 7.0, 6.0], metric="mass")
    result = result_of(pd.concat([loss_rows, mass_rows], ignore_index=True))
    assert result.top(3)["effect"].tolist() == [-2.0, 1.0, 0.5]
    assert result.top(2)["unit"].tolist() == [2, 3]
    assert np.isnan(result.top(4)["effect"].tolist()[-1])
    assert result.top(1, metric="mass")["effect"].tolist() == [9.0]
    assert len(result.top()) == 4


def test_failed_has_each_failed_cell_once_with_its_error():
    error = pd.array([None, "A: b", None, "C: d"], dtype="string")
    frame = swept_frame({"unit": [0, 1, 2, 3]}).assign(error=error)
    both = pd.concat([frame, frame.assign(metric="mass")], ignore_index=True)
    failed = result_of(both).failed
    assert failed[["cell", "metric", "error"]].to_numpy().tolist() == [
        [1, "loss", "A: b"],
        [3, "loss", "C: d"],
    ]
    assert len(result_of(swept_frame({"unit": [0, 1]})).failed) == 0


def test_hostile_names_are_text_in_a_notebook_and_in_a_figure():
    hostile = "<script>alert(1)</script> $\\frac{"
    frame = swept_frame({"unit": [0, 1]}, metric=hostile, name=hostile, site=hostile, where=hostile)
    frame["error"] = pd.array([hostile, None], dtype="string")
    result = result_of(frame, headline=hostile)
    shown = result._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "<img" in shown
    assert figure_bytes(result.figure(), "png").startswith(b"\x89PNG")
