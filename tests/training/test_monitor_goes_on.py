"""Whatever happens to a monitor, the training goes on, and what it has read stays readable."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import Trainer

from sink_lens.errors import InputError, ModelError
from sink_lens.records import read_run
from sink_lens.report.html import page_html
from sink_lens.training import SinkMonitor, SinkMonitorCallback
from sink_lens.training.monitor_keys import KeySums
from tests.tiny_families import tiny

from .monitor_ranks import batches, trainer


def not_gathered(frame):
    """Without what is gathered over the steps before, which begins anew in a training that goes on."""
    return frame[~frame["key"].str.contains("strongest")].reset_index(drop=True)


def steps_of(folder):
    return sorted(set(read_run(folder).tables["monitor"]["step"]))


class Training:
    """A training whose weights at a step are those of an unbroken one, whatever was begun again."""

    def __init__(self, model=None):
        self.model = (tiny("llama") if model is None else model).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses = []

    def steps(self, first, last, monitor=None, *, length=40):
        for step in range(first, last):
            tokens = batches(1, length=length, seed=step)[0]
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if monitor is not None:
                monitor.step()
        return self


def begun(training, folder, **options):
    monitor = SinkMonitor(training.model, every=1, folder=folder, **options)
    monitor.open()
    monitor.attach_hooks()
    return monitor


def unbroken(folder, *, last):
    training = Training()
    with SinkMonitor(training.model, every=1, folder=folder) as monitor:
        training.steps(0, last, monitor)
    return read_run(folder).tables["monitor"]


def warnings_of(caplog):
    return [one.getMessage() for one in caplog.records if "the sink monitor" in one.getMessage()]


# --- nothing that was read is lost


def test_a_killed_training_has_every_reading_and_goes_on_to_those_of_an_unbroken_one(tmp_path):
    whole = unbroken(tmp_path / "whole", last=9)
    training = Training()
    begun(training, tmp_path / "run").close(finished=False)  # before a reading
    monitor = begun(training, tmp_path / "run")
    training.steps(0, 5, monitor)
    run = read_run(tmp_path / "run")
    assert (run.status, run.missing) == ("running", [])
    pd.testing.assert_frame_equal(
        run.tables["monitor"], whole[whole["step"] < 5].reset_index(drop=True)
    )
    assert "of 5 readings" in page_html(tmp_path / "run")
    with SinkMonitor(training.model, every=1, folder=tmp_path / "run", first_step=5) as monitor:
        training.steps(5, 9, monitor)
        pd.testing.assert_frame_equal(not_gathered(monitor.frame()), not_gathered(whole))
    run = read_run(tmp_path / "run")
    assert run.status == "finished"
    pd.testing.assert_frame_equal(
        run.tables["alarms"], read_run(tmp_path / "whole").tables["alarms"]
    )


def test_alarms_go_on_from_what_was_read_before(tmp_path, monkeypatch):
    def rates(values):
        at = {("strongest_position", None): 0.0, ("strongest_sequences", None): 16.0}
        found = ({("rate_strongest", None): one} | at for one in values)
        monkeypatch.setattr(KeySums, "compute_reading", lambda self, n_layers: next(found))

    training = Training()
    monitor = begun(training, tmp_path / "run", threshold=0.25)
    rates([0.0, 0.5, 0.5])
    with pytest.warns(UserWarning, match="position 0"):
        training.steps(0, 3, monitor)
    again = begun(training, tmp_path / "run", threshold=0.25, first_step=3)
    assert [one.step for one in again.alarms] == [2]
    rates([0.5, 0.6])
    training.steps(3, 5, again)
    again.close()
    (sentence,) = read_run(tmp_path / "run").tables["alarms"]["sentence"]
    assert "sink score above 0.25" in sentence


def test_steps_that_are_trained_again_replace_those_of_the_branch_that_was_given_up(tmp_path):
    training = Training()
    training.steps(0, 8, begun(training, tmp_path / "run"))
    again = begun(Training().steps(0, 6), tmp_path / "run", first_step=6)
    assert sorted(set(again.frame()["step"])) == list(
        range(8)
    )  # until something else has been read in their place
    other = Training(tiny("llama", seed=1))
    again = begun(other, tmp_path / "run", first_step=6)
    other.steps(6, 7, again)
    assert sorted(set(again.frame()["step"])) == list(range(7))
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["at"] for line in lines[1:]] == [
        *range(8),
        6,
    ]  # they are still in the file


def test_half_a_line_that_a_kill_left_is_no_reading(tmp_path):
    training = Training()
    training.steps(0, 3, begun(training, tmp_path / "run"))
    log = tmp_path / "run/log.jsonl"
    log.write_bytes(log.read_bytes()[:-7])
    assert steps_of(tmp_path / "run") == [0, 1]
    again = begun(training, tmp_path / "run", first_step=2)
    training.steps(2, 4, again)
    assert sorted(set(again.frame()["step"])) == [0, 1, 2, 3]


def test_readings_wait_for_a_full_disk_and_are_written_later(tmp_path, monkeypatch, caplog):
    full, write = [False], os.write

    def sometimes(number, content):
        if full[0]:
            write(number, content[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(number, content)

    monkeypatch.setattr("sink_lens.records.log.os.write", sometimes)
    training = Training()
    with SinkMonitor(training.model, every=1, folder=tmp_path / "run") as monitor:
        training.steps(0, 2, monitor)
        full[0] = True
        training.steps(2, 4, monitor)
        assert steps_of(tmp_path / "run") == [0, 1]
        full[0] = False
        training.steps(4, 5, monitor)
        assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4]
    assert len(warnings_of(caplog)) == 1
    assert "No space left" in caplog.text


@pytest.mark.parametrize("what", ["other options", "finished", "killed", "no run", "in use"])
def test_readings_go_beside_a_folder_that_is_taken(what, tmp_path, caplog):
    folder, training = tmp_path / "run", Training()
    held = None
    if what == "other options":
        begun(Training(), folder, threshold=0.1).close(finished=False)
    elif what == "finished":
        unbroken(folder, last=1)
    elif what == "killed":
        monitor = begun(training, folder)
        training.steps(0, 4, monitor)
        monitor.close(finished=False)  # lets go of the folder as the end of a process does
    elif what == "no run":
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    elif what == "in use":
        begun(Training(), folder).close(finished=False)
        script = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1); input()"
        command = [sys.executable, "-u", "-c", script, folder / ".log.lock"]
        held = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert held.stdout.readline()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with SinkMonitor(training.model, every=1, folder=folder) as monitor:
        training.steps(0, 2, monitor)
    if held:
        held.communicate("\n")
        assert "in use by another process" in caplog.text
    assert what != "killed" or "what another run has read" in caplog.text
    assert steps_of(tmp_path / "run.beside-2") == [0, 1]
    assert {path: path.read_bytes() for path in before} == before
    assert len(warnings_of(caplog)) == 1


def test_two_monitors_of_one_process_lose_no_reading(tmp_path, caplog):
    folder, one, other = tmp_path / "run", Training(), Training(tiny("llama", seed=1))
    monitors = [SinkMonitor(each.model, every=1, folder=folder) for each in (one, other)]
    with monitors[0] as first, monitors[1] as second:
        for step in range(3):
            one.steps(step, step + 1, first)
            other.steps(step, step + 1, second)
    for place, monitor in ((folder, first), (tmp_path / "run.beside-2", second)):
        pd.testing.assert_frame_equal(read_run(place).tables["monitor"], monitor.frame())
        assert steps_of(place) == [0, 1, 2]
    (warning,) = warnings_of(caplog)
    assert "another monitor of this process" in warning


def test_readings_are_kept_in_memory_where_nothing_can_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    training = Training()
    with SinkMonitor(training.model, every=1, folder=tmp_path / "file" / "run") as monitor:
        training.steps(0, 2, monitor)
    assert sorted(set(monitor.frame()["step"])) == [0, 1]
    assert len(warnings_of(caplog)) == 1


# --- the training goes on


def test_an_error_of_the_monitors_own_is_one_warning_and_no_more(monkeypatch, caplog):
    plain = Training().steps(0, 4)
    for name in ("add_state", "add_attention", "is_complete", "sum_values", "compute_reading"):
        caplog.clear()
        training = Training()
        before = len(training.model._forward_hooks)
        with monkeypatch.context() as patched:
            patched.setattr(KeySums, name, lambda *given, **named: 1 / 0)
            with SinkMonitor(training.model, every=1) as monitor:
                training.steps(0, 4, monitor)
        assert training.losses == plain.losses, name
        assert monitor.stopped, name
        assert ["ZeroDivisionError" in one for one in warnings_of(caplog)] == [True], name
        assert len(training.model._forward_hooks) == before, name


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_batches_of_any_length_are_read(family):
    training = Training(tiny(family))
    with SinkMonitor(training.model, every=1) as monitor:
        for length in range(1, 12):
            tokens = batches(1, length=length)[0]
            training.model(input_ids=tokens)
            assert "sinks/max_activation" in monitor.step(), length
        for mask in (torch.zeros(4, 12), torch.ones(4, 12).tril()):
            training.model(input_ids=batches(1, length=12)[0], attention_mask=mask.long())
            monitor.step()
        training.model(input_ids=batches(1, sequences=1, length=12)[0])
        assert "sinks/norm_ratio" in monitor.step()
    assert not monitor.stopped


def test_a_step_without_a_forward_is_left_out_and_the_next_one_read(caplog):
    training = Training()
    with SinkMonitor(training.model, every=1) as monitor:
        assert monitor.step() is None
        assert monitor.step() is None
        training.steps(2, 4, monitor)
    assert sorted(set(monitor.frame()["step"])) == [2, 3]
    (warning,) = warnings_of(caplog)
    assert "the model was not called in it; need a forward of the given model" in warning
    assert SinkMonitor(training.model).step() is None  # never begun
    assert "the monitor was not listening" in caplog.text


def test_weights_that_are_not_finite_stop_nothing():
    training = Training()
    with SinkMonitor(training.model, every=1) as monitor:
        training.steps(0, 1, monitor)
        with torch.no_grad():
            next(training.model.parameters()).fill_(float("nan"))
        training.steps(1, 3, monitor)
    assert not monitor.stopped


@pytest.mark.exhaustive
def test_a_process_whose_monitor_stops_lets_no_other_one_wait(tmp_path):
    out = tmp_path / "readings.x"
    code, said = forks.run(
        Path(__file__).with_name("monitor_ranks.py"), out, "broken", said=tmp_path / "said", ranks=2
    )
    assert code == 0, said
    assert [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1)] == [
        [None, None]
    ] * 2
    assert "TypeError" in said


@pytest.mark.exhaustive
def test_a_monitor_in_one_process_of_two_stops_and_the_training_goes_on(tmp_path):
    out = tmp_path / "readings.x"
    code, said = forks.run(
        Path(__file__).with_name("monitor_ranks.py"), out, "alone", said=tmp_path / "said", ranks=2
    )
    assert code == 0, said
    assert [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1)] == [
        [None, None]
    ] * 2
    assert "not every process had one" in said


# --- the Trainer


class Broken(Trainer):
    """Its loss cannot be computed at step 5, before the model is called."""

    def compute_loss(self, model, inputs, **given):
        if self.state.global_step == 5:
            raise RuntimeError("of the loss")
        return super().compute_loss(model, inputs, **given)


def test_a_training_that_failed_is_resumed_with_its_readings(tmp_path, caplog):
    folder = tmp_path / "monitor"
    options = {"save_steps": 2, "lr_scheduler_type": "constant"}
    whole = SinkMonitorCallback(every=1, folder=tmp_path / "whole/monitor")
    trainer(tmp_path / "whole", whole, max_steps=8, **options).train()
    broken = trainer(
        tmp_path / "out", SinkMonitorCallback(every=1, folder=folder), kind=Broken, **options
    )
    with pytest.raises(RuntimeError, match="of the loss"):
        broken.train()
    assert steps_of(folder) == [0, 1, 2, 3, 4]
    broken.model(input_ids=batches(1)[0])
    assert not any(
        len(one._forward_hooks) + len(one._forward_pre_hooks) for one in broken.model.modules()
    )
    for steps in (6, 8):
        again = trainer(
            tmp_path / "out",
            SinkMonitorCallback(every=1, folder=folder),
            max_steps=steps,
            **options,
        )
        again.train(resume_from_checkpoint=True)
        assert read_run(folder).status == "finished"
        assert steps_of(folder) == list(range(steps))
    both = (
        not_gathered(read_run(one).tables["monitor"])
        for one in (folder, tmp_path / "whole/monitor")
    )
    pd.testing.assert_frame_equal(*both)
    assert warnings_of(caplog) == []


def test_a_model_that_cannot_be_watched_is_trained(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("sink_lens.training.monitor.FAMILIES", {})
    monkeypatch.setattr("sink_lens.models.families.FAMILIES", {})
    callback = SinkMonitorCallback(every=1)
    trainer(tmp_path, callback, max_steps=2).train()
    assert callback.monitor is None
    assert "watches nothing (ModelError" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, "every.*2.5.*need a whole number"),
        ({"threshold": float("nan")}, "threshold.*nan.*need a number"),
        ({"tokens": [1, 2]}, "tokens.*need a tensor"),
    ],
)
def test_options_are_refused_before_the_training(options, says):
    with pytest.raises(InputError, match=says):
        SinkMonitor(tiny("llama"), **options)
    with pytest.raises(InputError, match=says):
        SinkMonitorCallback(**options)


def test_what_is_no_model_or_no_option_is_refused():
    with pytest.raises(ModelError, match="was given a Linear; need a Hugging Face model"):
        SinkMonitor(nn.Linear(2, 2))
    with pytest.raises(InputError, match="treshold"):
        SinkMonitorCallback(treshold=0.2)
