"""``SinkMonitorLightning``: the monitor in a Lightning Trainer."""

import logging
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..arguments import checked
from ..errors import ModelError
from .monitor import SinkMonitor, check_options
from .monitor_alarms import alarms_for_trackers

try:
    from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
except ImportError as error:  # an extra
    raise ImportError("SinkMonitorLightning needs Lightning: pip install 'sink-lens[lightning]'") from error

__all__ = ["SinkMonitorLightning"]

_LOGGER = logging.getLogger(__name__)


class SinkMonitorLightning(Callback):
    """Watches sinks and outliers in a Lightning Trainer: ``Trainer(..., callbacks=[SinkMonitorLightning()])``.

    It watches the one Hugging Face model that the module holds, and gives each reading to the Trainer's loggers, at
    the step of the weights that were read.
    """

    @checked
    def __init__(self, every: int = 50, **options: Any) -> None:
        """Watch every so many steps of the optimizer; the options are those of ``SinkMonitor``.

        Raises:
            InputError: an option that there is not, or out of its range.
        """
        super().__init__()
        check_options(every=every, **options)
        self._every, self._options = every, options
        self._begun = -1
        self.monitor: SinkMonitor | None = None
        """The monitor of the training that runs, or of the last one; None where the model cannot be watched."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module's model; one that cannot be watched is a warning, and is trained."""
        self._close(None, finished=False)
        self._begun, self.monitor = -1, None
        try:
            self.monitor = SinkMonitor(
                _model_of(pl_module), every=self._every, first_step=trainer.global_step, **self._options
            )
        except Exception as error:  # noqa: BLE001  # the training goes on
            _LOGGER.warning("the sink monitor watches nothing (%s: %s)", type(error).__name__, error)
            return
        self.monitor.open()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the hooks on, for the first forward of a step that is read."""
        if self.monitor is not None and self._begun != trainer.global_step:
            self._begun = trainer.global_step
            self.monitor.arm()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the reading, where the optimizer has made its step."""
        if self.monitor is None or trainer.global_step == self._begun:  # the latter: gradients are accumulated
            return
        before = len(self.monitor.alarms)
        reading = self.monitor.finish()
        try:
            for logger in trainer.loggers if reading is not None else ():
                logs = dict(reading or {}) | alarms_for_trackers(self.monitor.alarms[before:])
                logger.log_metrics(logs, step=self._begun)
        except Exception as error:  # noqa: BLE001  # the training goes on
            _LOGGER.warning("the sink monitor: a logger takes no readings (%s: %s)", type(error).__name__, error)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the hooks off and write what was asked for."""
        self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off, and write how the training ended."""
        self._close(exception)

    def _close(self, error: BaseException | None, *, finished: bool = True) -> None:
        """Close the monitor if it was opened."""
        if self.monitor is not None:
            self.monitor.close(error, finished=finished)


def _model_of(module: nn.Module) -> PreTrainedModel:
    """The one Hugging Face model that a module holds."""
    models_within = [one for one in module.modules() if isinstance(one, PreTrainedModel)]
    inner = {id(part) for one in models_within for part in one.modules() if part is not one}
    models = [one for one in models_within if id(one) not in inner]
    if len(models) != 1:
        raise ModelError(
            f"{type(module).__name__} holds {len(models)} Hugging Face models; need one. Use SinkMonitor with the "
            "model itself in your training_step."
        )
    return models[0]
