"""Makes every table of the program on tiny models, for ``compare.py``: ``python tools/golden/make.py FOLDER``.

Run it before a change that must not move a number, and after it, and compare the two folders. Each *step* is one
command of ``sink-lens``, run in this process, or a few public names of ``sink_lens``. A step writes into
``FOLDER/runs/STEP``; what it prints is in ``terminal.txt`` there. Everything that it needs (models, tokenizer, text)
is made in the folder first, and everything runs on one thread of the CPU, without a network.

Paths are relative to the folder, so that two folders hold the same text. A step that fails is kept as such: its exit
code is the first line of ``terminal.txt``.
"""

import os

os.environ |= {  # read by the libraries when they are first imported
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "agg",
}

import argparse
import fnmatch
import json
import random
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.torch
import torch
from typer.testing import CliRunner

# Everything that is taken from the program: a rebuild that moves it changes this block and nothing below.
import sink_lens
from sink_lens.cli import app
from sink_lens.edits.metrics import logit_difference, loss, sink_mass
from sink_lens.edits.normalisation import natural_rms
from sink_lens.models.tiny import planted, tiny_tokenizer
from tests.tiny_families import TINY_FAMILIES, tiny

SMALL = ["--sequences", "4", "--length", "24"]
PAIR = ["--clean", "the cat and the dog", "--corrupted", "the bat and the hog"]
UNTRAINED = "n_layers=2,d_model=32,n_heads=4,vocab_size=100,n_context=64"
DRAWN = ["--sequences", "64", "--length", "16"]
TWO_FAMILIES = ("llama", "gpt2")

PATCHES: dict[str, list[str]] = {
    "resid_pre-layer-pos": ["--by", "layer,position"],
    "resid_pre-noising": ["--by", "layer,position", "--direction", "noising", "--metric", "kl"],
    "attn_out-layer": ["--site", "attn_out", "--by", "layer", "--metric", "loss"],
    "mlp_out-pos": [
        "--site",
        "mlp_out",
        "--by",
        "position",
        "--metric",
        "norm",
        "--metric-layers",
        "2",
    ],
    "everything": ["--by", ""],
    "z-head": [
        *("--site", "z", "--by", "layer,head", "--metric", "logit_difference"),
        *("--correct", "a", "--incorrect", "b"),
    ],
    "z-head-pos": [
        "--site",
        "z",
        "--by",
        "layer,position,head_index",
        "--positions",
        "1-3",
        "--heads",
        "0,2",
    ],
    "q-head": [
        "--site",
        "q",
        "--by",
        "layer,head",
        "--sink-position",
        "1",
        "--metric-layers",
        "1,2",
    ],
    "k-head-pos": [
        "--site",
        "k",
        "--by",
        "head_index,pos",
        "--layers",
        "1",
        "--direction",
        "noising",
    ],
    "v-head": ["--site", "v", "--by", "layer,head", "--metric", "kl"],
    "scores-head": ["--site", "scores", "--by", "layer,head"],
    "pattern-destination": ["--site", "pattern", "--by", "layer,position", "--metric", "loss"],
    "pattern-source": ["--site", "pattern", "--by", "layer,src_pos", "--metric", "kl"],
    "pattern-both": ["--site", "pattern", "--by", "pos,src_pos", "--layers", "1", "--metric", "kl"],
    "pattern-head-source": ["--site", "pattern", "--by", "layer,head,src_pos", "--metric", "loss"],
    "neurons-units": [
        *("--site", "neurons", "--layers", "0-1", "--units", "3,7-9", "--by", "layer,position"),
        *("--metric", "dominance", "--metric-layers", "2"),
    ],
    "several": [
        "--clean",
        "on a hot day in a",
        "--corrupted",
        "on a cot day in a",
        "--by",
        "layer",
    ],
    "zero": ["--site", "z", "--by", "layer,head", "--put", "zero", "--metric", "loss"],
    "mean_ordinary": [
        "--site",
        "neurons",
        "--by",
        "layer,position",
        "--put",
        "mean_ordinary",
        "--metric",
        "loss",
    ],
    "attribution": ["--approximate", "--check", "8", "--metric", "loss"],
    "attribution-head": [
        "--approximate",
        "--check",
        "8",
        "--site",
        "z",
        "--by",
        "layer,head",
        "--metric",
        "kl",
    ],
    "attribution-pattern": [
        "--approximate",
        "--check",
        "8",
        "--site",
        "pattern",
        "--by",
        "layer,src_pos",
    ],
}
"""Step -> options of ``sink-lens patch``."""

