"""``sink-lens preference`` and ``sink-lens contraction``: what a model is biased to before it has learned anything."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import InputError
from ..identity.config import NOTHING, ContractionConfig, PreferenceConfig, SurveyConfig
from .console import INTERRUPTED, app, console, echo, hush, say, table_of
from .options import Answer, DryRun, Out, Overwrite, Quiet, configured, rows

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from ..records import Result

_PREFERENCE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens preference --untrained gpt2 --seeds 0-2 --switch activation  [dim]three seeds of each activation[/dim]

sink-lens preference runs/softmax-0  [dim]every checkpoint of a training[/dim]

sink-lens preference ./my-checkpoint --sequences 10000 --length 1024 --dry-run  [dim]what it would cost[/dim]
"""
_CONTRACTION_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens contraction --untrained gpt2 --switch activation --switch attention --switch mlp --seeds 0-4

sink-lens contraction --untrained llama --untrained gpt2,activation=relu --length 256

sink-lens contraction runs/softmax-0 runs/softmax-1  [dim]along two trainings, and between them[/dim]
"""
_TITLES = {
    "preference": "top token relative to chance; tokens that cover 80%; largest mean probability × vocabulary",
    "contraction": "cosine between sequences: before layer 0, gained, by MLPs; between positions: gained, by attention",
}
"""Kind of run -> what stands over its table."""
_SHOWN = {
    "preference": {
        "argmax_top_ratio": "argmax",
        "argmax_covering": "80%",
        "argmin_top_ratio": "argmin",
        "argmin_covering": "80% ",
        "mean_probability_ratio": "mean p",
    },
    "contraction": {
        "inter_floor": "floor",
        "inter_excess": "inter",
        "inter_by_mlp": "by MLP",
        "intra_excess": "intra",
        "intra_by_attention": "by att.",
    },
}
"""Kind of run -> measure -> its column."""


@app.command(epilog=_PREFERENCE_EXAMPLES)
@configured(PreferenceConfig)
def preference(
    config: PreferenceConfig,
    out: Out = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Answer:
    """Which tokens does a model predict after random sequences? Against chance; trained, in training, or untrained."""
    return _run(config, out=out, dry_run=dry_run, overwrite=overwrite, quiet=quiet)


@app.command(epilog=_CONTRACTION_EXAMPLES)
@configured(ContractionConfig)
def contraction(
    config: ContractionConfig,
    out: Out = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Answer:
    """How alike does a model make unrelated sequences, and the positions of one? By sublayer, above the floor."""
    return _run(config, out=out, dry_run=dry_run, overwrite=overwrite, quiet=quiet)


def _run(config: SurveyConfig, *, out: Path | None, dry_run: bool, overwrite: bool, quiet: bool) -> Answer:
    """Run the survey, and print what it found and where the report is."""
    hush(quiet)
    if not (config.models or config.untrained):  # before torch is loaded
        raise InputError(NOTHING)
    from ..identity.pages.survey import shared
    from ..identity.surveys import estimate, survey
    from ..models.inputs import default_folder

    if dry_run:
        taken = estimate(config)
        _cost(taken)
        return Answer(found=lambda: {"dry_run": rows(taken)})
    kind, folder = config.kind, out or default_folder(config.kind)
    try:
        done = survey(config, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        say("interrupted", f"what is finished is in {folder}; the same command with --out {folder} continues")
        raise typer.Exit(INTERRUPTED) from None
    where = {"run": folder, "report": done.report_path}
    answer = Answer(found=lambda: where | {name: rows(done.tables[name]) for name in ("variants", "summary")})
    if quiet:
        echo(done.report_path)
        return answer
    for sentence in [f"{_TITLES[kind]} (± 95% over seeds)", *shared(done.tables["variants"]["variant"].tolist())]:
        console().print(sentence, soft_wrap=True)
    console().print(_table(kind, done))
    echo(f"report: {done.report_path}")
    return answer


def _cost(frame: "pd.DataFrame") -> None:
    from ..text import duration, short

    lines = [
        (
            str(row["variant"]),
            str(row["models"]),
            short(row["parameters"]),
            short(row["tokens"]),
            duration(row["seconds"]),
            f"{row['memory'] / 1e9:.2f} GB",
        )
        for row in frame.to_dict("records")
    ]
    heads = ("models", "how many", "parameters", "tokens", "time", "memory")
    console().print(table_of(heads, lines, wrapped=heads[:1]))
    console().print(f"in all {duration(sum(frame['seconds'].tolist()))}; the memory does not grow with the sequences")


def _table(kind: str, done: "Result") -> "Table":
    """One row per variant with its interval over seeds; one row per checkpoint."""
    from ..identity.pages.survey import variant_rows

    shown = _SHOWN[kind]
    lines = variant_rows(done.tables["variants"], done.tables["summary"], measures=tuple(shown))
    return table_of(("", *shown.values()), ((label, *cells) for label, cells in lines))
