"""Measuring a model that does not fit: whole in memory, and with most of its weights on disk under a memory limit.

    python benchmarks/offload.py             # a random Llama of 2.4 GB in float32, written to a temporary folder

Each way is a process of its own on one thread. The limit (``RLIMIT_DATA``) holds for what the process allocates
itself; pages of the checkpoint that the system keeps in its cache are not counted by it, and are in the peak of what is
resident.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sink_lens.activations.record import Reading, stream
from sink_lens.models.load import load


def main() -> None:
    """Write the model, run both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1408)
    parser.add_argument("--way", choices=("resident", "offloaded"), help="in this process")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.way is not None:
        _measured(options.way, folder=options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), layers=options.layers, width=options.width)
        found = {}
        for way in ("resident", "offloaded"):
            run = [sys.executable, __file__, "--way", way, "--folder", folder]
            found[way] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        print("| way | weights GB | limit GB | allocated GB | resident GB | load s | pass s |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for way, one in found.items():
            cells = [f"{one[name]:.2f}" for name in ("weights", "limit", "allocated", "resident", "load", "pass")]
            print(f"| {way} | {' | '.join(cells)} |")
        print(f"equal={found['resident']['sums'] == found['offloaded']['sums']}")


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
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e9


def _measured(way: str, *, folder: Path) -> None:
    torch.set_num_threads(1)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    begins, data = _status("VmHWM"), _status("VmData")
    limit = 0.0
    given: dict[str, Any] = {}
    if way == "offloaded":
        limit = weights / 3 / 1e9
        most = int((data + limit) * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        given = {"device_map": "auto", "max_memory": f"{weights // 8_000_000}MB"}
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lens = load(folder, **given)
    loaded = time.perf_counter()
    ids = torch.randint(0, 8192, (1, 64), generator=torch.Generator().manual_seed(0))
    names = ("mass", "resid_post")
    readings = [Reading(name=name, sites=(name,), function=lambda view, name=name: view[name]) for name in names]
    values = stream(lens, ids, readings)
    ended = time.perf_counter()
    sums = [values[name, layer].double().sum().item() for name in names for layer in range(lens.n_layers)]
    found = {
        "weights": weights / 1e9,
        "limit": limit,
        "allocated": _status("VmData") - data,
        "resident": _status("VmHWM") - begins,
        "load": loaded - started,
        "pass": ended - loaded,
        "sums": sums,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
