"""``SinkMonitorLightning``: the monitor in a Lightning Trainer."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError
from .monitor import SinkMonitor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
except ImportError as error:  # an extra
    raise ImportError("SinkMonitorLightning needs Lightning: pip install 'sink-lens[lightning]'") from error

__all__ = ["SinkMonitorLightning"]


class SinkMonitorLightning(Callback):
    """Watches sinks and outliers in a Lightning Trainer: ``Trainer(..., callbacks=[SinkMonitorLightning()])``.

    It watches the one Hugging Face model that the module holds, and gives each reading to the Trainer's loggers, at
    the step of the weights that were read.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        """Watch every so many steps of the optimizer; the options are those of ``SinkMonitor``."""
        super().__init__()
        self._every, self._options = every, options
        self._begun = -1
        self.monitor: SinkMonitor | None = None
        """The monitor of the training that runs, or of the last one."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module's model.

        Raises:
            ModelError: the module holds no Hugging Face model, or several.
        """
        self._close()
        self._begun = -1
        self.monitor = SinkMonitor(
            _model_of(pl_module), every=self._every, first_step=trainer.global_step, **self._options
        )
        self.monitor.open()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the hooks on, for the first forward of a step that is read."""
        assert self.monitor is not None  # made when the training began
        if self._begun != trainer.global_step:
            self._begun = trainer.global_step
            self.monitor.arm()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the reading, where the optimizer has made its step."""
        assert self.monitor is not None  # as above
        if trainer.global_step == self._begun:
            return  # gradients are accumulated
        reading = self.monitor.finish()
        for logger in trainer.loggers if reading is not None else ():
            logger.log_metrics(dict(reading or {}), step=self._begun)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the hooks off and write what was asked for."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)


def _model_of(module: nn.Module) -> PreTrainedModel:
    found = [one for one in module.modules() if isinstance(one, PreTrainedModel)]
    inner = {id(part) for one in found for part in one.modules() if part is not one}
    models = [one for one in found if id(one) not in inner]
    if len(models) != 1:
        raise ModelError(
            f"{type(module).__name__} holds {len(models)} Hugging Face models; need one. Use SinkMonitor with the "
            "model itself in your training_step."
        )
    return models[0]
