"""Configurations of ``train``, ``watch`` and ``compare``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ..configuration import (
    check_at_least,
    check_at_most,
    check_field_types,
    convert_field_value,
    make_config,
    read_settings,
    refuse_unknown_names,
)
from ..errors import InputError
from ..models.variants import Attention, StreamNorm, ValueNorm, ValueNormInit
from ..schema import SINK_THRESHOLD

Size = Literal["toy", "small", "medium", "paper"]

_BY_SIZE: dict[str, tuple[Any, ...]] = {
    "n_layers": (6, 6, 10, 12),
    "d_model": (192, 320, 512, 768),
    "d_mlp": (512, 864, 1408, 3072),
    "n_heads": (6, 5, 8, 12),
    "vocab_size": (4096, 8192, 16384, 50304),
    "length": (128, 512, 1024, 4096),
    "batch": (32, 64, 128, 60),  # 12 x 5
    "accumulation": (1, 1, 4, 5),
    "steps": (600, 3000, 5000, 40_000),
    "lr": (2e-3, 2e-3, 1.5e-3, 1e-3),
    "min_lr": (2e-4, 2e-4, 1.5e-4, 1e-4),
    "warmup": (60, 200, 500, 2000),
    "dtype": ("float32", "float32", "bfloat16", "bfloat16"),
    "log_every": (10, 10, 10, 20),
    "eval_every": (100, 250, 500, 1000),
    "save_every": (200, 500, 500, 1000),
}
"""Field -> its value in toy (3.4M parameters), small (10M), medium (40M) and paper (152M): arXiv 2605.06611, Tables 3
and 4; batch and accumulation are those of the authors' README."""
SIZES: dict[Size, dict[str, Any]] = {
    size: {name: values[place] for name, values in _BY_SIZE.items()}
    for place, size in enumerate(get_args(Size))
}
"""Name -> the fields of ``TrainConfig`` that go with a size."""

