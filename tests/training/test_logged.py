"""Logs of the user's own Trainer beside each other: read from its state and a monitor's run, drawn, and no verdict."""

import json

import pandas as pd
import pytest

from sink_lens.errors import InputError, RunError
from sink_lens.records import create_run, read_run
from sink_lens.training.compare import compare

from .runs import write_run


def trainer_run(folder, losses, *, rates=(), evaluation=(), checkpoint=True):
    """An output folder of a Trainer that logged every 10 steps; with rates, a monitor's callback too."""
    history = [{"loss": loss, "step": 10 * n, "epoch": 0.1 * n} for n, loss in enumerate(losses, 1)]
    history += [{"eval_loss": loss, "eval_runtime": 1.0, "step": step} for step, loss in evaluation]
    history += [
        {"sinks/rate_first": rate, "sinks/step": float(10 * n), "step": 10 * n + 1}
        for n, rate in enumerate(rates)
    ]
    history.append({"train_loss": 9.0, "train_runtime": 1.0, "step": 10 * len(losses)})
    for step in (10, 10 * len(losses)) if checkpoint else (10 * len(losses),):
        place = folder / f"checkpoint-{step}" if checkpoint else folder
        place.mkdir(parents=True, exist_ok=True)
        kept = [entry for entry in history if entry["step"] <= step]
        (place / "trainer_state.json").write_text(
            json.dumps({"global_step": step, "log_history": kept})
        )
    return folder


def monitor_run(folder, rates, *, threshold=0.3):
    """A monitor's run with readings every 10 steps."""
    rows = [
        {"step": 10 * n, "key": "rate_first", "layer": pd.NA, "value": rate}
        for n, rate in enumerate(rates)
    ]
    rows += [{"step": 0, "key": "mass_first", "layer": 1, "value": 0.5}]
    table = pd.DataFrame(rows).assign(unit="1").astype({"layer": "Int64"})
    with create_run(
        folder, kind="monitor", config={"threshold": threshold}, provenance={}
    ) as writer:
        writer.write_table("monitor", table)
    return folder


def test_the_logs_of_two_trainers_are_put_beside_each_other_without_a_verdict(tmp_path):
    a = trainer_run(tmp_path / "a", [5.0, 4.0, 3.0], rates=[0.0, 0.3, 0.5], evaluation=[(20, 3.5)])
    b = trainer_run(tmp_path / "b", [5.0, 4.5], rates=[0.0, 0.0])
    found = compare([a, b])
    values = found.frame.set_index(["run", "quantity", "step"])["value"].sort_index()
    assert values["a", "training loss"].to_dict() == {10: 5.0, 20: 4.0, 30: 3.0}
    assert values["a", "sink rate"].to_dict() == {
        0: 0.0,
        10: 0.3,
        20: 0.5,
    }  # of the weights, a step before the entry
    assert values["a", "evaluation loss"].to_dict() == {20: 3.5}
    said = found.headline
    assert "no interval" in said
    assert "4.0000 for “a” and 4.5000 for “b”" in said  # at step 20, which both logged
    assert "“a” has a sink from step 10 on" in said
    assert "“b” has no sink" in said
    figure = found.figure()
    losses, rate = figure.axes
    assert [line.get_label() for line in losses.lines] == ["a", "a, evaluation", "b"]
    assert [line.get_label() for line in rate.lines] == ["a", "b"]


def test_a_sink_of_the_first_reading_is_not_dated(tmp_path):
    a, b = (
        monitor_run(tmp_path / name, rates) for name, rates in (("a", [0.3, 0.5]), ("b", [0.0]))
    )
    said = compare([a, b]).headline
    assert "“a” has a sink from the first reading on" in said
    assert "“b” has no sink" in said


def test_sink_rates_of_unlike_thresholds_are_said_to_be(tmp_path):
    a, b = (monitor_run(tmp_path / f"{level}", [0.0, 0.4], threshold=level) for level in (0.3, 0.1))
    assert compare([a, b]).notes == (
        "the sink rates are not alike: their thresholds of the sink score are 0.3 for “0.3” and 0.1 for “0.1”",
    )
    assert compare([a, monitor_run(tmp_path / "c", [0.0])]).notes == ()


def test_the_sinks_of_a_monitors_run_in_the_folder_are_those_of_its_trainer(tmp_path):
    a = trainer_run(tmp_path / "a", [5.0, 4.0], checkpoint=False)
    monitor_run(a / "monitor", [0.0, 0.4])
    b = monitor_run(tmp_path / "b", [0.0, 0.1])
    found = compare([a, b], out=tmp_path / "out")
    values = found.frame.set_index(["run", "quantity", "step"])["value"].sort_index()
    assert values["a", "sink rate"].to_dict() == {0: 0.0, 10: 0.4}
    assert values["b"].index.unique("quantity").tolist() == ["sink rate"]
    run = read_run(found.folder)
    assert (run.kind, run.status, run.missing) == ("compare", "finished", [])
    pd.testing.assert_frame_equal(run.tables["logged"], found.frame)
    state = a / "trainer_state.json"
    assert compare([state, b]).frame["run"].unique().tolist() == ["a", "b"]
    monitor_run(a / "monitor.beside-2", [0.0])
    left = compare([a, b])
    assert any("several" in note for note in left.notes)
    assert "sink rate" not in set(left.frame.loc[left.frame["run"] == "a", "quantity"])


def test_runs_of_two_kinds_options_of_the_other_kind_and_damaged_logs_are_refused(tmp_path):
    a, b = (trainer_run(tmp_path / name, [5.0, 4.0]) for name in "ab")
    with pytest.raises(InputError, match="train-0"):
        compare([a, write_run(tmp_path / "train-0", [5.0, 4.0])])
    for option in ({"group_by": "lr"}, {"baseline": "a"}, {"threshold": 0.1}):
        with pytest.raises(InputError, match="baseline"):
            compare([a, b], **option)
    with pytest.raises(InputError, match="1 runs"):
        compare([a])
    (b / "checkpoint-20/trainer_state.json").write_text('{"global_step": 20}')
    with pytest.raises(RunError, match=r"b/checkpoint-20/trainer_state\.json.*log_history"):
        compare([a, b])
    (b / "checkpoint-20/trainer_state.json").write_text('{"global_step": 20, "log_history": []}')
    with pytest.raises(RunError, match="no loss"):
        compare([a, b])
