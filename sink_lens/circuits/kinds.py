"""The kind of run of this room."""

from ..kinds import RunKind

KINDS = (
    RunKind(
        name="circuit",
        heading="Intervene",
        help="Find the edges between heads and MLPs that carry a task or the sink, and judge them; write a run folder.",
        config="sink_lens.circuits.config:CircuitConfig",
        view="sink_lens.circuits.config:CircuitView",
        shards=True,
        run="sink_lens.circuits.command:find_or_compare",
        show="sink_lens.circuits.command:show_circuit",
        answer="sink_lens.circuits.command:answer_of_circuit",
        passes="sink_lens.circuits.passes:count_circuit_passes",
        tables="sink_lens.schema:circuit.toml",
        page="sink_lens.circuits.page:CIRCUIT",
        examples="""\
sink-lens circuit --task ioi

sink-lens circuit gpt2 --task greater-than --pairs 64 --edges 100 --save greater_than.json --save greater_than.svg

sink-lens circuit --task file --pairs-file my_pairs.csv --span subject=subject_at --metric my_metrics:margin

sink-lens circuit --task text --pairs 16 --metric-layers 12-29 --span sink=0 --span rest=1-63

sink-lens circuit --task ioi --circuit heads_of_a_paper.csv  [dim]judge a given circuit[/dim]

sink-lens circuit runs/ioi --against eap_ig.json

sink-lens circuit --task ioi --pairs 1000 --out runs/ioi --shard 3/8  [dim]in each of 8 jobs; or slurm[/dim]
""",
    ),
)
