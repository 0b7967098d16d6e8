"""Removed names and their replacements: one table of commands, options, Python names and kinds of run.

A name of this table is no alias: it is answered with an error that says what does its work now.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import GoneError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Names of one thing that was removed."""

    instead: str
    """What does its work now; it follows "use" in the error."""
    command: str | None = None
    """Command of ``sink-lens``."""
    options: tuple[str, ...] = ()
    """Options of commands that stay, each behind its command: ``contraction --calibrate``."""
    names: tuple[str, ...] = ()
    """Public names of the package or of one of its rooms, such as ``verify``, wherever they stood."""
    kind: str | None = None
    """Kind of run, whose folders nothing reads any more."""


GONE: tuple[Gone, ...] = (
    Gone(
        instead="analyses/b_born_biased/calibrated_trained_model",
        options=("contraction --calibrate",),
        kind="calibration",
    ),
    Gone(
        instead="the verdicts of all pairs; analyses/lineages.py has the area under the ROC curve",
        options=("fingerprint --lineages",),
    ),
    Gone(instead="--inputs embeddings", options=("fingerprint --embeddings",)),
    Gone(
        instead='--format pdf,svg, whose figures take any width, or Circuit.save("c.pdf", style="paper", width=3.25)',
        options=("report --width", "report --font"),
    ),
    Gone(
        instead="loss.backward() of your own: it was no part of what marks a sink",
        options=("tokens --gradient-sequences",),
    ),
    Gone(instead="your own copy of the model, whose down-projection you change", names=("bake",)),
    Gone(
        instead="a card of each, and sink-lens card runs/one runs/other; a card says what BOS is worth",
        options=("card --by", "card --other-dtype"),
    ),
    Gone(instead="--json, or sink_lens.studies.cards(...), a data frame", options=("card --format",)),
    Gone(instead="circuitsvis.activations.text_neuron_activations", names=("neuron_activations",)),
    Gone(instead="the page, which has the tables, or the run folder", options=("trace --verbose", "trace -v")),
    Gone(instead="scipy.stats.spearmanr on the two rankings", names=("agreement",)),
    Gone(instead="sink_lens.edits.metrics", names=("metrics",)),
    Gone(instead="sink_lens.models.headnorm.HeadNormConfig", names=("HeadNormConfig",)),
    Gone(instead="sink_lens.edits.outcome.Outcome", names=("Outcome",)),
    Gone(instead='sweep(..., shard="3/8")', names=("sweep_shard",)),
    Gone(instead='patch(..., shard="3/8")', names=("patch_shard",)),
    Gone(instead='circuits.run(..., shard="3/8")', names=("run_shard",)),
    Gone(
        instead="SinkMonitor in a callback of your own: docs/tutorials/monitor_my_training.md has it",
        names=("SinkMonitorLightning",),
    ),
    Gone(
        instead="sink-lens card A B, in Python sink_lens.studies.card(a, b); it checks no batches",
        command="diff",
        names=("diff", "DiffConfig"),
    ),
    Gone(instead="sink-lens card A B C, in Python sink_lens.studies.cards", command="table"),
    Gone(
        instead="sink-lens card, which names the positions that a cache must keep, and sink_lens.edits.window, as "
        "examples/11_keep_the_first_tokens.py does",
        command="streaming",
        names=("streaming", "StreamingConfig"),
        kind="streaming",
    ),
    Gone(
        instead="the page Examples of the documentation, or the folder examples of the repository", command="examples"
    ),
    Gone(instead="the glossary of the documentation, or sink_lens.measures.MEASURES", command="measures"),
    Gone(
        instead="python -m analyses.our_own.published_facts.run --model MODEL, in the repository",
        command="verify",
        names=("verify", "VerifyConfig"),
        kind="verify",
    ),
)


def refuse_removed_command(name: str) -> None:
    """Raise a GoneError if a command of ``sink-lens`` was removed; it says what to use instead."""
    for instead in _replacements(lambda row: name == row.command):
        raise GoneError(f"sink-lens {name} was removed; use {instead}")


def refuse_removed_option(command: str, option: str) -> None:
    """Raise a GoneError if an option of a command was removed; it says what to use instead."""
    for instead in _replacements(lambda row: f"{command} {option}" in row.options):
        raise GoneError(f"{option} of sink-lens {command} was removed; use {instead}")


def refuse_removed_name(package: str, name: str) -> None:
    """Raise a GoneError if a Python name of a package was removed; it says what to use instead."""
    for instead in _replacements(lambda row: name in row.names):
        raise GoneError(f"{package}.{name} was removed; use {instead}")


def refuse_removed_kind(kind: str, folder: object) -> None:
    """Raise a GoneError if a run folder is of a kind that was removed; it says what to use instead."""
    for instead in _replacements(lambda row: kind == row.kind):
        raise GoneError(
            f"{folder} is a run of the kind {kind!r}, which was removed; use {instead}. Its tables are Parquet and CSV "
            "files, which pandas reads"
        )


def _replacements(is_it: Callable[[Gone], bool]) -> Iterator[str]:
    """Yield the replacements of those rows of the table that fit."""
    return (row.instead for row in GONE if is_it(row))
