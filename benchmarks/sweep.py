"""What a sweep costs beside one forward of the bridge per cell, and beside a hand-written Hugging Face hook loop.

    python benchmarks/sweep.py --quick      # a sample of the cells, under a minute on two cores
    python benchmarks/sweep.py              # more cells, growth with cells and prompts
    python benchmarks/sweep.py --whole      # all 1,536 neurons of layer 11 and all 270 heads: 40 minutes on two cores
    python benchmarks/sweep.py --device cuda --dtype bfloat16            # on a GPU
    python benchmarks/sweep.py --llama-1b --device cuda --quick          # a randomly initialised Llama of 1B parameters

Each neuron of a layer (11 of the default model), and each head, is ablated on 64 tokens, and the mean attention to
position 0 in the layers behind it is read. *Theirs* is what ``transformer_lens.patching.generic_activation_patch`` does
for a cell: one forward of the bridge with a hook, here with those that read the metric; a forward of the bridge ends
with the logits. *Theirs without logits* is the same, stopped before the unembedding. *Hugging Face hooks* is a loop
with forward hooks on the body of the eager model; *batched* is that of an author who batches, up to 8 cells of a layer
in a forward. All take turns in one process, the slow ways on a few cells of each block.

Memory is the peak above the loaded model, of ours over theirs. The last line is
``neurons_speedup heads_speedup one_prompt_speedup memory equal``: speedups are theirs over ours, ``equal``
says whether ours is ``torch.equal`` to theirs in every cell that both ran.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor

from sink_lens import load, wrap
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_tensor, from_text
from sink_lens.edits.metrics import Metric, sink_mass
from sink_lens.engine.cells import Cell
from sink_lens.engine.engine import Engine
from sink_lens.engine.needs import Needs
from sink_lens.engine.plan import choose_plan
from sink_lens.measures.attention import sink_mass as mass_of
from sink_lens.models.lens import LensModel
from sink_lens.sweeps import EditGrid, Grid
from sink_lens.sweeps.cells import grid_cells

sys.path.insert(0, str(Path(__file__).parent))
from measure import peak, processor

LENGTH = 64
_BATCH = 8
_COMPARED = 2
"""Cells of a block that the slow ways run too."""
NAMES = ("neurons_speedup", "heads_speedup", "one_prompt_speedup", "memory")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A neuron or a head to ablate."""

    layer: int
    unit: int
    is_head: bool

    @property
    def grid(self) -> EditGrid:
        """It, as a grid of one cell."""
        where = (
            {"site": "z", "heads": self.unit}
            if self.is_head
            else {"site": "neurons", "units": self.unit}
        )
        return EditGrid(layers=self.layer, **where)

    @property
    def hook(self) -> str:
        """The bridge's hook."""
        return (
            f"blocks.{self.layer}.attn.hook_z"
            if self.is_head
            else f"blocks.{self.layer}.mlp.hook_post"
        )

    def ablated(self, x: Tensor, *, n_heads: int) -> Tensor:
        """The hook's tensor without it; heads may lie side by side."""
        x = x.clone()
        if self.is_head and x.dim() == 4:
            x[:, :, self.unit] = 0
        elif self.is_head:
            x.unflatten(-1, (n_heads, -1))[:, :, self.unit] = 0
        else:
            x[..., self.unit] = 0
        return x


