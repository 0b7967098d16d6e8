"""Measure on a CUDA GPU in minutes, without a network; each number is a line of JSON, written when it is there.

    python benchmarks/gpu.py --minutes 8 --out FOLDER --wheels WHEELS
    python benchmarks/gpu.py --dry-run --out FOLDER       # all of it on a CPU, with tiny models and few rounds
    python benchmarks/gpu.py --table FOLDER               # what was measured, as tables in Markdown

The parts, in this order; ``--parts bce`` runs some of them:

- a: the tests that need a GPU (``tests/test_cuda.py``), in processes beside each other;
- b: ``sink-lens trace --quick`` of the default model, the whole command;
- c: patching beside ``transformer_lens.patching``, sweeps beside a forward of the bridge a cell, EAP-IG beside its
  formula by hooks of the bridge, in turns, on the default model and a random Llama of 1.5B parameters, in float32 and
  bfloat16; how often the processor waits for the GPU, and how long the GPU works, in a run of ours;
- d: capture and streaming beside a plain pass;
- e: a training step with the head norm beside the same without, eager and compiled, in bfloat16, at 152M parameters.

Each part has a share of the minutes, and what a part leaves over goes to the later ones. A part that takes longer is
stopped between two measurements. One that fails is written down with its traceback, and the next one begins. What was
written is kept if the script is cut off: ``results.jsonl`` in the folder, beside the output of the tests and the trace.

A machine without a network gets what Python lacks there from a folder of wheels, which is unpacked into a temporary
folder; this repository itself need not be installed. ``pip download --no-deps --only-binary=:all: --python-version
3.12`` fetches them: transformer-lens, beartype, circuitsvis, gguf, platformdirs, pytest-socket, and whatever else of
``pip show transformer-lens`` is missing. ``--model`` is a folder or a GGUF file; without one the default model is
taken, and where that is not installed a random one of its sizes, as the first line says.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARES = {"a": 0.27, "b": 0.15, "c": 0.30, "d": 0.08, "e": 0.20}
"""Part -> its share of the time."""
RESULTS, TESTS, TRACE = "results.jsonl", "tests.txt", "trace.txt"
ANSWERS = (5, 6)
"""Token ids of the logit difference."""
EVERY = 4
"""One layer in so many is patched and swept, so that a run takes seconds."""
DEFAULT_SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
LARGE_SIZES = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
TINY_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}

Measurement = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and what measures and returns numbers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print the tables of what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts together")
    parser.add_argument("--out", type=Path, help="folder of what is measured")
    parser.add_argument("--parts", default="abcde", help="which parts, such as bce")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--model", help="the default model as a folder or a GGUF file")
    parser.add_argument(
        "--dry-run", action="store_true", help="all of it on a CPU, with tiny models"
    )
    parser.add_argument("--table", type=Path, help="print the tables of such a folder, and end")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(tables(rows_of(options.table / RESULTS)))
        return
    if options.out is None or not set(options.parts) <= SHARES.keys():
        parser.error(f"need --out FOLDER, and parts among {''.join(SHARES)}")
    if options.wheels is not None:
        unpack(options.wheels)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "MPLBACKEND": "agg",
    }
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # this repository need not be installed
    measure_parts(options)


def unpack(wheels: Path) -> None:
    """Install the wheels into a temporary folder, and begin again with it on the path.

    Raises:
        SystemExit: a folder without wheels.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"{wheels} holds no wheels; need the .whl files of what this Python lacks")
    folder = tempfile.mkdtemp(prefix="sink_lens_wheels_")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
    ]
    subprocess.run([*pip, "--target", folder, *files], check=True)
    os.environ["SINK_LENS_COMMAND"] = " ".join(sys.argv)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), folder, os.environ.get("PYTHONPATH")])
    )
    given = list(sys.argv)
    at = next(place for place, one in enumerate(given) if one.startswith("--wheels"))
    del given[at : at + (1 if "=" in given[at] else 2)]
    os.execv(sys.executable, [sys.executable, *given])


