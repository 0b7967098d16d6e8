"""The kinds of run of this room: a study has one question, and one run folder."""

from ..kinds import RunKind
from . import tokens

ISOLATE = RunKind(
    name="isolate",
    heading="Intervene",
    help="Isolate tokens by the attention mask: does a sink form there, is the model's own removed or relocated?",
    config="sink_lens.studies.config:IsolateConfig",
    passes="sink_lens.studies.passes:count_passes",
    run="sink_lens.studies.interventions:isolate",
    tables="sink_lens.schema:isolate.toml",
    page="sink_lens.studies.pages.interventions:ISOLATE",
    show="sink_lens.studies.pages.interventions:show",
    answer="sink_lens.studies.pages.interventions:answer",
    examples="""\
sink-lens isolate  [dim]a third of the length, in all layers of the default model[/dim]

sink-lens isolate gpt2 --target-position 9 --target-position 20 --layers 0-5

sink-lens isolate --prompt "Call me Ishmael. Some years ago, never mind how long" --target-position 5
""",
)
AMPLIFY = RunKind(
    name="amplify",
    heading="Intervene",
    help="Amplify the variance of a token's aggregated values, by factor and centre: does a sink form there?",
    config="sink_lens.studies.config:AmplifyConfig",
    passes="sink_lens.studies.passes:count_passes",
    run="sink_lens.studies.interventions:amplify",
    tables="sink_lens.schema:amplify.toml",
    page="sink_lens.studies.pages.interventions:AMPLIFY",
    show="sink_lens.studies.pages.interventions:show",
    answer="sink_lens.studies.pages.interventions:answer",
    examples="""\
sink-lens amplify  [dim]a third of the length, layer 0 to the end of the first growth step[/dim]

sink-lens amplify gpt2 --target-position 10 --factors 1,2,5,10 --centre values --centre none

sink-lens amplify --target-position 10 --layers 0-1 --factors 0,0.5  [dim]attenuate[/dim]
""",
)
QUANTISE = RunKind(
    name="quantise",
    heading="Decide",
    help="Which tokens and channels must stay in 16 bit? What a low-precision format costs, and what keeping them "
    "saves.",
    config="sink_lens.studies.config:QuantiseConfig",
    passes="sink_lens.studies.passes:count_passes",
    run="sink_lens.studies.quantise:quantise",
    tables="sink_lens.schema:quantise.toml",
    page="sink_lens.studies.pages.quantise:QUANTISE",
    show="sink_lens.studies.pages.quantise:show",
    examples="""\
sink-lens quantise  [dim]int8, one scale per sequence, at the inputs of the linear layers of the default model[/dim]

sink-lens quantise ./my-model --format mxfp4 --cache int4_token --weights int8_token --text mine.txt

sink-lens quantise gpt2 --site resid_post --format fp8_e4m3_tensor --json > decision.json
""",
)
CARD = RunKind(
    name="card",
    heading="Decide",
    help="What must users know about a model's sinks? One model, what changed in a second one, or many in a table.",
    config="sink_lens.studies.config:CardConfig",
    cost="sink_lens.studies.passes:cost_of_cards",
    run="sink_lens.studies.card_table:run_command",
    tables="sink_lens.schema:card.toml",
    page="sink_lens.studies.pages.card:CARD",
    show="sink_lens.studies.card_table:show",
    answer="sink_lens.studies.card_table:answer",
    failed="sink_lens.studies.card_table:is_loss_above_bound",
    examples="""\
sink-lens card  [dim]the default model on bundled prose; card.json and card.md lie in the run folder[/dim]

sink-lens card ./my-model --text mine.txt --out runs/card --trace runs/my-trace

sink-lens card ./base ./tuned --text mine.txt  [dim]what changed: base and fine-tuned, or two checkpoints[/dim]

sink-lens card runs/* --columns model,sink_rate,loss  [dim]a row per card or trace[/dim]
""",
)
DIFF = RunKind(name="diff", tables="sink_lens.schema:diff.toml", page="sink_lens.studies.pages.diff:DIFF")
"""What ``card A B`` writes."""
KINDS = (tokens.KIND, ISOLATE, AMPLIFY, CARD, DIFF, QUANTISE)
