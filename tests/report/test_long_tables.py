"""Pages of tables of a million rows stay small, and say what they are made from."""

import json

import numpy as np
import pandas as pd

from sink_lens.records import RunLog, read_log, read_run
from sink_lens.records.long_tables import shorten_table
from sink_lens.report import html
from sink_lens.report.html import page_content
from sink_lens.report.style import new_figure, panel, thin_lines

from .circuits import grid, write_run


def readings(steps):
    """Two layers' and the model's readings, of which no two are alike."""
    keys = ("rate_first", "mass_first", "max_activation")
    frame = grid(step=range(0, 10 * steps, 10), key=keys, layer=[0, 1, pd.NA]).astype(
        {"layer": "Int64"}
    )
    return frame.assign(value=np.arange(len(frame)) / len(frame), unit="1")


def test_a_long_monitor_shows_the_last_readings_and_counts_all(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "MOST_READ", 900)
    whole = readings(500)
    run = read_run(write_run(tmp_path / "run", "monitor", monitor=whole))
    part = page_content(run)
    assert "the last of 500 readings" in " ".join(part.headline)
    assert "At step 4,990" in " ".join(part.headline)
    (said,) = [note for note in part.notes if "is made from" in note]
    assert "Monitor has 4,500 rows; this page is made from" in said
    short = page_content(
        read_run(write_run(tmp_path / "short", "monitor", monitor=whole[whole["step"] > 4800]))
    )
    assert part.tables[-1].table.rows[:19] == short.tables[-1].table.rows  # to the digit
    assert not [note for note in short.notes if "is made from" in note]


def test_a_log_of_a_training_that_goes_on_is_read_as_its_table(tmp_path):
    whole = readings(150)
    dtypes = {"step": "int64", "key": "str", "layer": "Int64", "value": "float64", "unit": "str"}
    log = RunLog(tmp_path, columns={"monitor": dtypes})
    for step, rows in whole.groupby("step"):
        blocks = [
            {
                **{
                    name: json.loads(part[name].to_json(orient="values"))
                    for name in ("layer", "value")
                },
                "step": step,
            }
            | {"key": key, "unit": "1"}
            for key, part in rows.groupby("key", sort=False)
        ]
        log.append(step, {"monitor": blocks})
    log.close()
    read = read_log(tmp_path / "log.jsonl")["monitor"]
    pd.testing.assert_frame_equal(read, whole, check_dtype=False, rtol=1e-9)
    some, left = shorten_table(read, most=450)
    assert (left.rows, left.steps) == (1350, 150)
    assert some["step"].iloc[-1] == 1490


def test_of_other_tables_the_extremes_are_read():
    values = np.random.default_rng(0).normal(size=20_000)
    values[[12_345, 17]] = 100.0, -100.0
    frame = pd.DataFrame({"layer": np.arange(20_000), "effect": values, "name": "a"})
    some, left = shorten_table(frame, most=4_000)
    assert left.rows == 20_000
    assert left.steps is None
    assert left.kept == len(some) < 4_000
    assert some["effect"].agg(["max", "min"]).tolist() == [100.0, -100.0]
    pd.testing.assert_frame_equal(
        some, frame[frame["layer"].isin(some["layer"])].reset_index(drop=True)
    )


def test_very_many_points_keep_their_extremes():
    figure = new_figure()
    axes = panel(figure)
    values = np.zeros(100_000)
    values[70_001] = 5.0
    (line,) = axes.plot(np.arange(100_000), values)
    axes.scatter(np.arange(5_000), np.zeros(5_000))
    assert "smallest and largest value of each stretch" in thin_lines(figure)
    x, y = line.get_data()
    assert len(x) <= 20_002
    assert x[y == 5.0].tolist() == [70_001]
    assert axes.collections[0].get_rasterized()
    assert thin_lines(new_figure()) == ""
