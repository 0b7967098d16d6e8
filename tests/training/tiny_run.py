"""A training that takes seconds; run as a script, it kills itself at the step that it is given."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import trainer

from sink_lens.training import checkpoint_files
from sink_lens.training.arguments import leave_process_group
from sink_lens.training.config import TrainConfig
from sink_lens.training.loop import Loop
from sink_lens.training.train import train

VOCAB_SIZE, LENGTH = 40, 12
FIELDS: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "d_mlp": 24, "n_heads": 2, "vocab_size": VOCAB_SIZE, "length": LENGTH, "batch": 4,
    "steps": 12, "warmup": 3, "lr": 1e-2, "log_every": 3, "eval_every": 6, "save_every": 5, "device": "cpu",
}  # fmt: skip


def config_of(**changes):
    return TrainConfig(**{**FIELDS, **changes})


def rows(n, *, seed):
    """Sequences that count up from a random id, with noise: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCAB_SIZE, (n, 1), generator=generator)
    noise = torch.randint(3, (n, LENGTH), generator=generator)
    ids = (first + torch.arange(LENGTH) + noise) % VOCAB_SIZE
    return [{"input_ids": row, "labels": row} for row in ids]


def data():
    """To train on, and held out: five, so that two processes with two each have one twice in the last batch."""
    return rows(50, seed=1), rows(5, seed=2)


def trained(out, *, config=None, **options):
    return train(
        config=config_of() if config is None else config,
        out=out,
        data=data(),
        progress=False,
        **options,
    )


@contextlib.contextmanager
def after_step(n, do):
    """Within the block, a training does this between step n and the next one."""
    own = Loop.training_step

    def step(self, *given, **named):
        if self.state.global_step == n:
            do()
        return own(self, *given, **named)

    with mock.patch.object(Loop, "training_step", step):
        yield


def stop_at(out, n, **options):
    """A run folder whose training was stopped after a step."""
    with (
        after_step(n, mock.Mock(side_effect=KeyboardInterrupt)),
        contextlib.suppress(KeyboardInterrupt),
    ):
        trained(out, **options)
        raise AssertionError("it was not stopped")
    return out


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _main(out, place):
    """Train; be killed in the forward of step 8, while that of step 8 is saved, or in both, in two forks."""
    if place == "both":
        if os.fork() == 0:
            _main(f"{out}-forward", "forward")
        os.wait()
        _main(f"{out}-saving", "saving")
    if place == "saving":
        seal = checkpoint_files.seal_checkpoint

        def half(folder, target):
            if target.name == "checkpoint-8":
                _kill()
            seal(folder, target)

        checkpoint_files.seal_checkpoint = half
    if (
        os.environ.get("RANK") == "1"
    ):  # the first process has ended before this one has listed the folder
        sort, scan = trainer.sort_checkpoints, os.scandir

        def late(**given):
            with mock.patch("os.scandir", lambda path: (time.sleep(1), scan(path))[1]):
                return sort(**given)

        trainer.sort_checkpoints = late
    with after_step(7, _kill) if place == "forward" else contextlib.nullcontext():
        trained(Path(out))
    leave_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
