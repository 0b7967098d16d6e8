"""A lens is frozen: a model that was changed since is refused; threads take turns."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
import torch
from torch import nn

from sink_lens import Reading, TokenBatch, capture, generate, run_with, stream, sweep, wrap
from sink_lens.edits import edit, fwd_hooks, metrics
from sink_lens.engine import threads
from sink_lens.errors import ModelError
from sink_lens.models.load import weights_hash
from sink_lens.models.running import exclusive_use
from sink_lens.models.unchanged import TensorValues
from sink_lens.models.weights import attention_weights
from sink_lens.patching import patch
from sink_lens.patching.attribution import attribution_patch
from sink_lens.report import style
from sink_lens.sweeps import EditGrid, Grid
from tests.tiny_families import tiny

GRID = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0, 1), heads=(0,)),))


@pytest.fixture(autouse=True)
def plain_picture(monkeypatch):
    """Sweeps take longer to draw than to run."""
    monkeypatch.setattr(style, "figure_bytes", lambda figure, form: b"a picture")


def batch(seed=0):
    return TokenBatch.from_tensor(
        torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
    )


DOORS = {
    "capture": lambda lens: capture(lens, batch(), sites=["z"]),
    "stream": lambda lens: stream(
        lens, batch(), [Reading(name="size", sites=("z",), function=lambda v: v["z"])]
    ),
    "attribution_patch": lambda lens: attribution_patch(
        lens, batch(), batch(1), site="z", metric="loss"
    ),
    "generate": lambda lens: generate(lens, [5, 6, 7], max_new_tokens=2),
    "fwd_hooks": lambda lens: fwd_hooks(lens, edit("z", lambda x, at: x, layers=[1])),
    "weights_hash": lambda lens: weights_hash(lens),
    "attention_weights": lambda lens: attention_weights(lens, layer=0),
}
"""Beside those that ``changed_models`` asks after every change."""


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_a_model_that_was_changed(door):
    model = tiny("llama")
    lens = wrap(model)
    DOORS[door](lens)
    down = model.model.layers[1].mlp.down_proj
    down.weight = nn.Parameter(down.weight * 2)
    with pytest.raises(
        ModelError, match=r"layers.1.mlp.down_proj.weight is another tensor; .*[Ww]rap it again"
    ):
        DOORS[door](lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 7), (64, 2080)])
def test_entries_that_change_places_behind_the_counter_are_noticed(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    changes = {
        "rows": lambda x: x[torch.arange(len(x)).roll(1)],
        "columns": lambda x: x.flip(1),
        "all": lambda x: x.flatten().flip(0).view_as(x),
        "two": lambda x: torch.cat([x[:, 2:3], x[:, 1:2], x[:, :1], x[:, 3:]], dim=1),
        "signs": lambda x: -x,
        "one": lambda x: x.index_fill(1, torch.tensor([6]), 0.5),
    }
    for name, change in changes.items():
        model = nn.Linear(*shape[::-1], bias=False)
        model.weight.data = weight.clone()
        then, version = TensorValues([("weight", model.weight)]), model.weight._version
        model.weight.data.copy_(weight.clone())
        assert not then.names_of_changed()
        model.weight.data.copy_(change(weight))
        assert model.weight._version == version
        assert then.names_of_changed() == ["weight"], name


def test_two_lenses_on_one_model_and_its_bridge_go_on():
    model = tiny("mixtral")  # its experts are given hooks when they are wrapped
    first, second = wrap(model), wrap(model)
    third = wrap(wrap(tiny("llama")).bridge)
    assert first.state.turns is second.state.turns is not third.state.turns
    assert torch.equal(run_with(first, batch()).loss, run_with(second, batch()).loss)


def test_a_pass_waits_while_it_is_another_threads_turn(monkeypatch):
    """Whoever finds the lock taken says so before it waits: no clock is needed to see that it does."""
    lens, arrived, inside = wrap(tiny("llama")), Event(), []

    class Announced:
        def __init__(self, lock):
            self.lock = lock

        def __getattr__(self, name):
            return getattr(self.lock, name)

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                arrived.set()
                self.lock.acquire()

        def __exit__(self, *error):
            self.lock.release()

    monkeypatch.setattr(lens.state.turns, "lock", Announced(lens.state.turns.lock))

    def second(x, at):
        inside.append("second")
        arrived.set()
        return x * 2

    other = Thread(target=run_with, args=(lens, batch(), edit("z", second, layers=[1])))
    with exclusive_use(lens):
        other.start()
        arrived.wait()
        inside.append("first")
    other.join()
    assert list(dict.fromkeys(inside)) == ["first", "second"]


def test_threads_share_sweeps(tmp_path, monkeypatch):
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 2)
    lens = wrap(tiny("llama"))

    def effects(n):
        return (
            sweep(lens, GRID, tokens=batch(), out=tmp_path / f"{n}", progress=False)
            .frame["effect"]
            .tolist()
        )

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(effects, range(1, 4))) == [pytest.approx(effects(0), abs=1e-6)] * 3


def test_a_metric_may_run_the_model():
    lens = wrap(tiny("llama"))
    options = {"site": "z", "layers": (0,), "progress": False}
    metric = metrics.on_batch(lambda logits: run_with(lens, batch()).loss.mean())
    found = patch(lens, batch(), batch(1), metric=metric, **options)
    assert found.frame["effect"].abs().max() == 0


def test_a_pickled_lens_says_load():
    lens = wrap(tiny("llama"))
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ModelError, match=r"Call load\(\.\.\.\) in the worker"):
            send(lens)
