"""``isolate`` and ``amplify`` make the grid of a sweep, whose page draws the attention before and after."""

import pytest
from planted_sequences import planted_lens, sequences

from sink_lens import edits, read_run, run_with
from sink_lens.errors import InputError
from sink_lens.sweeps.page import SWEEP
from sink_lens.sweeps.presets import amplification_sweep, isolation_sweep
from sink_lens.sweeps.sweep import sweep


def test_the_grid_has_each_position_alone_and_the_layers_together():
    made = isolation_sweep(
        {"target_positions": (9, 20), "layers": (0, 1), "sink_position": 3, "model": "gpt2"}, ""
    )
    (grid,) = made.grid.edits
    assert (grid.kind, grid.positions, grid.layers, made.model) == (
        "isolate",
        [9, 20],
        [[0, 1]],
        "gpt2",
    )
    assert [one.options.get("sink_position") for one in made.metrics] == [9, 20, 3, None]
    usual = isolation_sweep({"length": 30}, "").grid.edits[0]
    assert (usual.positions, usual.layers) == ([10], "all")
    made = amplification_sweep({"factors": (2.0,), "centres": ("none",), "controls": 1}, "")
    (grid,) = made.grid.edits
    assert (grid.kind, grid.layers, list(grid.factors), list(grid.centres)) == (
        "amplify",
        [[0, 1]],
        [2.0],
        ["none"],
    )
    assert made.grid.controls == made.controls == 1


def test_prompts_need_a_position():
    with pytest.raises(InputError, match="target_positions="):
        isolation_sweep({"prompts": ("a b c",)}, "")


def test_an_isolated_position_has_the_attention_of_a_run_with_that_edit(tmp_path):
    _, lens = planted_lens()
    asked = isolation_sweep({"target_positions": (9,), "controls": 0}, "")
    found = sweep(
        lens,
        asked.grid,
        tokens=sequences(),
        metrics=asked.metrics,
        out=tmp_path / "run",
        progress=False,
    )
    run = run_with(lens, sequences(), edits.isolate([9]), positions=(9, 0))
    before = run_with(lens, sequences(), positions=(9, 0))
    rows = found.frame.set_index("metric")
    for position in (9, 0):
        row = rows.loc[f"sink mass at position {position}"]
        assert row["value"] == pytest.approx(float(run.mass_at(position).mean()), rel=1e-5)
        assert row["baseline"] == pytest.approx(float(before.mass_at(position).mean()), rel=1e-5)
    (drawn,) = [one for one in SWEEP.figures if one.key == "masses"]
    kept = read_run(tmp_path / "run")
    assert drawn.when(kept)
    _, figure = drawn.make(kept)
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "sink mass at position 9",
        "sink mass at position 0",
    ]
    assert drawn.data(kept)["metric"].nunique() == 2  # the loss is no mass
