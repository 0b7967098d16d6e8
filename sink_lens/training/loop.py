"""The Hugging Face Trainer with our order of the data and our schedule; a callback says what is due after a step.

What it does at a step is decided by the step alone, so that a run that goes on from a checkpoint is the run that
was never stopped.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from ..errors import RunError, first_line_of_error
from ..models.headnorm import undecayed
from ..models.wrapping import keep_random_state
from ..progress import tqdm
from ..records import RunWriter
from .batches import Order, TrainingRows, stack_batch
from .checkpoint_files import (
    KEPT,
    LATEST,
    list_checkpoints,
    remove_superseded_checkpoints,
    remove_unsealed,
    seal_checkpoint,
)
from .config import TrainConfig
from .muon import MuonWithAdamW

_FLOATS = ("loss", "lr", "grad_norm", "seconds", "eval_loss")
COLUMNS = {"step": "int64", "tokens": "int64"} | dict.fromkeys(_FLOATS, "float64")
"""Columns of the log: the loss is the mean over the steps since the row before; nan where there is nothing."""


class Loop(Trainer):
    """A Trainer of which public methods alone are overridden."""

    def __init__(
        self, config: TrainConfig, *, model: PreTrainedModel, data: TrainingRows, args: TrainingArguments
    ) -> None:
        self.config, self.data = config, data
        self.undecayed = frozenset(undecayed(model, unshared_gain=not config.decay_unshared_gain))
        rows: dict[str, Any] = {"train_dataset": data.train, "eval_dataset": data.evaluation}
        super().__init__(model=model, args=args, data_collator=stack_batch, **rows)
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches of the training, in our order of the sequences."""
        drawn = self.config.steps * self.config.batch
        batches = DataLoader[Any](
            cast("Any", self.data.train),
            batch_size=self.args.per_device_train_batch_size,
            sampler=Order(n_sequences=len(self.data.train), drawn=drawn, seed=self.config.data_seed),
            collate_fn=stack_batch,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(batches)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the model's parameters with weight decay: all but those in ``undecayed``."""
        return [name for name, _ in model.named_parameters() if name not in self.undecayed]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the optimizer, AdamW or Muon with AdamW; the first call makes it for ``model`` (None: our model)."""
        if self.config.optimizer == "muon" and self.optimizer is None:
            self.optimizer = MuonWithAdamW(
                cast("nn.Module", self.model if model is None else model),
                lr=self.config.lr,
                weight_decay=self.config.weight_decay,
                betas=(self.config.betas[0], self.config.betas[1]),
                undecayed=self.undecayed,
            )
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the learning-rate schedule of ``optimizer``, a warm-up and a cosine over the configuration's steps."""
        own = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = LambdaLR(own, lambda step: self.config.learning_rate(step) / self.config.lr)
        return self.lr_scheduler

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Return the evaluation's losses; the random state is left alone."""
        with keep_random_state():
            return super().evaluate(*given, **named)

    def log_frame(self) -> pd.DataFrame:
        """Return the log so far, one row per logged step."""
        rows: dict[int, dict[str, Any]] = {}
        for entry in cast("list[dict[str, Any]]", self.state.log_history):
            if "seconds" in entry:  # not the Trainer's summary at the end
                rows.setdefault(entry["step"], {}).update(entry)
        for row in rows.values():
            row["lr"] = row.get("learning_rate", math.nan)
        return pd.DataFrame(list(rows.values()), columns=list(COLUMNS)).astype(COLUMNS)


class Steps(TrainerCallback):
    """What is due after each step of a training: a row of the log, an evaluation, a checkpoint."""

    def __init__(
        self,
        loop: Loop,
        *,
        folder: Path,
        writer: RunWriter | None = None,
        watch: Callable[[], object] | None = None,
        progress: bool = False,
    ) -> None:
        self.loop, self.config, self.folder, self.writer, self.watch = loop, loop.config, folder, writer, watch
        self.part = Path(str(loop.args.output_dir))
        """Folder in which the Trainer writes a checkpoint."""
        self.progress, self.stopping = progress, False
        self._begun = self._written = time.perf_counter()
        self._bar: Any = None
        self._resumed = folder

    def run(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint or, if it is None, from the initial weights.

        Raises:
            RunError: the loss or the gradient is not finite, or a checkpoint cannot be written.
            KeyboardInterrupt: Ctrl-C was pressed (``stopping`` is set); the state is saved.
        """
        self.loop.add_callback(self)
        self._resumed = checkpoint or self.folder
        try:
            if checkpoint is not None and (weights := checkpoint / SAFE_WEIGHTS_NAME).is_file():
                safetensors.torch.load_model(cast("nn.Module", self.loop.model), weights)  # the Trainer is not strict
            self.loop.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except Exception as error:
            full = isinstance(error, OSError | RuntimeError | SafetensorError) and any(self.part.glob("*"))
            if full:  # torch's error of a full disk is a RuntimeError
                raise RunError(
                    f"the checkpoint of step {self.loop.state.global_step} cannot be written to {self.folder} "
                    f"({first_line_of_error(error)}; {shutil.disk_usage(self.folder).free:,} bytes are free). "
                    f"{self._last_checkpoint_text()} Free some space and run the same again: it goes on from there."
                ) from error
            if checkpoint is not None and checkpoint.is_dir():
                error.add_note(f"the training went on from {checkpoint}, which is still there")
            raise
        finally:
            if self._bar is not None:
                self._bar.close()
            if self.writer is not None:
                with contextlib.suppress(OSError, RunError):
                    remove_unsealed(self.part)
                if self.loop.state.log_history:
                    with contextlib.suppress(RunError):  # an error on its way says more
                        self.write_log()
        if self.stopping and self.loop.state.global_step < self.config.steps:
            raise KeyboardInterrupt

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **named: Any) -> None:
        """Start the clock and the progress bar; in a new run, also evaluate and save step 0."""
        step = state.global_step
        if step and not state.log_history:  # of an earlier version, which kept the log in a file of its own
            log = pd.read_parquet(self._resumed / "log.parquet").rename(columns={"lr": "learning_rate"})
            state.log_history = log.to_dict("records")
        self._begun = time.perf_counter() - (state.log_history[-1]["seconds"] if step else 0.0)
        if self.progress:
            told = f"train, on from the end of step {step}" if step else "train"
            how: dict[str, Any] = {"desc": told, "unit": "step", "leave": False, "mininterval": 0.5}
            self._bar = tqdm(total=self.config.steps, initial=step, **how)
        if step == 0:
            self.loop.log({})
            if self.config.eval_every:
                self.loop.evaluate()
            self.loop.save_model(str(self.part / f"{KEPT}0"))
            self.on_save(args, state, control)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **named: Any) -> None:
        """Tell the Trainer what is due."""
        step, config = state.global_step, self.config
        last, kept = step == config.steps, step in config.kept_steps
        control.should_training_stop |= self.stopping
        control.should_evaluate = config.eval_every > 0 and (step % config.eval_every == 0 or last)
        control.should_save = kept or self.stopping or (config.save_every > 0 and step % config.save_every == 0)
        control.should_log = control.should_evaluate or control.should_save or step % config.log_every == 0
        if self._bar is not None:
            self._bar.update(1)

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        """Complete the Trainer's entry, and refuse a loss, gradient or weights that are not finite."""
        step, told = state.global_step, cast("dict[str, float]", logs)
        if "train_loss" in told:
            return  # the Trainer's summary at the end
        broken = [name for name in ("loss", "grad_norm") if not math.isfinite(told.get(name, 0.0))]
        if control.should_save and "loss" in told and not self.loop.is_fsdp_enabled:
            weights = cast("nn.Module", self.loop.model).parameters()
            broken += [] if all(bool(torch.isfinite(one).all()) for one in weights) else ["weights"]
        if broken:
            raise RunError(
                f"{' and '.join(broken)} not finite by step {step}; need numbers. {self._last_checkpoint_text()} "
                f"Nothing later was saved. Lower lr ({self.config.lr:g}), lengthen warmup or "
                f"{'lower clip' if self.config.clip else 'set clip'}, and train into another folder."
            )
        state.log_history[-1] |= {
            "tokens": step * self.config.step_tokens,
            "seconds": time.perf_counter() - self._begun,
        }
        if self._bar is not None and "loss" in told:
            self._bar.set_postfix_str(f"loss {told['loss']:.3f}", refresh=False)
        if time.perf_counter() - self._written > 10.0:  # seconds
            self.write_log()

    def write_log(self) -> None:
        """Write the table ``log`` into the run folder, in the first process only."""
        if self.writer is not None:
            self.writer.write_table("log", self.loop.log_frame())
        self._written = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **named: Any) -> None:
        """Complete the checkpoint that the Trainer wrote, give it its name, and remove those that it supersedes."""
        step, wait = state.global_step, self.loop.accelerator.wait_for_everyone
        kept = step in self.config.kept_steps
        wait()  # each process writes its random state
        if args.should_save:
            self.write_log()
            written = self.part / f"{KEPT}{step}"
            (written / "training_args.bin").unlink(missing_ok=True)  # a pickle, and nothing reads it
            config = cast("PreTrainedModel", self.loop.model).config
            config.use_cache = True  # the Trainer puts it out for training; a saved model generates with it
            config.save_pretrained(written)
            config.use_cache = False
            if self.loop.data.tokenizer is not None:
                self.loop.data.tokenizer.save_pretrained(str(written))
            seal_checkpoint(written, self.folder / f"{KEPT if kept else LATEST}{step}")
            remove_superseded_checkpoints(self.folder, finished=step == self.config.steps)
        if kept and self.watch is not None:
            begun = time.perf_counter()
            with keep_random_state():
                self.watch()
            self._begun += time.perf_counter() - begun  # the seconds of the log are those of training
        wait()

    def _last_checkpoint_text(self) -> str:
        there = list_checkpoints(self.folder)
        return f"The last good checkpoint is {there[max(there)]}." if there else "There is no checkpoint yet."
