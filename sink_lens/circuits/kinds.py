"""The kind of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="circuit",
        heading="Intervene",
        config="sink_lens.circuits.config:CircuitConfig",
        passes="sink_lens.circuits.passes:passes",
        tables="sink_lens.schema:circuit.toml",
        page="sink_lens.circuits.page:CIRCUIT",
    ),
)
