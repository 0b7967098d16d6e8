"""The kind of run of this room."""

from ..kinds import RunKind

PATCH = RunKind(
    name="patch",
    heading="Intervene",
    help="Put activations of one run into another, part by part, and measure what changes; write a run folder.",
    config="sink_lens.patching.config:PatchConfig",
    view="sink_lens.patching.config:PatchView",
    check="sink_lens.patching.config:check_prompts",
    passes="sink_lens.patching.passes:count_patch_passes",
    run="sink_lens.patching.command:run_patch",
    shards=True,
    tables="sink_lens.schema:patch.toml",
    page="sink_lens.patching.page:PATCH",
    show="sink_lens.patching.command:show_patch",
    answer="sink_lens.patching.command:answer_of_patch",
    examples="""\
sink-lens patch --clean "The capital of France is" --corrupted "The capital of Spain is" \
--correct " Paris" --incorrect " Madrid"

sink-lens patch gpt2 --clean "A cat sat down" --corrupted "A dog sat down" --site z --by layer,head \
--metric sink_mass --sink-position 0

sink-lens patch --clean "One two three" --corrupted "One four three" --site neurons --layers 3-5 --units 12,800 \
--metric norm --metric-layers 6 --direction noising

sink-lens patch --clean "One two three" --corrupted "One four three" --metric loss --out runs/one \
--shard 3/8 [dim]in each of 8 jobs; --shard slurm in an array job[/dim]
""",
)
KINDS = (PATCH,)
