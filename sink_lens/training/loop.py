"""The Hugging Face Trainer with our schedule; a callback says what is due after a step."""

import contextlib
import copy
import math
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import safetensors.torch
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Subset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import SAFE_WEIGHTS_NAME

from ..errors import RunError, first_line_of_error
from ..models.headnorm import undecayed
from ..models.wrapping import keep_random_state
from ..progress import tqdm
from ..records import RunWriter
from . import checkpoint_files
from .batches import TrainingRows, stack_batch, training_order
from .config import TrainConfig
from .muon import MuonWithAdamW

_FLOATS = ("loss", "lr", "grad_norm", "seconds", "eval_loss")
COLUMNS = {"step": "int64", "tokens": "int64"} | dict.fromkeys(_FLOATS, "float64")
"""Columns of the log; the loss is the mean over the steps since the row before."""


class Loop(Trainer):
    """A Trainer with our order of the sequences, optimizers and schedule."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: PreTrainedModel,
        data: TrainingRows,
        args: TrainingArguments,
    ) -> None:
        self.config = config
        self.undecayed = frozenset(undecayed(model, unshared_gain=not config.decay_unshared_gain))
        rows: Any = data.train
        held_out: Any = data.evaluation
        order: Any = training_order(
            n_sequences=len(rows), drawn=config.steps * config.batch, seed=config.data_seed
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=Subset(rows, order),
            eval_dataset=held_out,
            data_collator=stack_batch,
            processing_class=data.tokenizer,
            preprocess_logits_for_metrics=_losses_and_counts,
            compute_metrics=_mean_loss,
        )
        self.remove_callback(PrinterCallback)

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """Evaluate; the loss is the mean over all tokens, each once.

        The Trainer's is the mean of the batches' means, and several processes have sequences twice in the last batch.
        """
        found = super().evaluation_loop(*given, **named)
        metrics = cast("dict[str, float]", found.metrics)
        metrics["eval_loss"] = metrics.pop("eval_mean_loss")
        return found

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters() if name not in self.undecayed]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.config.optimizer == "muon" and self.optimizer is None:
            self.optimizer = MuonWithAdamW(
                cast("nn.Module", self.model if model is None else model),
                lr=self.config.lr,
                weight_decay=self.config.weight_decay,
                betas=cast("tuple[float, float]", self.config.betas),
                undecayed=self.undecayed,
            )
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        own = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = LambdaLR(
            own, lambda step: self.config.learning_rate(step) / self.config.lr
        )
        return self.lr_scheduler

    def log_frame(self) -> pd.DataFrame:
        rows: dict[int, dict[str, Any]] = {}
        for entry in cast("list[dict[str, Any]]", self.state.log_history):
            if "seconds" in entry:  # not the Trainer's summary at the end
                rows.setdefault(entry["step"], {}).update(entry)
        log = pd.DataFrame(list(rows.values())).rename(columns={"learning_rate": "lr"})
        return log.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def _losses_and_counts(logits: Tensor, labels: Tensor) -> Float[Tensor, "batch 2"]:
    """Return each sequence's summed loss, and the number of its tokens that are predicted."""
    labels = labels[:, 1:]
    nats = cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="none"
    ).view_as(labels)
    return torch.stack([nats.sum(1), labels.ne(-100).sum(1).to(nats.dtype)], dim=1)


def _mean_loss(found: EvalPrediction) -> dict[str, float]:
    loss, n = np.asarray(found.predictions, dtype=np.float64).sum(0)
    return {"mean_loss": loss / n if n else math.nan}


