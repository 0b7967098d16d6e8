"""The Hugging Face Trainer with our order of the data, schedule, log and checkpoints.

What it does at a step is decided by the step alone, so that a run that goes on from a checkpoint is the run that
was never stopped.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pandas as pd
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from ..errors import RunError, first_line_of_error
from ..models.headnorm import undecayed
from ..models.private_apis import SHARDED, UNCOMPILED, save_checkpoint
from ..models.wrapping import keep_random_state
from ..progress import tqdm
from ..records import RunWriter
from . import checkpoint_files
from .batches import TrainingRows, stack_batch
from .config import TrainConfig
from .muon import MuonWithAdamW

COLUMNS = {
    "step": "int64",
    "tokens": "int64",
    "loss": "float64",
    "lr": "float64",
    "grad_norm": "float64",
    "seconds": "float64",
    "eval_loss": "float64",
}
"""Columns of the log: the loss is the mean over the steps since the row before; nan where there is nothing."""


class Loop(Trainer):
    """One training run by the Hugging Face Trainer, with log, evaluation and checkpoints of ours."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: PreTrainedModel,
        data: TrainingRows,
        args: TrainingArguments,
        folder: Path,
        writer: RunWriter | None = None,
        watch: Callable[[], object] | None = None,
        progress: bool = False,
    ) -> None:
        self.config = config
        self.rows: list[dict[str, Any]] = []
        self.stopping = False
        self._folder, self._writer, self._watch, self._progress = folder, writer, watch, progress
        self._tokenizer = data.tokenizer
        self._undecayed = frozenset(undecayed(model, unshared_gain=not config.decay_unshared_gain))
        self._resumed: checkpoint_files.Checkpoint | None = None
        self._done = -1
        self._seconds, self._begun, self._written = 0.0, time.perf_counter(), 0.0
        self._part = folder
        self._stepped = False
        self._last_loss: Tensor | None = None
        self._broken: Tensor | None = None
        self._bar: Any = None
        super().__init__(
            model=model,
            args=args,
            train_dataset=cast("Any", data.train),
            eval_dataset=cast("Any", data.evaluation),
            data_collator=stack_batch,
            callbacks=[_Beginning(self._begin_training)],
        )
        self.remove_callback(PrinterCallback)

    def run(self, checkpoint: checkpoint_files.Checkpoint | None) -> None:
        """Train to the end, from a checkpoint or, if it is None, from the initial weights.

        Raises:
            RunError: the loss or the gradient is not finite, or a checkpoint cannot be written.
            KeyboardInterrupt: Ctrl-C was pressed (``stopping`` is set); the state is saved.
        """
        self._resumed = checkpoint
        try:
            if checkpoint is not None:
                log = pd.read_parquet(checkpoint.folder / checkpoint_files.LOG)
                self.rows = cast("Any", pd.DataFrame(log[list(COLUMNS)]).astype(COLUMNS).to_dict("records"))
                self._seconds, self._done = float(checkpoint.facts["seconds"]), checkpoint.step
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))
        except Exception as error:
            if checkpoint is not None and not self._stepped:
                error.add_note(f"the training was going on from {checkpoint.folder}, which is as it was")
            raise
        finally:
            if self._bar is not None:
                self._bar.close()

    def log_frame(self) -> pd.DataFrame:
        """Return the log so far, one row per logged step."""
        return pd.DataFrame(self.rows, columns=list(COLUMNS)).astype(COLUMNS)

    # --- what the Trainer asks

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """Return our order of the sequences of ``train_dataset`` (None: the Trainer's data), for the Trainer to use."""
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        drawn = self.config.steps * self.config.batch
        return Order(n_sequences=len(rows), drawn=drawn, seed=self.config.data_seed)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the model's parameters with weight decay: all but those in ``undecayed``."""
        decayed = []
        for name, _ in model.named_parameters():
            plain = name  # without the prefixes of compilation and parallel training
            for wrapped in ("module.", f"{UNCOMPILED}.", f"{SHARDED}."):
                plain = plain.replace(wrapped, "")
            if plain not in self._undecayed:
                decayed.append(name)
        return decayed

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the optimizer, AdamW or Muon with AdamW; the first call makes it for ``model`` (None: our model)."""
        if self.config.optimizer != "muon" or self.optimizer is not None:
            return super().create_optimizer(model)
        self.optimizer = MuonWithAdamW(
            cast("nn.Module", self.model if model is None else model),
            lr=self.config.lr,
            weight_decay=self.config.weight_decay,
            betas=(self.config.betas[0], self.config.betas[1]),
            undecayed=self._undecayed,
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the learning-rate schedule of ``optimizer``, a warm-up and a cosine over the configuration's steps."""
        if self.lr_scheduler is None:
            own: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(own, lambda step: learning_rate(step, config=self.config) / self.config.lr)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, *given: Any, **named: Any) -> Tensor:
        """Run a forward and a backward pass; return the loss, and keep it for the check that it is finite."""
        self._stepped = True
        self._last_loss = super().training_step(*given, **named)
        return self._last_loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient's norm (``grad_norm`` if given); note the first step where norm or loss is not finite."""
        found: Any = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = found.full_tensor() if hasattr(found, "full_tensor") else torch.as_tensor(found)  # of all processes
        number = norm.detach()
        if self.args.world_size == 1 and self._last_loss is not None:
            number = number + 0 * self._last_loss  # not finite if either is not; the gradient is every process's
        step = torch.where(torch.isfinite(number), math.inf, float(self.state.global_step + 1))
        self._broken = step if self._broken is None else torch.minimum(self._broken, step)
        if self.args.device.type == "cpu":  # elsewhere, reading it at each step would make the device wait
            self._check_finite()
        return norm

    def _maybe_log_save_evaluate(  # pyright: ignore[reportIncompatibleMethodOverride]  # it is called so
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, *rest: Any, learning_rate: float | None = None
    ) -> None:
        """After a step, evaluate ``model``, log the losses and rates, and write a checkpoint: each if it is due."""
        del rest
        step, config = self.state.global_step, self.config
        if step == self._done:
            return  # the Trainer asks again at the end
        self._done = step
        if self._bar is not None:
            self._bar.update(1)
        last, kept = step == config.steps, step in config.kept_steps
        evaluated = config.eval_every > 0 and (step % config.eval_every == 0 or last)
        if evaluated or kept or last or step % config.log_every == 0:
            self._check_finite()
            self._add_log_row(tr_loss, lr=learning_rate, grad_norm=grad_norm, evaluated=evaluated)
        if kept:
            self._write_checkpoint(model, tr_loss, prefix=checkpoint_files.KEPT)
        elif self.stopping or (config.save_every and step % config.save_every == 0):
            self._write_checkpoint(model, tr_loss, prefix=checkpoint_files.LATEST)
        if self.stopping and not last:
            raise KeyboardInterrupt

    def _get_output_dir(self, trial: Any) -> str:
        """Return the temporary folder that the Trainer writes a checkpoint to; ``trial`` is not used."""
        return str(self._part)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write weights (``state_dict``, or the model's if None), tokenizer and configuration into ``output_dir``."""
        config = cast("Any", self.model).config
        config.use_cache = True  # the Trainer puts it out for training; a saved model generates with it
        try:
            super()._save(output_dir, state_dict)
        finally:
            config.use_cache = False
        if self.args.should_save and self._tokenizer is not None:
            self._tokenizer.save_pretrained(str(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the model's weights from the folder ``resume_from_checkpoint``; refuse a file that lacks a parameter."""
        weights = Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME
        if self.is_fsdp_enabled or not weights.is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:  # strictly: the Trainer would pass over a parameter that is missing
            safetensors.torch.load_model(cast("nn.Module", self.model), weights)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and schedule from the folder ``checkpoint``; refuse them if shapes or step do not fit."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self._resumed is None or self.is_fsdp_enabled:
            return
        held: Any = cast("Any", self.optimizer).state
        if self._resumed.step > 0 and not held:
            raise ValueError("the optimizer's state is empty")
        for parameter, entry in held.items():
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                    raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
        if (at := cast("Any", self.lr_scheduler).last_epoch) != self._resumed.step:
            raise ValueError(f"the schedule is at step {at}, not {self._resumed.step}")

    # --- what is done at a step

    def _begin_training(self) -> None:
        """Start the clock and the progress bar; in a new run, also log and save step 0."""
        self._begun = time.perf_counter()
        if self._progress:
            how: dict[str, Any] = {"desc": "train", "unit": "step", "leave": False, "mininterval": 0.5}
            self._bar = tqdm(total=self.config.steps, initial=max(0, self._done), **how)
        if self._resumed is not None:
            self._tr_loss += float(self._resumed.facts["since_row"])
            return
        self._done = 0
        self._add_log_row(self._tr_loss, lr=None, grad_norm=None, evaluated=self.config.eval_every > 0)
        self._write_checkpoint(cast("nn.Module", self.model), self._tr_loss, prefix=checkpoint_files.KEPT)

    def _add_log_row(self, tr_loss: Tensor, *, lr: float | None, grad_norm: Any, evaluated: bool) -> None:
        """Add a row to the log: mean loss since the last row, ``lr``, ``grad_norm``, seconds, and evaluation loss.

        ``tr_loss``, the sum of the losses since the last row, is set to 0. Without ``evaluated``, ``eval_loss`` is nan.
        """
        step = self.state.global_step
        since = step - int(self.rows[-1]["step"]) if self.rows else 0
        row: dict[str, Any] = {
            "step": step,
            "tokens": step * self.config.step_tokens,
            "loss": self._mean_over_processes(tr_loss) / since if since else math.nan,
            "lr": math.nan if lr is None else lr,
            "grad_norm": math.nan if grad_norm is None else float(grad_norm),
            "seconds": self._seconds_so_far(),
            "eval_loss": math.nan,
        }
        if evaluated:
            with keep_random_state():
                found = self.evaluation_loop(self.get_eval_dataloader(), description="eval", prediction_loss_only=True)
            assert found.metrics is not None
            row["eval_loss"] = float(found.metrics["eval_loss"])
        tr_loss.zero_()
        self.rows.append(row)
        if self._bar is not None and since:
            self._bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        if time.perf_counter() - self._written > 10.0:  # seconds
            self.write_log()

    def write_log(self) -> None:
        """Write the table ``log`` into the run folder, in the first process only."""
        if self._writer is not None:
            self._writer.write_table("log", self.log_frame())
        self._written = time.perf_counter()

    def _mean_over_processes(self, value: Tensor) -> float:
        return float(cast("Tensor", self.accelerator.gather(value.detach().reshape(1))).mean())

    def _seconds_so_far(self) -> float:
        return self._seconds + time.perf_counter() - self._begun

    def _check_finite(self) -> None:
        """Raise a RunError if a loss or gradient has not been finite at some step."""
        if self._broken is None or math.isinf(step := float(self._broken)):
            return
        broken = "gradient" if self._last_loss is not None and bool(torch.isfinite(self._last_loss)) else "loss"
        raise RunError(
            f"the {broken} is not finite at step {step:.0f}; need numbers. {self._last_checkpoint_text()} "
            f"Nothing later was saved. Lower lr ({self.config.lr:g}), lengthen warmup or "
            f"{'lower clip' if self.config.clip else 'set clip'}, and train into another folder."
        )

    # --- checkpoints

    def _write_checkpoint(self, model: nn.Module, tr_loss: Tensor, *, prefix: str) -> None:
        """Write a checkpoint of ``model`` and the summed loss ``tr_loss``; only then name it ``prefix`` + step."""
        self._check_finite()
        since_row = self._mean_over_processes(tr_loss)
        step, first = self.state.global_step, self.args.should_save
        target = self._folder / f"{prefix}{step}"
        self._part = self._folder / f".part-{step}"
        if first:
            self.write_log()
            self._prepare_checkpoint_folder()
        self.accelerator.wait_for_everyone()
        try:
            save_checkpoint(self, model)
            self.accelerator.wait_for_everyone()
            if first:
                written = self._part / f"{PREFIX_CHECKPOINT_DIR}-{step}"
                self.log_frame().to_parquet(written / checkpoint_files.LOG, index=False)
                checkpoint_files.seal_checkpoint(
                    written, step=step, facts={"since_row": since_row, "seconds": self._seconds_so_far()}
                )
                if target.exists():
                    shutil.rmtree(target)
                written.replace(target)
                self._part.rmdir()
                checkpoint_files.remove_superseded_checkpoints(self._folder, finished=step == self.config.steps)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk; torch's is a RuntimeError
            shutil.rmtree(self._part, ignore_errors=True)
            raise self._unwritten_checkpoint_error(target, first_line_of_error(error)) from error
        self.accelerator.wait_for_everyone()
        if first and prefix == checkpoint_files.KEPT and self._watch is not None:
            begun = time.perf_counter()
            with keep_random_state():
                self._watch()
            self._begun += time.perf_counter() - begun  # the seconds of the log are those of training
        self.accelerator.wait_for_everyone()

    def _prepare_checkpoint_folder(self) -> None:
        """Empty the temporary folder of a checkpoint; refuse weights that are not finite or do not fit on the disk."""
        parameters = list(cast("nn.Module", self.model).parameters())
        if not self.is_fsdp_enabled and not all(bool(torch.isfinite(one).all()) for one in parameters):
            raise RunError(
                f"the weights are not finite after step {self.state.global_step}; need finite ones. "
                f"{self._last_checkpoint_text()} Nothing later was saved. Lower lr, and train into another folder."
            )
        shutil.rmtree(self._part, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = 3 * sum(one.numel() * one.element_size() for one in parameters)  # AdamW has two moments
        if shutil.disk_usage(self._folder).free < needed:
            raise self._unwritten_checkpoint_error(self._part, f"it needs about {needed:,} bytes: the disk is full")

    def _unwritten_checkpoint_error(self, path: Path, reason: str) -> RunError:
        """Return the error that a checkpoint cannot be written, with its ``path``, ``reason`` and the last good one."""
        free = shutil.disk_usage(self._folder).free
        return RunError(
            f"the checkpoint of step {self.state.global_step} cannot be written to {path} ({reason}; {free:,} bytes "
            f"are free). {self._last_checkpoint_text()} Free some space and run the same again: it goes on from there."
        )

    def _last_checkpoint_text(self) -> str:
        """Return a sentence that names the newest checkpoint, or says that there is none yet."""
        there = checkpoint_files.list_checkpoints(self._folder)
        return f"The last good checkpoint is {there[max(there)]}." if there else "There is no checkpoint yet."


class _Beginning(TrainerCallback):
    """Callback that calls ``begin`` when the Trainer begins to train."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin_training = begin

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        """Call the function that was given."""
        self._begin_training()


def learning_rate(step: int, *, config: TrainConfig) -> float:
    """Return the learning rate at the update ``step`` of the weights; the first update is step 0.

    The rate rises linearly to ``config.lr`` over the warm-up (never 0: the first update counts), then falls along a
    cosine that would reach ``config.min_lr`` at the update after the last.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * done)) / 2


class Order(Sampler[int]):
    """Order in which sequences are trained on: one random permutation of all of them after another, from a seed.

    The order does not depend on how a step is cut into forwards and processes.
    """

    def __init__(self, *, n_sequences: int, drawn: int, seed: int) -> None:
        self._n_sequences, self._drawn, self._seed = n_sequences, drawn, seed

    def __len__(self) -> int:
        return self._drawn

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the sequences; each comes once before any comes again."""
        generator = torch.Generator().manual_seed(self._seed)
        left = self._drawn
        while left > 0:
            passed = torch.randperm(self._n_sequences, generator=generator)[:left].tolist()
            yield from passed
            left -= len(passed)
