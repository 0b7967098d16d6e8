"""``train``: a run folder from a configuration; the same call on a folder that holds part of it goes on from there.

``config.json``, ``tokenizer/`` (listed in ``tokenizer_files.json``), ``log.parquet``, ``checkpoints/`` and, where it is
asked for, ``watch.parquet``.
"""

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..errors import InputError, RunError, SinkLensError
from ..files import parse_json
from ..models.wrapping import keep_random_state
from ..records import Result, RunWriter, create_run, package_versions, write_atomically
from ..records.writing import refuse_foreign_files
from ..signatures import takes
from .arguments import check_batch_divisible, choose_device, silence_transformers, trainer_arguments
from .batches import Rows, TrainingRows, check_given_rows, load_training_rows, tokenizer_hash
from .checkpoint_files import (
    KEPT,
    PART,
    list_checkpoints,
    newest_checkpoint,
    refuse_foreign_folders,
    remove_checkpoint,
    remove_unsealed,
)
from .config import TrainConfig, read_train_config
from .loop import Loop, Steps
from .model import model_of

_TOKENIZER_FILES = "tokenizer_files.json"
"""File of a run that lists those which it has written into its folder ``tokenizer``."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(Result):
    """A training that has ended; its table is the log."""

    main = "log"
    folder: Path
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
    *,
    out: str | Path,
    config: TrainConfig | str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    data: tuple[Rows, Rows] | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    **fields: Any,
) -> TrainResult:
    """Train a model; the same call on a folder that holds part of the training does the rest.

    It goes on from the newest checkpoint whose files are whole; on the CPU every later checkpoint is that of a training
    that was not stopped, bit for bit. Ctrl-C ends the step and saves it, with a row of its own in the log; whatever
    else stops a training, within a step too, takes it back to the last step that was saved.
    Under ``torchrun`` or ``accelerate launch`` every process calls this; the first one writes.

    Args:
        out: the run folder.
        config: everything that decides the numbers, or a file of it; the defaults if None.
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

            loop = Loop(config, model=model, data=corpus, args=args)
            steps = Steps(
                loop,
                folder=folder / "checkpoints",
                writer=writer,
                watch=watch_run if config.watch and writer is not None else None,
                progress=progress and args.should_save,
            )
            with _save_on_interrupt(steps, alone=args.world_size == 1):
                steps.run(checkpoint)
        log = loop.log_frame()
        return TrainResult(
            folder=folder,
            config=config,
            tables={"log": log},
            headline=_headline(config, log, gains) if len(log) else "",  # another process may have none
            checkpoints={
                step: path
                for step, path in reversed(list_checkpoints(folder / "checkpoints").items())
                if path.name.startswith(KEPT)
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


@contextlib.contextmanager
def _open_run_folder(
    config: TrainConfig, corpus: TrainingRows, args: TrainingArguments, *, folder: Path, overwrite: bool
) -> Iterator[tuple[RunWriter | None, Path | None]]:
    """Yield (the run folder's writer, the checkpoint to resume from or None); only the first process has a writer."""
    provenance = {
        "data_source": corpus.source,
        "data_sha256": corpus.sha256,
        "tokenizer_sha256": tokenizer_hash(corpus.tokenizer),
        "tokens_sha256": corpus.sha256,
        "token_source": corpus.source,
        "bos_condition": config.bos,
        "dtype": config.dtype,
        "device": args.device.type,
        "processes": args.world_size,
        "kernel": "sdpa",
        "versions": package_versions(),
        "seeds": {"weights": config.seed, "order": config.data_seed},
    }
    tables = ("config", "log", "watch") if config.watch else ("config", "log")
    record: dict[str, Any] = {"config": asdict(config), "provenance": provenance, "expects": tables}
    writer, outcome = None, [None, None]
    with contextlib.ExitStack() as stack:
        if args.should_save:
            try:
                opened = create_run(folder, kind="train", overwrite=overwrite, reopen=True, **record)
                writer = stack.enter_context(opened)
                outcome = [None, _prepare_run(record["config"], corpus, writer, overwrite=overwrite)]
            except SinkLensError as error:
                outcome = [error, None]
        if args.world_size > 1:
            broadcast_object_list(outcome)
        error, checkpoint = outcome
        if error is not None:
            raise error
        yield writer, checkpoint


def _prepare_run(config: dict[str, Any], corpus: TrainingRows, writer: RunWriter, *, overwrite: bool) -> Path | None:
    """Write configuration and tokenizer into the run folder; return the checkpoint to resume from, or None."""
    folder, words = writer.folder / "checkpoints", writer.folder / "tokenizer"
    refuse_foreign_folders(folder, words)
    remove_unsealed(folder / PART)
    listed = writer.folder / _TOKENIZER_FILES
    own = parse_json(listed.read_text("utf-8")) if listed.is_file() else []
    with tempfile.TemporaryDirectory() as made:
        if corpus.tokenizer is not None:
            corpus.tokenizer.save_pretrained(made)
        files = {path.name: path.read_bytes() for path in sorted(Path(made).iterdir())}
    changed = [name for name, content in files.items() if not _holds(words / name, content)]
    refuse_foreign_files(words, changed, written=own)
    writer.write_text("config.json", json.dumps(config, indent=2) + "\n")
    if overwrite:
        for old in list_checkpoints(folder).values():
            remove_checkpoint(old)
        for name in own:
            (words / name).unlink(missing_ok=True)
    if files:
        words.mkdir(exist_ok=True)
        writer.write_text(_TOKENIZER_FILES, json.dumps(list(files)) + "\n")
    for name in changed:
        write_atomically(words / name, files[name])
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None and max(list_checkpoints(folder), default=0) > 0:
        raise RunError(
            f"{folder} has checkpoints and none that training can go on from; need one with the files that its "
            "checkpoint.json lists. Put them back, or train into another folder."
        )
    return checkpoint


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


@contextlib.contextmanager
def _save_on_interrupt(steps: Steps, *, alone: bool) -> Iterator[None]:
    """Within the block, a first Ctrl-C lets ``steps`` end the step, save and stop; a second one stops at once."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        if steps.stopping:
            raise KeyboardInterrupt
        steps.stopping = True

    own = alone and callable(before) and threading.current_thread() is threading.main_thread()
    if own:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGINT, before)
