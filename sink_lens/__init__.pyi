"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from sink_lens.chain.links.link import Link
from sink_lens.chain.trace import Trace
from sink_lens.data.tokens import Tokens
from sink_lens.engine.measured import Measured
from sink_lens.models.load import ModelLike
from sink_lens.sweeps.cells import What
from sink_lens.sweeps.config import SweepConfig
from sink_lens.sweeps.results import SweepResult
from sink_lens.training.batches import Rows
from sink_lens.training.config import TrainConfig
from sink_lens.training.train import TrainResult

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
from .chain.config import TraceConfig as TraceConfig
from .chain.trace import trace as _trace
from .circuits.logit_attribution import direct_logit_attribution as direct_logit_attribution
from .data.tokens import TokenBatch as TokenBatch
from .engine.answers import answers as answers
from .engine.forward import run_with as run_with
from .engine.generation import generate as generate
from .errors import SinkLensError as SinkLensError
from .models.headnorm.adapter import HeadNormForCausalLM as HeadNormForCausalLM
from .models.headnorm.configuration import HeadNormConfig as HeadNormConfig
from .models.lens import LensModel as LensModel
from .models.load import load as load
from .models.load import wrap as wrap
from .models.sites import SITES as SITES
from .records import read_run as read_run
from .sweeps.sweep import sweep as _sweep
from .training.train import train as _train

def trace(
    model: TraceConfig | ModelLike,
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
    intervention_sequences: int = 20,
    intervention_length: int = 64,
    target_position: int | None = None,
    controls: int = 19,
    floors: Mapping[str, Any] | Iterable[str] | None = None,
) -> Trace: ...
def sweep(
    model: ModelLike | SweepConfig,
    what: What | None = None,
    *,
    tokens: Tokens | None = None,
    metrics: Sequence[Measured] | Measured = (),
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
def train(
    config: TrainConfig | str | Path | None = None,
    *,
    out: str | Path,
    overwrite: bool = False,
    progress: bool = True,
    data: tuple[Rows, Rows] | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    size: Literal["toy", "small", "medium", "paper"] = "toy",
    n_layers: int | None = None,
    d_model: int | None = None,
    d_mlp: int | None = None,
    n_heads: int | None = None,
    n_kv_heads: int = 0,
    vocab_size: int | None = None,
    rms_eps: float = 1e-06,
    rope_theta: float = 10000.0,
    tied: bool = True,
    init_std: float = 0.02,
    attention: Literal[
        "softmax", "sigmoid", "gate_elementwise", "gate_headwise", "sink_logit", "off_by_one", "key_bias"
    ] = "softmax",
    norm: Literal["rms", "single_scale"] = "rms",
    value_norm: Literal["none", "shared", "per_head", "position"] = "none",
    value_norm_init: Literal["first_token", "dummy_pass", "ones", "matched"] = "matched",
    bos: bool = True,
    eval_frac: float = 0.02,
    eval_sequences: int = 64,
    length: int | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    min_lr: float | None = None,
    warmup: int | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    weight_decay: float = 0.1,
    decay_unshared_gain: bool = False,
    betas: Iterable[float] | str = (0.9, 0.95),
    clip: float = 1.0,
    seed: int = 0,
    data_seed: int = 0,
    dtype: Literal["float32", "bfloat16"] | None = None,
    compile: bool = False,
    device: Literal["cpu", "cuda", "mps"] | None = None,
    fsdp: bool = False,
    log_every: int | None = None,
    eval_every: int | None = None,
    save_every: int | None = None,
    checkpoints: Iterable[int] | str = (),
    watch: bool = False,
) -> TrainResult: ...

__version__: str
