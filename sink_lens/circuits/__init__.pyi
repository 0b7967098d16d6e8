"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sink_lens.circuits.config import ReadyTask
from sink_lens.circuits.given import Given
from sink_lens.edits.metrics import Metric
from sink_lens.edits.outcome import Outcome
from sink_lens.models.load import ModelLike
from sink_lens.patching.pairs import Sequences

from .circuit import Circuit as Circuit
from .circuit import find as _find
from .config import CircuitConfig as CircuitConfig
from .curve import Curve as Curve
from .files import SavedCircuit as SavedCircuit
from .files import read as read
from .given import CircuitComparison as CircuitComparison
from .given import CircuitEvaluation as CircuitEvaluation
from .given import compare as compare
from .given import evaluate as _evaluate
from .graph import Graph as Graph
from .logit_attribution import LogitAttribution as LogitAttribution
from .run import CircuitRun as CircuitRun
from .run import run as _run
from .tasks import MetricOfTask as MetricOfTask
from .tasks import Task as Task
from .tasks import task_of as _task

def find(
    model: ModelLike,
    clean: Task | Sequences,
    corrupted: Sequences | None = None,
    *,
    metric: Metric | Callable[[Outcome], Any] | None = None,
    templates: Sequence[str] | None = None,
    config: CircuitConfig | None = None,
    progress: bool = True,
    sink_position: int = 0,
    method: Literal["eap-ig", "eap", "gim", "eap-corrupted", "eap-ig-left", "exact"] = "eap-ig",
    ablation: Literal["resample", "mean_ordinary", "mean_aligned", "mean_all", "zero"]
    | None = None,
    freeze: Literal["sink"] | None = None,
    steps: int = 5,
    most_steps: int = 160,
    tolerance: float = 0.01,
    edges: int | None = None,
    choice: Literal["top", "greedy", "threshold"] = "top",
    threshold: float = 0.0,
    neurons: Iterable[str] = (),
    spans: Mapping[str, Any] | Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    batch_size: int | None = None,
    seed: int = 0,
) -> Circuit: ...
def evaluate(
    model: ModelLike,
    pairs: Task | tuple[Sequences, Sequences | None],
    circuit: Given,
    *,
    metric: Metric | None = None,
    sizes: Sequence[float] = (),
    random: int = 3,
    config: CircuitConfig | None = None,
    sink_position: int = 0,
    ablation: Literal["resample", "mean_ordinary", "mean_aligned", "mean_all", "zero"]
    | None = None,
    freeze: Literal["sink"] | None = None,
    neurons: Iterable[str] = (),
    spans: Mapping[str, Any] | Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    batch_size: int | None = None,
    seed: int = 0,
) -> CircuitEvaluation: ...
def run(
    model: ModelLike,
    *,
    config: CircuitConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    report: bool = True,
    progress: bool = True,
    task: Literal[
        "ioi", "greater-than", "agreement", "capitals", "induction", "text", "file"
    ] = "ioi",
    pairs_file: str | Path | None = None,
    answers_as: Literal["text", "ids"] | None = None,
    pairs: int = 128,
    length: int = 64,
    metric: str | None = None,
    sink_position: int = 0,
    metric_layers: Iterable[int] | str | None = None,
    method: Literal["eap-ig", "eap", "gim", "eap-corrupted", "eap-ig-left", "exact"] = "eap-ig",
    ablation: Literal["resample", "mean_ordinary", "mean_aligned", "mean_all", "zero"]
    | None = None,
    freeze: Literal["sink"] | None = None,
    steps: int = 5,
    most_steps: int = 160,
    tolerance: float = 0.01,
    edges: int | None = None,
    circuit: str | Path | None = None,
    choice: Literal["top", "greedy", "threshold"] = "top",
    threshold: float = 0.0,
    neurons: Iterable[str] = (),
    spans: Mapping[str, Any] | Iterable[str] = (),
    sizes: Iterable[float] | str = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    nodes: bool = True,
    random: int = 3,
    check: int = 20,
    check_pairs: int = 8,
    core: bool = False,
    against: str | Path | None = None,
    save: Iterable[str] | Path = (),
    bos: Literal["auto", "with", "without"] = "auto",
    batch_size: int | None = None,
    seed: int = 0,
) -> CircuitRun: ...
def task(
    model: ModelLike,
    task: Literal[ReadyTask, "file"] | None = None,
    *,
    generator: np.random.Generator | None = None,
    least: float = 0.5,
    config: CircuitConfig | None = None,
    pairs_file: str | Path | None = None,
    answers_as: Literal["text", "ids"] | None = None,
    pairs: int = 128,
    spans: Mapping[str, Any] | Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    batch_size: int | None = None,
    seed: int = 0,
) -> Task: ...
