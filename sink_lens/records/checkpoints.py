"""The checkpoints in the run folder of a training."""

import re
from pathlib import Path

from sink_lens.errors import RunError
from sink_lens.records.reading import Run

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folders(run: Run) -> dict[int, Path]:
    """Return step -> folder for each checkpoint of a training run, in the order of the steps.

    Raises:
        RunError: the run is no training, or has no checkpoint.
    """
    if run.kind != "train":
        raise RunError(f"{run.folder} holds a {run.kind} run; need one of sink-lens train. Give its folder.")
    there = (run.folder / "checkpoints").glob("checkpoint-*")
    found = {int(name[1]): path for path in there if path.is_dir() and (name := _NAME.fullmatch(path.name))}
    if not found:
        raise RunError(
            f"{run.folder} has no checkpoint; need checkpoints/checkpoint-N at least once. Train it, or give another."
        )
    return dict(sorted(found.items()))
