"""What a sweep costs beside one forward of the bridge per cell, and beside a hand-written Hugging Face hook loop.

    python benchmarks/sweep.py --quick      # a sample of the cells, under a minute on two cores
    python benchmarks/sweep.py              # more cells, every mode, growth with cells and prompts
    python benchmarks/sweep.py --whole      # all 1,536 neurons of layer 11 and all 270 heads: an hour on two cores
    python benchmarks/sweep.py --device cuda --dtype bfloat16            # on a GPU
    python benchmarks/sweep.py --llama-1b --device cuda --quick          # a randomly initialised Llama of 1B parameters

Each neuron of a layer (11 of the default model), and each head, is ablated on 64 tokens, and the mean attention to
position 0 in the layers behind it is read. *Theirs* is what ``transformer_lens.patching.generic_activation_patch`` does
for one cell: one forward of the bridge with a hook, and here the hooks that read the same metric; it ends with the
logits, as theirs does. *Theirs without logits* is the same stopped before the unembedding. *Hugging Face* is a loop with
forward hooks on the eager model. Ours and theirs take turns in one process; medians are compared. The floor is the
arithmetic that cannot be skipped: the matrix products of the layers behind the edit, timed alone.

Memory is the peak above the loaded model, of ours over theirs. The last line is
``neurons_speedup heads_speedup one_prompt_speedup fast_speedup memory equal``: speedups are theirs over ours, ``equal``
says whether in exact mode ours is ``torch.equal`` to theirs in every cell that was run.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor

from sink_lens import EditGrid, Grid, load, wrap
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_tensor, from_text
from sink_lens.interventions.metrics import Metric, sink_mass
from sink_lens.measures.attention import sink_mass as mass_of
from sink_lens.models.lens import LensModel
from sink_lens.sweep.engine import Engine
from sink_lens.sweep.grid import Cell
from sink_lens.sweep.needs import Needs
from sink_lens.sweep.plan import Mode, plan_of

sys.path.insert(0, str(Path(__file__).parent))
from measure import peak

LENGTH = 64
NAMES = ("neurons_speedup", "heads_speedup", "one_prompt_speedup", "fast_speedup", "memory")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A neuron or a head to ablate."""

    layer: int
    unit: int
    is_head: bool

    @property
    def grid(self) -> EditGrid:
        """It, as a grid of one cell."""
        where = {"site": "z", "heads": self.unit} if self.is_head else {"site": "neurons", "units": self.unit}
        return EditGrid(layers=self.layer, **where)

    @property
    def hook(self) -> str:
        """The bridge's hook."""
        return f"blocks.{self.layer}.attn.hook_z" if self.is_head else f"blocks.{self.layer}.mlp.hook_post"

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
        with torch.no_grad():
            try:
                self.lens.bridge.run_with_hooks(
                    self.tokens.tokens.to(self.lens.device), fwd_hooks=hooks, use_cache=False
                )
            except _StoppedError:
                pass
        return self._mean(found)

    def hugging_face(self, site: Site) -> Tensor:
        """One forward of the eager Hugging Face body with hooks."""
        found: dict[int, Tensor] = {}
        valid = self.tokens.valid.to(self.lens.device)
        layer = self.lens.layer(site.layer)
        place = "self_attn.o_proj" if site.is_head else "mlp.down_proj"
        handles = [
            layer.get_submodule(place).register_forward_pre_hook(
                lambda module, args: (site.ablated(args[0], n_heads=self.lens.n_heads),)
            )
        ]
        for index in self.late:

            def read(module: object, args: object, output: Any, index: int = index) -> None:
                found[index] = mass_of(output[1][..., 0].float(), valid=valid, key=0)

            handles.append(self.lens.layer(index).get_submodule("self_attn").register_forward_hook(read))
        before = str(self.lens.plain.config._attn_implementation)
        self.lens.plain.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                self.lens.plain.base_model(input_ids=self.tokens.tokens.to(self.lens.device), use_cache=False)
        finally:
            self.lens.plain.set_attn_implementation(before)
            for handle in handles:
                handle.remove()
        return self._mean(found)

    def engine(self, sites: Sequence[Site], *, mode: Mode) -> Engine:
        """Ours for some cells."""
        cells: list[Cell] = []
        for site in sites:
            found, _ = Grid.of(site.grid, controls=0).cells(self.lens, n_positions=LENGTH)
            cells += found
        needs = Needs.of([self.metric], lens=self.lens)
        plan = plan_of(self.lens, self.tokens, needs, mode=mode, n_cells=len(cells))
        return Engine(self.lens, self.tokens, cells, [self.metric], plan=plan)

    def products(self, site: Site) -> float:
        """Seconds of the matrix products that cannot be skipped: of the layers behind the edit, timed alone."""
        rows = self.tokens.n_sequences * LENGTH
        device, dtype = self.lens.device, self.lens.dtype
        linears = [
            module
            for index in range(site.layer + 1, max(self.late) + 1)
            for name, module in self.lens.layer(index).named_modules()
            if isinstance(module, torch.nn.Linear) and (index < max(self.late) or name.endswith(("q_proj", "k_proj")))
        ]
        inputs = {
            width: torch.randn(rows, width, device=device, dtype=dtype) for width in {m.in_features for m in linears}
        }
        with torch.no_grad():
            before = self._now()
            for module in linears:
                module(inputs[module.in_features])
            return self._now() - before

    def timed(self, run: Callable[[], object]) -> float:
        """Seconds."""
        before = self._now()
        run()
        return self._now() - before

    def _now(self) -> float:
        if self.lens.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _mean(self, found: dict[int, Tensor]) -> Tensor:
        return torch.stack([found[layer].cpu() for layer in self.late]).nanmean(dim=(0, 2))


