"""Cells side by side: the threads, the copies of the model, what fails in one of them."""

import threading
from threading import Lock

import pandas as pd
import pytest
import torch
from rounding import CLOSE

from sink_lens.edits.constructors import edit, scale
from sink_lens.edits.metrics import sink_mass
from sink_lens.engine import threads as lanes
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.forward import run_with
from sink_lens.engine.threads import Lanes, copy_for_thread, lanes_of
from sink_lens.engine.trust import make_accurate_engine
from sink_lens.models.load import wrap
from tests.tiny_families import tiny


def cells(n, *more):
    return [*(cell_of_edits(scale("z", 1 / (2 + one), layers=[1])) for one in range(n)), *more]


@pytest.fixture
def two(lens_of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes.torch, "get_num_threads", lambda: 4)
        return Lanes(lens_of("llama"), count=2)


def test_each_lane_has_its_share_of_the_threads(two):
    before = torch.get_num_threads()
    found = two.map(lambda lens, given, stop: (given, torch.get_num_threads()), "abc")
    assert sorted(found) == [("a", 2), ("b", 2), ("c", 2)]
    assert torch.get_num_threads() == before


def test_where_one_lane_fails_the_others_stop(two):
    both, told = threading.Barrier(2), threading.Event()

    def run(lens, given, stop):
        both.wait()
        if given == "bad":
            raise KeyError("bad")
        stop.wait()
        told.set()

    with pytest.raises(KeyError, match="bad"):
        two.map(run, ["bad", "good"])
    assert told.wait()


def test_a_copy_shares_the_weights_and_no_module(lens_of):
    lens = lens_of("llama")
    copy = copy_for_thread(lens)
    inner, inner_copy = lens.bridge.original_model, copy.bridge.original_model
    own, theirs = dict(inner.named_parameters()), dict(inner_copy.named_parameters())
    assert own.keys() == theirs.keys()
    assert all(theirs[name] is parameter for name, parameter in own.items())
    assert not set(map(id, lens.bridge.modules())) & set(map(id, copy.bridge.modules()))
    assert not set(map(id, inner.modules())) & set(map(id, inner_copy.modules()))
    assert inner_copy.config is not inner.config  # which kernel runs is written there


def test_a_copy_of_a_bridge_in_train_mode_drops_nothing():
    lens = wrap(tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5))
    lens.bridge.train()
    copy, tokens = copy_for_thread(lens), torch.randint(3, 300, (2, 6))
    first, second = (run_with(copy, tokens, progress=False).loss for _ in range(2))
    assert torch.equal(first, second)


def test_a_cell_that_fails_in_a_lane_is_recorded_and_the_others_are_there(
    lens_of, tokens_of, engine_of
):
    def fails(x, where):
        raise ValueError("no such number")

    bad = cell_of_edits(edit("z", fails, layers=[1]))
    made = engine_of(
        lens_of("llama"), tokens_of((6, 6)), cells(5, bad), [sink_mass(0)], pack=2, lanes=2
    )
    seen = []
    frame = pd.concat([made.run(block, advance=seen.append) for block in made.blocks])
    assert sum(seen) == 6
    assert frame.loc[frame["cell"] == 5, "error"].tolist() == ["ValueError: no such number"]
    rest = frame[frame["cell"] != 5]
    assert rest["error"].isna().all()
    assert rest["cell"].tolist() == [cell for cell in range(5) for _ in range(2)]


def test_numbers_that_differ_in_a_lane_are_seen_and_there_is_one_then(
    tokens_of, engine_of, monkeypatch
):
    def off(lens):
        found = copy_for_thread(lens)
        layer = found.bridge.blocks[2].attn.original_component
        layer.scaling = layer.scaling * 2
        return found

    monkeypatch.setattr(lanes, "copy_for_thread", off)
    lens, tokens = wrap(tiny("llama")), tokens_of((6, 6))
    made = engine_of(lens, tokens, cells(6), [sink_mass(0)], pack=2, lanes=2)
    assert made.deviations([0])[0][1] > CLOSE
    found = make_accurate_engine(lens, tokens, cells(6), [sink_mass(0)], plan=made.plan).plan
    assert (found.lanes, found.pack) == (1, 2)
    assert found.deviation < CLOSE


def test_a_model_whose_modules_cannot_be_copied_is_swept_one_cell_at_a_time(
    lens_of, tokens_of, engine_of, monkeypatch
):
    tokens, other = tokens_of((6, 6)), wrap(tiny("llama"))
    plan = engine_of(lens_of("llama"), tokens, cells(6), [sink_mass(0)], pack=2, lanes=2).plan
    monkeypatch.setattr(other.bridge.blocks[0], "guard", Lock(), raising=False)
    for lens, n in ((lens_of("llama"), 2), (other, 1)):
        made = make_accurate_engine(lens, tokens, cells(6), [sink_mass(0)], plan=plan)
        assert made.plan.lanes == n


def test_lanes_are_made_once_and_take_no_hook_with_them(tokens_of):
    lens, tokens = wrap(tiny("llama")), tokens_of((6, 6))
    read = lambda copy, given, stop: run_with(copy, tokens, progress=False).loss  # noqa: E731
    (before,) = Lanes(lens, count=2).map(read, "a")
    kept = lanes_of(lens, count=2)
    point = lens.bridge.hook_dict["blocks.1.hook_resid_pre"]
    point.add_hook(lambda x, hook: x * 0)
    other = lanes_of(lens, count=2)
    lens.bridge.reset_hooks()
    assert lanes_of(lens, count=2) is kept is not other
    assert lanes_of(lens, count=1) is not kept
    for loss in kept.map(read, "ab"):
        assert torch.equal(loss, before)
