"""Removed names and their replacements: one table of commands, options, Python names and kinds of run.

A name of this table is no alias: it is answered with an error that says what does its work now.
"""

from collections.abc import Mapping

from .errors import GoneError

GONE: Mapping[tuple[str, ...], str] = {
    ("--calibrate of sink-lens contraction", "kind calibration"): "analyses/b_born_biased/calibrated_trained_model",
    ("--lineages of sink-lens fingerprint",): "the verdicts of all pairs; analyses/lineages.py has the area under the "
    "ROC curve",
    ("--embeddings of sink-lens fingerprint",): "--inputs embeddings",
    ("--width of sink-lens report", "--font of sink-lens report"): "--format pdf,svg, whose figures take any width, or "
    'Circuit.save("c.pdf", style="paper", width=3.25)',
    ("--gradient-sequences of sink-lens tokens",): "loss.backward() of your own: it was no part of what marks a sink",
    ("bake",): "your own copy of the model, whose down-projection you change",
    ("--by of sink-lens card", "--other-dtype of sink-lens card"): "a card of each, and sink-lens card runs/one "
    "runs/other; a card says what BOS is worth",
    ("--format of sink-lens card",): "--json, or sink_lens.studies.cards(...), a data frame",
    ("neuron_activations",): "circuitsvis.activations.text_neuron_activations",
    ("--verbose of sink-lens trace", "-v of sink-lens trace"): "the page, which has the tables, or the run folder",
    ("agreement",): "scipy.stats.spearmanr on the two rankings",
    ("--set of sink-lens train", "--set of sink-lens sweep"): "the option of the field, such as --lr 3e-4",
    ("metrics",): "sink_lens.edits.metrics",
    ("HeadNormConfig",): "sink_lens.models.headnorm.HeadNormConfig",
    ("Outcome",): "sink_lens.edits.outcome.Outcome",
    ("sweep_shard",): 'sweep(..., shard="3/8")',
    ("patch_shard",): 'patch(..., shard="3/8")',
    ("run_shard",): 'circuits.run(..., shard="3/8")',
    ("SinkMonitorLightning",): "SinkMonitor in a callback of your own: docs/tutorials/monitor_my_training.md has it",
    ("sink-lens diff", "diff", "DiffConfig"): "sink-lens card A B, in Python sink_lens.studies.card(a, b); it checks "
    "no batches",
    ("sink-lens table",): "sink-lens card A B C, in Python sink_lens.studies.cards",
    ("sink-lens streaming", "streaming", "StreamingConfig", "kind streaming"): "sink-lens card, which names the "
    "positions that a cache must keep, and sink_lens.edits.window, as examples/11_keep_the_first_tokens.py does",
    ("sink-lens examples",): "the page Examples of the documentation, or the folder examples of the repository",
    ("sink-lens measures",): "the glossary of the documentation, or sink_lens.measures.MEASURES",
    ("sink-lens verify", "verify", "VerifyConfig", "kind verify"): "python -m analyses.our_own.published_facts.run "
    "--model MODEL, in the repository",
}
"""Commands, options, Python names (wherever they stood) and kinds of run that went -> what does their work now; it
follows "use" in the error."""


def refuse_removed(name: str, *, said: str = "", more: str = "") -> None:
    """Raise a GoneError if this name was removed; the error calls it ``said`` and ends with ``more``."""
    for names, instead in GONE.items():
        if name in names:
            raise GoneError(f"{said or name} was removed; use {instead}{more}")