class Steps(TrainerCallback):
    """What is due after each step of a training: a row of the log, an evaluation, a checkpoint."""

    def __init__(
        self, loop: Loop, *, writer: RunWriter | None = None, progress: bool = False
    ) -> None:
        self.loop, self.config, self.writer = loop, loop.config, writer
        self.model = cast("PreTrainedModel", loop.model)
        self.part = Path(str(loop.args.output_dir))
        """Folder in which the Trainer writes a checkpoint, within that of the checkpoints."""
        self.folder, self.stopping = self.part.parent, False
        self._begun = self._written = time.perf_counter()
        self._bar = tqdm(
            desc="train", total=self.config.steps, unit="step", leave=False, disable=not progress
        )

    def run(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint or from the initial weights.

        Raises:
            RunError: the loss or the gradient is not finite, or a checkpoint cannot be written.
            KeyboardInterrupt: Ctrl-C was pressed; the state is saved.
        """
        self.loop.add_callback(self)
        before, alone = signal.getsignal(signal.SIGINT), self.loop.args.world_size == 1
        handled = (
            alone and callable(before) and threading.current_thread() is threading.main_thread()
        )
        try:
            if handled:
                signal.signal(signal.SIGINT, self._stop)
            if checkpoint is not None and (weights := checkpoint / SAFE_WEIGHTS_NAME).is_file():
                safetensors.torch.load_model(self.model, weights)  # the Trainer is not strict
            self.loop.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            self.loop.accelerator.wait_for_everyone()  # another process may still list the folder
        except Exception as error:
            if isinstance(error, OSError | RuntimeError | SafetensorError) and any(
                self.part.glob("*")
            ):
                raise RunError(
                    f"the checkpoint of step {self.loop.state.global_step} cannot be written to {self.folder} "
                    f"({first_line_of_error(error)}; {shutil.disk_usage(self.folder).free:,} bytes are free). "
                    f"{self._last_checkpoint_text()} Free some space and run the same again: it goes on from there."
                ) from error
            if checkpoint is not None and checkpoint.is_dir():
                error.add_note(f"the training went on from {checkpoint}, which is still there")
            raise
        finally:
            if handled:
                signal.signal(signal.SIGINT, before)
            self._bar.close()
            with contextlib.suppress(OSError, RunError):  # an error on its way says more
                if self.writer is not None:
                    checkpoint_files.remove_unsealed(self.part)
                self.write_log()
        if self.stopping and self.loop.state.global_step < self.config.steps:
            raise KeyboardInterrupt

    def _stop(self, number: int, frame: Any) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: Any, **named: Any
    ) -> None:
        step = state.global_step
        self._begun = time.perf_counter() - (state.log_history[-1]["seconds"] if step else 0.0)
        if step:
            self._bar.initial = self._bar.n = step
            self._bar.set_description(f"train, on from the end of step {step}")
        else:
            self.loop.log({})
            if self.config.eval_every:
                self.loop.evaluate()
            self.loop.save_model(str(self.part / f"{checkpoint_files.KEPT}0"))
            self.on_save(args, state, control)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **named: Any) -> None:
        step, config = state.global_step, self.config
        control.should_training_stop |= self.stopping
        control.should_evaluate = config.eval_every > 0 and (
            step % config.eval_every == 0 or step == config.steps
        )
        control.should_save = (
            step in config.kept_steps
            or self.stopping
            or step % (config.save_every or math.inf) == 0
        )
        control.should_log = (
            control.should_evaluate or control.should_save or step % config.log_every == 0
        )
        self._bar.update(1)

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **named: Any
    ) -> None:
        step, told = state.global_step, cast("dict[str, float]", logs)
        if "train_loss" in told:
            return  # the Trainer's summary at the end
        broken = [name for name in ("loss", "grad_norm") if not math.isfinite(told.get(name, 0.0))]
        if control.should_save and "loss" in told and not self.loop.is_fsdp_enabled:
            whole = all(bool(one.isfinite().all()) for one in self.model.parameters())
            broken += [] if whole else ["weights"]
        if broken:
            raise RunError(
                f"{' and '.join(broken)} not finite by step {step}; need numbers. {self._last_checkpoint_text()} "
                f"Nothing later was saved. Lower lr ({self.config.lr:g}), lengthen warmup or "
                f"{'lower clip' if self.config.clip else 'set clip'}, and train into another folder."
            )
        seconds = time.perf_counter() - self._begun
        state.log_history[-1] |= {"tokens": step * self.config.step_tokens, "seconds": seconds}
        if "loss" in told:
            self._bar.set_postfix_str(f"loss {told['loss']:.3f}", refresh=False)
        if time.perf_counter() - self._written > 10.0:  # seconds
            self.write_log()

    def write_log(self) -> None:
        if self.writer is not None and self.loop.state.log_history:
            self.writer.write_table("log", self.loop.log_frame())
        self._written = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **named: Any) -> None:
        step, wait = state.global_step, self.loop.accelerator.wait_for_everyone
        kept = step in self.config.kept_steps
        wait()  # each process writes its random state
        if args.should_save:
            self.write_log()
            written = self.part / f"{checkpoint_files.KEPT}{step}"
            (written / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads
            saved = copy.copy(self.model.config)
            saved.use_cache = True  # which the Trainer puts out for training
            saved.save_pretrained(written)
            prefix = checkpoint_files.KEPT if kept else checkpoint_files.LATEST
            checkpoint_files.seal_checkpoint(written, self.folder / f"{prefix}{step}")
            checkpoint_files.remove_superseded_checkpoints(
                self.folder, finished=step == self.config.steps
            )
        if kept and self.config.watch and self.writer is not None:
            from .watch import watch  # with the chain, which nothing else here needs

            begun = time.perf_counter()
            with keep_random_state():
                watch(
                    self.writer.folder,
                    writer=self.writer,
                    device=self.config.device,
                    progress=False,
                )
            # The seconds of the log are those of training.
            self._begun += time.perf_counter() - begun
        wait()

    def _last_checkpoint_text(self) -> str:
        newest = next(iter(checkpoint_files.list_checkpoints(self.folder).values()), None)
        return f"The last good checkpoint is {newest}." if newest else "There is no checkpoint yet."
