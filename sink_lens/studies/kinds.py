"""The kinds of run of this room: a study has one question, and one run folder."""

from ..kinds import RunKind
from . import tokens

QUANTISE = RunKind(
    name="quantise",
    heading="Decide",
    help="Which tokens and channels must stay in 16 bit? What a low-precision format costs, and what keeping them "
    "saves.",
    config="sink_lens.studies.config:QuantiseConfig",
    passes="sink_lens.studies.passes:count_study_passes",
    run="sink_lens.studies.quantise:run",
    tables="sink_lens.schema:quantise.toml",
    page="sink_lens.studies.pages.quantise:QUANTISE",
    show="sink_lens.studies.pages.quantise:show_quantise",
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
    run="sink_lens.studies.card_table:run_card",
    tables="sink_lens.schema:card.toml",
    page="sink_lens.studies.pages.card:CARD",
    show="sink_lens.studies.card_table:show_card",
    answer="sink_lens.studies.card_table:answer_of_card",
    failed="sink_lens.studies.card_table:is_loss_above_bound",
    examples="""\
sink-lens card  [dim]the default model on bundled prose; card.json and card.md lie in the run folder[/dim]

sink-lens card ./my-model --text mine.txt --out runs/card --trace runs/my-trace

sink-lens card ./base ./tuned --text mine.txt  [dim]what changed: base and fine-tuned, or two checkpoints[/dim]

sink-lens card runs/* --columns model,sink_rate,loss  [dim]a row per card or trace[/dim]
""",
)
DIFF = RunKind(
    name="diff", tables="sink_lens.schema:diff.toml", page="sink_lens.studies.pages.diff:DIFF"
)
"""What ``card A B`` writes."""
KINDS = (tokens.KIND, CARD, DIFF, QUANTISE)