SWEEP = """\
controls = 3
seed = 1
[tokens]
kind = "text"
text = "text.txt"
bos = "with"
sequences = 3
length = 16
[[metrics]]
name = "sink_mass"
layers = "1-2"
[[metrics]]
name = "sink_mass"
sink_position = 4
[[metrics]]
name = "loss"
[[metrics]]
name = "logit_difference"
correct = 70
incorrect = 71
position = -2
[[metrics]]
name = "norm"
layer = 2
[[metrics]]
name = "dominance"
layer = 2
[[edits]]
kind = "zero"
site = "neurons"
layers = "1-2"
units = [[1, 5], 7, 40]
[[edits]]
kind = "zero"
site = "z"
heads = "each"
[[edits]]
kind = "mean_all"
site = "mlp_out"
layers = "each"
[[edits]]
kind = "mean_all"
site = "k"
heads = "each"
layers = 1
[[edits]]
kind = "resample"
site = "attn_out"
positions = [0, 5]
seeds = [0, 1]
[[edits]]
kind = "scale"
site = "resid_pre"
positions = [0, 3]
factors = [0.5, 2]
layers = 1
[[edits]]
kind = "set"
site = "resid_post"
positions = 0
units = [3, 9]
factors = [0, 1.5]
layers = 0
[[edits]]
kind = "zero"
site = "pattern"
keys = 0
layers = "each"
[[edits]]
kind = "isolate"
positions = [4, 6]
layers = "all"
[[edits]]
kind = "amplify"
positions = 5
layers = [[0, 1]]
factors = [2, 5]
"""

TRAIN = """\
n_layers = 2
d_model = 32
d_mlp = 48
n_heads = 4
vocab_size = 290
length = 24
batch = 4
steps = 12
warmup = 2
lr = 1e-2
log_every = 3
eval_every = 4
save_every = 5
device = "cpu"
data = "text.txt"
"""


def command(*arguments: str) -> Callable[[Path], str]:
    """A step that is a command; the name of its folder is put where ``OUT`` stands."""

    def run(out: Path) -> str:
        words = [str(out) if word == "OUT" else word for word in arguments]
        done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        messages = re.sub(
            r"[^\r\n]*\d+/(\d+|\?) \[[^\r\n]*\r?|\r", "", done.stderr
        )  # without progress bars
        return f"exit code {done.exit_code}\n--- output\n{done.stdout}--- messages\n{messages.rstrip(' ')}"

    return run


def api(function: Callable[..., Mapping[str, Any]], *given: Any) -> Callable[[Path], str]:
    """A step that uses public names: a function of its folder, and what is given; ``keep`` writes what it returns."""

    def run(out: Path) -> str:
        for name, value in function(out, *given).items():
            keep(out, name, value)
        return "exit code 0\n"

    return run


