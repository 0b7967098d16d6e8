"""``train``: a run folder from a configuration; on a folder that holds part of the run, the rest of it."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..errors import InputError, RunError, SinkLensError
from ..models.wrapping import keep_random_state
from ..records import Result, RunWriter, create_run, package_versions, read_run
from ..records.checkpoints import checkpoint_folders
from ..signatures import takes
from . import checkpoint_files
from .arguments import choose_device, silence_transformers, trainer_arguments
from .batches import Rows, TrainingRows, check_given_rows, load_training_rows, tokenizer_hash
from .config import TrainConfig, read_train_config
from .loop import Loop, Steps
from .model import model_of


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
        """Return the end of the log."""
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
    else stops a training, within a step too, takes it back to the last step that was saved. Under ``torchrun`` or
    ``accelerate launch`` every process calls this; the first one writes.

    Args:
        out: the run folder.
        config: everything that decides the numbers, or a file of it; the defaults if None.
        overwrite: replace the run that the folder holds.
        progress: show a bar.
        data: (rows to train on, rows held out) instead of text; or a value of the configuration's field ``data``.
        tokenizer: tokenizer of such rows, saved with the model; or a value of the configuration's field ``tokenizer``.
        **fields: of ``TrainConfig``; they win over ``config``.

    Raises:
        InputError: a configuration, data or tokenizer that cannot be used here.
        RunError: the folder is in use or holds another run; the loss is not finite; a checkpoint cannot be written.
        KeyboardInterrupt: it was stopped; everything up to that step is saved.
    """
    if isinstance(data, str | Path):
        fields, data = fields | {"data": str(data)}, None
    if isinstance(tokenizer, str | Path):
        fields, tokenizer = fields | {"tokenizer": str(tokenizer)}, None
    if tokenizer is not None and data is None:
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__} and no rows were given; need data=(rows, rows) beside it, "
            "or the name of a tokenizer"
        )
    config = read_train_config(config, **fields)
    folder = Path(out)
    with keep_random_state(), silence_transformers():
        args = trainer_arguments(config, folder, device=choose_device(config))
        with args.main_process_first(local=False, desc="packing"):
            if data is None:
                corpus = load_training_rows(config, progress=progress and args.should_save)
            else:
                corpus = check_given_rows(config, data, tokenizer=tokenizer)
        model = model_of(config, tokenizer=corpus.tokenizer)
        gains = tuple(model.mean_gains())  # before a checkpoint is read
        with _open_run_folder(config, corpus, args, folder=folder, overwrite=overwrite) as (
            writer,
            checkpoint,
        ):
            loop = Loop(config, model=model, data=corpus, args=args)
            Steps(loop, writer=writer, progress=progress and args.should_save).run(checkpoint)
        log = loop.log_frame()
        return TrainResult(
            folder=folder,
            config=config,
            tables={"log": log},
            # Another process may have no log.
            headline=_headline(config, log, gains) if len(log) else "",
            checkpoints=checkpoint_folders(read_run(folder)),
            first=args.should_save,
        )


def _headline(config: TrainConfig, log: pd.DataFrame, gains: tuple[float, ...]) -> str:
    last, held_out = log.iloc[-1], log["eval_loss"].dropna()
    norm = "" if config.value_norm == "none" else f", value norm {config.value_norm}"
    if gains:
        least, most = f"{min(gains):.3g}", f"{max(gains):.3g}"
        over_layers = "" if least == most else f" to {most} over layers"
        norm += f" (first gain, {config.value_norm_init}: {least}{over_layers})"
    tail = f", held out {held_out.iloc[-1]:.4f}" if len(held_out) else ""
    return (
        f"{config.size}, {config.attention}{norm}, seed {config.seed}: {int(last['step']):,} steps, "
        f"{int(last['tokens']):,} tokens, {last['seconds']:,.0f} s; loss {last['loss']:.4f} nats{tail}"
    )


@contextlib.contextmanager
def _open_run_folder(
    config: TrainConfig,
    corpus: TrainingRows,
    args: TrainingArguments,
    *,
    folder: Path,
    overwrite: bool,
) -> Iterator[tuple[RunWriter | None, Path | None]]:
    """Yield (the run folder's writer in the first process, the checkpoint to resume from or None)."""
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
    written = asdict(config)
    writer, outcome = None, [None, None]
    with contextlib.ExitStack() as stack:
        if args.should_save:
            try:
                opened = create_run(
                    folder,
                    kind="train",
                    config=written,
                    provenance=provenance,
                    expects=("config", "log", *["watch"] * config.watch),
                    overwrite=overwrite,
                    reopen=True,
                )
                writer = stack.enter_context(opened)
                outcome = [None, _prepare_run(written, writer, overwrite=overwrite)]
            except SinkLensError as error:
                outcome = [error, None]
        if args.world_size > 1:
            broadcast_object_list(outcome)
        if outcome[0] is not None:
            raise outcome[0]
        yield writer, outcome[1]


def _prepare_run(config: dict[str, Any], writer: RunWriter, *, overwrite: bool) -> Path | None:
    folder = writer.folder / "checkpoints"
    checkpoint_files.refuse_foreign_folders(folder)
    checkpoint_files.remove_unsealed(folder / checkpoint_files.PART)
    writer.write_text("config.json", json.dumps(config, indent=2) + "\n")
    for old in checkpoint_files.list_checkpoints(folder).values() if overwrite else ():
        checkpoint_files.remove_checkpoint(old)
    checkpoint = checkpoint_files.newest_checkpoint(folder)
    if checkpoint is None and max(checkpoint_files.list_checkpoints(folder), default=0) > 0:
        raise RunError(
            f"{folder} has checkpoints and none that training can go on from; need one with the files that its "
            "checkpoint.json lists. Put them back, or train into another folder."
        )
    return checkpoint
