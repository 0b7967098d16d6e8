"""A process that is forked while a thread is in a pass of the model does not wait for that thread."""

import os
import threading

import pytest
import torch

from sink_lens.edits import edit
from sink_lens.engine.forward import run_with
from sink_lens.errors import ModelError
from sink_lens.models.load import wrap
from tests.tiny_families import tiny

IDS = torch.randint(3, 300, (1, 6), generator=torch.Generator().manual_seed(0))


def in_child(call):
    """Whether ``call`` is refused (1) or ends (0) in a forked child; None if it has not ended after 20 seconds."""
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        except ModelError:
            os._exit(1)
        finally:
            os._exit(2)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="on Windows nothing is forked")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_during_a_pass_is_told_and_one_before_or_after_runs():
    torch.set_num_threads(1)
    lens, inside, go_on = wrap(tiny("llama")), threading.Event(), threading.Event()

    def wait(x, at):
        inside.set()
        assert go_on.wait(60)
        return x * 2

    thread = threading.Thread(target=run_with, args=(lens, IDS, [edit("z", wait, layers=[1])]))
    assert in_child(lambda: run_with(lens, IDS)) == 0
    thread.start()
    assert inside.wait(60)
    try:
        assert in_child(lambda: run_with(lens, IDS)) == 1
        assert in_child(lambda: run_with(wrap(tiny("llama")), IDS)) == 0
    finally:
        go_on.set()
        thread.join()
    assert in_child(lambda: run_with(lens, IDS)) == 0
