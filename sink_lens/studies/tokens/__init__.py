"""``sink-lens tokens``: which tokens are sinks, which are massive, and which dimensions are large on most tokens."""

from ...kinds import RunKind

KIND = RunKind(
    name="tokens",
    heading="Where the sink comes from",
    help="Find the tokens that are sinks or massive, and the dimensions that are large on most tokens.",
    config="sink_lens.studies.tokens.config:TokensConfig",
    passes="sink_lens.studies.tokens.config:count_token_passes",
    run="sink_lens.studies.tokens.run:run",
    tables="sink_lens.studies.tokens:tables.toml",
    page="sink_lens.studies.tokens.page:TOKENS",
    show="sink_lens.studies.tokens.page:show_tokens",
    answer="sink_lens.studies.tokens.page:answer_of_tokens",
    examples="""\
sink-lens tokens  [dim]the default model on bundled prose, about a minute on two cores[/dim]

sink-lens tokens gpt2 --text corpus.txt --length 1024 --out runs/gpt2-tokens

sink-lens tokens ./my-checkpoint --bos without --massive-threshold 10  [dim]your own threshold[/dim]

sink-lens tokens --json  [dim]thresholds, rates and dimensions for a program[/dim]
""",
)