@dataclass(kw_only=True)
class Setting:
    """Device, models and output file of a run."""

    out: Path
    dry: bool
    device: Any
    model: str | None
    ends: float = 0.0
    """When the part has to end, of ``time.monotonic``."""
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that the part still has."""
        return max(0.0, self.ends - time.monotonic())

    @property
    def on_gpu(self) -> bool:
        """Check that this is no rehearsal on a CPU."""
        return self.device.type == "cuda"

    def write(self, row: dict[str, Any]) -> None:
        """Append a line to the results, and show it."""
        line = json.dumps({"at": round(time.monotonic() - self.began, 1), **row})
        with (self.out / RESULTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line[:400], flush=True)

    def wait(self) -> None:
        """Wait until the GPU has done everything."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """What a function returns, and its seconds."""
        self.wait()
        before = time.perf_counter()
        found = run()
        self.wait()
        return found, time.perf_counter() - before

    def peak(self, run: Callable[[], Any]) -> float | None:
        """Megabytes that a function takes at most on the GPU beyond what was there before."""
        import torch

        if not self.on_gpu:
            run()
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)

    def in_turns(
        self, runs: dict[str, Callable[[], Any]], *, rounds: int = 5, seconds: float = 10.0
    ) -> dict[str, list[float]]:
        """Seconds of each function, run in turns in changing order; all have run once before.

        There are two rounds at least, and no more than ``rounds`` or than there is time for.
        """
        found: dict[str, list[float]] = {name: [] for name in runs}
        end = time.monotonic() + min(seconds, self.left)
        for number in range(1 if self.dry else rounds):
            if number > 1 and time.monotonic() > end:
                break
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                found[name].append(self.timed(runs[name])[1])
        return found


def measure_parts(options: argparse.Namespace) -> None:
    """Make the parts one after another, each within its time."""
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = 60 * options.minutes
    with (options.out / "stuck.txt").open("w") as stuck:
        faulthandler.dump_traceback_later(
            1.25 * seconds, exit=True, file=stuck
        )  # a measurement that never ends
        try:
            _measure_parts(options, seconds=seconds)
        finally:
            faulthandler.cancel_dump_traceback_later()
    if (options.out / "stuck.txt").stat().st_size == 0:
        (options.out / "stuck.txt").unlink()


def _measure_parts(options: argparse.Namespace, *, seconds: float) -> None:
    began = time.monotonic()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here; need one, or --dry-run")
    setting = Setting(
        out=options.out,
        dry=options.dry_run,
        device=torch.device("cpu" if options.dry_run else "cuda"),
        model=options.model,
        began=began,
    )
    setting.write({"part": "machine", **machine(setting, minutes=options.minutes)})
    parts = {"a": tests, "b": quick_trace, "c": beside, "d": measuring, "e": training}
    chosen = [name for name in parts if name in options.parts]
    for number, name in enumerate(chosen):
        left = began + seconds - time.monotonic()
        share = SHARES[name] / sum(SHARES[one] for one in chosen[number:])
        setting.ends = time.monotonic() + left * share
        make_part(name, parts[name], setting)
    setting.write({"part": "end", "seconds": round(time.monotonic() - began, 1)})


def make_part(
    name: str, measurements: Callable[[Setting], Iterator[Measurement]], setting: Setting
) -> None:
    """Make a part's measurements until its time is up; write each, and whatever one of them raises."""
    import torch

    began, left_out = time.monotonic(), []
    try:
        for what, measurement in measurements(setting):
            if setting.left <= 0:
                left_out.append(what)
                continue
            before = time.monotonic()
            try:
                numbers = measurement()
            except Exception as error:  # noqa: BLE001  # the other measurements are made all the same
                numbers = {"error": repr(error)[:500], "traceback": traceback.format_exc()[-4000:]}
            took = round(time.monotonic() - before, 1)
            setting.write({"part": name, "what": what, **numbers, "took": took})
            del measurement
            gc.collect()
            if setting.on_gpu:
                torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001  # as above: what a part is made on may be missing
        setting.write(
            {"part": name, "error": repr(error)[:500], "traceback": traceback.format_exc()[-4000:]}
        )
    ended = {"part": name, "what": "ended", "seconds": round(time.monotonic() - began, 1)}
    setting.write(ended | ({"left_out": left_out} if left_out else {}))


