"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from sink_lens.data.tokens import Prompts
from sink_lens.engine.measured import Measured
from sink_lens.models.load import ModelLike
from sink_lens.sweeps.cells import Swept

from ..edits.named_metrics import MetricSpec as MetricSpec
from .cells import OwnCell as OwnCell
from .cells import cell_of as cell_of
from .config import SweepConfig as SweepConfig
from .config import read_sweep as _read_sweep
from .grid import EditGrid as EditGrid
from .grid import Grid as Grid
from .results import SweepResult as SweepResult
from .sweep import sweep as _sweep

def read_sweep(
    path: str | Path,
    *,
    model: str = "SmolLM2-135M-Instruct",
    controls: int | None = None,
    least_effect: float = 0.2,
    tokens: Literal["text", "random", "repeated"] = "text",
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    prompts_file: str | Path | None = None,
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 8,
    length: int = 64,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    retry_failed: bool = False,
    imports: Iterable[str] = (),
) -> SweepConfig: ...
def sweep(
    model: ModelLike,
    what: Swept | None = None,
    *,
    tokens: Prompts | None = None,
    metrics: Sequence[Measured] | Measured = (),
    config: SweepConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    controls: int | None = None,
    least_effect: float = 0.2,
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    prompts_file: str | Path | None = None,
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 8,
    length: int = 64,
    seed: int = 0,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    retry_failed: bool = False,
    imports: Iterable[str] = (),
) -> SweepResult: ...
