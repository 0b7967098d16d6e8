"""``SinkMonitorCallback``: the monitor in the Hugging Face Trainer, with one line and without a model argument."""

import gc
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from .monitor import SinkMonitor

__all__ = ["SinkMonitorCallback"]


class SinkMonitorCallback(TrainerCallback):
    """Watches sinks and outliers in a ``transformers.Trainer``: ``Trainer(..., callbacks=[SinkMonitorCallback()])``.

    Each reading is an entry of its own in the Trainer's log history, and goes to its trackers (TensorBoard, W&B and
    the others of ``report_to``); the losses are logged as before, and nothing more is printed. A reading of step N is
    of the weights that N steps have made.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        """Watch every so many steps; the options are those of ``SinkMonitor``."""
        self._every, self._options = every, options
        self.monitor: SinkMonitor | None = None
        """The monitor of the training that runs, or of the last one."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Attach to the Trainer's model."""
        self._close()
        self.monitor = SinkMonitor(given["model"], every=self._every, first_step=state.global_step, **self._options)
        self.monitor.compiled = args.torch_compile
        self.monitor.open()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Put the hooks on, if this step is read."""
        assert self.monitor is not None  # made when the training began
        self.monitor.arm()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Log the reading of this step."""
        assert self.monitor is not None  # as above
        reading = self.monitor.finish()
        if reading is None:
            return
        logs = dict(reading)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        step = state.global_step
        state.global_step = step - 1  # the trackers' axis: the weights before this step
        try:
            state.log_history.append({**logs, "step": step - 1})
            for tracker in self._trackers():
                tracker.on_log(args, state, control, logs=dict(logs), **given)
        finally:
            state.global_step = step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Take the hooks off and write what was asked for."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)

    def _trackers(self) -> list[TrainerCallback]:
        """The Trainer's trackers: a callback is given everything but the Trainer, whose list holds this one too."""
        kinds = tuple(INTEGRATION_TO_CALLBACK.values())
        lists = [one for one in gc.get_referrers(self) if isinstance(one, list)]
        found = {id(each): each for one in lists for each in one if isinstance(each, kinds)}
        return list(found.values())
