"""The kind of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="patch",
        heading="Intervene",
        config="sink_lens.patching.config:PatchConfig",
        passes="sink_lens.patching.passes:passes",
        tables="sink_lens.schema:patch.toml",
        page="sink_lens.patching.page:PATCH",
    ),
)
