"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from sink_lens.edits.constructors import Edit
from sink_lens.edits.evaluation import Metric
from sink_lens.models.load import ModelLike
from sink_lens.patching.pairs import Sequences

from .attribution import attribution_patch as _attribution_patch
from .config import PatchConfig as PatchConfig
from .patch import patch as _patch
from .path import PathConfig as PathConfig
from .path import PathResult as PathResult
from .path import path_patch as _path_patch
from .results import AttributionResult as AttributionResult
from .results import PatchResult as PatchResult

def attribution_patch(
    model: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    config: PatchConfig | None = None,
    pairs_file: str | Path | None = None,
    answers_as: Literal["text", "ids"] | None = None,
    site: str = "resid_pre",
    metric: Literal["sink_mass", "logit_difference", "loss", "kl", "norm", "dominance"]
    | Metric
    | Callable[..., Any]
    | None = None,
    by: Iterable[str] | str = ("layer", "position"),
    direction: Literal["denoising", "noising"] = "denoising",
    layers: Iterable[int] | str | None = None,
    positions: Iterable[int] | str | None = None,
    heads: Iterable[int] | str | None = None,
    keys: Iterable[int] | str | None = None,
    units: Iterable[int] | str | None = None,
    sink_position: int = 0,
    metric_layers: Iterable[int] | str | None = None,
    correct: int | str | Sequence[Any] | None = None,
    incorrect: int | str | Sequence[Any] | None = None,
    bos: Literal["auto", "with", "without"] = "auto",
    steps: int = 1,
    seed: int = 0,
) -> AttributionResult: ...
def patch(
    model: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    config: PatchConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    pairs_file: str | Path | None = None,
    answers_as: Literal["text", "ids"] | None = None,
    site: str = "resid_pre",
    metric: Literal["sink_mass", "logit_difference", "loss", "kl", "norm", "dominance"]
    | Metric
    | Callable[..., Any]
    | None = None,
    by: Iterable[str] | str = ("layer", "position"),
    direction: Literal["denoising", "noising"] = "denoising",
    layers: Iterable[int] | str | None = None,
    positions: Iterable[int] | str | None = None,
    heads: Iterable[int] | str | None = None,
    keys: Iterable[int] | str | None = None,
    units: Iterable[int] | str | None = None,
    sink_position: int = 0,
    metric_layers: Iterable[int] | str | None = None,
    correct: int | str | Sequence[Any] | None = None,
    incorrect: int | str | Sequence[Any] | None = None,
    bos: Literal["auto", "with", "without"] = "auto",
    put: Literal[
        "source", "zero", "mean_ordinary", "mean_all", "mean_aligned", "resample", "scale", "set"
    ]
    | Callable[..., Any] = "source",
    edits: Iterable[Edit] | Edit = (),
    factor: float | None = None,
    controls: int = 5,
    batch_size: int | None = None,
    steps: int = 1,
    screen: int = 0,
    seed: int = 0,
) -> PatchResult: ...
def path_patch(
    model: ModelLike,
    clean: Sequences,
    corrupted: Sequences,
    *,
    config: PathConfig | None = None,
    progress: bool = True,
    sender: Any | None = None,
    receiver: Any | None = None,
    metric: Any | None = None,
    direction: Literal["denoising", "noising"] = "denoising",
    freeze: Literal["all", "attention"] = "all",
    bos: Literal["auto", "with", "without"] = "auto",
) -> PathResult: ...
