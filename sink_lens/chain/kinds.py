"""The kind of run of this room."""

from ..kinds import RunKind

TRACE = RunKind(
    name="trace",
    heading="Where the sink comes from",
    help="Find the sinks of a model and where they come from; write a run folder with tables and a report.",
    config="sink_lens.chain.config:TraceConfig",
    passes="sink_lens.chain.passes:count_trace_passes",
    run="sink_lens.chain.trace:run_trace",
    tables="sink_lens.schema:trace.toml",
    page="sink_lens.chain.page.trace:TRACE",
    show="sink_lens.chain.terminal:show_trace",
    answer="sink_lens.chain.terminal:answer_of_trace",
    examples="""\
sink-lens trace --quick  [dim]the default model, about 5 minutes on two cores; without --quick some 2.4 times that[/dim]

sink-lens trace gpt2 --sequences 8 --out runs/gpt2  [dim]a hub name, where there is a network[/dim]

sink-lens trace ./my-checkpoint --tokens random --bos without  [dim]a folder written by save_pretrained[/dim]

sink-lens trace model.gguf --prompt "Call me Ishmael." --prompt "It was the best of times"

sink-lens trace --length 1024 --dry-run  [dim]what it would cost; measures nothing[/dim]
""",
)
KINDS = (TRACE,)
