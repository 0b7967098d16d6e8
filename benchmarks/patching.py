"""Time activation patching beside ``transformer_lens.patching`` and a Hugging Face loop that batches.

    python benchmarks/patching.py --quick                  # a round
    python benchmarks/patching.py                          # three
    python benchmarks/patching.py --case resid_pre_4x64

Clean and corrupted prompts are random tokens that differ in every position, so that no patch is skipped because it
changes nothing. The stream (``resid_pre``, by layer and position) and the heads (``z``, all positions) of the default
model are patched in some 64 cells, at 4 pairs of 64 tokens and at one pair of 14; the metric is a logit difference at
the last position. *Ours* is the whole public call: both runs, the comparison with the bridge, and the patches. *Theirs*
is one forward of the bridge a cell, as ``get_act_patch_resid_pre`` and ``get_act_patch_attn_head_out_all_pos`` make it,
run on some of the cells. *Batched* is the loop of an author who batches: the clean run with a hook in each layer, and
for each layer a forward of the plain model on all of its cells, with ``logits_to_keep=1``. All take turns in one
process; the median is taken. *Fixed* is our call on one cell.

The last line is ``CASE_theirs CASE_batched ... equal same_bits``: speedups are theirs over ours. ``equal``: every cell
that ours and another way ran is within 1e-5 of the largest of their logits; ``same_bits``: those of theirs to the last
bit. Some CPUs sum a product of 14 rows in another order than one of 504.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor
from transformer_lens import patching as theirs

from sink_lens import load
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.metrics import logit_difference
from sink_lens.models.lens import LensModel
from sink_lens.patching import patch
from sink_lens.patching.parts import parts_to_patch
from sink_lens.patching.results import part_table

sys.path.insert(0, str(Path(__file__).parent))
from measure import processor

TOLERANCE = 1e-5
ANSWERS = (5, 6)
"""Token ids of the logit difference."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One patching: its site, its number of pairs, their length, and its cells."""

    name: str
    site: str
    clean: Tensor
    corrupted: Tensor
    layers: tuple[int, ...]
    places: tuple[int, ...]
    """Positions of ``resid_pre``, heads of ``z``."""

    @property
    def is_stream(self) -> bool:
        """True if the stream is patched, by position; else the heads."""
        return self.site == "resid_pre"

    @property
    def by(self) -> tuple[str, str]:
        """The swept axes."""
        return ("layer", "position") if self.is_stream else ("layer", "head")

    @property
    def grid(self) -> dict[str, Any]:
        """The cells, as options."""
        return {"layers": self.layers, "positions" if self.is_stream else "heads": self.places}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time, where others use the machine too"
    )
    parser.add_argument("--case", default="", help="only the cases whose name begins so")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    lens = load("SmolLM2-135M-Instruct")
    print(f"{lens!r}; {torch.get_num_threads()} threads of {processor()}", flush=True)
    found = []
    for pairs, length in ((4, 64), (1, 14)):
        generator = torch.Generator().manual_seed(0)
        clean = torch.randint(0, lens.d_vocab, (pairs, length), generator=generator)
        corrupted = (
            clean + torch.randint(1, lens.d_vocab, clean.shape, generator=generator)
        ) % lens.d_vocab
        for site, places in (
            ("resid_pre", range(0, length, -(-length // 8))),
            ("z", range(lens.n_heads)),
        ):
            layers = tuple(number * lens.n_layers // 8 for number in range(8))
            name = f"{site}_{pairs}x{length}"
            case = Case(
                name=name,
                site=site,
                clean=clean,
                corrupted=corrupted,
                layers=layers,
                places=tuple(places),
            )
            if name.startswith(options.case):
                found.append(
                    (name, *_case(lens, case, rounds=1 if options.quick else 3, clock=clock))
                )
    line = " ".join(
        f"{name}_theirs={slow:.2f} {name}_batched={batched:.2f}"
        for name, slow, batched, _, _ in found
    )
    print(
        f"{line} equal={all(one[3] for one in found)} same_bits={all(one[4] for one in found)}".lower()
    )


def _case(
    lens: LensModel, case: Case, *, rounds: int, clock: Callable[[], float]
) -> tuple[float, float, bool, bool]:
    """The speedups over theirs and over the batched loop, and whether the numbers are equal, and to the last bit."""
    n = len(case.layers) * len(case.places)
    compared = range(0, n, n // 6)
    ways: dict[str, Callable[[], Any]] = {
        "ours": partial(_ours, lens, case, **case.grid),
        "fixed": partial(_ours, lens, case, **{axis: own[:1] for axis, own in case.grid.items()}),
        "batched": partial(_batched, lens, case),
        "theirs": partial(_theirs, lens, case, compared),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    values: dict[str, Any] = {}
    ways["fixed"]()  # to warm up
    for _ in range(rounds):
        for way, run in ways.items():
            before = clock()
            values[way] = run()
            seconds[way].append(clock() - before)
    spent = {way: statistics.median(some) for way, some in seconds.items()}
    their, largest = values["theirs"]
    off = float((values["ours"][list(compared)] - their).abs().max()) / largest
    apart = float((values["ours"] - values["batched"]).abs().max()) / largest
    each = spent["ours"] / n
    slow, batched = spent["theirs"] / len(compared) / each, spent["batched"] / spent["ours"]
    print(
        f"{case.name}: {n} cells, {each * 1e3:.1f} ms a cell, {spent['fixed'] * 1e3:.0f} ms for one alone; theirs "
        f"{slow * each * 1e3:.1f} ms ({slow:.2f}x); batched {batched * each * 1e3:.1f} ms ({batched:.2f}x); "
        f"off by {off:.1e}, from the batched loop by {apart:.1e}",
        flush=True,
    )
    return slow, batched, max(off, apart) <= TOLERANCE, off == 0


def _ours(lens: LensModel, case: Case, **at: Any) -> Tensor:
    """Our patches: the metric by cell and sequence."""
    prompts = from_tensor(case.clean), from_tensor(case.corrupted)
    how: dict[str, Any] = {"metric": logit_difference(*ANSWERS), "controls": 0, "progress": False}
    return patch(lens, *prompts, site=case.site, by=case.by, **at, **how).values


def _batched(lens: LensModel, case: Case) -> Tensor:
    """The patches of an author who knows Hugging Face and batches the cells of a layer."""
    n, heads, held = len(case.clean), lens.n_heads, dict[int, Tensor]()

    def logits(tokens: Tensor, hooks: dict[int, Callable[..., Any]]) -> Tensor:
        """Logits of the last token, with a hook before the block, or before W_O, of each of these layers."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            for layer, hook in hooks.items():
                module = (
                    lens.layer(layer)
                    if case.is_stream
                    else lens.layer(layer).get_submodule("self_attn.o_proj")
                )
                stack.callback(module.register_forward_pre_hook(hook).remove)
            return lens.plain(
                input_ids=tokens.to(lens.device), use_cache=False, logits_to_keep=1
            ).logits[:, -1]

    def keep(module: object, args: tuple[Any, ...], layer: int) -> None:
        held[layer] = args[0]

    def put(module: object, args: tuple[Any, ...], source: Tensor) -> Any:
        x = args[0].clone()
        for cell, place in enumerate(case.places):
            own = x[cell * n : (cell + 1) * n]
            if case.is_stream:
                own[:, place] = source[:, place]
            else:
                own.unflatten(-1, (heads, -1))[:, :, place] = source.unflatten(-1, (heads, -1))[
                    :, :, place
                ]
        return (x, *args[1:])

    logits(case.clean, {layer: partial(keep, layer=layer) for layer in case.layers})
    found = []
    for layer in case.layers:
        last = logits(
            case.corrupted.repeat(len(case.places), 1), {layer: partial(put, source=held[layer])}
        )
        found.append((last[:, ANSWERS[0]] - last[:, ANSWERS[1]]).double().cpu().view(-1, n))
    return torch.cat(found)


def _theirs(lens: LensModel, case: Case, compared: range) -> tuple[Tensor, float]:
    """Their patches of some cells: the metric by cell and sequence, and the largest of the two logits."""
    grid = parts_to_patch(lens, case.site, by=case.by, n_positions=case.clean.shape[1], **case.grid)
    found: list[Tensor] = []
    sizes: list[float] = [1.0]

    def metric(logits: Tensor) -> Tensor:
        last = logits[:, -1].float()
        found.append((last[:, ANSWERS[0]] - last[:, ANSWERS[1]]).double().cpu())
        sizes.append(float(last[:, list(ANSWERS)].abs().max()))
        return found[-1].mean()

    setter = (
        theirs.layer_pos_patch_setter if case.is_stream else theirs.layer_head_vector_patch_setter
    )
    table = part_table([grid[number] for number in compared], case.by)
    with torch.no_grad():
        wanted = [
            f"blocks.{layer}.{'hook_resid_pre' if case.is_stream else 'attn.hook_z'}"
            for layer in case.layers
        ]
        _, cache = lens.bridge.run_with_cache(case.clean.to(lens.device), names_filter=wanted)
        theirs.generic_activation_patch(
            model=lens.bridge,
            corrupted_tokens=case.corrupted.to(lens.device),
            clean_cache=cache,
            patching_metric=metric,
            patch_setter=setter,
            activation_name=case.site,
            index_df=table.set_axis(["layer", "pos" if case.is_stream else "head_index"], axis=1),
        )
    return torch.stack(found), max(sizes)


if __name__ == "__main__":
    main()
