"""What measuring costs: time and peak memory over one plain SDPA forward of the same tokens.

    python benchmarks/measure.py            # 64 (batch 16), 1,024 and 4,096 tokens, 7 alternating rounds each
    python benchmarks/measure.py --quick    # 64 and 1,024 tokens, under a minute on two cores

Two things are measured on the default model: `sink`, the sink score of every head by streaming, and `all`,
everything that `trace` streams. In each round both and a plain SDPA forward pass are run in the same process, and the
median of the rounds' ratios is printed: of `sink` to the pass until its body ends, without the unembedding, since
`sink` needs no logits; of `all`, which reads the loss, to the whole pass with logits. Memory is the peak above
the loaded model, from the kernel's high-water mark, over the whole forward pass with logits. The last line is the
worst of the lengths 64 and 1,024: `sink_time=<ratio> sink_memory=<ratio> all_time=<ratio> all_memory=<ratio>`.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from sink_lens import load
from sink_lens.activations.record import Reading, stream
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.links import LINKS
from sink_lens.chain.locate import Location
from sink_lens.chain.measure import measure, scout
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_text
from sink_lens.measures.attention import sink_score
from sink_lens.models.lens import LensModel

OWN = [link.readings for link in LINKS]
SIZES = {64: 16, 1024: 1, 4096: 1}
"""Length -> sequences."""
ROUNDS = 7
NAMES = ("sink_time", "sink_memory", "all_time", "all_memory")


def processor() -> str:
    """The processor's name, with AVX-512 where it has it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    return name + ", AVX-512" * any("avx512f" in line for line in lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="64 and 1,024 tokens only, two rounds each"
    )
    parser.add_argument(
        "--model", default=None, help="what sink_lens.load takes; the default model if not given"
    )
    options = parser.parse_args()
    lens = load() if options.model is None else load(options.model)
    print(f"{lens!r}; {torch.get_num_threads()} threads of {processor()}", flush=True)
    warm_up = case(lens, length=64, sequences=8)
    warm_up.everything()
    location = warm_up.location  # one for all sizes: it only says where to look
    sizes = {length: n for length, n in SIZES.items() if length <= 1024 or not options.quick}
    cases = [
        case(lens, length=length, sequences=n, location=location) for length, n in sizes.items()
    ]
    # All times first: counting memory makes the allocator slow.
    found = [times(one, rounds=2 if options.quick else ROUNDS) for one in cases]
    for one, ratios in zip(cases, found, strict=True):
        ratios |= memory(one)
        line = " ".join(f"{name}={ratios[name]:.2f}" for name in NAMES)
        print(
            f"{one.tokens.n_positions} tokens, batch {one.tokens.n_sequences}: {line}", flush=True
        )
    short = [
        ratios for one, ratios in zip(cases, found, strict=True) if one.tokens.n_positions <= 1024
    ]
    print(" ".join(f"{name}={max(ratios[name] for ratios in short):.2f}" for name in NAMES))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run at one size."""

    lens: LensModel
    tokens: TokenBatch
    location: Location
    config: TraceConfig

    def sink(self) -> float:
        """Stream the sink score of every head; seconds."""
        score = Reading(
            name="sink_score",
            sites=("mass",),
            function=lambda v: sink_score(v["mass"][..., 0], valid=v.valid, key=0),
        )
        before = time.perf_counter()
        stream(self.lens, self.tokens, [score], batch_size=self.tokens.n_sequences)
        return time.perf_counter() - before

    def everything(self) -> float:
        """Everything that ``trace`` streams; seconds."""
        before = time.perf_counter()
        measure(
            self.lens,
            self.tokens,
            plan=self.location.measuring_plan(self.lens.attention_layers),
            own=OWN,
            config=self.config,
        )
        return time.perf_counter() - before

    def plain(self) -> tuple[float, float]:
        """The plain forward pass with logits: seconds until its body ended, and in all."""
        ends: list[float] = []
        body = self.lens.plain.base_model
        handle = body.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
        before = time.perf_counter()
        with torch.no_grad():
            self.lens.plain(input_ids=self.tokens.tokens, use_cache=False)
        handle.remove()
        return ends[0] - before, time.perf_counter() - before


def case(lens: LensModel, *, length: int, sequences: int, location: Location | None = None) -> Case:
    """A size on bundled prose, and what the trace looks for in it (looked up if not given)."""
    tokens = from_text(
        bundled_text(), lens.tokenizer, sequences=sequences, length=length, bos="without"
    )
    config = TraceConfig(model=lens.name, batch_size=sequences)
    aim = scout(lens, tokens, config=config) if location is None else location
    return Case(lens=lens, tokens=tokens, location=aim, config=config)


def times(one: Case, *, rounds: int) -> dict[str, float]:
    """Median ratios over rounds in which ours and theirs take turns, in changing order."""
    found: dict[str, list[float]] = {"sink_time": [], "all_time": []}
    for index in range(rounds):
        runs = {"sink": one.sink, "plain": one.plain, "all": one.everything}
        names = list(runs) if index % 2 == 0 else list(runs)[::-1]
        seconds = {name: runs[name]() for name in names}
        body, whole = seconds["plain"]
        found["sink_time"].append(seconds["sink"] / body)
        found["all_time"].append(seconds["all"] / whole)
    return {name: statistics.median(values) for name, values in found.items()}


def memory(one: Case) -> dict[str, float]:
    """Peaks over that of the whole plain forward pass."""
    base = peak(one.plain)
    return {"sink_memory": peak(one.sink) / base, "all_memory": peak(one.everything) / base}


def peak(run: Callable[[], object]) -> float:
    """Peak resident memory in bytes above what is resident before, from Linux's high-water mark; nan elsewhere.

    The allocator is told to return every large block at once, so that memory kept from an earlier run hides nothing.
    """
    status = Path("/proc/self/status")
    if sys.platform != "linux" or not status.exists():
        return float("nan")
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(
        -3, 65536
    )  # M_MMAP_THRESHOLD: blocks from here on are mapped, and unmapped when freed
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _field(status, "VmRSS")
    run()
    return float(_field(status, "VmHWM") - before)


def _field(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