_OF_SIZE: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A model, its data, and how it is trained; every field that a size sets may be given."""

    size: Size = "toy"
    """toy (3M parameters), small (10M), medium (40M) or paper (152M); it sets the fields without a default."""

    n_layers: int = _OF_SIZE
    """Number of layers."""
    d_model: int = _OF_SIZE
    """Width of the residual stream."""
    d_mlp: int = _OF_SIZE
    """Neurons of each layer's SwiGLU MLP."""
    n_heads: int = _OF_SIZE
    """Query heads of each layer."""
    n_kv_heads: int = 0
    """Key-value heads of each layer; 0 for as many as query heads."""
    vocab_size: int = _OF_SIZE
    """Rows of the embedding; a tokenizer may have fewer ids, not more."""
    rms_eps: float = 1e-6
    """Number added under the root of every RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    tied: bool = True
    """Use the embedding matrix as the unembedding too."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 n_layers) for output projections."""
    attention: Attention = "softmax"
    """softmax, sigmoid, gate_elementwise, gate_headwise, sink_logit (a learned one), off_by_one (the same at 0) or
    key_bias (a learned key whose value is 0)."""
    norm: StreamNorm = "rms"
    """Norm of the residual stream: rms (a gain for each dimension) or single_scale (one gain; arXiv 2506.19697)."""
    value_norm: ValueNorm = "none"
    """Head-wise RMSNorm of the aggregated values: none, shared (one gain for all heads) or per_head; position instead
    scales them by the root of how many they average."""
    value_norm_init: ValueNormInit = "matched"
    """Initial gain of value_norm: first_token (the size of the first token's head output on noise, mean of 64 draws),
    dummy_pass (the same from one draw, with a biased deviation, as in the released code), ones, or matched (the size
    of a head's output in the same model without the norm, by layer, on random tokens)."""

    data: str = "bundled"
    """bundled; a text, JSONL or Parquet file, or a folder of such files; a folder that ``datasets`` saved; or a data
    set of the model hub (OWNER/NAME; streamed: OWNER/NAME[:1000])."""
    tokenizer: str = "bpe"
    """bpe (a byte-level one of vocab_size ids, trained on the data), a saved tokenizer's folder or a model's name."""
    bos: Literal["with", "without"] = "with"
    """BOS in front of every sequence, or none."""
    eval_frac: float = 0.02
    """Share of the sequences held out for evaluation."""
    eval_sequences: int = 64
    """Maximum number of held-out sequences in an evaluation."""

    length: int = _OF_SIZE
    """Tokens per sequence, BOS included; the model's context too."""
    batch: int = _OF_SIZE
    """Sequences per step, over all processes."""
    accumulation: int = _OF_SIZE
    """Number of forward passes into which each process splits its part of a step."""
    steps: int = _OF_SIZE
    """Number of optimiser steps."""
    lr: float = _OF_SIZE
    """Largest learning rate."""
    min_lr: float = _OF_SIZE
    """Learning rate at the end of the cosine schedule."""
    warmup: int = _OF_SIZE
    """Steps over which the learning rate rises from 0 to its largest value."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of the layers and adamw for the rest."""
    weight_decay: float = 0.1
    """Weight decay of matrices; gains, biases and sink logits are not decayed."""
    decay_unshared_gain: bool = False
    """Decay the gain of value_norm per_head like a matrix, as the released code of arXiv 2605.06611 does."""
    betas: tuple[float, ...] = field(
        default=(0.9, 0.95), metadata={"written": "commas", "metavar": "F,F"}
    )
    """The two betas of AdamW."""
    clip: float = 1.0
    """Clip the gradient to this norm; 0 for no clipping."""

    seed: int = 0
    """Seed of the initial weights."""
    data_seed: int = 0
    """Seed of the order of the sequences only: variants with the same seed see the same tokens."""
    dtype: Literal["float32", "bfloat16"] = _OF_SIZE
    """float32, or bfloat16: autocast, with weights and optimiser state in float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    device: Literal["cpu", "cuda", "mps"] | None = None
    """cpu, cuda or mps. Default: the first GPU, else the CPU."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer over the processes; needs GPUs and a launcher."""

    log_every: int = _OF_SIZE
    """Steps between rows of the log."""
    eval_every: int = _OF_SIZE
    """Steps between evaluations; 0 for none."""
    save_every: int = _OF_SIZE
    """Steps between checkpoints that are kept only for resuming; 0 for none."""
    checkpoints: tuple[int, ...] = field(default=(), metadata={"written": "ranges"})
    """Steps whose checkpoints are kept, besides 0, the powers of two and the last step."""
    watch: bool = False
    """Measure the chain on every kept checkpoint and write watch.parquet."""

    def __post_init__(self) -> None:
        # A size of another type is refused below.
        of_size = SIZES.get(self.size, {}) if isinstance(self.size, str) else {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None:
                value = of_size.get(one.name)
                if one.name == "warmup" and value is not None and value >= self.steps:
                    value = self.steps // 10  # a training that is shorter than its size's warm-up
            if value is not None or self.size in tuple(SIZES):
                object.__setattr__(self, one.name, convert_field_value(one, one.type, value))
        check_field_types(self)
        if self.n_kv_heads == 0:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        self._check_values()

    @property
    def d_head(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.n_heads

    @property
    def step_tokens(self) -> int:
        """Tokens that the model is trained on in one step."""
        return self.batch * self.length

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints are kept for good, ascending: 0, powers of two, the last, and ``checkpoints``."""
        powers = {2**power for power in range(self.steps.bit_length())}
        return tuple(sorted({0, *powers, self.steps, *self.checkpoints}))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate at the update ``step`` of the weights; the first update is step 0.

        It rises linearly to ``lr`` over the warm-up (never 0: the first update counts), then falls along a cosine that
        would reach ``min_lr`` at the update after the last.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * done)) / 2

    def _check_values(self) -> None:
        for least, names in _LEAST.items():
            check_at_least(self, least, *names)
        for most, names in _MOST.items():
            check_at_most(self, most, *names)
        if self.fsdp and self.optimizer == "muon":
            raise InputError(
                "fsdp is asked for with the optimizer muon, which needs whole matrices; need adamw"
            )
        if self.fsdp and self.device in ("cpu", "mps"):
            raise InputError(
                f"fsdp is asked for on {self.device}; need GPUs: device = 'cuda', or leave fsdp out"
            )
        for name in ("data", "tokenizer"):
            if not getattr(self, name).strip():
                raise InputError(f"{name} is empty; need a name or a path")
        for name in ("lr", "init_std", "rope_theta", "rms_eps"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; need a number above 0")
        if self.d_model % self.n_heads or self.d_head % 2:
            raise InputError(
                f"d_model is {self.d_model} and n_heads {self.n_heads}; need heads of an equal, even width"
            )
        for name, divisor in (("n_heads", "n_kv_heads"), ("batch", "accumulation")):
            whole, part = getattr(self, name), getattr(self, divisor)
            if whole % part:
                raise InputError(
                    f"{name} is {whole} and {divisor} {part}; need a multiple of {divisor}"
                )
        if self.decay_unshared_gain and self.value_norm != "per_head":
            raise InputError(
                f"decay_unshared_gain is true and value_norm {self.value_norm!r}; need per_head, or false"
            )
        if self.min_lr > self.lr:
            raise InputError(
                f"min_lr is {self.min_lr} and lr {self.lr}; need a min_lr of at most lr"
            )
        if self.warmup >= self.steps:
            raise InputError(
                f"warmup is {self.warmup} and steps {self.steps}; need fewer steps of warm-up"
            )
        if not 0 < self.eval_frac <= 0.5:
            raise InputError(f"eval_frac is {self.eval_frac}; need a number above 0, up to 0.5")
        if self.watch and self.length < 10:
            raise InputError(
                f"watch is asked for with sequences of {self.length} tokens; need a length of 10 at least"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas is {self.betas}; need two numbers from 0 to below 1")
        if outside := [step for step in self.checkpoints if not 0 <= step <= self.steps]:
            raise InputError(f"checkpoints has {outside}; need steps from 0 to {self.steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Configuration of ``watch``."""

    run: str = field(default="", metadata={"positional": True, "metavar": "FOLDER"})
    """Folder of a run of sink-lens train, or of any checkpoints (checkpoint-500, step_1000, ...)."""
    out: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Run folder, for checkpoints that sink-lens train did not write. Default: runs/watch-NAME."""
    step_tokens: int | None = field(default=None, metadata={"metavar": "N"})
    """Tokens per step, for checkpoints that sink-lens train did not write. Default: what the Hugging Face Trainer
    counted; without a count, tokens are unknown."""
    sequences: int = 32
    """Number of sequences, from the run's own evaluation data if there are any, else from the bundled prose."""
    length: int = field(default=64, metadata={"metavar": "T"})
    """Tokens per sequence, BOS included; the run's own context if that is shorter."""
    threshold: float = SINK_THRESHOLD
    """A head has a sink if its sink score is above this; 0.05 (on sequences of at least 105 tokens), 0.1 (44), 0.2 (18)
    and 0.3 are measured too."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    resume: bool = field(default=True, metadata={"off": "again"})
    """Keep earlier measurements, or measure every checkpoint again."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if not self.run:
            raise InputError(
                "no run was given; need the folder of a training: sink-lens watch runs/NAME"
            )
        if self.step_tokens is not None:
            check_at_least(self, 1, "step_tokens")
        check_at_least(self, 1, "sequences")
        check_at_least(self, 10, "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """Training runs to compare, and the comparison."""

    runs: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "RUN"})
    """Folders of finished runs of sink-lens train; or of your own Trainer's, with its trainer_state.json or a monitor's
    run."""
    group_by: tuple[str, ...] | None = field(
        default=None, metadata={"written": "commas", "metavar": "FIELD[,FIELD]"}
    )
    """The field of the configuration that is compared. Default: the one that differs."""
    baseline: str | None = field(default=None, metadata={"metavar": "VALUE"})
    """The variant that the others are compared with. Default: softmax attention without a value norm."""
    threshold: float = SINK_THRESHOLD
    """A head has a sink if its sink score is above this."""
    seed: int = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        check_field_types(self)


_LEAST = {
    0: ("warmup", "eval_every", "save_every", "min_lr", "weight_decay", "clip"),
    1: (
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "d_mlp",
        "batch",
        "accumulation",
        "steps",
        "log_every",
        "eval_sequences",
    ),
    2: ("d_model", "vocab_size", "length"),
}
"""Smallest value -> its fields."""
_MOST = {
    1.0: ("init_std",),
    10_000: ("n_layers",),
    1_000_000: ("d_model", "d_mlp", "n_heads", "n_kv_heads", "batch", "accumulation"),
    10_000_000: ("vocab_size", "length"),
    2**63 - 1: ("steps", "warmup", "log_every", "eval_every", "save_every", "eval_sequences"),
}
"""Largest value that is accepted -> its fields, so that a typo does not run for ever."""

EXAMPLE = """\
# A training of sink-lens. Everything has a default; what a size sets can be set here too.
size = "toy"              # toy 3M, small 10M, medium 40M, paper 152M parameters
# n_layers, d_model, d_mlp, n_heads, n_kv_heads, vocab_size, rms_eps, rope_theta, tied, init_std

attention = "softmax"     # sigmoid, gate_elementwise, gate_headwise, sink_logit, off_by_one, key_bias
value_norm = "none"       # shared, per_head: RMSNorm of each head's aggregated values; position: scaled by position
# value_norm_init = "matched"  # or dummy_pass, as in the released code; first_token; ones

data = "bundled"          # a file or folder of texts, or OWNER/NAME on the model hub
tokenizer = "bpe"         # trained on the data, vocab_size ids; or a tokenizer's folder, or a model's name
# bos, eval_frac, eval_sequences

steps = 600
batch = 32                # sequences per step, over all processes
# length, accumulation, optimizer, lr, min_lr, warmup, weight_decay, decay_unshared_gain, betas, clip

seed = 0                  # of the weights
data_seed = 0             # of the order of the data: the same in every variant
dtype = "float32"         # bfloat16: autocast
compile = false           # torch.compile
# device = "cpu"          # cuda, mps; without it the first GPU
# fsdp = true             # shard over the GPUs of torchrun or accelerate launch

log_every = 10
eval_every = 100
save_every = 200          # to go on from; those of 0, 1, 2, 4, 8, ... and the end are kept
checkpoints = []          # more that are kept, by step
watch = false             # measure the chain on every checkpoint that is kept
"""
"""A file to begin with."""


def read_train_config(config: TrainConfig | str | Path | None, **changes: Any) -> TrainConfig:
    """Return a training's configuration from the path of its TOML or JSON file; ``changes`` win over it.

    None gives the default one.

    Raises:
        InputError: the file is missing or cannot be read, has a key that is not known, or a value that cannot be used.
    """
    if isinstance(config, TrainConfig):
        if "size" in changes:
            raise InputError(
                "a configuration and a size were given; the configuration has its own: leave one out"
            )
        if "n_heads" in changes and config.n_kv_heads == config.n_heads:
            changes.setdefault("n_kv_heads", 0)  # as many as query heads, as before
        return make_config(TrainConfig, config, changes, where="train")
    if config is None:
        return build_train_config({}, **changes)
    return build_train_config(
        read_settings(config, what="a training"), where=str(config), **changes
    )


def build_train_config(
    given: Mapping[str, Any], *, where: str = "the configuration", **changes: Any
) -> TrainConfig:
    """Build a training's configuration from a mapping, called ``where`` in errors; ``changes`` win over it.

    Raises:
        InputError: a key that is not known, or a value that cannot be used.
    """
    refuse_unknown_names(given, [one.name for one in fields(TrainConfig)], where=where)
    return make_config(TrainConfig, None, {**given, **changes}, where="train")
