"""What measuring costs: time and peak memory over one plain SDPA forward of the same tokens.

    python benchmarks/measure.py            # 64 (batch 16), 1,024 and 4,096 tokens, 7 alternating pairs each
    python benchmarks/measure.py --quick    # 64 and 1,024 tokens, under a minute on two cores

Two things are measured on the default model: `sink`, the sink score of every head by streaming, and `all`,
everything that `trace` streams. Each is run alternately with its plain counterpart in the same process, and the
median of the pairs' ratios is printed. The counterparts: for `sink` the model's body, without the unembedding, since
`sink` needs no logits; for `all`, which reads the loss, the whole forward pass with logits. Memory is the peak above
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
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from sink_lens import load
from sink_lens.capture.record import Reading, stream
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.panel import measure, scout
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_text
from sink_lens.measures.attention import sink_score
from sink_lens.models.lens import LensModel

SIZES = {64: 16, 1024: 1, 4096: 1}
"""Length -> sequences."""
PAIRS = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 and 1,024 tokens only, as many pairs as fit")
    parser.add_argument("--model", default=None, help="what sink_lens.load takes; the default model if not given")
    options = parser.parse_args()
    lens = load() if options.model is None else load(options.model)
    sizes = {length: n for length, n in SIZES.items() if length <= 1024 or not options.quick}
    budget = 20.0 / len(sizes) / 2 if options.quick else None
    print(f"{lens!r}; {torch.get_num_threads()} threads")
    worst: dict[str, float] = {}
    for length, sequences in sizes.items():
        tokens = from_text(bundled_text(), lens.tokenizer, sequences=sequences, length=length, bos="without")
        found = ratios(lens, tokens, budget=budget)
        line = " ".join(f"{name}={value:.2f}" for name, value in found.items())
        print(f"{length} tokens, batch {sequences}: {line}", flush=True)
        if length <= 1024:
            worst = {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
    print(" ".join(f"{name}={worst[name]:.2f}" for name in ("sink_time", "sink_memory", "all_time", "all_memory")))


def ratios(lens: LensModel, tokens: TokenBatch, *, budget: float | None) -> dict[str, float]:
    """Time and memory ratios of both measurements at one size."""
    config = TraceConfig(model=lens.name, batch_size=tokens.n_sequences)
    aim = scout(lens, tokens, config=config)
    score = Reading(
        name="sink_score", sites=("mass",), function=lambda v: sink_score(v["mass"][..., 0], valid=v.valid, key=0)
    )

    def plain_body() -> None:
        with torch.no_grad():
            lens.plain.base_model(input_ids=tokens.tokens, use_cache=False)

    def plain() -> None:
        with torch.no_grad():
            lens.plain(input_ids=tokens.tokens, use_cache=False)

    def sink() -> None:
        stream(lens, tokens, [score], batch_size=tokens.n_sequences)

    def everything() -> None:
        measure(lens, tokens, finding=aim, config=config)

    base = peak(plain)
    return {
        "sink_time": time_ratio(sink, plain_body, budget=budget),
        "sink_memory": peak(sink) / base,
        "all_time": time_ratio(everything, plain, budget=budget),
        "all_memory": peak(everything) / base,
    }


def time_ratio(ours: Callable[[], None], theirs: Callable[[], None], *, budget: float | None) -> float:
    """Median ratio of wall times over alternating pairs, after one warm-up of each."""
    ours(), theirs()
    found: list[float] = []
    started = time.perf_counter()
    while len(found) < PAIRS and (budget is None or len(found) < 3 or time.perf_counter() - started < budget):
        pair = []
        for run in (ours, theirs) if len(found) % 2 == 0 else (theirs, ours):
            before = time.perf_counter()
            run()
            pair.append((run, time.perf_counter() - before))
        seconds = dict(pair)
        found.append(seconds[ours] / seconds[theirs])
    return statistics.median(found)


def peak(run: Callable[[], None]) -> float:
    """Peak resident memory in bytes above what is resident before, from Linux's high-water mark; nan elsewhere.

    The allocator is told to return every large block at once, so that memory kept from an earlier run hides nothing.
    """
    status = Path("/proc/self/status")
    if sys.platform != "linux" or not status.exists():
        return float("nan")
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: blocks from here on are mapped, and unmapped when freed
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
