"""Checkpoints that ``sink-lens train`` did not write, by the step of each: a folder of them, or models."""

import re
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import InputError, RunError
from ..files import parse_json

Checkpoint = str | Path | PreTrainedModel
Checkpoints = str | Path | Mapping[int, Checkpoint]
"""A folder of checkpoints, or step -> what ``load`` takes."""

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def find_checkpoints(source: Checkpoints) -> dict[int, Checkpoint]:
    """Return step -> checkpoint, ascending.

    In a folder, or in its subfolder ``checkpoints``, a checkpoint is a folder with weights (safetensors) and a
    config.json, or a GGUF file; its name ends in the step (``checkpoint-500``, ``step_1000``).

    Raises:
        RunError: the folder has no checkpoint.
        InputError: two checkpoints have the same step.
    """
    if isinstance(source, Mapping):
        if not source:
            raise InputError("no checkpoint was given; need a step and a model at least")
        return dict(sorted(source.items()))
    folder = Path(source)
    by_step: dict[int, Path] = {}
    for path in (
        path for one in (folder, folder / "checkpoints") if one.is_dir() for path in one.iterdir()
    ):
        number = re.search(r"(\d+)$", path.name.removesuffix(".gguf"))
        has_weights = path.suffix == ".gguf" or any(any(path.glob(name)) for name in _WEIGHTS)
        is_model = path.is_file() or (path / "config.json").is_file()
        if number is None or not (has_weights and is_model):
            continue
        if (step := int(number[1])) in by_step:
            raise InputError(
                f"{by_step[step]} and {path} are both of step {step}; need each step once"
            )
        by_step[step] = path
    if not by_step:
        raise RunError(
            f"{folder} is no run and has no checkpoint; need a run of sink-lens train, or folders with config.json and "
            "safetensors whose names end in their step, such as checkpoint-500. Give the folder that holds them."
        )
    return dict(sorted(by_step.items()))


def count_tokens_seen(checkpoint: object, *, step: int, step_tokens: int | None) -> int | None:
    """Return the number of tokens that a checkpoint was trained on; None if it is not known.

    If ``step_tokens`` is None, it is the count in ``trainer_state.json``.
    """
    if step_tokens is not None:
        return step * step_tokens
    file = Path(str(checkpoint)) / "trainer_state.json"
    try:
        state = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    seen = state.get("num_input_tokens_seen") if isinstance(state, dict) else None
    return seen if isinstance(seen, int) and (seen > 0 or step == 0) else None
