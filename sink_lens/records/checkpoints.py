"""The checkpoints in the run folder of a training."""

import hashlib
import json
import os
import re
from pathlib import Path

from ..errors import RunError
from .reading import Run

_OF_NUMBERS = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf")
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folders(run: Run) -> dict[int, Path]:
    """Return step -> folder for each checkpoint of a training run, in the order of the steps."""
    if run.kind != "train":
        raise RunError(f"{run.folder} holds a {run.kind} run; need one of sink-lens train.")
    there = (run.folder / "checkpoints").glob("checkpoint-*")
    found = {
        int(name[1]): path
        for path in there
        if path.is_dir() and (name := _NAME.fullmatch(path.name))
    }
    if not found:
        raise RunError(
            f"{run.folder} has no checkpoint; need checkpoints/checkpoint-N at least once. Train it, or give another."
        )
    return dict(sorted(found.items()))


def model_identity(source: str | Path, *, content: bool = False) -> str:
    """Return a hash of the configuration of a model on the disk, and of size, time and inode of its weights' files.

    With ``content`` the bytes of the weights are hashed instead: a copied model has the same hash. The identity of a
    name, such as one of the hub, is the name.
    """
    path = Path(os.path.expanduser(source))  # noqa: PTH111  # Path.expanduser raises where there is no such user
    found: list[object] = []
    files = [path]
    if not path.is_file():
        files = sorted(one for name in _OF_NUMBERS for one in path.glob(name))
    for file in files:
        status = file.stat()
        about: object = [status.st_size, status.st_mtime_ns, status.st_ino]
        if content or file.name == "config.json":
            with file.open("rb") as opened:
                about = hashlib.file_digest(opened, "sha256").hexdigest()
        found.append([file.name, about])
    return hashlib.sha256(json.dumps(found or str(source)).encode()).hexdigest()
