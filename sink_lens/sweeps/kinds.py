"""The kind of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="sweep",
        heading="Intervene",
        config="sink_lens.sweeps.config:SweepConfig",
        passes="sink_lens.sweeps.passes:passes",
        tables="sink_lens.schema:sweep.toml",
        page="sink_lens.sweeps.page:SWEEP",
    ),
)
