"""The kind of run of this room."""

from ..kinds import RunKind

SWEEP = RunKind(
    name="sweep",
    heading="Intervene",
    help="Edit a model in every cell of a grid: neurons, heads, layers, positions, factors; resumable.",
    config="sink_lens.sweeps.config:SweepConfig",
    read="sink_lens.sweeps.config:config_of_command",
    example="sink_lens.sweeps.config:EXAMPLE",
    passes="sink_lens.sweeps.passes:count_sweep_passes",
    run="sink_lens.sweeps.sweep:run_sweep",
    shards=True,
    tables="sink_lens.schema:sweep.toml",
    page="sink_lens.sweeps.page:SWEEP",
    show="sink_lens.sweeps.results:show_sweep",
    answer="sink_lens.sweeps.results:answer_of_sweep",
    failed="sink_lens.sweeps.results:failed",
    examples="""\
sink-lens sweep --example > sweep.toml  [dim]a file to begin with[/dim]

sink-lens sweep sweep.toml --dry-run  [dim]cells, forwards, time and memory[/dim]

sink-lens sweep sweep.toml --out runs/neurons  [dim]again after an interruption: it goes on[/dim]

sink-lens sweep sweep.toml --model gpt2 --sequences 32 --controls 19 --out runs/gpt2

sink-lens sweep sweep.toml --out runs/one --shard 3/8  [dim]in each of 8 jobs; --shard slurm in an array job[/dim]

sink-lens sweep sweep.toml --engine ray --workers 16  [dim]on the cluster of RAY_ADDRESS[/dim]

Exit codes: 0 all cells, 1 some cells failed, 2 bad input, 130 interrupted.
""",
)
KINDS = (SWEEP,)
