"""Measuring a model that does not fit: whole in memory, and with most of its weights on disk under a memory limit.

    python benchmarks/offload.py             # a random Llama of 2.6 GB in float32, written to a temporary folder

Each run is a process of its own on one thread, and begins with none of the checkpoint in the system's cache. The limit
is a third of the weights, on what is resident beyond the imported libraries: a thread looks every 5 ms and ends the
process where it is passed. (Limits of allocation, as ``RLIMIT_DATA``, do not serve: a checkpoint's pages are mapped
privately and all count at once, whether or not they are read.) The resident run is tried under the same limit too, to
show that the limit holds.

The last line: ``equal`` (all numbers of both runs, to the last bit), ``resident`` (peak over the weights), ``pass``
and ``all`` (seconds over those of the resident run, of a pass over 1,024 tokens and of loading and all passes).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sink_lens.activations.record import Reading, stream
from sink_lens.models.load import load

WAYS = ("resident", "offloaded", "resident under the limit")
OVER = 99
"""Exit status of a process that passed the limit."""


def main() -> None:
    """Write the model, run each way and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1408)
    parser.add_argument("--way", choices=WAYS, help="in this process")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.way is not None:
        _measured(options.way, folder=options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), layers=options.layers, width=options.width)
        found: dict[str, dict[str, Any]] = {}
        print(
            "| way | weights GB | limit GB | peak resident GB | load s | 64 tokens s | 1,024 tokens s |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for way in WAYS:
            _forget(Path(folder))
            run = [sys.executable, __file__, "--way", way, "--folder", folder]
            done = subprocess.run(run, check=False, stdout=subprocess.PIPE, text=True)
            if done.returncode == OVER:
                print(f"| {way} | | | over the limit: ended | | | |", flush=True)
                continue
            done.check_returncode()
            found[way] = json.loads(done.stdout)
            columns = ("weights", "limit", "resident", "load", "short", "pass")
            cells = [
                "none" if found[way][name] is None else f"{found[way][name]:.2f}"
                for name in columns
            ]
            print(f"| {way} | {' | '.join(cells)} |", flush=True)
        whole, part = found["resident"], found["offloaded"]
        every = [sum(one[name] for name in ("load", "short", "pass")) for one in (part, whole)]
        print(
            f"equal={str(whole['sums'] == part['sums']).lower()} resident={part['resident'] / part['weights']:.3f} "
            f"pass={part['pass'] / whole['pass']:.2f} all={every[0] / every[1]:.2f}"
        )


def _forget(folder: Path) -> None:
    """Drop the checkpoint from the system's cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write(folder: Path, *, layers: int, width: int) -> None:
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.05, 0.05)
    model.save_pretrained(folder, max_shard_size="500MB")


def _status(name: str) -> float:
    """A line of Linux's account of this process, in GB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024 / 1e9


def _ended_over(most: float) -> None:
    """End this process once more than so many GB are resident."""

    def look() -> None:
        while _status("VmRSS") <= most:
            time.sleep(0.005)
        os._exit(OVER)

    threading.Thread(target=look, daemon=True).start()


def _measured(way: str, *, folder: Path) -> None:
    torch.set_num_threads(1)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    begins, limit = _status("VmHWM"), None
    given: dict[str, Any] = {}
    if way != "resident":
        limit = weights / 3 / 1e9
        _ended_over(begins + limit)
    if way == "offloaded":
        given = {"device_map": "auto", "max_memory": f"{weights // 8_000_000}MB"}
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lens = load(folder, **given)
    found: dict[str, Any] = {
        "weights": weights / 1e9,
        "limit": limit,
        "load": time.perf_counter() - started,
    }
    found["sums"] = []
    for name, tokens in (("short", 64), ("pass", 1024)):
        ids = torch.randint(0, 8192, (1, tokens), generator=torch.Generator().manual_seed(0))
        sites = ("mass", "resid_post")
        readings = [
            Reading(name=site, sites=(site,), function=lambda view, site=site: view[site])
            for site in sites
        ]
        started = time.perf_counter()
        values = stream(lens, ids, readings, keys=(0,))
        found[name] = time.perf_counter() - started
        found["sums"] += [
            values[site, layer].double().sum().item()
            for site in sites
            for layer in range(lens.n_layers)
        ]
    found["resident"] = _status("VmHWM") - begins
    print(json.dumps(found))


if __name__ == "__main__":
    main()
