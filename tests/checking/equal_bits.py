"""A program: what must be equal to the last bit, on every family, with the kernels that this process was given.

It writes one JSON object: the instruction set that PyTorch chose, and a line for each number that is off.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from lenses import lens_of
from raw_models import raw_logits
from rounding import CLOSE

from sink_lens.data.batch import from_tensor
from sink_lens.edits.constructors import scale, zero
from sink_lens.edits.metrics import Metric, evaluate, loss, norm, sink_mass
from sink_lens.engine.cells import cell_of
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.needs import Needs
from sink_lens.engine.plan import plan_of
from sink_lens.engine.trust import checked
from sink_lens.models.lens import LensModel
from sink_lens.models.tiny import TINY_FAMILIES, VOCAB_SIZE
from sink_lens.patching.activation import patch

ROUNDING = 2e-6
"""Largest difference, as a share of a row's norm, that float32 rounding leaves where the products differ."""
EDITS = {
    "no edit": ((), ()),
    "scale z": (scale("z", 0.5, layers=[1]), [("z", 1, lambda view: view.mul_(0.5))]),
    "zero keys": (zero("k", layers=[0], positions=[2]), [("k", 0, lambda view: view[:, 2].zero_())]),
    "zero the pattern": (zero("pattern", layers=[2], heads=[1]), [("pattern", 2, lambda view: view[:, 1].zero_())]),
}
CELLS = [scale("z", 0.5, layers=[1]), zero("z", layers=[1], heads=[2]), zero("mlp_out", layers=[0], positions=[3])]
CELLS += [scale("resid_post", 0.5, layers=[layer]) for layer in range(3)]
METRICS = (sink_mass(0), norm(0, layer=1), loss())


def drawn(n: int, length: int, *, seed: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(3, VOCAB_SIZE, (n, length), generator=torch.Generator().manual_seed(seed))


def equal(found: torch.Tensor, expected: torch.Tensor, *, bits: bool) -> bool:
    """Equal to the last bit, or but for rounding."""
    return torch.equal(found, expected) if bits else torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE)


def bridge_and_raw_model(family: str, lens: LensModel) -> Iterator[str]:
    """Logits on both paths, with and without edits: equal where the products are the same."""
    ids = drawn(2, 12, seed=1)
    for name, (edits, changes) in EDITS.items():
        found = run_with(lens, ids, edits, logits=True).logits
        expected = raw_logits(family, ids, changes)
        if lens.family.same_products:
            if not torch.equal(found, expected):
                yield f"{name}: {(found - expected).abs().max():.1e} and not 0"
        elif ((found - expected).norm(dim=-1) > ROUNDING * expected.norm(dim=-1)).any():
            yield f"{name}: more than rounding"


def sweep_and_single_runs(lens: LensModel) -> Iterator[str]:
    """A sweep's numbers, and those of one run of the bridge for each cell.

    With one whole forward a cell they are equal where the products are the same; where cells share forwards, close.
    """
    tokens = from_tensor(drawn(3, 10, seed=2), lengths=torch.tensor([10, 7, 9]))
    cells = [cell_of(one, name=str(number)) for number, one in enumerate(CELLS)]
    plan = plan_of(lens, tokens, Needs.of(METRICS, lens=lens), n_cells=len(cells))
    shared, deviation = checked(lens, tokens, cells, METRICS, plan=plan)
    if deviation > CLOSE:
        yield f"sweep: its own check found {deviation:.1e}"
    alone = replace(plan, lanes=1, cut=False, pack=1)
    runs = [run_with(lens, tokens, one, sites=("resid_post",), logits=True, quiet=True) for one in CELLS]
    for own, bits in ((alone, lens.family.same_products), (shared, False)):
        engine = Engine(lens, tokens, cells, METRICS, plan=own)
        for block in engine.blocks:
            for (cell, metric), rows in engine.run(block).groupby(["cell", "metric"], sort=False):
                one = next(one for one in METRICS if one.name == metric)
                expected = evaluate(one, runs[cell])[block.prompts].double()
                if not equal(torch.tensor(rows["value"].to_numpy()), expected, bits=bits):
                    yield f"sweep: cell {cell}, {metric}, {own.pack} a forward"


def patched_and_clean(lens: LensModel) -> Iterator[str]:
    """The whole stream patched from the clean run gives the clean logits."""
    clean, corrupted, seen = drawn(2, 9, seed=3), drawn(2, 9, seed=4), []

    def keep(run):
        seen.append(run.logits)
        return run.logits[:, -1, 7]

    metric = Metric(name="kept", function=keep, layers=(), logits=True)
    patch(lens, clean, corrupted, site="resid_pre", by=("layer",), layers=[0, 2], metric=metric, progress=False)
    expected = run_with(lens, clean, logits=True).logits
    if not all(equal(logits, expected, bits=False) for logits in seen[-2:]):
        yield "patch: not the clean logits"


def main() -> None:
    """All checks on all families."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    off = []
    for family in TINY_FAMILIES:
        lens = lens_of(family)
        for check in (bridge_and_raw_model(family, lens), sweep_and_single_runs(lens), patched_and_clean(lens)):
            off += [f"{family}, {line}" for line in check]
    found = {"capability": torch.backends.cpu.get_cpu_capability(), "families": len(TINY_FAMILIES), "off": off}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
