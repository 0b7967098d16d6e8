"""The kind of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="trace",
        heading="Where the sink comes from",
        config="sink_lens.chain.config:TraceConfig",
        passes="sink_lens.chain.passes:passes",
        tables="sink_lens.schema:trace.toml",
        page="sink_lens.chain.page.trace:TRACE",
    ),
)
