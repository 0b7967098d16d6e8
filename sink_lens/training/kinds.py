"""The kinds of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="train",
        heading="Train",
        config="sink_lens.training.config:TrainConfig",
        tables="sink_lens.schema:train.toml",
        page="sink_lens.training.pages.training:TRAIN",
    ),
    RunKind(
        name="watch",
        heading="Train",
        config="sink_lens.training.config:WatchConfig",
        tables="sink_lens.schema:watch.toml",
        page="sink_lens.training.pages.training:WATCH",
    ),
    RunKind(
        name="compare",
        heading="Train",
        config="sink_lens.training.config:CompareConfig",
        tables="sink_lens.schema:compare.toml",
        page="sink_lens.training.pages.training:COMPARE",
    ),
    RunKind(
        name="monitor",
        tables="sink_lens.schema:monitor.toml",
        page="sink_lens.training.pages.monitor:MONITOR",
    ),
)
