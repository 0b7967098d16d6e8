"""``train``: a run folder from a configuration; the same call on a folder that holds part of it goes on from there.

``config.json``, ``tokenizer/``, ``log.parquet``, ``checkpoints/`` and, where it is asked for, ``watch.parquet``.
"""

import contextlib
import gc
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from ..errors import InputError, RunError, SinkLensError
from ..models.private_apis import use_one_gpu
from ..models.wrapping import keep_random_state
from ..records import Result, RunWriter, create_run, package_versions
from ..signatures import takes
from . import checkpoint_files
from .batches import Rows, TrainingRows, check_given_rows, load_training_rows, tokenizer_hash
from .checkpoint_files import Checkpoint
from .config import TrainConfig, read_train_config
from .loop import Loop
from .model import model_of

LAUNCH = "torchrun --nproc_per_node N --no-python sink-lens train FILE"
"""Distribution of a training over processes."""


@dataclass(frozen=True, kw_only=True)
class TrainResult(Result):
    """A training that has ended; its table is the log."""

    main = "log"
    config: TrainConfig
    checkpoints: dict[int, Path]
    """Step -> folder that ``load`` opens."""
    first: bool = True
    """True if this is the process that wrote the run."""

    def notebook_parts(self) -> tuple[object, ...]:
        """Return the end of the log, which a notebook shows below the headline."""
        return (self.frame.tail(5),)


@takes(TrainConfig, loads=True)
def train(
    config: TrainConfig | str | Path | None = None,
    *,
    out: str | Path,
    overwrite: bool = False,
    progress: bool = True,
    data: tuple[Rows, Rows] | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    **fields: Any,
) -> TrainResult:
    """Train a model; the same call on a folder that holds part of the training does the rest.

    On the CPU a training that was stopped, in whatever way, and goes on equals one that was not, bit for bit. Under
    ``torchrun`` or ``accelerate launch`` every process calls this; the first one writes.

    Args:
        config: everything that decides the numbers, or a file of it; the defaults if None.
        out: the run folder.
        overwrite: replace the run that the folder holds.
        progress: show a bar.
        data: (rows to train on, rows held out) instead of text; or a value of the configuration's field ``data``.
        tokenizer: tokenizer of such rows, saved with the model; or a value of the configuration's field ``tokenizer``.
        **fields: fields of ``TrainConfig``, as ``size="small", seed=1``; they win over ``config``.

    Raises:
        InputError: a configuration, data or tokenizer that cannot be used here.
        RunError: the folder is in use or holds another run; the loss is not finite; a checkpoint cannot be written.
        KeyboardInterrupt: it was stopped; everything up to that step is saved.
    """
    fields |= {k: str(v) for k, v in {"data": data, "tokenizer": tokenizer}.items() if isinstance(v, str | Path)}
    rows = None if isinstance(data, str | Path) else data
    own_tokenizer = None if isinstance(tokenizer, str | Path) else tokenizer
    if own_tokenizer is not None and rows is None:
        raise InputError(
            f"tokenizer is a {type(own_tokenizer).__name__} and no rows were given; need data=(rows, rows) beside it, "
            "or the name of a tokenizer"
        )
    config = read_train_config(config, **fields)
    device = choose_device(config)
    folder = Path(out)
    with keep_random_state(), silence_transformers():
        args = trainer_arguments(config, folder, device=device)
        check_batch_divisible(config, args.world_size)
        with args.main_process_first(local=False, desc="packing"):
            corpus = (
                load_training_rows(config, progress=progress and args.should_save)
                if rows is None
                else check_given_rows(config, rows, tokenizer=own_tokenizer)
            )
        model = model_of(config, tokenizer=corpus.tokenizer)
        gains = tuple(model.mean_gains())  # before a checkpoint is read
        with _open_run_folder(config, corpus, args, folder=folder, overwrite=overwrite) as (writer, checkpoint):

            def watch_run() -> object:
                from .watch import watch  # with the chain, which nothing else here needs

                return watch(folder, writer=writer, device=config.device, progress=False)

            loop = Loop(
                config,
                model=model,
                data=corpus,
                args=args,
                folder=folder / "checkpoints",
                writer=writer,
                watch=watch_run if config.watch and writer is not None else None,
                progress=progress and args.should_save,
            )
            with _handle_interrupt(loop, args):
                loop.run(checkpoint)
        log = loop.log_frame()
        return TrainResult(
            folder=folder,
            config=config,
            tables={"log": log},
            headline=_headline(config, log, gains) if len(log) else "",  # another process may have none
            checkpoints={
                step: path
                for step, path in reversed(checkpoint_files.list_checkpoints(folder / "checkpoints").items())
                if path.name.startswith(checkpoint_files.KEPT)
            },
            first=args.should_save,
        )


def _headline(config: TrainConfig, log: pd.DataFrame, gains: tuple[float, ...]) -> str:
    """Return a sentence with model, time, last losses of ``log``, and the range of the value norm's first ``gains``."""
    last = log.iloc[-1]
    norm = "" if config.value_norm == "none" else f", value norm {config.value_norm}"
    if gains:
        least, most = f"{min(gains):.3g}", f"{max(gains):.3g}"
        norm += f" (first gain, {config.value_norm_init}: {least}" + f" to {most} over layers" * (least != most) + ")"
    held_out = log["eval_loss"].dropna()
    tail = f", held out {held_out.iloc[-1]:.4f}" if len(held_out) else ""
    return (
        f"{config.size}, {config.attention}{norm}, seed {config.seed}: {int(last['step']):,} steps, "
        f"{int(last['tokens']):,} tokens, {float(last['seconds']):,.0f} s; "
        f"loss {float(last['loss']):.4f} nats{tail}"
    )


