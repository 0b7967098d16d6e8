"""The kinds of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="preference",
        heading="Whose model is it",
        config="sink_lens.identity.config:PreferenceConfig",
        tables="sink_lens.schema:preference.toml",
        page="sink_lens.identity.pages.preference:PREFERENCE",
    ),
    RunKind(
        name="contraction",
        heading="Whose model is it",
        config="sink_lens.identity.config:ContractionConfig",
        tables="sink_lens.schema:contraction.toml",
        page="sink_lens.identity.pages.contraction:CONTRACTION",
    ),
    RunKind(
        name="fingerprint",
        heading="Whose model is it",
        config="sink_lens.identity.config:FingerprintConfig",
        tables="sink_lens.schema:fingerprint.toml",
        page="sink_lens.identity.pages.fingerprint:FINGERPRINT",
    ),
)