def machine(setting: Setting, *, minutes: float) -> dict[str, Any]:
    """The card, its driver, versions and the command."""
    import torch

    from sink_lens.records.provenance import package_versions

    command = os.environ.get("SINK_LENS_COMMAND", " ".join(sys.argv))
    found: dict[str, Any] = {
        "command": f"python {command}",
        "minutes": minutes,
        "dry_run": setting.dry,
    }
    found |= {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": package_versions(),
    }
    found["matmul_precision"] = torch.get_float32_matmul_precision()
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        asked = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.mem",
            "--format=csv,noheader",
        ]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        found |= {"card": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
        found |= {"cuda": torch.version.cuda, "nvidia_smi": said}
    return found


# (a) the tests


def tests(setting: Setting) -> Iterator[Measurement]:
    """The tests that need a GPU."""
    yield "tests", partial(_tests, setting)


def _tests(setting: Setting) -> dict[str, Any]:
    """Run pytest; say how many passed, and the names of those that did not."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_cuda.py",
        "-v",
        "-rfE",
        "--tb=short",
        "--durations=10",
    ]
    command += [
        "-o",
        "filterwarnings=default",
        "-p",
        "no:cacheprovider",
    ]  # versions that no warning was read of
    environment = dict(os.environ)
    if setting.dry:
        environment["SINK_LENS_TEST_DEVICE"] = "cpu"
        command += ["-k", "test_number_formats or test_text_under_edits"]
    else:
        command += ["-n", str(max(1, min(8, (os.cpu_count() or 2) // 2)))]
    with (setting.out / TESTS).open("w", encoding="utf-8") as file:
        code = _ended(command, file=file, seconds=setting.left, environment=environment)
    text = (setting.out / TESTS).read_text(encoding="utf-8")
    verdicts: dict[str, str] = {}
    for line in text.splitlines():
        verdict = re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line)
        name = re.search(r"tests/\S+?::\S+", line)
        if verdict and name:
            verdicts[name[0]] = verdict[1]
    counts = {
        verdict: list(verdicts.values()).count(verdict)
        for verdict in sorted(set(verdicts.values()))
    }
    failed = sorted(name for name, verdict in verdicts.items() if verdict in ("FAILED", "ERROR"))
    summary = text.strip().splitlines()[-1].strip("= ") if text.strip() else ""
    return {"code": code, "counts": counts, "failed": failed, "summary": summary}


def _ended(
    command: list[str], *, file: Any, seconds: float, environment: dict[str, str] | None = None
) -> int | str:
    """Run a command in this repository; its exit code, or that it was ended for want of time."""
    environment = dict(os.environ) if environment is None else environment
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        return f"ended after {seconds:.0f} s, for want of time"


# (b) the quick trace


def quick_trace(setting: Setting) -> Iterator[Measurement]:
    """The command on the default model, in a process of its own; and the same in this one, with its waits counted."""
    with tempfile.TemporaryDirectory() as folder:
        yield "load", partial(_first_load, setting)
        yield "trace --quick", partial(_quick_trace, setting, folder=Path(folder) / "first")
        yield "trace --quick here", partial(_trace_here, setting, folder=Path(folder) / "second")


def _first_load(setting: Setting) -> dict[str, Any]:
    """Seconds of the first load, in which a GGUF file is converted."""
    _, seconds = setting.timed(lambda: small_lens(setting))
    return {"model": small_lens(setting).name, "seconds": round(seconds, 2)}


def _quick_trace(setting: Setting, *, folder: Path) -> dict[str, Any]:
    """Run the command; its seconds, and what it says."""
    model = named_model(setting)
    if model is None:
        made = folder.parent / "model"
        save_model(setting, made)
        model = str(made)
    arguments = [
        "trace",
        model,
        "--quick",
        "--device",
        str(setting.device.type),
        "--out",
        str(folder),
    ]
    if setting.dry:
        arguments += ["--tokens", "random", "--sequences", "2", "--length", "24"]
        arguments += ["--no-interventions", "--no-random-init"]
    command = [sys.executable, "-c", "from sink_lens.cli import main; main()", *arguments]
    with (setting.out / TRACE).open("a", encoding="utf-8") as file:
        code, seconds = setting.timed(lambda: _ended(command, file=file, seconds=setting.left))
    run = (
        json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if (folder / "run.json").exists()
        else {}
    )
    links = folder / "links.csv"
    found: dict[str, Any] = {"model": Path(model).name, "code": code, "seconds": round(seconds, 1)}
    found["status"] = run.get("status")
    if links.exists():
        import pandas as pd

        frame = pd.read_csv(links)
        found["verdicts"] = (
            frame["verdict"].value_counts().to_dict() if "verdict" in frame else None
        )
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _trace_here(setting: Setting, *, folder: Path) -> dict[str, Any]:
    """The same trace of a model that is loaded already: seconds, peak and waits."""
    from sink_lens import trace
    from sink_lens.chain.config import TraceConfig

    lens = small_lens(setting)
    tokens = "text" if lens.tokenizer is not None and not setting.dry else "random"
    few: dict[str, Any] = (
        {"sequences": 2, "length": 24, "interventions": False} if setting.dry else {}
    )
    config = TraceConfig(
        model=lens.name, quick=True, tokens=tokens, random_init=not setting.dry, **few
    )
    run = partial(trace, lens, config=config, out=folder, overwrite=True, progress=False)
    numbers, seconds = setting.timed(lambda: work(setting, run, count=1, profiled=False))
    return {"model": lens.name, "seconds": round(seconds, 1), **numbers}


# Models


def named_model(setting: Setting) -> str | None:
    """The default model: as it was given, or by its name where it is installed; None where it is not."""
    from sink_lens.errors import ModelError
    from sink_lens.models.bundled import bundled_gguf
    from sink_lens.schema import DEFAULT_MODEL

    if setting.model is not None or setting.dry:
        return setting.model
    try:
        bundled_gguf()
    except ModelError:
        return None
    return DEFAULT_MODEL


def random_llama(sizes: dict[str, Any], *, device: Any, dtype: str = "float32") -> Any:
    """A Llama with random weights, made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return model.to(getattr(torch, dtype))


def small_lens(setting: Setting, *, dtype: str = "float32") -> Any:
    """The default model, or a random one of its sizes."""
    from sink_lens import load, wrap

    name = named_model(setting)
    if name is not None:
        return load(name, device=str(setting.device.type), dtype=dtype)
    sizes = TINY_SIZES if setting.dry else DEFAULT_SIZES
    return wrap(
        random_llama(sizes, device=setting.device, dtype=dtype),
        name="random, the default model's sizes",
    )


def large_lens(setting: Setting, *, dtype: str) -> Any:
    """A random Llama of 1.5B parameters."""
    from sink_lens import wrap

    sizes = TINY_SIZES if setting.dry else LARGE_SIZES
    return wrap(random_llama(sizes, device=setting.device, dtype=dtype), name="random Llama 1.5B")


def save_model(setting: Setting, folder: Path) -> None:
    """Write a model that the command can trace, with a tokenizer of 300 ids."""
    from sink_lens.models.tiny import planted, tiny_tokenizer

    model = planted().model if setting.dry else random_llama(DEFAULT_SIZES, device="cpu")
    model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)


