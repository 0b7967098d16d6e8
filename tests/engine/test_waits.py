"""A cell makes the processor wait for a GPU once, for its edit, however many layers are read of it."""

from collections import Counter

import pytest
import torch
from lenses import lens_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sink_lens.activations import record
from sink_lens.activations.record import Reading, stream
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.engine import forward, passes
from sink_lens.engine.engine import Engine
from sink_lens.engine.needs import Needs
from sink_lens.engine.plan import Plan
from sink_lens.sweeps import EditGrid, Grid
from sink_lens.sweeps.cells import grid_cells

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::masked_select", "aten::unique_dim"}
"""Operations whose result the processor waits for, beside an index by a mask."""
CALLS = {"tolist", "cpu", "numpy"}


class Scalars(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        masks = name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in READS or masks:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in CALLS:
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """Counts in the pass and in what reads it: there every tensor would lie on the GPU."""
    found = Counter()

    def counting(function):
        def run(*args, **named):
            with Scalars(found), Calls(found):
                return function(*args, **named)

        return run

    monkeypatch.setattr(passes, "partial_pass", counting(passes.partial_pass))
    monkeypatch.setattr(forward.RunCollector, "finish", counting(forward.RunCollector.finish))
    return found


def run(metric, *, cells, lens):
    tokens = from_tensor(torch.randint(3, 300, (2, 10), generator=torch.Generator().manual_seed(0)))
    grids = EditGrid(site="z", layers="0", heads="each"), EditGrid(site="mlp_out", layers="0", positions="each")
    made = grid_cells(Grid.of(*grids, controls=0), lens, n_positions=10).every
    plan = Plan(path="blocks", prompts=2, pack=99)
    engine = Engine(lens, tokens, made[:cells], [metric], plan=plan, needs=Needs.of([metric], lens=lens))
    engine.baseline()
    return lambda: [engine.run(block) for block in engine.blocks]


@pytest.mark.parametrize(
    "metric", [metrics.sink_mass(0), metrics.sink_mass(0, layers=[1]), metrics.logit_difference(5, 6), metrics.loss()]
)
def test_a_cell_waits_for_the_gpu_once(metric, waits):
    lens, found = lens_of("llama"), {}
    for cells in (3, 6):
        engine = run(metric, cells=cells, lens=lens)
        waits.clear()
        engine()
        found[cells] = waits.copy()
    assert (found[6] - found[3]).total() <= 3, found
    assert found[6]["tolist"] >= 6  # what is counted is there


def test_readings_come_to_the_cpu_in_one_copy(monkeypatch):
    lens, copies = lens_of("llama"), []
    tokens = from_tensor(torch.randint(3, 300, (4, 10), generator=torch.Generator().manual_seed(0)))
    readings = [
        Reading(name=f"norm {site}", sites=(site,), function=lambda v, site=site: v[site].norm(dim=-1))
        for site in ("resid_pre", "resid_post", "mlp_out")
    ]
    monkeypatch.setattr(record, "bring_home", lambda lists: copies.append(len(lists)))
    found = stream(lens, tokens, readings, batch_size=2)
    assert copies == [9, 9]  # once a forward, for three readings of three layers
    assert found["norm mlp_out", 2].shape == (4, 10)
