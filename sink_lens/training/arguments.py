"""The Trainer's arguments for a configuration, its device and its processes."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from ..errors import InputError
from .checkpoint_files import PART
from .config import TrainConfig

LAUNCH = "torchrun --nproc_per_node N --no-python sink-lens train FILE"


class OneGpuArguments(TrainingArguments):
    """Arguments of a Trainer that uses one GPU for each process, and never ``DataParallel`` over all of them."""

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)


def trainer_arguments(config: TrainConfig, folder: Path, *, device: str) -> TrainingArguments:
    """Build the Trainer's arguments; under a launcher, join its processes.

    Raises:
        InputError: the batch cannot be split evenly over the processes and the forwards of a step.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    micro, left = divmod(config.batch, config.accumulation * launched)
    if left or not micro:
        raise InputError(
            f"batch is {config.batch} sequences, for {launched} processes with {config.accumulation} "
            f"forwards per step each; need a multiple of {config.accumulation * launched}"
        )
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["HeadNormDecoderLayer"]}
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": wrapped} if config.fsdp else {}
    return OneGpuArguments(
        output_dir=str(folder / "checkpoints" / PART),
        max_steps=config.steps,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        max_grad_norm=config.clip,
        optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
        seed=config.seed,
        bf16=config.dtype == "bfloat16",
        torch_compile=config.compile,
        use_cpu=device == "cpu",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device == "cuda",
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        log_level_replica="error",
        report_to="none",
        **sharding,
    )


def choose_device(config: TrainConfig) -> str:
    """Return the device that the training runs on: cpu, cuda or mps.

    Raises:
        InputError: the device does not exist, or cannot do sharding or bfloat16 as the configuration asks.
    """
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    device = config.device or next(name for name in ("cuda", "mps", "cpu") if there[name])
    if not there[device]:
        raise InputError(
            f"device is {device} and there is none; need one of {', '.join(n for n in there if there[n])}"
        )
    if config.fsdp and device != "cuda":
        raise InputError(
            f"fsdp is asked for on {device}, where it would be skipped in silence; need GPUs. Leave fsdp out: "
            f"several processes share the work of a step without it too ({LAUNCH})"
        )
    if config.fsdp and "RANK" not in os.environ:
        raise InputError(f"fsdp is asked for in one process; need a launcher: {LAUNCH}")
    if config.dtype == "bfloat16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise InputError("dtype is bfloat16 and the GPU has none; need float32")
    return device


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def leave_process_group() -> None:
    """Leave the group of processes that ``train`` joined; without this call a launched program can hang at its end."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # the wrapped model first: where it is the last to hold the group, that is such a wait
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