@dataclass(kw_only=True)
class Bench:
    """A model, its prompts, and the layers whose attention is read."""

    lens: LensModel
    tokens: TokenBatch
    late: tuple[int, ...]

    @property
    def metric(self) -> Metric:
        """Late sink mass."""
        return sink_mass(0, layers=self.late)

    def bridge(self, site: Site, *, logits: bool = True) -> Tensor:
        """One forward of the bridge with the cell's hook."""
        found: dict[int, Tensor] = {}
        valid = self.tokens.valid.to(self.lens.device)

        def ablate(x: Tensor, hook: object) -> Tensor:
            return site.ablated(x, n_heads=self.lens.n_heads)

        def read(layer: int) -> Callable[[Tensor, object], None]:
            def hook(pattern: Tensor, hook: object) -> None:
                found[layer] = mass_of(pattern[..., 0].float(), valid=valid, key=0)

            return hook

        def stop(x: Tensor, hook: object) -> None:
            raise _StoppedError

        hooks: list[Any] = [(site.hook, ablate)]
        hooks += [(f"blocks.{layer}.attn.hook_pattern", read(layer)) for layer in self.late]
        if not logits:
            hooks.append(("ln_final.hook_out", stop))
        with torch.no_grad(), contextlib.suppress(_StoppedError):
            ids = self.tokens.tokens.to(self.lens.device)
            self.lens.bridge.run_with_hooks(ids, fwd_hooks=hooks, use_cache=False)
        return self._mean(found)

    def hugging_face(self, *sites: Site) -> Tensor:
        """One forward of the eager Hugging Face body with hooks, on a copy of the prompts for each site of a layer."""
        found: dict[int, Tensor] = {}
        valid = self.tokens.valid.to(self.lens.device).repeat(len(sites), 1)
        layer = self.lens.layer(sites[0].layer)
        place = "self_attn.o_proj" if sites[0].is_head else "mlp.down_proj"

        def ablate(module: object, args: tuple[Any, ...]) -> Any:
            own = zip(sites, args[0].chunk(len(sites)), strict=True)
            return (torch.cat([site.ablated(x, n_heads=self.lens.n_heads) for site, x in own]),)

        handles = [layer.get_submodule(place).register_forward_pre_hook(ablate)]
        for index in self.late:

            def read(module: object, args: object, output: Any, index: int = index) -> None:
                found[index] = mass_of(output[1][..., 0].float(), valid=valid, key=0)

            handles.append(
                self.lens.layer(index).get_submodule("self_attn").register_forward_hook(read)
            )
        before = str(self.lens.plain.config._attn_implementation)
        self.lens.plain.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                tokens = self.tokens.tokens.to(self.lens.device).repeat(len(sites), 1)
                self.lens.plain.base_model(input_ids=tokens, use_cache=False)
        finally:
            self.lens.plain.set_attn_implementation(before)
            for handle in handles:
                handle.remove()
        return self._mean(found)

    def engine(self, sites: Sequence[Site]) -> Engine:
        """Ours for some cells."""
        cells: list[Cell] = []
        for site in sites:
            found = grid_cells(Grid.of(site.grid, controls=0), self.lens, n_positions=LENGTH).every
            cells += found
        needs = Needs.of_metrics([self.metric], lens=self.lens)
        plan = choose_plan(self.lens, self.tokens, needs, n_cells=len(cells))
        return Engine(self.lens, self.tokens, cells, [self.metric], plan=plan)

    def timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Return what it gives, and the seconds that it took."""
        self._wait()
        before = time.perf_counter()
        found = run()
        self._wait()
        return found, time.perf_counter() - before

    def _wait(self) -> None:
        if self.lens.device.type == "cuda":
            torch.cuda.synchronize()

    def _mean(self, found: dict[int, Tensor]) -> Tensor:
        return torch.stack([found[layer].cpu() for layer in self.late]).nanmean(dim=(0, 2))


class _StoppedError(Exception):
    """Ends a forward of the bridge before the unembedding."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cells of each kind")
    parser.add_argument(
        "--whole", action="store_true", help="every neuron of the layer and every head"
    )
    parser.add_argument("--device", default=None, help="as in sink_lens.load")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16")
    parser.add_argument(
        "--llama-1b", action="store_true", help="a randomly initialised Llama of 1B parameters"
    )
    options = parser.parse_args()
    lens = (
        _llama(options)
        if options.llama_1b
        else load("SmolLM2-135M-Instruct", device=options.device, dtype=options.dtype)
    )
    layer = 11 if not options.llama_1b else lens.n_layers // 3
    late = tuple(range(layer + 1, lens.n_layers))
    print(
        f"{lens!r}; {torch.get_num_threads()} threads of {processor()}; reads layers {late[0]}-{late[-1]}",
        flush=True,
    )
    eight = Bench(lens=lens, tokens=_tokens(lens, 8), late=late)
    one = Bench(lens=lens, tokens=_tokens(lens, 1), late=late)
    width = lens.d_mlp or 0
    neurons = range(0, width, width // (4 if options.quick else 32))
    # Depths that are on average those of all heads.
    depths, heads_each = ((7, 22), 2) if options.quick else ((2, 8, 14, 21, 27), lens.n_heads)
    heads = [(lens.n_layers * depth // 30, head) for depth in depths for head in range(heads_each)]
    if options.whole:
        heads = [(at, head) for at in range(lens.n_layers) for head in range(lens.n_heads)]
    some = [Site(layer=layer, unit=unit, is_head=False) for unit in neurons]
    every = [Site(layer=layer, unit=unit, is_head=False) for unit in range(width)]
    cases: dict[str, tuple[Bench, list[Site]]] = {
        "neurons, 8 prompts": (eight, every if options.whole else some),
        "heads, 8 prompts": (
            eight,
            [Site(layer=at, unit=head, is_head=True) for at, head in heads],
        ),
        "neurons, 1 prompt": (
            one,
            every if options.whole else every[:: width // (16 if options.quick else 32)],
        ),
    }
    for bench in (eight, one):
        bench.bridge(some[0])  # to warm up
    found = [_case(name, *case, quick=options.quick) for name, case in cases.items()]
    site = Site(layer=layer, unit=0, is_head=False)
    if not options.quick:
        _growth(eight, layer=layer)
    few = some[: 2 if options.quick else 8]
    memory = _peak(eight, lambda: _all(eight.engine(few))) / _peak(
        eight, lambda: eight.bridge(site)
    )
    numbers = [*(speedup for speedup, _ in found), memory]
    line = " ".join(f"{name}={value:.2f}" for name, value in zip(NAMES, numbers, strict=True))
    print(f"{line} equal={str(all(is_equal for _, is_equal in found)).lower()}")


def _all(engine: Engine) -> None:
    for block in engine.blocks:
        engine.run(block)


def _peak(bench: Bench, run: Callable[[], object]) -> float:
    """Peak memory in bytes above what there is before."""
    if bench.lens.device.type != "cuda":
        return peak(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return float(torch.cuda.max_memory_allocated() - before)


def _case(name: str, bench: Bench, sites: list[Site], *, quick: bool) -> tuple[float, bool]:
    """The speedup of some cells, and whether every number is equal; the slow ways run a few cells of each block."""
    engine = bench.engine(sites)
    engine.baseline_metrics()  # the baseline run, once for all cells
    ways: dict[str, Callable[[Site], Tensor]] = {"theirs": bench.bridge}
    if not quick:
        ways |= {
            "theirs without logits": partial(bench.bridge, logits=False),
            "Hugging Face hooks": bench.hugging_face,
        }
    ours, seconds = 0.0, dict.fromkeys([*ways, *(() if quick else ("batched",))], 0.0)
    is_equal, gap = True, 0.0
    for block in engine.blocks:
        compared = block.cells[:: max(1, len(block.cells) // _COMPARED)][:_COMPARED]
        share = len(block.cells) / len(compared)
        step = engine.plan.pack * engine.plan.lanes
        for start in range(0, len(block.cells), step):
            pack = replace(block, cells=block.cells[start : start + step])
            frame, spent = bench.timed(lambda pack=pack: engine.run(pack))
            ours += spent
            for cell in set(compared) & set(pack.cells):
                found = {
                    way: bench.timed(lambda run=run, site=sites[cell]: run(site))
                    for way, run in ways.items()
                }
                for way, (_, spent) in found.items():
                    seconds[way] += spent * share
                if cell == compared[0] and not quick:
                    some = [site for site in sites if site.layer == sites[cell].layer][:_BATCH]
                    spent = bench.timed(lambda some=some: bench.hugging_face(*some))[1]
                    seconds["batched"] += spent / len(some) * len(block.cells)
                wanted = found["theirs"][0].float()
                got = torch.tensor(
                    frame.loc[frame["cell"] == cell, "value"].tolist(), dtype=torch.float32
                )
                is_equal = is_equal and torch.equal(got, wanted)
                gap = max(gap, float((got - wanted).abs().max()))
    text = f"{name}: {len(sites)} cells, {engine.plan.pack} a forward, {engine.plan.lanes} side by side"
    text += f": {ours:.1f} s, {ours / len(sites) * 1e3:.0f} ms a cell"
    for way, spent in seconds.items():
        text += f"; {way} {spent / len(sites) * 1e3:.0f} ms ({spent / ours:.2f}x)"
    print(text + "; " + ("equal" if is_equal else f"largest difference {gap:.1e}"), flush=True)
    return seconds["theirs"] / ours, is_equal


def _growth(bench: Bench, *, layer: int) -> None:
    """Time of a cell and memory as cells and prompts grow: flat, since cost is linear.

    The times of all come first: counting memory makes the allocator slow.
    """
    sizes = ((8, 8), (32, 8), (8, 16), (8, 32))
    made: list[Callable[[], Engine]] = []
    for n_cells, n_prompts in sizes:
        more = Bench(lens=bench.lens, tokens=_tokens(bench.lens, n_prompts), late=bench.late)
        sites = [Site(layer=layer, unit=unit, is_head=False) for unit in range(n_cells)]
        made.append(partial(more.engine, sites))
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(3):  # in turns
        for (n_cells, n_prompts), make, found in zip(sizes, made, times, strict=True):
            engine = make()
            engine.baseline_metrics()
            found.append(
                bench.timed(lambda engine=engine: _all(engine))[1] / (n_cells * n_prompts) * 1e3
            )
    for (n_cells, n_prompts), make, found in zip(sizes, made, times, strict=True):
        memory = _peak(bench, lambda make=make: _all(make()))
        text = f"{n_cells} cells on {n_prompts} prompts: {statistics.median(found):.1f} ms a cell and prompt"
        print(
            f"{text} ({min(found):.1f} to {max(found):.1f}), peak {memory / 1e6:.0f} MB", flush=True
        )


def _tokens(lens: LensModel, n: int) -> TokenBatch:
    if lens.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return from_tensor(torch.randint(0, lens.d_vocab, (n, LENGTH), generator=generator))
    return from_text(bundled_text(), lens.tokenizer, sequences=n, length=LENGTH, bos="without")


def _llama(options: argparse.Namespace) -> LensModel:
    """1.1B parameters, as in Llama 3.2 1B with a smaller vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    dtype = getattr(torch, options.dtype or "float32")
    return wrap(model.to(device=options.device or "cpu", dtype=dtype))


if __name__ == "__main__":
    main()