def leave_process_group() -> None:
    """Leave the group of processes that ``train`` joined; without this call a launched program can hang at its end."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # the wrapped model first: where it is the last to hold the group, that is such a wait
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def trainer_arguments(config: TrainConfig, folder: Path, *, device: str) -> TrainingArguments:
    """Build the Hugging Face Trainer's arguments for ``folder`` on ``device``; under a launcher, join its processes."""
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["HeadNormDecoderLayer"]}
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": wrapped} if config.fsdp else {}
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    micro = max(1, config.batch // (config.accumulation * launched))
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
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
        data_seed=config.data_seed,
        bf16=config.dtype == "bf16",
        torch_compile=config.compile,
        use_cpu=device == "cpu",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device == "cuda",
        label_names=["labels"],
        remove_unused_columns=False,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        report_to="none",
        run_name=folder.name,
        **sharding,
    )
    if args.n_gpu > 1:  # without a launcher: one GPU, and not the Trainer's old data parallel
        use_one_gpu(args)
    return args


def choose_device(config: TrainConfig) -> str:
    """Return the device that the training runs on: cpu, cuda or mps.

    Raises:
        InputError: the device does not exist, or cannot do sharding or bf16 as the configuration asks.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = config.device or next(name for name in ("cuda", "mps", "cpu") if there[name])
    if not there[device]:
        raise InputError(f"device is {device} and there is none; need one of {', '.join(n for n in there if there[n])}")
    if config.fsdp and device != "cuda":
        raise InputError(
            f"fsdp is asked for on {device}, where it would be skipped in silence; need GPUs. Leave fsdp out: "
            f"several processes share the work of a step without it too ({LAUNCH})"
        )
    if config.fsdp and "RANK" not in os.environ:
        raise InputError(f"fsdp is asked for in one process; need a launcher: {LAUNCH}")
    if config.dtype == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise InputError("dtype is bf16 and the GPU has none; need float32")
    return device


def check_batch_divisible(config: TrainConfig, n_processes: int) -> None:
    """Refuse a batch that cannot be split evenly over the processes and the forwards of a step."""
    if config.batch % (config.accumulation * n_processes):
        raise InputError(
            f"batch is {config.batch} sequences, for {n_processes} processes with {config.accumulation} "
            f"forwards per step each; need a multiple of {config.accumulation * n_processes}"
        )


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide the messages and progress bars of transformers within the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _open_run_folder(
    config: TrainConfig, corpus: TrainingRows, args: TrainingArguments, *, folder: Path, overwrite: bool
) -> Iterator[tuple[RunWriter | None, Checkpoint | None]]:
    """Yield (the run folder's writer, the checkpoint to resume from or None); only the first process has a writer."""
    writer: RunWriter | None = None
    outcome: list[Any] = [None, None]
    provenance = {
        "data_source": corpus.source,
        "data_sha256": corpus.sha256,
        "tokenizer_sha256": tokenizer_hash(corpus.tokenizer),
        "tokens_sha256": corpus.sha256,
        "token_source": corpus.source,
        "bos_condition": "with" if config.bos else "without",
        "dtype": config.dtype,
        "device": args.device.type,
        "processes": args.world_size,
        "kernel": "sdpa",
        "versions": package_versions(),
        "seeds": {"weights": config.seed, "order": config.data_seed},
    }
    with contextlib.ExitStack() as stack:
        if args.should_save:
            try:
                opened = create_run(
                    folder,
                    kind="train",
                    config=asdict(config),
                    provenance=provenance,
                    expects=("config", "log", "watch") if config.watch else ("config", "log"),
                    overwrite=overwrite,
                    reopen=True,
                )
                writer = stack.enter_context(opened)
                outcome = [None, _prepare_run(config, corpus, writer, overwrite=overwrite)]
            except SinkLensError as error:
                outcome = [error, None]
        if args.world_size > 1:
            broadcast_object_list(outcome)
        error, checkpoint = outcome
        if error is not None:
            raise error
        yield writer, checkpoint


def _prepare_run(config: TrainConfig, corpus: TrainingRows, writer: RunWriter, *, overwrite: bool) -> Checkpoint | None:
    """Write configuration and tokenizer into the run folder; return the checkpoint to resume from, or None."""
    folder = writer.folder / "checkpoints"
    if overwrite:
        for name in ("checkpoints", "tokenizer"):
            shutil.rmtree(writer.folder / name, ignore_errors=True)
    writer.write_text("config.json", json.dumps(asdict(config), indent=2) + "\n")
    if corpus.tokenizer is not None:
        corpus.tokenizer.save_pretrained(str(writer.folder / "tokenizer"))
    checkpoint = checkpoint_files.newest_checkpoint(folder)
    if checkpoint is None and any(checkpoint_files.list_checkpoints(folder)):
        raise RunError(
            f"{folder} has checkpoints and none that training can go on from; need one with the files that its "
            "checkpoint.json lists. Put them back, or train into another folder."
        )
    checkpoint_files.remove_checkpoints_after(folder, -1 if checkpoint is None else checkpoint.step)
    return checkpoint


@contextlib.contextmanager
def _handle_interrupt(loop: Loop, args: TrainingArguments) -> Iterator[None]:
    """Within the block, a first Ctrl-C lets ``loop`` save and stop, a second one stops at once; then write the log."""
    own = args.world_size == 1 and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        if loop.stopping or not callable(before):
            raise KeyboardInterrupt
        loop.stopping = True

    if own:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    except BaseException as error:
        try:
            if loop.rows:
                loop.write_log()
        except RunError as unwritten:
            error.add_note(f"the log was not written: {unwritten}")
        raise
    finally:
        if own:
            signal.signal(signal.SIGINT, before)
    loop.write_log()
