"""Bars leave one line where what is printed is kept, and a line that changes in a notebook."""

import os
import signal
import threading

import IPython
import IPython.display
import pytest
from lenses import lens_of, tokens

from sink_lens import circuits, patching, progress, run_with, sweep, trace
from sink_lens.edits import metrics, zero
from sink_lens.progress import tqdm


def test_a_log_gets_one_line_of_the_outermost_bar(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SHORT", 0.0)
    for _ in tqdm(range(3), desc="models", unit="model", leave=False):
        for _ in tqdm(range(5), desc="inner", leave=False):
            pass
    for _ in tqdm(range(2), desc="site", unit="patch", leave=False):
        pass
    assert capsys.readouterr().err == "models: 3 models, 00:00\nsite: 2 patches, 00:00\n"


def can_show_a_bar() -> bool:
    return tqdm.get_lock().acquire(timeout=5) is True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_bar_waits_for_no_other_process():
    """As of pools that fork: one is killed while it draws, or is made while this process draws."""
    if (child := os.fork()) == 0:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert can_show_a_bar()
    held = threading.Thread(target=tqdm.get_lock().acquire)
    tqdm.get_lock().release()
    held.start()
    held.join()
    if (child := os.fork()) == 0:
        os._exit(not can_show_a_bar())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tqdm.set_lock(threading.RLock())


@pytest.mark.parametrize("options", [{}, {"disable": True}])
def test_a_short_or_unwanted_bar_leaves_nothing(capsys, options):
    for _ in tqdm(range(3), **options):
        pass
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_a_notebook_gets_one_line_of_text_that_changes(capsys, monkeypatch):
    """As it is without ipywidgets, too: nothing is imported from there."""
    shown = []
    shell = type("ZMQInteractiveShell", (), {})()
    handle = type(
        "Handle",
        (),
        {"update": lambda self, data, raw: shown.append(("changed", data["text/plain"]))},
    )()
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(
        IPython.display,
        "display",
        lambda data, **options: shown.append(("made", data["text/plain"])) or handle,
    )
    with tqdm(total=2, desc="models", mininterval=0, leave=False) as bar:
        bar.set_description("models")
    assert shown == []  # in the first second
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with tqdm(total=2, desc="models", mininterval=0, leave=False) as bar:
        bar.update(2)
    assert [how for how, _ in shown] == ["made"] + ["changed"] * (len(shown) - 1)
    assert shown[-1][1] == "models: 00:00"
    assert capsys.readouterr().err == ""


def test_a_call_without_progress_shows_no_bar_of_a_call_within(monkeypatch):
    shown, init, lens, ids = [], tqdm.__init__, lens_of(), tokens(4, 12)

    def noted(self, *args, **options):
        shown.append(options.get("desc", "") if not options.get("disable") else None)
        init(self, *args, **options)

    monkeypatch.setattr(tqdm, "__init__", noted)
    pair, loss = (ids[:2], ids[2:]), metrics.loss()
    patching.patch(lens, *pair, site="z", metric=loss, controls=0, progress=False)
    patching.path_patch(
        lens, *pair, sender=("z", 0, 0), receiver=("q", 2, 1), metric=loss, progress=False
    )
    patching.attribution_patch(lens, *pair, site="z", metric=loss)
    sweep(
        lens, zero("mlp_out", layers="each"), tokens=ids, metrics=loss, controls=0, progress=False
    )
    circuits.find(lens, *pair, metric=loss, edges=300, progress=False)
    trace(lens, ids, quick=True, random_init=False, report=False, progress=False)
    assert set(shown) == {None}
    run_with(lens, ids)
    assert shown[-1] == "edited run"
