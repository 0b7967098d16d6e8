"""What activation patching costs beside ``transformer_lens.patching``, on the same bridge, prompts and metric.

    python benchmarks/patching.py --quick      # a sample of the cells, under 90 seconds on two cores
    python benchmarks/patching.py              # more cells

Clean and corrupted prompts are random tokens that differ in every position, so that no patch is skipped because it
changes nothing. The stream (``resid_pre``, by layer and position) and the heads (``z``, all positions) of the default
model are patched, at 4 pairs of 64 tokens and at one pair of 14; the metric is a logit difference at the last position.
*Theirs* is one forward of the bridge a cell, as ``get_act_patch_resid_pre`` and ``get_act_patch_attn_head_out_all_pos``
make it. Both take turns in one process: after each share of our cells, their way runs one of these cells.

Ours is timed whole: both baseline runs, the comparison with the bridge, and the patches. What does not grow with the
cells counts by the sample's share of all cells. The floor is the matrix products of the cone alone, timed beside.

The last line is ``resid_speedup heads_speedup one_pair_speedup one_pair_heads_speedup equal same_bits``: the first two
at 4 pairs of 64 tokens; speedups are theirs over ours. ``equal``: every cell that both ran is within 1e-5 of the
largest of their logits; ``same_bits``: to the last bit. Some CPUs sum a product of 14 rows in another order than one
of 504.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor
from transformer_lens import patching as theirs

from sink_lens import load
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.metrics import evaluate, logit_difference
from sink_lens.edits.outcome import Outcome
from sink_lens.edits.part import Part
from sink_lens.engine.trust import make_engine
from sink_lens.models.lens import LensModel
from sink_lens.patching.cells import cell_of_patch
from sink_lens.patching.parts import parts_to_patch
from sink_lens.patching.results import part_table
from sink_lens.patching.run_pair import RunPair, run_for_metric

NAMES = ("resid_speedup", "heads_speedup", "one_pair_speedup", "one_pair_heads_speedup")
TOLERANCE = 1e-5
ANSWERS = (5, 6)
"""Token ids of the logit difference."""


Timed = Callable[[Callable[[], Any]], tuple[Any, float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is patched, on how many pairs of which length, and which of the cells are run."""

    site: str
    pairs: int
    length: int
    layers: tuple[int, ...]
    places: tuple[int, ...]
    """Positions of ``resid_pre``, heads of ``z``."""
    slow: int
    """Cells that their way runs."""

    @property
    def by(self) -> tuple[str, str]:
        """The swept axes."""
        return ("layer", "position") if self.site == "resid_pre" else ("layer", "head")

    @property
    def theirs(self) -> list[str]:
        """The same in their words."""
        return ["layer", "pos"] if self.site == "resid_pre" else ["layer", "head_index"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, where others use the machine too")
    options = parser.parse_args()
    quick, timed = options.quick, partial(_timed, clock=time.process_time if options.cpu_time else time.perf_counter)
    lens = load("SmolLM2-135M-Instruct")
    print(f"{lens!r}; {torch.get_num_threads()} threads", flush=True)
    n, heads = lens.n_layers, tuple(range(lens.n_heads))
    some = tuple(range(2, n, 9 if quick else 3))
    cases = [
        Case(site="resid_pre", pairs=4, length=64, layers=some, places=tuple(range(0, 64, 8)), slow=6 if quick else 16),
        Case(site="z", pairs=4, length=64, layers=some, places=heads, slow=6 if quick else 16),
        Case(site="resid_pre", pairs=1, length=14, layers=some, places=tuple(range(14)), slow=12 if quick else 40),
        Case(site="z", pairs=1, length=14, layers=some, places=heads, slow=12 if quick else 40),
    ]
    found = [_case(lens, case, timed=timed) for case in cases]
    line = " ".join(f"{name}={speedup:.2f}" for name, (speedup, _) in zip(NAMES, found, strict=True))
    worst = max(off for _, off in found)
    print(f"{line} equal={str(worst <= TOLERANCE).lower()} same_bits={str(worst == 0).lower()}")


def _case(lens: LensModel, case: Case, *, timed: Timed) -> tuple[float, float]:
    """The speedup of the cells of a case, and how far the worst number is off, over the largest logit of theirs."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, lens.d_vocab, (case.pairs, case.length), generator=generator)
    corrupted = (clean + torch.randint(1, lens.d_vocab, clean.shape, generator=generator)) % lens.d_vocab
    run, source = from_tensor(corrupted), from_tensor(clean)
    metric = logit_difference(*ANSWERS)
    chosen: dict[str, Any] = {"positions" if case.site == "resid_pre" else "heads": case.places}
    grid = parts_to_patch(lens, case.site, by=case.by, n_positions=case.length, layers=case.layers, **chosen)
    whole = lens.n_layers * (case.length if case.site == "resid_pre" else lens.n_heads)  # cells of all layers
    run_for_metric(lens, run, metric=metric)  # to warm up
    runs, once = timed(partial(RunPair.make, lens, run, source, site=case.site, metric=metric, grid=grid))
    patches = [cell_of_patch(part, run=runs.held, source=runs.given) for part in grid]
    engine, checking = timed(partial(make_engine, lens, run, patches, [metric]))
    _, baseline = timed(lambda: engine.baseline_outcome(slice(0, case.pairs)))
    ours, slow, floor = (once + checking + baseline) * len(grid) / whole, [], 0.0
    values: dict[int, Tensor] = {}

    def take(number: int, outcome: Outcome, changed: list[bool]) -> None:
        values[number] = evaluate(metric, outcome)

    compared = _spread(len(grid), case.slow)
    cache = lens.bridge.run_with_cache(clean.to(lens.device))[1]
    off, largest = 0.0, 1.0
    for block in engine.blocks:
        ours += timed(lambda block=block: engine.map(block, take))[1]
        for number in set(compared) & set(block.cells):
            (found, size), spent = timed(lambda number=number: _theirs(lens, grid[number], case, corrupted, cache))
            slow.append(spent)
            off = max(off, float((found - values[number]).abs().max()))
            largest = max(largest, size)
        positions = sum(engine.tokens.n_positions - engine.cells[number].begin for number in block.cells)
        floor += _floor(lens, case, rows=case.pairs * positions, first=block.first, timed=timed)
    each, their = ours / len(grid), sum(slow) / len(slow)
    print(
        f"{case.site}, {case.pairs} pairs of {case.length} tokens: {len(grid)} cells, {each * 1e3:.1f} ms a cell; "
        f"theirs {their * 1e3:.1f} ms ({their / each:.2f}x, {len(slow)} cells); floor {floor / ours:.0%} of ours; "
        f"the fixed part {(once + checking + baseline) * 1e3:.0f} ms; off by {off / largest:.1e}",
        flush=True,
    )
    return their / each, off / largest


def _theirs(lens: LensModel, part: Part, case: Case, corrupted: Tensor, cache: Any) -> tuple[Tensor, float]:
    """Their patch of one cell, with the metric by sequence and the larger of its two logits."""
    found: list[Tensor] = []
    sizes: list[float] = []

    def metric(logits: Tensor) -> Tensor:
        last = logits[:, -1].float()
        found.append((last[:, ANSWERS[0]] - last[:, ANSWERS[1]]).cpu())
        sizes.append(float(last[:, list(ANSWERS)].abs().max()))
        return found[-1].mean()

    setter = theirs.layer_pos_patch_setter if case.site == "resid_pre" else theirs.layer_head_vector_patch_setter
    with torch.no_grad():
        theirs.generic_activation_patch(
            model=lens.bridge,
            corrupted_tokens=corrupted.to(lens.device),
            clean_cache=cache,
            patching_metric=metric,
            patch_setter=setter,
            activation_name=case.site,
            index_df=part_table([part], case.by).set_axis(case.theirs, axis=1),
        )
    return found[-1], sizes[-1]


def _floor(lens: LensModel, case: Case, *, rows: int, first: int, timed: Timed) -> float:
    """Seconds that the matrix products of a block take alone, in the layers and on the rows that it computes."""
    linears = [
        module
        for index in range(first, lens.n_layers)
        for name, module in lens.layer(index).named_modules()
        if isinstance(module, torch.nn.Linear)
        and (index > first or case.site == "resid_pre" or "mlp" in name or name.endswith("o_proj"))
    ]
    inputs = {width: torch.randn(min(rows, 512), width) for width in {module.in_features for module in linears}}

    def run() -> None:
        with torch.no_grad():
            for module in linears:
                module(inputs[module.in_features])

    return timed(run)[1] * max(1.0, rows / 512)


def _spread(n: int, count: int) -> Sequence[int]:
    """Numbers of some cells, evenly over all."""
    return [place * n // count for place in range(min(n, count))]


def _timed(run: Callable[[], Any], *, clock: Callable[[], float]) -> tuple[Any, float]:
    before = clock()
    found = run()
    return found, clock() - before


if __name__ == "__main__":
    main()