class _StoppedError(Exception):
    """Ends a forward of the bridge before the unembedding."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells of each kind")
    parser.add_argument("--whole", action="store_true", help="every neuron of the layer and every head")
    parser.add_argument("--device", default=None, help="as in sink_lens.load")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16")
    parser.add_argument("--llama-1b", action="store_true", help="a randomly initialised Llama of 1B parameters")
    options = parser.parse_args()
    lens = (
        _llama(options)
        if options.llama_1b
        else load("SmolLM2-135M-Instruct", device=options.device, dtype=options.dtype)
    )
    layer = 11 if not options.llama_1b else lens.n_layers // 3
    late = tuple(range(layer + 1, lens.n_layers))
    print(f"{lens!r}; {torch.get_num_threads()} threads; reads layers {late[0]}-{late[-1]}", flush=True)
    eight = Bench(lens=lens, tokens=_tokens(lens, 8), late=late)
    one = Bench(lens=lens, tokens=_tokens(lens, 1), late=late)
    width = lens.d_mlp or 0
    if options.whole:
        neurons, heads = range(width), [(at, head) for at in range(lens.n_layers) for head in range(lens.n_heads)]
    else:
        # Layers spread evenly, so that their mean depth is that of all heads.
        count, depth = (4, 5) if options.quick else (16, 10)
        neurons = range(0, width, width // count)[:count]
        step = (lens.n_layers - 1) / (depth - 1)
        heads = [(round(index * step), index % lens.n_heads) for index in range(depth)]
    cases = {
        "neurons, 8 prompts, exact": (
            eight,
            [Site(layer=layer, unit=unit, is_head=False) for unit in neurons],
            "exact",
        ),
        "heads, 8 prompts, exact": (eight, [Site(layer=at, unit=head, is_head=True) for at, head in heads], "exact"),
        "neurons, 1 prompt, exact": (
            one,
            [Site(layer=layer, unit=unit, is_head=False) for unit in range(0, width, max(1, width // 32))[:32]],
            "exact",
        ),
        "neurons, 8 prompts, fast": (eight, [Site(layer=layer, unit=unit, is_head=False) for unit in neurons], "fast"),
    }
    found = [_case(name, *case, quick=options.quick) for name, case in cases.items()]
    equal = all(result[1] for result in found[:3])
    site = Site(layer=layer, unit=0, is_head=False)
    memory = max(
        peak(lambda: bench.engine([site] * 1, mode="exact").run(bench.engine([site], mode="exact").blocks[0]))
        / peak(lambda: bench.bridge(site))
        for bench in (eight,)
    )
    if not options.quick:
        _growth(eight, layer=layer)
    line = " ".join(f"{name}={value:.2f}" for name, value in zip(NAMES, [*(r[0] for r in found), memory], strict=True))
    print(f"{line} equal={str(equal).lower()}")


def _case(name: str, bench: Bench, sites: list[Site], mode: Mode, *, quick: bool) -> tuple[float, bool]:
    """The speedup of some cells, and whether every number is equal."""
    engine = bench.engine(sites, mode=mode)
    engine.baseline()  # the unedited run, once for all cells
    order = [cell for block in engine.blocks for cell in block.cells]
    ours: list[float] = []
    theirs: list[float] = []
    stripped: list[float] = []
    plain: list[float] = []
    floors: list[float] = []
    is_equal, gap = True, 0.0
    bench.bridge(sites[0])
    for block in engine.blocks:
        for start in range(0, len(block.cells), engine.plan.pack):
            pack = replace(block, cells=block.cells[start : start + engine.plan.pack])
            before = bench._now()
            frame = engine.run(pack)
            ours.append(bench._now() - before)
            chosen = pack.cells if bench.tokens.n_sequences > 1 else pack.cells[:2]
            for cell in chosen:
                before = bench._now()
                wanted = bench.bridge(sites[cell])
                theirs.append((bench._now() - before) * len(pack.cells) / len(chosen))
                got = torch.tensor(frame.loc[frame["cell"] == cell, "value"].tolist(), dtype=torch.float32)
                is_equal = is_equal and torch.equal(got, wanted.float())
                gap = max(gap, float((got - wanted.float()).abs().max()))
                floors.append(bench.products(sites[cell]) * len(pack.cells) / len(chosen))
                if not quick:
                    stripped.append(
                        bench.timed(lambda site=sites[cell]: bench.bridge(site, logits=False))
                        * len(pack.cells)
                        / len(chosen)
                    )
                    plain.append(
                        bench.timed(lambda site=sites[cell]: bench.hugging_face(site)) * len(pack.cells) / len(chosen)
                    )
    assert sorted(order) == list(range(len(sites)))
    total = sum(ours)
    text = f"{name}: {len(sites)} cells, {engine.plan.pack} a forward; ours {total / len(sites) * 1e3:.0f} ms a cell, "
    text += f"theirs {sum(theirs) / len(sites) * 1e3:.0f} ms: {sum(theirs) / total:.2f}x"
    if stripped:
        text += f" (without logits {sum(stripped) / total:.2f}x, Hugging Face hooks {sum(plain) / total:.2f}x)"
    text += f"; the products alone are {sum(floors) / total:.0%} of ours; "
    text += "equal" if is_equal else f"largest difference {gap:.1e}"
    print(text, flush=True)
    return sum(theirs) / total, is_equal


def _growth(bench: Bench, *, layer: int) -> None:
    """Time a cell and memory as cells and prompts grow: flat, if cost is linear."""
    for n_cells in (8, 32):
        sites = [Site(layer=layer, unit=unit, is_head=False) for unit in range(n_cells)]
        seconds, memory = _cost(bench, sites)
        print(
            f"{n_cells} cells on 8 prompts: {seconds / n_cells * 1e3:.0f} ms a cell, peak {memory / 1e6:.0f} MB",
            flush=True,
        )
    for n_prompts in (8, 16, 32):
        more = replace_tokens(bench, _tokens(bench.lens, n_prompts))
        sites = [Site(layer=layer, unit=unit, is_head=False) for unit in range(8)]
        seconds, memory = _cost(more, sites)
        each = seconds / (8 * n_prompts) * 1e3
        print(
            f"8 cells on {n_prompts} prompts: {each:.0f} ms a cell and prompt, peak {memory / 1e6:.0f} MB", flush=True
        )


def _cost(bench: Bench, sites: list[Site]) -> tuple[float, float]:
    def run() -> None:
        engine = bench.engine(sites, mode="exact")
        for block in engine.blocks:
            engine.run(block)

    run()
    return bench.timed(run), peak(run)


def replace_tokens(bench: Bench, tokens: TokenBatch) -> Bench:
    """The same on other prompts."""
    return Bench(lens=bench.lens, tokens=tokens, late=bench.late)


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
    gc.freeze()
    main()
    statistics.median([0])
