"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sink_lens.chain.links.link import Link
from sink_lens.data.tokens import Tokens
from sink_lens.models.load import ModelLike

from . import circuits as circuits
from . import edits as edits
from . import identity as identity
from . import measures as measures
from . import patching as patching
from . import report as views
from . import studies as studies
from . import sweeps as sweeps
from . import training as training
from .activations.record import Reading as Reading
from .activations.record import capture as capture
from .activations.record import stream as stream
from .activations.sink_mask import sink_mask as sink_mask
from .activations.views import Captured as Captured
from .activations.views import Streamed as Streamed
from .chain.config import TraceConfig as TraceConfig
from .chain.trace import Trace as Trace
from .chain.trace import trace as _trace
from .circuits.logit_attribution import direct_logit_attribution as direct_logit_attribution
from .data.tokens import TokenBatch as TokenBatch
from .engine.answers import answers as answers
from .engine.forward import run_with as run_with
from .engine.generation import Generated as Generated
from .engine.generation import generate as generate
from .errors import SinkLensError as SinkLensError
from .models.headnorm.adapter import HeadNormForCausalLM as HeadNormForCausalLM
from .models.headnorm.configuration import HeadNormConfig as HeadNormConfig
from .models.lens import LensModel as LensModel
from .models.load import load as load
from .models.load import wrap as wrap
from .models.sites import SITES as SITES
from .records import read_run as read_run
from .records.reading import Run as Run
from .sweeps import sweep as sweep
from .training import train as train

def trace(
    model: ModelLike,
    tokens: Tokens | str | None = None,
    *,
    config: TraceConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    report: bool = True,
    links: Sequence[Link] = ...,
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 32,
    length: int = 64,
    batch_size: int | None = None,
    seed: int = 0,
    threshold: float = 0.3,
    min_sink_rate: float = 0.05,
    growth_factor: float = 2.0,
    dominance_threshold: float = 25.0,
    energy_frac: float = 0.8,
    max_outliers: int = 8,
    kernel: Literal["auto", "fused", "eager"] = "auto",
    at: str | None = None,
    super_share: float = 0.05,
    random_init: bool = True,
    interventions: bool = True,
    quick: bool = False,
    intervention_sequences: int | None = None,
    intervention_length: int = 64,
    target_position: int | None = None,
    controls: int | None = None,
    floors: Mapping[str, Any] | Iterable[str] | None = None,
) -> Trace: ...

__version__: str