def keep(folder: Path, name: str, value: Any) -> None:
    """Write tables as parquet, tensors as safetensors and plain values as JSON; a mapping is walked."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, pd.DataFrame):
            value.to_parquet(folder / f"{name}.parquet", index=False)
        elif isinstance(value, torch.Tensor | np.ndarray):
            tensors[name] = torch.as_tensor(value).detach().cpu().clone().contiguous()
        elif isinstance(value, Mapping):
            for key, one in value.items():
                walk(f"{name}.{'.'.join(map(str, key)) if isinstance(key, tuple) else key}", one)
        elif isinstance(value, float):
            plain[name] = value.hex()  # to the last bit
        else:
            plain[name] = value

    walk(name, value)
    if tensors:
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
    if plain:
        (folder / f"{name}.facts.json").write_text(json.dumps(plain, indent=1) + "\n")


# --- what the steps need


def prepare() -> None:
    """Models, a tokenizer and a text, in the folder that is the current one."""
    drawn = random.Random(0)
    text = "the cat and dog in a house on hill saw other near river then it was here every day"
    words = text.split()
    sentences = [
        " ".join(drawn.choices(words, k=drawn.randint(5, 12))).capitalize() for _ in range(1500)
    ]
    paragraphs = [". ".join(sentences[at : at + 5]) + "." for at in range(0, len(sentences), 5)]
    Path("text.txt").write_text("\n\n".join(paragraphs) + "\n")
    Path("sweep.toml").write_text(SWEEP)
    Path("train.toml").write_text(TRAIN)
    models = {family: tiny(family) for family in TINY_FAMILIES}
    models |= {
        "planted": planted().model,
        "planted-1": planted(seed=1).model,
        "unplanted": planted(sink=False).model,
        "llama-1": tiny("llama", seed=1),
    }
    for name, model in models.items():
        model.save_pretrained(f"models/{name}")
        tiny_tokenizer().save_pretrained(f"models/{name}")
    planted().model.save_pretrained("models/planted-bos")
    tiny_tokenizer(adds_bos=True).save_pretrained("models/planted-bos")


def tokens(lens: Any, *, sequences: int = 3, length: int = 14) -> Any:
    """Random ids behind BOS."""
    generator = torch.Generator().manual_seed(3)
    return sink_lens.TokenBatch.random(
        lens.tokenizer,
        generator=generator,
        vocab_size=lens.d_vocab,
        sequences=sequences,
        length=length,
        bos="with",
    )


# --- steps that use public names


def paths(out: Path, family: str) -> Mapping[str, Any]:
    """Path patching, from every kind of sender."""
    lens = sink_lens.load(f"models/{family}")
    clean, corrupted = "the cat and the dog", "the bat and the hog"
    difference = logit_difference(70, 71)
    senders: list[Any] = [("z", 0, head) for head in range(lens.n_heads)] + [
        ("attn_out", 0),
        ("mlp_out", 0),
    ]
    found = {}
    asked: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("keys", ("k", 2, 1), sink_mass(0), {}),
        ("queries", ("q", 2, 1), sink_mass(0), {"direction": "noising"}),
        ("values", ("v", 1), difference, {"freeze": "attention"}),
        ("stream", ("resid_post", 2), loss(), {"freeze": "attention", "direction": "noising"}),
    ]
    for name, receiver, metric, options in asked:
        done = sink_lens.patching.path_patch(
            lens, clean, corrupted, sender=senders, receiver=receiver, metric=metric, **options
        )
        found[name] = {"frame": done.frame, "baseline": done.baseline, "source": done.source}
    return found


def patches(out: Path, family: str) -> Mapping[str, Any]:
    """Patching and attribution from Python, with the values by sequence."""
    lens = sink_lens.load(f"models/{family}")
    texts = (
        ["the cat and the dog", "on a hot day in a"],
        ["the bat and the hog", "on a cot day in a"],
    )
    patched = sink_lens.patching.patch(
        lens, *texts, site="z", metric=sink_mass(0), by=("layer", "head"), progress=False
    )
    screened = sink_lens.patching.attribution_patch(
        lens, *texts, site="resid_pre", metric=logit_difference(70, 71)
    )
    checked = screened.sample(6, generator=torch.Generator().manual_seed(0))
    return {
        "patch": {
            "frame": patched.frame,
            "values": patched.values,
            "differences": patched.differences,
        },
        "attribution": {
            "frame": screened.frame,
            "baseline": screened.baseline,
            "source": screened.source,
        },
        "attribution_check": {"frame": checked.frame, "sentence": checked.sentence},
    }


def outcome(run: Any) -> Mapping[str, Any]:
    """Return what was read of a run."""
    return {
        "mass": run.mass,
        "state": run.state,
        "loss": run.loss,
        "logits": run.logits,
        "tensors": run.tensors,
    }


def edits(out: Path, family: str) -> Mapping[str, Any]:
    """Each ready-made edit, beside the baseline."""
    lens = sink_lens.load(f"models/{family}")
    batch = tokens(lens)
    keys = (0, 5)
    baseline = sink_lens.run_with(
        lens, batch, positions=keys, logits=True, sites=("resid_post", "z"), quiet=True
    )
    means = sink_lens.edits.centring_means(lens, n_tokens=256)
    made = {
        "isolation": sink_lens.edits.isolate([5]),
        "amplification": sink_lens.edits.amplify(5.0, positions=[5], layers=[0, 1], means=means),
        "amplification_aggregated": sink_lens.edits.amplify(
            5.0, positions=[5], layers=[0, 1], centre="aggregated", means=means
        ),
        "amplification_norm": sink_lens.edits.amplify(
            5.0, positions=[5], layers=[0, 1], centre="none"
        ),
        "calibration": sink_lens.edits.calibrate(0.5),
        "calibration_centred": sink_lens.edits.calibrate(2.0, centre=means.aggregated),
        "head_rms_norm": sink_lens.edits.normalise(natural_rms(lens, batch)),
    }
    found: dict[str, Any] = {"baseline": outcome(baseline), "means": means.tensors()}
    for name, edit in made.items():
        edited = sink_lens.run_with(lens, batch, edit, positions=keys, logits=True, quiet=True)
        found[name] = outcome(edited)
        found[f"effect_{name}"] = sink_lens.edits.effect(
            baseline, edited, generator=np.random.default_rng(0)
        )
    greedy = sink_lens.generate(lens, "the cat and", sink_lens.edits.isolate([2]), max_new_tokens=6)
    drawn = sink_lens.generate(
        lens,
        "the cat and",
        sink_lens.edits.calibrate(0.5),
        max_new_tokens=6,
        temperature=0.7,
        generator=torch.Generator().manual_seed(0),
    )
    for name, one in (("generated", greedy), ("drawn", drawn)):
        found[name] = {
            "text": one.text,
            "plain": one.plain,
            "ids": one.ids,
            "plain_ids": one.plain_ids,
        }
    return found


def captured(out: Path, family: str) -> Mapping[str, Any]:
    """Every site that the family shows, of the plain model and of the bridge."""
    lens = sink_lens.load(f"models/{family}")
    batch = tokens(lens, sequences=2, length=10)
    found: dict[str, Any] = {}
    for site in sink_lens.SITES:
        try:
            found[site] = sink_lens.capture(lens, batch, sites=[site]).tensors
        except sink_lens.SinkLensError as error:
            found[f"{site}_refused"] = str(error)
    return found


def own_cells(out: Path) -> Mapping[str, Any]:
    """A sweep over cells of one's own."""
    lens = sink_lens.load("models/planted")
    cells = [
        sink_lens.sweeps.cell_of(
            sink_lens.edits.isolate([position]), name=f"isolated {position}", place=position
        )
        for position in (3, 5)
    ]
    cells.append(
        sink_lens.sweeps.cell_of(
            sink_lens.edits.calibrate(0.5, layers=[1]), name="calibrated", place=-1
        )
    )
    done = sink_lens.sweep(
        lens, cells, tokens=tokens(lens), metrics=[sink_mass(0), loss()], out=out, progress=False
    )
    return {"result": {"frame": done.frame, "values": done.values, "headline": done.headline}}


