"""A kind of run of your own: ``pip install -e examples/plugin``, then ``sink-lens letters abba``."""

from sink_lens.kinds import RunKind

KIND = RunKind(
    name="letters",
    heading="Decide",
    help="Count letters.",
    examples="sink-lens letters abba",
    config="letters.run:Config",
    run="letters.run:letters",
    tables="letters:tables.toml",
    page="letters.run:PAGE",
)
