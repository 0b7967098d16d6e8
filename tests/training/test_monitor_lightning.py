"""The monitor in a Lightning Trainer: tested where Lightning is installed."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sink_lens.models.tiny import tiny
from sink_lens.training import SinkMonitor

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is an extra: pip install 'sink-lens[lightning]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers, of loggers and of its own imports

from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from sink_lens.training.monitor_lightning import SinkMonitorLightning  # noqa: E402


class Logger(DummyLogger):
    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, *args, **given):
        self.seen.append((given["step"], dict(args[0] if args else given["metrics"])))


class Module(pl.LightningModule):
    def __init__(self, *, broken=False):
        super().__init__()
        self.model, self.broken, self.losses = tiny("llama").train(), broken, []

    def training_step(self, batch, index):
        if self.broken:
            raise RuntimeError("of the step")
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(n=24):
    return torch.randint(3, 300, (n, 40), generator=torch.Generator().manual_seed(0))


def fitted(module, callbacks, *, accumulated=1, logger=False):
    trainer = pl.Trainer(
        max_steps=5,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulated,
        barebones=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(rows()), batch_size=2, shuffle=False))
    return module


def hooks_of(model):
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_loggers_get_the_readings_and_the_training_is_the_same(accumulated):
    logger, callback = Logger(), SinkMonitorLightning(every=2)
    watched = fitted(Module(), [callback], accumulated=accumulated, logger=logger)
    plain = fitted(Module(), [], accumulated=accumulated)
    readings = [(step, logs) for step, logs in logger.seen if "sinks/rate_first" in logs]
    assert [step for step, _ in readings] == [0, 2, 4]
    assert watched.losses == plain.losses
    pairs = zip(watched.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert hooks_of(watched.model) == 0
    model = tiny("llama").train()
    with SinkMonitor(model, every=1) as monitor:
        model(input_ids=rows()[:2])
        expected = monitor.step()
    assert readings[0][1] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_hooks_are_gone_after_an_error():
    module = Module(broken=True)
    with pytest.raises(RuntimeError, match="of the step"):
        fitted(module, [SinkMonitorLightning(every=1)])
    assert hooks_of(module.model) == 0


def test_a_module_without_a_model_is_trained_with_a_warning(caplog):
    class Empty(Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(40, 2)

        def training_step(self, batch, index):
            return self.model(batch[0].float()).square().mean()

    fitted(Empty(), [SinkMonitorLightning()])
    assert "watches nothing (ModelError: Empty holds 0 Hugging Face models; need one" in caplog.text
