"""The folder that every attempt gets a copy of: a model, files of settings, and runs of every kind, all tiny."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf_files
from options import small

from sink_lens.cli import main
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.training.loop import Loop
from tests.tiny_families import tiny

SWEEP = """\
model = "MODEL"
controls = 2
device = "cpu"
[tokens]
kind = "random"
sequences = 2
length = 10
[[metrics]]
name = "sink_mass"
sink_position = 0
[[edits]]
kind = "zero"
site = "z"
heads = "each"
layers = [0, 1]
"""
TRAIN = """\
size = "toy"
steps = 8
batch = 2
n_layers = 2
d_model = 16
d_mlp = 24
n_heads = 2
n_kv_heads = 2
vocab_size = 300
length = 16
warmup = 1
log_every = 1
eval_every = 4
eval_sequences = 2
save_every = 3
data = "text.txt"
tokenizer = "MODEL"
device = "cpu"
"""
TRACE = 'model = "MODEL"\nlength = 20\nsequences = 3\ninterventions = false\nrandom_init = false\ndevice = "cpu"\n'
MADE = ("sweep", "train", "patch", "trace")
"""What every workspace holds a run of; a long attack has one of the others too."""
_MORE = ("tokens", "isolate", "amplify", "ablate", "quantise", "preference", "contraction", "fingerprint")


def invoke(arguments: Sequence[str]) -> int:
    """Run a command in this process; its exit code."""
    sys.argv = ["sink-lens", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def build(folder: Path, *, long: bool) -> None:
    """Make it.

    Raises:
        RuntimeError: a command failed on good input.
    """
    folder.mkdir(parents=True)
    os.chdir(folder)
    os.environ["SINK_LENS_CACHE"] = "cache"
    tiny("llama").save_pretrained("MODEL")
    tiny_tokenizer().save_pretrained("MODEL")
    gguf_files.write_gguf(Path("model.gguf"))
    Path("text.txt").write_text("It was the best of times, it was the worst of times. " * 80)
    for name, text in (("SWEEP.toml", SWEEP), ("TRAIN.toml", TRAIN), ("TRACE.toml", TRACE)):
        Path(name).write_text(text)
    for command in MADE:
        _made(command, "--out", f"runs/{command}", "--quiet")
    for command in _MORE if long else ():
        _made(command, "--out", f"runs/{command}", "--quiet", refused=True)
    shutil.copytree("runs/train", "runs/other")
    _stopped()


def _made(command: str, *options: str, refused: bool = False) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = invoke([*command.split(), *small(command), *options])
    if code and not (refused and code == 2):  # a study may find nothing to study in a random model
        raise RuntimeError(f"{command} ended with {code} on good input: {said.getvalue()}")


def _stopped() -> None:
    """A training that was stopped at step 5: its checkpoints are what the next one goes on from."""
    step = Loop.training_step

    def stopping(self: Loop, *given: object, **named: object) -> object:
        self.stopping = self.stopping or self.state.global_step >= 4
        return step(self, *given, **named)

    Loop.training_step = stopping  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            invoke(["train", "TRAIN.toml", "--out", "runs/stopped", "--quiet"])
    finally:
        Loop.training_step = step  # type: ignore[method-assign]