# (c) cells beside one forward each


def beside(setting: Setting) -> Iterator[Measurement]:
    """Patching, sweeps and edge scores beside what they replace, model by model."""
    kinds = [
        (small_lens, "float32"),
        (large_lens, "bfloat16"),
        (small_lens, "bfloat16"),
        (large_lens, "float32"),
    ]
    for make, dtype in kinds[: 2 if setting.dry else None]:
        lens = make(setting, dtype=dtype)
        about = {"model": lens.name, "dtype": dtype}
        yield "eap-ig", partial(_edges, setting, lens, about)
        for site in ("z", "resid_pre"):
            yield f"patch {site}", partial(_patch, setting, lens, about, site=site)
        for kind in ("heads", "neurons"):
            yield f"sweep {kind}", partial(_sweep, setting, lens, about, kind=kind)
        del lens


def pairs(lens: Any, *, count: int, length: int) -> tuple[Any, Any]:
    """Random prompts that differ in every position."""
    import torch

    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, lens.d_vocab, (count, length), generator=generator)
    return clean, (
        clean + torch.randint(1, lens.d_vocab, clean.shape, generator=generator)
    ) % lens.d_vocab


def _patch(setting: Setting, lens: Any, about: dict[str, Any], *, site: str) -> dict[str, Any]:
    """Every cell of a site by ``patch``, beside some of them by ``transformer_lens.patching``."""
    import pandas as pd
    import torch
    from transformer_lens import patching as theirs

    from sink_lens.edits.metrics import logit_difference
    from sink_lens.patching import patch

    clean, corrupted = pairs(lens, count=2 if setting.dry else 4, length=8 if setting.dry else 64)
    axes = ("layer", "position") if site == "resid_pre" else ("layer", "head")
    layers = tuple(range(0, lens.n_layers, EVERY))
    given = {
        "site": site,
        "by": axes,
        "layers": layers,
        "metric": logit_difference(*ANSWERS),
        "controls": 0,
    }
    run = partial(patch, lens, clean, corrupted, **given, progress=False)
    frame = run().frame
    some = frame.iloc[:: max(1, len(frame) // (3 if setting.dry else 12))]
    names = {"position": "pos", "head": "head_index", "layer": "layer"}
    index = some[list(axes)].rename(columns=names).reset_index(drop=True)
    ids = corrupted.to(lens.device)
    with torch.no_grad():
        hooks = [
            f"blocks.{layer}.{'hook_resid_pre' if site == 'resid_pre' else 'attn.hook_z'}"
            for layer in index.layer
        ]
        cache = lens.bridge.run_with_cache(
            clean.to(lens.device), names_filter=list(dict.fromkeys(hooks))
        )[1]
    setter = (
        theirs.layer_pos_patch_setter
        if site == "resid_pre"
        else theirs.layer_head_vector_patch_setter
    )

    def difference(logits: Any) -> Any:
        last = logits[:, -1].float()
        return (last[:, ANSWERS[0]] - last[:, ANSWERS[1]]).mean()

    def by_theirs() -> Any:
        with torch.no_grad():
            return theirs.generic_activation_patch(
                model=lens.bridge,
                corrupted_tokens=ids,
                clean_cache=cache,
                patching_metric=difference,
                patch_setter=setter,
                activation_name=site,
                index_df=pd.DataFrame(index),
            )

    off = float((by_theirs().cpu().double() - torch.tensor(some["value"].to_numpy())).abs().max())
    about = about | {
        "prompts": "x".join(map(str, clean.shape)),
        "cells": len(frame),
        "theirs_cells": len(some),
    }
    about["off"] = off
    return about | _compared(setting, {"ours": (run, len(frame)), "theirs": (by_theirs, len(some))})


def _sweep(setting: Setting, lens: Any, about: dict[str, Any], *, kind: str) -> dict[str, Any]:
    """Neurons of a layer and heads of all layers, ablated; the attention behind them is read."""
    import torch
    from sweep import Bench, Site

    from sink_lens.data.tokens import from_tensor

    layer, length, count = lens.n_layers // 3, 8 if setting.dry else 64, 2 if setting.dry else 8
    clean, _ = pairs(lens, count=count, length=length)
    bench = Bench(lens=lens, tokens=from_tensor(clean), late=tuple(range(layer + 1, lens.n_layers)))
    if kind == "neurons":
        units = range(0, lens.d_mlp, max(1, lens.d_mlp // (4 if setting.dry else 128)))
        sites = [Site(layer=layer, unit=unit, is_head=False) for unit in units]
    else:
        every = [
            (at, head) for at in range(0, lens.n_layers - 1, EVERY) for head in range(lens.n_heads)
        ]
        sites = [Site(layer=at, unit=head, is_head=True) for at, head in every]
    values: dict[int, Any] = {}

    def ours() -> None:
        engine = bench.engine(sites)
        engine.baseline_metrics()
        for block in engine.blocks:
            for cell, rows in engine.run(block).groupby("cell"):
                values[int(cell)] = rows["value"].tolist()  # type: ignore[arg-type]

    some = range(0, len(sites), max(1, len(sites) // (3 if setting.dry else 12)))
    slow = {cell: bench.bridge(sites[cell]) for cell in some}
    ours()
    off = max(float((torch.tensor(values[cell]) - slow[cell].cpu()).abs().max()) for cell in some)
    about = about | {
        "prompts": f"{count}x{length}",
        "cells": len(sites),
        "theirs_cells": len(some),
        "off": off,
    }
    runs = {
        "ours": (ours, len(sites)),
        "theirs": (lambda: [bench.bridge(sites[cell]) for cell in some], len(some)),
    }
    return about | _compared(setting, runs)


def _edges(setting: Setting, lens: Any, about: dict[str, Any]) -> dict[str, Any]:
    """EAP-IG of all edges beside its formula by hooks of the bridge, pair by pair."""
    import torch

    from sink_lens.circuits.graph import Graph
    from sink_lens.circuits.runs import Runs
    from sink_lens.circuits.scores import score_by_gradients
    from sink_lens.edits.metrics import logit_difference

    steps = 2 if setting.dry else 5
    clean, corrupted = pairs(lens, count=2 if setting.dry else 4, length=6 if setting.dry else 16)
    found: dict[str, Any] = {}

    def ours() -> None:
        graph = Graph.of(lens)
        runs = Runs.make(lens, clean, corrupted, graph=graph, metric=logit_difference(*ANSWERS))
        found["ours"] = score_by_gradients(runs, steps=steps, most_steps=steps).mean
        found["graph"] = graph

    def theirs() -> None:
        found["theirs"] = edges_by_hooks(lens, clean, corrupted, steps=steps)

    ours()
    theirs()
    expected = torch.tensor([found["theirs"][name] for name in found["graph"].names])
    off = float((torch.from_numpy(found["ours"]) - expected).abs().max() / expected.abs().max())
    about = about | {
        "prompts": "x".join(map(str, clean.shape)),
        "steps": steps,
        "edges": len(expected),
        "off": off,
    }
    return about | _compared(setting, {"ours": (ours, len(clean)), "theirs": (theirs, len(clean))})


def edges_by_hooks(lens: Any, clean: Any, corrupted: Any, *, steps: int) -> dict[str, float]:
    """EAP-IG as its formula says, with hooks where the bridge shows each reader's stream and each head's output.

    The score of an edge is what its writer differs by times the reader's mean gradient at the middles of the steps
    between the two embeddings, summed over positions; the mean over pairs is returned, by the edge's name.
    """
    import torch
    from transformer_lens.tools.analysis import attribution_patching

    bridge, group = lens.bridge, lens.n_heads // lens.n_kv_heads
    layers = range(lens.n_layers)
    writers = ["hook_embed"]
    readers = []
    for layer in layers:
        writers += [f"blocks.{layer}.attn.hook_result", f"blocks.{layer}.hook_mlp_out"]
        readers += [f"blocks.{layer}.attn.hook_{kind}_input" for kind in "qkv"] + [
            f"blocks.{layer}.hook_mlp_in"
        ]
    readers.append(f"blocks.{lens.n_layers - 1}.hook_resid_post")
    scores: dict[str, float] = {}
    with attribution_patching._edge_hook_flags(bridge):
        for row in range(len(clean)):
            own, other = (ids[row : row + 1].to(lens.device) for ids in (clean, corrupted))
            with torch.no_grad():
                ends = [bridge.run_with_cache(ids, names_filter=writers)[1] for ids in (own, other)]
            difference = {name: (ends[0][name] - ends[1][name])[0] for name in writers}
            total: dict[str, Any] = {}
            for step in range(steps):
                kept: dict[str, Any] = {}

                def begin(
                    x: Any, hook: Any, at: float = (step + 0.5) / steps, ends: Any = ends
                ) -> Any:
                    return torch.lerp(
                        ends[1]["hook_embed"], ends[0]["hook_embed"], at
                    ).requires_grad_()

                def keep(x: Any, hook: Any, name: str, kept: dict[str, Any] = kept) -> Any:
                    kept[name] = x.clone()  # else the gradient of the stream that goes on is in it
                    kept[name].retain_grad()
                    return kept[name]

                hooks: list[Any] = [
                    ("hook_embed", begin),
                    *((name, partial(keep, name=name)) for name in readers),
                ]
                with torch.enable_grad(), bridge.hooks(fwd_hooks=hooks):
                    last = bridge(own)[:, -1].float()
                    (last[:, ANSWERS[0]] - last[:, ANSWERS[1]]).sum().backward()
                for name, x in kept.items():
                    gradient = x.grad[0].float() / steps
                    total[name] = total[name] + gradient if name in total else gradient
                bridge.zero_grad(set_to_none=True)
            _add_scores(
                scores, difference, total, share=1 / len(clean), n_layers=lens.n_layers, group=group
            )
    return scores


def _add_scores(
    scores: dict[str, float],
    difference: Any,
    gradients: Any,
    *,
    share: float,
    n_layers: int,
    group: int,
) -> None:
    """Contract what the writers differ by with the readers' gradients, and add each edge's number under its name."""
    import torch

    names, parts = ["input"], [difference["hook_embed"][None].float()]

    def add(reader: Sequence[str], gradient: Any) -> None:
        """Add the edges from every writer so far to some readers; gradient: reader, position, d_model."""
        found = torch.einsum("wpd,rpd->wr", torch.cat(parts), gradient) * share
        for writer, row in zip(names, found.tolist(), strict=True):
            for to, value in zip(reader, row, strict=True):
                scores[f"{writer}->{to}"] = scores.get(f"{writer}->{to}", 0.0) + value

    for layer in range(n_layers):
        heads = difference[f"blocks.{layer}.attn.hook_result"].movedim(1, 0).float()
        for kind in "qkv":
            gradient = gradients[f"blocks.{layer}.attn.hook_{kind}_input"].movedim(1, 0)
            if kind != "q" and group > 1:
                gradient = (
                    gradient
                    if len(gradient) < len(heads)
                    else gradient.unflatten(0, (-1, group)).sum(1)
                )
                readers = [f"a{layer}.kv{head}<{kind}>" for head in range(len(gradient))]
            else:
                readers = [f"a{layer}.h{head}<{kind}>" for head in range(len(gradient))]
            add(readers, gradient)
        names += [f"a{layer}.h{head}" for head in range(len(heads))]
        parts.append(heads)
        add([f"m{layer}"], gradients[f"blocks.{layer}.hook_mlp_in"][None])
        names.append(f"m{layer}")
        parts.append(difference[f"blocks.{layer}.hook_mlp_out"][None].float())
    add(["logits"], gradients[f"blocks.{n_layers - 1}.hook_resid_post"][None])


def _compared(setting: Setting, runs: dict[str, tuple[Callable[[], Any], int]]) -> dict[str, Any]:
    """Ours and theirs in turns: seconds, cells a second, the ratio of a cell, peaks; waits and work of ours."""
    times = setting.in_turns({name: run for name, (run, _) in runs.items()}, rounds=4, seconds=8)
    each = {name: [spent / runs[name][1] for spent in spents] for name, spents in times.items()}
    ratios = [slow / fast for slow, fast in zip(each["theirs"], each["ours"], strict=True)]
    found: dict[str, Any] = {"rounds": len(ratios), "speedup": round(statistics.median(ratios), 2)}
    found["speedups"] = [round(one, 2) for one in ratios]
    for name, spent in each.items():
        found[f"{name}_s"] = round(statistics.median(times[name]), 3)
        found[f"{name}_cells_per_s"] = round(1 / statistics.median(spent), 1)
    found["theirs_peak_mb"] = setting.peak(runs["theirs"][0])
    ours, count = runs["ours"]
    return found | {
        f"ours_{name}": value for name, value in work(setting, ours, count=count).items()
    }


def work(
    setting: Setting, run: Callable[[], Any], *, count: int, profiled: bool = True
) -> dict[str, Any]:
    """A run's peak; how often it waits for the GPU, in all and a cell; the share of its time in which the GPU works."""
    import torch

    if not setting.on_gpu:
        return {"peak_mb": setting.peak(run)}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found: dict[str, Any] = {"peak_mb": setting.peak(run)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places: dict[str, int] = {}
    for one in said:
        if "synchroniz" in str(one.message):
            place = f"{Path(one.filename).name}:{one.lineno}"
            places[place] = places.get(place, 0) + 1
    waits = sum(places.values())
    found |= {"waits": waits, "waits_a_cell": round(waits / count, 3)}
    found["waits_at"] = dict(sorted(places.items(), key=lambda item: -item[1])[:8])
    if not profiled:
        return found
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _, seconds = setting.timed(run)
    kernels = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
    busy = sum(one.self_device_time_total for one in kernels) / 1e6
    found["gpu_busy"] = round(busy / seconds, 3)
    found["kernels"] = {
        one.key[:60]: round(one.self_device_time_total / 1e6 / busy, 3) for one in kernels[:6]
    }
    return found


# (d) measuring


def measuring(setting: Setting) -> Iterator[Measurement]:
    """Capture and streaming beside a plain pass, at three lengths."""
    for dtype in ("float32", "bfloat16")[: 1 if setting.dry else 2]:
        lens = small_lens(setting, dtype=dtype)
        sizes = ((8, 2),) if setting.dry else ((64, 64), (1024, 8), (4096, 2))
        for length, sequences in sizes:
            yield (
                f"{sequences} x {length}",
                partial(_measuring, setting, lens, dtype, length, sequences),
            )
        del lens


def _measuring(
    setting: Setting, lens: Any, dtype: str, length: int, sequences: int
) -> dict[str, Any]:
    """Medians of seconds over those of a plain pass: the sink alone, all that a trace streams, one site kept."""
    import torch
    from measure import Case

    from sink_lens import capture
    from sink_lens.chain.config import TraceConfig
    from sink_lens.chain.measure import scout
    from sink_lens.data.tokens import from_tensor

    ids, _ = pairs(lens, count=sequences, length=length)
    tokens = from_tensor(ids)
    config = TraceConfig(model="m", batch_size=sequences)
    one = Case(lens=lens, tokens=tokens, location=scout(lens, tokens, config=config), config=config)
    here = ids.to(lens.device)

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(input_ids=here, use_cache=False)

    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain(lens.plain),
        "body": lambda: plain(lens.plain.base_model),
        "sink": one.sink,
        "all": one.everything,
        "capture": lambda: capture(lens, tokens, sites=["resid_post"], batch_size=sequences),
    }
    for run in runs.values():
        run()
    times = setting.in_turns(runs, rounds=7, seconds=8)

    def over(name: str, base: str) -> float:
        """Median ratio of the rounds."""
        return round(
            statistics.median(a / b for a, b in zip(times[name], times[base], strict=True)), 2
        )

    found: dict[str, Any] = {
        "model": lens.name,
        "dtype": dtype,
        "tokens": length,
        "sequences": sequences,
    }
    found |= {"sink_over_body": over("sink", "body"), "all_over_plain": over("all", "plain")}
    found["capture_over_plain"] = over("capture", "plain")
    found["plain_ms"] = round(statistics.median(times["plain"]) * 1e3, 2)
    found |= {f"{name}_peak_mb": setting.peak(runs[name]) for name in ("plain", "sink")}
    for name in ("all", "capture"):
        found |= {
            f"{name}_{key}": value for key, value in work(setting, runs[name], count=1).items()
        }
    return found


# (e) training


def training(setting: Setting) -> Iterator[Measurement]:
    """A step with the head norm beside the same without."""
    for compiled in (False,) if setting.dry else (False, True):
        yield "compiled" if compiled else "eager", partial(_training, setting, compiled=compiled)


def _training(setting: Setting, *, compiled: bool) -> dict[str, Any]:
    """Tokens a second, share of the card's peak, and memory of both models, with steps in turns."""
    import torch
    import training as steps

    from sink_lens.training.config import TrainConfig

    tiny = {"length": 16, "n_layers": 2, "d_model": 32, "d_mlp": 48, "n_heads": 2, "vocab_size": 64}
    sizes: dict[str, Any] = (
        {"size": "toy", "batch": 2, **tiny} if setting.dry else {"size": "paper", "batch": 8}
    )
    dtype = torch.float32 if setting.dry else torch.bfloat16
    case = steps.Case(
        config=TrainConfig(**sizes, accumulation=1, compile=compiled, bos="without"),
        device=setting.device,
        dtype=dtype,
        peak=steps._peak(setting.device, dtype),
        seconds=0,
    )
    made = [arm for arm in steps.arms(case) if arm.name != "plain Llama"]
    batches = steps._tokens(case)
    _, first = setting.timed(lambda: steps.warm_up(made, case, batches, steps=2))

    def some(arm: Any) -> None:
        for _ in range(1 if setting.dry else 5):
            steps.step(arm, case, batches)

    times = setting.in_turns({arm.name: partial(some, arm) for arm in made}, rounds=9, seconds=20)
    base, norm = (times[arm.name] for arm in made)
    config = case.config
    found: dict[str, Any] = {"compiled": compiled, "dtype": str(dtype).removeprefix("torch.")}
    found |= {
        "batch": f"{config.batch} x {config.length}",
        "first_steps_s": round(first, 1),
        "rounds": len(base),
    }
    found["headnorm_over_softmax"] = round(
        statistics.median(b / a for a, b in zip(base, norm, strict=True)), 4
    )
    for arm in made:
        seconds = statistics.median(times[arm.name]) / (1 if setting.dry else 5)
        speed, key = config.step_tokens / seconds, arm.name.replace(" ", "_")
        share = speed * steps.flops(arm.model, config) / case.peak
        found[f"{key}_parameters"] = sum(one.numel() for one in arm.model.parameters())
        found |= {f"{key}_step_ms": round(seconds * 1e3, 2), f"{key}_tokens_per_s": round(speed)}
        found[f"{key}_share_of_peak"] = round(share, 4) if share == share else None
        found[f"{key}_peak_mb"] = setting.peak(lambda arm=arm: steps.step(arm, case, batches))
    return found


# The tables


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


COLUMNS: dict[str, dict[str, str]] = {
    "c": {
        "what": "run",
        "model": "model",
        "dtype": "type",
        "ours_cells_per_s": "ours, cells a second",
        "theirs_cells_per_s": "theirs",
        "speedup": "speedup",
        "ours_peak_mb": "ours, MB",
        "theirs_peak_mb": "theirs, MB",
        "ours_waits_a_cell": "waits a cell",
        "ours_gpu_busy": "GPU works",
        "off": "off by",
    },
    "d": {
        "what": "sequences x tokens",
        "dtype": "type",
        "plain_ms": "plain pass, ms",
        "sink_over_body": "sink, over the body",
        "all_over_plain": "all, over the pass",
        "capture_over_plain": "capture, over the pass",
        "plain_peak_mb": "plain, MB",
        "all_peak_mb": "all, MB",
    },
    "e": {
        "what": "step",
        "baseline_tokens_per_s": "softmax, tokens a second",
        "head_norm_tokens_per_s": "head norm",
        "headnorm_over_softmax": "step, ratio",
        "baseline_share_of_peak": "softmax, of the card's peak",
        "head_norm_share_of_peak": "head norm",
        "baseline_peak_mb": "softmax, MB",
        "head_norm_peak_mb": "head norm, MB",
    },
}
"""Part -> field of its rows -> title of a column."""


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown: the machine, sentences of (a) and (b), and a table for each other part."""
    found = []
    for row in rows:
        if row["part"] == "machine":
            versions = ", ".join(
                f"{name} {version}" for name, version in row["versions"].items() if version
            )
            card = row.get("nvidia_smi") or row["platform"]
            found.append(
                f"{card}; {row['cores']} cores; CUDA {row.get('cuda')}; {versions}; `{row['command']}`"
            )
        elif "error" in row:
            found.append(f"{row['part']}, {row.get('what', 'all')}: {row['error']}")
        elif row["part"] == "a" and row["what"] == "tests":
            found.append(
                "Tests: " + row["summary"] + "".join(f"\n- {name}" for name in row["failed"])
            )
        elif row["part"] == "b" and row["what"] != "ended":
            found.append(f"{row['what']} of {row['model']}: {row['seconds']} s")
        elif row.get("left_out"):
            found.append(f"{row['part']}: no time was left for {', '.join(row['left_out'])}")
    for part, columns in COLUMNS.items():
        own = [
            row
            for row in rows
            if row["part"] == part and row["what"] != "ended" and "error" not in row
        ]
        if own:
            lines = [" | ".join(columns.values()), " | ".join("---" for _ in columns)]
            lines += [" | ".join(_cell(row.get(name)) for name in columns) for row in own]
            found.append("\n".join(f"| {line} |" for line in lines))
    return "\n\n".join(found)


def _cell(value: Any) -> str:
    """A number as a table shows it."""
    if isinstance(value, float):
        return (
            f"{value:.1e}"
            if 0 < abs(value) < 1e-3
            else f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:g}"
        )
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
