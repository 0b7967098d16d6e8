"""The kinds of run of this room."""

from functools import partial

from ..kinds import RunKind

_kind = partial(
    RunKind,
    heading="Whose model is it",
    check="sink_lens.identity.config:check_model_is_named",
    cost="sink_lens.identity.cost:dry_run_output",
)
_survey = partial(
    _kind,
    run="sink_lens.identity.surveys:survey",
    answer="sink_lens.identity.pages.survey:answer_of_survey",
)
PREFERENCE = _survey(
    name="preference",
    help="Which tokens does a model predict after random sequences? Against chance; trained, in training, or "
    "untrained.",
    config="sink_lens.identity.config:PreferenceConfig",
    tables="sink_lens.schema:preference.toml",
    page="sink_lens.identity.pages.preference:PREFERENCE",
    show="sink_lens.identity.pages.preference:show_preference",
    examples="""\
sink-lens preference --untrained gpt2 --seeds 0-2 --switch activation  [dim]three seeds of each activation[/dim]

sink-lens preference runs/softmax-0  [dim]every checkpoint of a training[/dim]

sink-lens preference ./my-checkpoint --sequences 10000 --length 1024 --dry-run  [dim]what it would cost[/dim]
""",
)
CONTRACTION = _survey(
    name="contraction",
    help="How alike does a model make unrelated sequences, and the positions of one? By sublayer, above the floor.",
    config="sink_lens.identity.config:ContractionConfig",
    tables="sink_lens.schema:contraction.toml",
    page="sink_lens.identity.pages.contraction:CONTRACTION",
    show="sink_lens.identity.pages.contraction:show_contraction",
    examples="""\
sink-lens contraction --untrained gpt2 --switch activation --switch attention --switch mlp --seeds 0-4

sink-lens contraction --untrained llama --untrained gpt2,activation=relu --length 256

sink-lens contraction runs/softmax-0 runs/softmax-1  [dim]along two trainings, and between them[/dim]
""",
)
FINGERPRINT = _kind(
    name="fingerprint",
    help="""\
Do two models come from one initialisation? SeedPrint on each pair of models, with nulls that hold.

Read tau_bar, the effect, first: a p only says how sure it is that the effect is not 0.

With --inputs embeddings unrelated narrow models (192 wide and less), untrained or little trained, look related under
every null: their stream carries an embedding's own coordinates to the end. At a width of 768 one pair in six does.
""",
    config="sink_lens.identity.config:FingerprintConfig",
    run="sink_lens.identity.fingerprint:run_fingerprint",
    show="sink_lens.identity.pages.fingerprint:show_fingerprint",
    answer="sink_lens.identity.fingerprint:answer_of_fingerprint",
    examples="""\
sink-lens fingerprint ./base ./finetuned  [dim]two models: one seed?[/dim]

sink-lens fingerprint runs/softmax-0 runs/softmax-1 runs/softmax-2  [dim]first and last checkpoint of each[/dim]

sink-lens fingerprint --untrained gpt2,n_layers=4,d_model=192 --seeds 0-14  [dim]105 unrelated pairs[/dim]

sink-lens fingerprint A B --dry-run  [dim]what it would cost; states are cached, so that a stopped run goes on[/dim]
""",
    tables="sink_lens.schema:fingerprint.toml",
    page="sink_lens.identity.pages.fingerprint:FINGERPRINT",
)
KINDS = (PREFERENCE, CONTRACTION, FINGERPRINT)
