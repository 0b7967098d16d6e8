"""Large inputs on tiny models: time and peak memory of each, in a process of its own, on one thread.

    python benchmarks/load.py             # every case
    python benchmarks/load.py cells       # one of them

Each case prints a row of the table in benchmarks/README.md: seconds on the clock and of the CPU, and the most memory
that its process held, of which ``begins`` was there before the case began (Python, torch, the model).
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "MPLBACKEND": "agg",
}

import pandas as pd
import torch

from sink_lens import TokenBatch, TraceConfig, read_run, trace
from sink_lens.models.lens import LensModel
from sink_lens.models.load import wrap
from sink_lens.report import render
from sink_lens.sweeps import EditGrid, Grid, sweep
from tests.tiny_families import tiny


def main() -> None:
    """Run the cases and print a row of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="all if none is named")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        _measured(options.cases[0])
        return
    print(
        "| case | what | seconds | of the CPU | most MB | begins at |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    for name in options.cases or CASES:
        subprocess.run([sys.executable, __file__, name, "--here"], check=True)


def _measured(name: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        timed, what = CASES[name]()
        begins, begun, cpu = _peak(), time.perf_counter(), time.process_time()
        timed()
        seconds, of_cpu = time.perf_counter() - begun, time.process_time() - cpu
        print(
            f"| {name} | {what} | {seconds:,.1f} | {of_cpu:,.1f} | {_peak():,.0f} | {begins:,.0f} |",
            flush=True,
        )


def _peak() -> float:
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e6
    )


def _random(lens: LensModel, sequences: int, length: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, lens.d_vocab, (sequences, length), generator=generator)
    return TokenBatch.from_tensor(ids, tokenizer=lens.tokenizer)


def _traced(lens: LensModel, tokens: TokenBatch, out: str) -> object:
    config = TraceConfig(model=lens.name, random_init=False, interventions=False, device="cpu")
    return trace(lens, config=config, tokens=tokens, out=out, progress=False, report=False)


Prepared = tuple[Callable[[], object], str]
"""What is timed, and what it is."""


def tokens() -> Prepared:
    """One sequence of 100,000 tokens."""
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 16,
    }
    lens = wrap(tiny("llama", **sizes, max_position_embeddings=131_072))
    batch = _random(lens, 1, 100_000)
    return lambda: _traced(
        lens, batch, "run"
    ), "trace, measuring only: 1 sequence of 100,000 tokens, 1 layer, 1 head"


def sequences() -> Prepared:
    """10,000 sequences streamed."""
    lens = wrap(tiny("llama"))
    batch = _random(lens, 10_000, 16)
    return lambda: _traced(
        lens, batch, "run"
    ), "trace, measuring only: 10,000 sequences of 16 tokens"


def cells() -> Prepared:
    """10,000 cells swept."""
    lens = wrap(tiny("llama", intermediate_size=3_400))
    batch = _random(lens, 1, 8)
    grid = Grid.of(EditGrid(kind="zero", site="neurons", layers="each", units="each"), controls=0)
    return lambda: sweep(
        lens, grid, tokens=batch, out="run", progress=False
    ), "sweep of 10,200 neurons, 1 sequence"


def runs() -> Prepared:
    """50 run folders in one table."""
    lens = wrap(tiny("llama"))
    for number in range(50):
        _traced(lens, _random(lens, 2, 16), f"run-{number}")

    def table() -> pd.DataFrame:
        found = {number: read_run(f"run-{number}").tables["links"] for number in range(50)}
        return pd.concat(found, names=["run"])

    return table, "the links of 50 traces, read and checked, in one table"


def heads() -> Prepared:
    """A report of 200 layers x 128 heads."""
    sizes = {
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 256,
        "intermediate_size": 32,
    }
    lens = wrap(tiny("llama", num_hidden_layers=200, **sizes))
    _traced(lens, _random(lens, 2, 16), "run")
    return lambda: render("run"), "the page of a trace of 200 layers x 128 heads"


def vocabulary() -> Prepared:
    """A vocabulary of 256,000."""
    lens = wrap(tiny("llama", vocab_size=256_000))
    batch = _random(lens, 32, 64)
    return lambda: _traced(
        lens, batch, "run"
    ), "trace, measuring only: 32 sequences of 64 tokens, 256,000 ids"


CASES: dict[str, Callable[[], Prepared]] = {
    one.__name__: one for one in (tokens, sequences, cells, runs, heads, vocabulary)
}

if __name__ == "__main__":
    main()