def traced(out: Path, family: str) -> Mapping[str, Any]:
    """A trace with thresholds so low that a random model has a sink, growth steps, neurons and dimensions to follow."""
    config = sink_lens.TraceConfig(
        model=f"models/{family}",
        text="text.txt",
        bos="with",
        sequences=4,
        length=24,
        intervention_sequences=3,
        threshold=0.1,
        growth_factor=1.05,
        dominance_threshold=3.0,
        max_outliers=40,
        super_share=0.01,
    )
    sink_lens.trace(config.model, config=config, out=out, progress=False, report=False)
    return {}


def traced_in_memory(out: Path) -> Mapping[str, Any]:
    """A trace of a model and of tokens that are given, and its tables as they are read back."""
    lens = sink_lens.load("models/planted")
    config = sink_lens.TraceConfig(model="models/planted", intervention_sequences=3)
    done = sink_lens.trace(
        lens, config=config, tokens=tokens(lens, length=24), out=out, progress=False, report=False
    )
    return {"read": sink_lens.read_run(done.folder).tables}


# --- the list


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of the check."""

    name: str
    """Its folder below ``runs``."""
    run: Callable[[Path], str]
    """Makes its files in the folder that it is given, and returns what it printed."""


def steps() -> list[Step]:
    """All of them, in order: the later ones may read the folders of the earlier."""
    found: dict[str, Callable[[Path], str]] = {}
    text = ["--text", "text.txt"]
    for family in ("planted", "llama", "gpt2", "gpt_oss", "headnorm_sink"):
        found[f"trace-{family}"] = command(
            "trace", f"models/{family}", "--out", "OUT", *text, "--bos", "with", *SMALL
        )
    model = ["trace", "models/planted", "--out", "OUT", *SMALL]
    found |= {
        "trace-unplanted": command(
            "trace", "models/unplanted", "--out", "OUT", *text, "--bos", "with", *SMALL
        ),
        "trace-bos-auto": command("trace", "models/planted-bos", "--out", "OUT", *text, *SMALL),
        "trace-bos-without": command(*model, *text, "--bos", "without"),
        "trace-random": command(
            *model, "--tokens", "random", "--bos", "with", "--seed", "5", "--no-interventions"
        ),
        "trace-repeated": command(
            *model,
            "--tokens",
            "repeated",
            "--bos",
            "with",
            "--no-interventions",
            "--no-random-init",
        ),
        "trace-bundled-text": command(
            *model, "--bos", "with", "--no-interventions", "--threshold", "0.1"
        ),
        "trace-prompts": command(
            *("trace", "models/planted", "--out", "OUT", "--bos", "with", "--target-position", "6"),
            *("--prompt", "the cat and the dog saw the river near the hill"),
            *("--prompt", "then it was not in the house every day of rain"),
        ),
        "trace-in-memory": api(traced_in_memory),
    }
    found |= {f"trace-low-{family}": api(traced, family) for family in TINY_FAMILIES}
    for family in TWO_FAMILIES:
        for name, options in PATCHES.items():
            metric = () if "--metric" in options else ("--metric", "sink_mass")
            words = [
                "patch",
                f"models/{family}",
                *PAIR,
                *options,
                *metric,
                "--bos",
                "with",
                "--out",
                "OUT",
            ]
            found[f"patch-{family}-{name}"] = command(*words)
        found |= {
            f"paths-{family}": api(paths, family),
            f"patches-{family}": api(patches, family),
            f"edits-{family}": api(edits, family),
        }
    found |= {f"captured-{family}": api(captured, family) for family in TINY_FAMILIES}
    for name in ("planted", "gpt2"):
        found[f"sweep-{name}"] = command(
            "sweep", "sweep.toml", "--model", f"models/{name}", "--out", "OUT"
        )
    found["sweep-cells"] = api(own_cells)
    for name in ("planted", "gpt2"):
        given = [f"models/{name}", *text, "--bos", "with", *SMALL, "--out", "OUT"]
        found |= {
            f"isolate-{name}": command(
                "isolate",
                *given,
                "--target-position",
                "7",
                "--target-position",
                "9",
                "--layers",
                "0-2",
            ),
            f"amplify-{name}": command(
                "amplify", *given, "--target-position", "7", "--factors", "1,5,20"
            ),
        }
    for name in ("planted", "planted-1"):
        given = [
            f"models/{name}",
            *text,
            "--bos",
            "with",
            "--sequences",
            "6",
            "--length",
            "32",
            "--out",
            "OUT",
        ]
        found[f"tokens-{name}"] = command("tokens", *given)
    runs = {
        f"train-{arm}-{seed}": ["--value-norm", arm, "--seed", str(seed)]
        for arm in ("none", "shared")
        for seed in (0, 1, 2)
    }
    for name, options in runs.items():
        found[name] = command("train", "train.toml", *options, "--out", "OUT")
    for attention in ("sigmoid", "gate_headwise", "sink_logit"):
        options = ["--attention", attention, "--watch", "--steps", "4", "--out", "OUT"]
        found[f"train-{attention}"] = command("train", "train.toml", *options)
    for name in runs:
        found[f"watch-{name}"] = command(
            "watch", f"runs/{name}", "--sequences", "4", "--length", "20", "--threshold", "0.2"
        )
    found["compare"] = command(
        "compare", *(f"runs/{name}" for name in runs), "--threshold", "0.2", "--out", "OUT"
    )
    drawn = [
        "--untrained",
        f"gpt2,activation=relu,{UNTRAINED}",
        "--untrained",
        f"llama,{UNTRAINED}",
        "--seeds",
        "0-2",
    ]
    given = [*drawn, *DRAWN, "--out", "OUT"]
    found |= {
        "preference": command("preference", *given, "--switch", "activation"),
        "preference-models": command(
            "preference", "models/llama", "models/planted", *DRAWN, "--out", "OUT"
        ),
        "preference-training": command(
            "preference", "runs/train-none-0", *DRAWN, "--bos", "with", "--out", "OUT"
        ),
        "contraction": command("contraction", *given, "--switch", "mlp", "--switch", "attention"),
        "contraction-models": command(
            "contraction", "models/llama", "models/gpt2", *DRAWN, "--out", "OUT"
        ),
        "contraction-training": command(
            "contraction",
            "runs/train-none-0",
            "runs/train-none-1",
            *DRAWN,
            "--no-sinks",
            "--out",
            "OUT",
        ),
    }
    compared = ["--sequences", "200", "--length", "4", "--coordinates", "28", "--out", "OUT"]
    found |= {
        "fingerprint": command("fingerprint", "models/llama", "models/llama-1", *compared),
        "fingerprint-many": command(
            *(
                "fingerprint",
                "models/llama",
                "models/llama-1",
                "models/mistral",
                "models/gpt2",
                *compared,
            )
        ),
        "fingerprint-training": command(
            "fingerprint", "runs/train-none-0", "runs/train-none-1", *compared
        ),
        "fingerprint-untrained": command(
            "fingerprint",
            "--untrained",
            f"gpt2,{UNTRAINED}",
            "--seeds",
            "0-3",
            *compared,
            "--inputs",
            "embeddings",
            "--no-cache",
        ),
        "train-example": command("train", "--example"),
        "sweep-example": command("sweep", "--example"),
    }
    return [Step(name=name, run=run) for name, run in found.items()]


def make(folder: Path, *, only: str = "*") -> list[str]:
    """Run the steps whose name fits a pattern, in a new folder; the names of those that failed.

    A step that reads the folder of another needs that one to fit as well.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(
            f"{folder} is not empty; need a new folder, since files of an earlier check would stay in it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    os.environ["SINK_LENS_CACHE"] = "cache"
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    failed, begun = [], time.perf_counter()
    try:
        prepare()
        for step in steps():
            if not any(fnmatch.fnmatch(step.name, pattern) for pattern in only.split(",")):
                continue
            at, out = time.perf_counter(), Path("runs") / step.name
            try:
                said = step.run(out)
            except Exception as error:  # noqa: BLE001  kept as what the step gave, and told at the end
                said = f"exit code none\n{type(error).__name__}: {error}\n"
            out.mkdir(parents=True, exist_ok=True)
            (out / "terminal.txt").write_text(said)
            if not said.startswith("exit code 0\n"):
                failed.append(step.name)
            tell(f"{time.perf_counter() - at:6.1f} s  {said.splitlines()[0]}  {step.name}")
    finally:
        shutil.rmtree("cache", ignore_errors=True)
        os.chdir(before)
    tell(f"{time.perf_counter() - begun:6.1f} s in all; failed: {', '.join(failed) or 'none'}")
    return failed


def tell(line: str) -> None:
    """A line for who waits."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("folder", type=Path, help="a new folder")
    asked.add_argument(
        "--only", default="*", metavar="PATTERN", help="only such steps, as 'trace-*,sweep-*'"
    )
    options = asked.parse_args()
    sys.exit(1 if make(options.folder, only=options.only) else 0)
