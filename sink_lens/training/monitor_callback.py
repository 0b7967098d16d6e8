"""``SinkMonitorCallback``: the monitor in the Hugging Face Trainer, with one line and without a model argument."""

import logging
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..arguments import check_calls
from .monitor import SinkMonitor, check_monitor_options

_LOGGER = logging.getLogger(__name__)
STEP = "sinks/step"
"""Key of a logged reading: the number of steps that made its weights."""


class SinkMonitorCallback(TrainerCallback):
    """Watches sinks and outliers in a ``transformers.Trainer``: ``Trainer(..., callbacks=[SinkMonitorCallback()])``.

    Each reading is an entry of its own in the Trainer's log history. To have the readings in its trackers too
    (TensorBoard, W&B and the others of ``report_to``), give it the trainer:
    ``trainer.add_callback(SinkMonitorCallback(trainer=trainer))``. A reading is of the weights before the step at
    which it is logged: ``sinks/step`` is the number of steps that made them. A model that cannot be watched is a
    warning, and is trained.
    """

    @check_calls
    def __init__(self, every: int = 50, *, trainer: Trainer | None = None, **options: Any) -> None:
        """Prepare to watch the Trainer's model.

        Args:
            every: steps between readings.
            trainer: whose trackers get the readings; None keeps them in the log history and the folder.
            **options: those of ``SinkMonitor``.

        Raises:
            InputError: an option does not exist or is out of its range.
        """
        check_monitor_options(every=every, **options)
        self._every, self._options = every, options
        self._trainer = trainer
        self._refused = False
        self.monitor: SinkMonitor | None = None
        """The monitor of the training that runs, or of the last one; None where the model cannot be watched."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin to watch the model; one that cannot be watched is a warning."""
        if self.monitor is not None:  # of a training that ended with an error
            self.monitor.close(finished=False)
        self.monitor = None
        try:
            self.monitor = SinkMonitor(
                given["model"], every=self._every, first_step=state.global_step, **self._options
            )
        except Exception as error:  # noqa: BLE001  # the training goes on
            _LOGGER.warning(
                "the sink monitor watches nothing (%s: %s)", type(error).__name__, error
            )
            return
        self.monitor.compiled = args.torch_compile
        self.monitor.open()
        if self._trainer is None and args.report_to:
            _LOGGER.warning(
                "the sink monitor: its readings go into the log history alone, and not to %s; for those too use "
                "trainer.add_callback(SinkMonitorCallback(trainer=trainer))",
                ", ".join(args.report_to),
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Put hooks on the model if a reading is due."""
        if self.monitor is not None:
            self.monitor.attach_hooks(last=state.global_step + 1 == state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Log the reading of this step, if there is one."""
        if self.monitor is None or (reading := self.monitor.finish()) is None:
            return
        logs = dict(reading)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        logs[STEP] = float(self.monitor.steps - 1)
        state.log_history.append({**logs, "step": state.global_step})
        for tracker in [] if self._trainer is None else self._trainer.callback_handler.callbacks:
            if not isinstance(tracker, tuple(INTEGRATION_TO_CALLBACK.values())):
                continue
            try:
                tracker.on_log(args, state, control, logs=dict(logs), **given)
            except Exception as error:  # noqa: BLE001  # the training goes on, and other trackers have the reading
                if not self._refused:
                    name = type(error).__name__
                    _LOGGER.warning(
                        "the sink monitor: a tracker takes no readings (%s: %s)", name, error
                    )
                self._refused = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Take the hooks off, and write the tables."""
        if self.monitor is not None:
            self.monitor.close()
