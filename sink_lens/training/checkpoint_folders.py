"""Checkpoints that ``sink-lens train`` did not write: folders of them, and lists of models, by the step of each."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import InputError, RunError
from ..text import json_value

Checkpoints = str | Path | Sequence[str | Path] | Mapping[int, str | Path | PreTrainedModel]
"""A folder of checkpoints, names or paths that end in their step, or step -> what ``load`` takes."""

_STEP = re.compile(r"(\d+)$")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def checkpoints_in(source: Checkpoints) -> dict[int, str | Path | PreTrainedModel]:
    """Checkpoints (folders, GGUF files or open models) by step, in ascending order, from a folder or a list.

    A folder's checkpoints are its subfolders, or those of its ``checkpoints``, that hold weights (safetensors) and a
    config.json and whose name ends in a number (``checkpoint-500``, ``step_1000``), and GGUF files named like that.

    Raises:
        RunError: the folder has no checkpoint.
        InputError: a name without a number, or a step that two have.
    """
    if isinstance(source, Mapping):
        if not source:
            raise InputError("no checkpoint was given; need a step and a model at least")
        return dict(sorted(source.items()))
    if not isinstance(source, str | Path):
        return _by_step(source)
    folder = Path(source)
    paths = [path for one in (folder, folder / "checkpoints") if one.is_dir() for path in one.iterdir()]
    models = [path for path in paths if _is_model(path) and _STEP.search(path.name.removesuffix(".gguf"))]
    if not models:
        raise RunError(
            f"{folder} is no run and has no checkpoint; need a run of sink-lens train, or folders with config.json and "
            "safetensors whose names end in their step, such as checkpoint-500. Give the folder that holds them."
        )
    return _by_step(models)


def tokens_seen(checkpoint: object, *, step: int, step_tokens: int | None) -> int | None:
    """Number of tokens that a checkpoint was trained on: ``step_tokens`` a step, else the Trainer's count, or None."""
    if step_tokens is not None:
        return step * step_tokens
    try:
        state = json_value((Path(str(checkpoint)) / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    seen = state.get("num_input_tokens_seen") if isinstance(state, dict) else None
    return seen if isinstance(seen, int) and (seen > 0 or step == 0) else None


def _is_model(path: Path) -> bool:
    """Check whether a path is a GGUF file or a folder with a configuration and safetensors."""
    if path.is_file():
        return path.suffix == ".gguf"
    return (path / "config.json").is_file() and any(True for name in _WEIGHTS for _ in path.glob(name))


def _by_step(models: Sequence[str | Path]) -> dict[int, str | Path | PreTrainedModel]:
    """Models by the step number that each one's name ends in, ascending."""
    by_step: dict[int, str | Path] = {}
    for model in models:
        name = str(model).rstrip("/").removesuffix(".gguf")
        number = _STEP.search(name.rpartition("/")[2])
        if number is None:
            raise InputError(
                f"{model} does not say its step; need a name that ends in a number, such as checkpoint-500"
            )
        step = int(number[1])
        if step in by_step:
            raise InputError(f"{by_step[step]} and {model} are both of step {step}; need each step once")
        by_step[step] = model
    return dict(sorted(by_step.items()))
