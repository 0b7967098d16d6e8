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
        help="""\
Compare training runs, seed by seed: who is ahead, how sure, and what became of the sink.

All runs must have the same data in the same order; variants differ in one thing, and have the same seeds. Of two runs
of your own Trainer (folders with a trainer_state.json, or runs of the monitor), the logs are put beside each other.
""",
        config="sink_lens.training.config:CompareConfig",
        run="sink_lens.training.compare:run_comparison",
        show="sink_lens.training.compare:show_comparison",
        answer="sink_lens.training.compare:answer_of_comparison",
        examples="""\
sink-lens compare runs/softmax-0 runs/softmax-1 runs/softmax-2 runs/headnorm-0 runs/headnorm-1 runs/headnorm-2

sink-lens compare runs/lr-* --group-by lr --baseline 0.001  [dim]any field of the configuration[/dim]

sink-lens compare out-a out-b  [dim]two output folders of your own Trainer: losses, and the monitor's sink rate[/dim]
""",
        tables="sink_lens.schema:compare.toml",
        page="sink_lens.training.pages.training:COMPARE",
    ),
    RunKind(
        name="monitor",
        tables="sink_lens.schema:monitor.toml",
        page="sink_lens.training.pages.monitor:MONITOR",
    ),
)
