"""Checkpoints that ``sink-lens train`` did not write, by the step of each: a folder of them, or models."""

import re
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import InputError, RunError
from ..files import parse_json

Checkpoints = str | Path | Mapping[int, str | Path | PreTrainedModel]
"""A folder of checkpoints, or step -> what ``load`` takes."""

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def find_checkpoints(source: Checkpoints) -> dict[int, str | Path | PreTrainedModel]:
    """Return the checkpoints of ``source``, a folder or a mapping, as step -> checkpoint.

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
        weights = (
            [path]
            if path.suffix == ".gguf"
            else [one for name in _WEIGHTS for one in path.glob(name)]
        )
        if (
            number is None
            or not weights
            or not (path.is_file() or (path / "config.json").is_file())
        ):
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

    It is ``step`` times ``step_tokens`` or, if ``step_tokens`` is None, the count in its ``trainer_state.json``.
    """
    if step_tokens is not None:
        return step * step_tokens
    try:
        state = parse_json(
            (Path(str(checkpoint)) / "trainer_state.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    seen = state.get("num_input_tokens_seen") if isinstance(state, dict) else None
    return seen if isinstance(seen, int) and (seen > 0 or step == 0) else None
