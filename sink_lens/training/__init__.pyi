"""The public names, each from the module that defines it: `__init__.py` reads this file."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sink_lens.data.tokens import TokenBatch
from sink_lens.records import RunWriter
from sink_lens.training.batches import Rows
from sink_lens.training.checkpoint_folders import Checkpoints

from .compare import Comparison as Comparison
from .compare import compare as _compare
from .config import CompareConfig as CompareConfig
from .config import TrainConfig as TrainConfig
from .config import WatchConfig as WatchConfig
from .logged import LogComparison as LogComparison
from .monitor import SinkMonitor as SinkMonitor
from .monitor_callback import SinkMonitorCallback as SinkMonitorCallback
from .prefix import PrefixConfig as PrefixConfig
from .prefix import PrefixModel as PrefixModel
from .prefix import get_prefix_model as _get_prefix_model
from .train import TrainResult as TrainResult
from .train import train as _train
from .watch import watch as _watch

def compare(
    runs: Sequence[str | os.PathLike[str]],
    *,
    config: CompareConfig | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    generator: np.random.Generator | None = None,
    group_by: Iterable[str] | str | None = None,
    baseline: str | None = None,
    threshold: float = 0.3,
    seed: int = 0,
) -> Comparison | LogComparison: ...
def get_prefix_model(
    model: PreTrainedModel,
    config: PrefixConfig | None = None,
    *,
    phi: Literal["elu", "elu_plus_one", "constant"] = "elu",
    share: Literal["kv_head", "head"] = "kv_head",
    rank: int | None = None,
    layers: Iterable[int] | str | None = None,
    seed: int = 0,
) -> PrefixModel: ...
def train(
    *,
    out: str | Path,
    config: TrainConfig | str | Path | None = None,
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
        "softmax",
        "sigmoid",
        "gate_elementwise",
        "gate_headwise",
        "sink_logit",
        "off_by_one",
        "key_bias",
    ] = "softmax",
    norm: Literal["rms", "single_scale"] = "rms",
    value_norm: Literal["none", "shared", "per_head", "position"] = "none",
    value_norm_init: Literal["first_token", "dummy_pass", "ones", "matched"] = "matched",
    bos: Literal["with", "without"] = "with",
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
def watch(
    run_folder: Checkpoints,
    *,
    config: WatchConfig | None = None,
    tokens: TokenBatch | None = None,
    writer: RunWriter | None = None,
    progress: bool = True,
    run: str | Path = "",
    out: str | Path | None = None,
    step_tokens: int | None = None,
    sequences: int = 32,
    length: int = 64,
    threshold: float = 0.3,
    device: str | None = None,
    resume: bool = True,
) -> pd.DataFrame: ...
