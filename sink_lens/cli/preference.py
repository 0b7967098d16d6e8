"""``sink-lens preference`` and ``sink-lens contraction``: what a model is biased to before it has learned anything."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.described import BOS_CONDITIONS
from .console import INTERRUPTED, PACKAGE, app, console, numbers, say

if TYPE_CHECKING:
    from rich.table import Table

    from ..identity.measured_models import Draws, Subject
    from ..identity.survey import Survey

_UNTRAINED = "An untrained model: a style (gpt2, llama, qwen) and fields, as gpt2,activation=relu,n_layers=4; repeat."
_SWITCHES = "activation, gating, attention, mlp, norm, positions, init, writers, tied"

Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names, folders of save_pretrained, .gguf files, or folders of sink-lens train (their checkpoints).",
        metavar="[MODEL]...",
        show_default=False,
    ),
]
Untrained = Annotated[list[str] | None, typer.Option(help=_UNTRAINED, metavar="STYLE[,FIELD=VALUE]...")]
Seeds = Annotated[str, typer.Option(help="Seeds of the untrained models' weights.", metavar="0-4")]
Switch = Annotated[
    list[str] | None,
    typer.Option(help=f"Also each other value of a part of the untrained model: {_SWITCHES}; repeat.", metavar="NAME"),
]
Sequences = Annotated[int, typer.Option(help="Random sequences, 50 at least.", metavar="N")]
Length = Annotated[int, typer.Option(help="Tokens a sequence.", metavar="T")]
Bos = Annotated[str, typer.Option(help="The first token.", metavar="|".join(BOS_CONDITIONS))]
Seed = Annotated[int, typer.Option(help="Seed of the sequences.", metavar="N", min=0)]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the run; an unfinished one is continued. Default: runs/COMMAND-DATE-TIME.", metavar="DIR"
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU.")]
Dtype = Annotated[str | None, typer.Option(help="Of models that are loaded. Default: float32.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would cost; write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the report's path.")]

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

sink-lens contraction --untrained gpt2 --seeds 0-2 --calibrate  [dim]variance calibration at initialisation[/dim]
"""
_TITLES = {
    "preference": "most frequent token over chance; tokens that cover 80%; largest mean probability times vocabulary",
    "contraction": "cosine between sequences: before layer 0, gained, by MLPs; between positions: gained, by attention",
    "calibration": "what is gained between sequences and positions, the top token's share, attention to 0, loss",
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
    "calibration": {
        "inter_excess": "inter",
        "intra_excess": "intra",
        "argmax_top_share": "argmax",
        "sink_mass": "sink",
        "loss": "loss",
    },
}
"""Kind of run -> measure -> its column."""


@app.command(epilog=_PREFERENCE_EXAMPLES)
def preference(
    models: Models = None,
    untrained: Untrained = None,
    seeds: Seeds = "0",
    switch: Switch = None,
    sequences: Sequences = 1000,
    length: Length = 64,
    bos: Bos = "without",
    seed: Seed = 0,
    out: Out = None,
    device: Device = None,
    dtype: Dtype = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Which tokens a model predicts after random sequences, against chance: trained, along training, or untrained."""
    _hush(quiet)
    from ..identity.measurements import preferences
    from ..identity.survey import variants_of

    asked = _Asked(models, untrained, seeds=seeds, switches=switch)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "out": out, "overwrite": overwrite, "quiet": quiet}
    draws = asked.draws(sequences=sequences, length=length, seed=seed, bos=bos)
    if dry_run:
        _cost("preference", asked.found, draws=draws, device=device, dtype=dtype)
        return
    _run("preference", asked, preferences(draws, progress=not quiet), draws=draws, finish=variants_of, **options)


@app.command(epilog=_CONTRACTION_EXAMPLES)
def contraction(
    models: Models = None,
    untrained: Untrained = None,
    seeds: Seeds = "0",
    switch: Switch = None,
    sequences: Sequences = 128,
    length: Length = 64,
    bos: Bos = "without",
    seed: Seed = 0,
    no_sinks: Annotated[bool, typer.Option("--no-sinks", help="Leave out the attention to position 0.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Instead, what variance calibration of z does to the model.")
    ] = False,
    out: Out = None,
    device: Device = None,
    dtype: Dtype = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """How alike a model makes unrelated sequences, and the positions of one, after each sublayer, over the floor."""
    _hush(quiet)
    from ..identity import measurements as kinds

    asked = _Asked(models, untrained, seeds=seeds, switches=switch)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "out": out, "overwrite": overwrite, "quiet": quiet}
    draws = asked.draws(sequences=sequences, length=length, seed=seed, bos=bos)
    kind = "calibration" if calibrate else "contraction"
    if dry_run:
        _cost(kind, asked.found, draws=draws, device=device, dtype=dtype)
    elif calibrate:
        measure = kinds.calibrations(draws, progress=not quiet)
        _run(kind, asked, measure, draws=draws, finish=kinds.calibrations_compared, **options)
    else:
        measure = kinds.contractions(draws, sinks=not no_sinks, progress=not quiet)
        _run(kind, asked, measure, draws=draws, finish=kinds.directions_compared, sinks=not no_sinks, **options)


def _hush(quiet: bool) -> None:
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported; bars of other libraries too
        logging.getLogger(PACKAGE).setLevel(logging.WARNING)


class _Asked:
    """The models that were asked for, and how.

    Raises:
        InputError: what was asked for cannot be, or switches without a model to switch.
    """

    def __init__(
        self, models: list[str] | None, untrained: list[str] | None, *, seeds: str, switches: list[str] | None
    ) -> None:
        from ..errors import InputError
        from ..identity.contrasts import contrasts
        from ..identity.measured_models import subjects
        from ..identity.untrained_models import read_untrained

        if switches and not untrained:
            raise InputError("--switch was given and no untrained model; need one to switch: --untrained gpt2")
        bases = [read_untrained(text) for text in untrained or ()]
        variants = dict.fromkeys(variant for base in bases for variant in contrasts(base, switches=switches or ()))
        chosen = numbers(seeds, option="seeds") or (0,)
        self.found = subjects(models or (), configs=list(variants), seeds=chosen)
        self.config = {
            "models": list(models or ()),
            "untrained": [variant.label for variant in variants],
            "seeds": list(chosen),
        }

    def draws(self, **size: Any) -> "Draws":
        """The sequences."""
        from ..identity.measured_models import Draws

        return Draws(**size)


def _cost(kind: str, found: "list[Subject]", *, draws: "Draws", device: str | None, dtype: str | None) -> None:
    """Print what it would take."""
    from rich.table import Table

    from ..engine.cost import duration
    from ..identity.estimate import estimate
    from ..text import short

    frame = estimate(kind, found, draws=draws, device=device, dtype=dtype)
    table = Table("models", box=None, pad_edge=False)
    for name in ("how many", "parameters", "tokens", "time", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in frame.to_dict("records"):
        table.add_row(
            str(row["variant"]),
            str(row["models"]),
            short(row["parameters"]),
            short(row["tokens"]),
            duration(row["seconds"]),
            f"{row['memory'] / 1e9:.2f} GB",
        )
    console().print(table)
    console().print(f"in all {duration(sum(frame['seconds'].tolist()))}; the memory does not grow with the sequences")


def _run(
    kind: str,
    asked: _Asked,
    measure: Any,
    *,
    draws: "Draws",
    finish: Any,
    out: Path | None,
    quiet: bool,
    sinks: bool | None = None,
    **options: Any,
) -> None:
    """Run the survey, and print what it found and where the report is."""
    from dataclasses import asdict

    from ..identity.measurements import TABLES
    from ..identity.survey import survey
    from ..models.inputs import default_folder

    folder = out or default_folder(kind)
    config = asked.config | asdict(draws) | ({} if sinks is None else {"sinks": sinks})
    options |= {"tables": TABLES[kind], "finish": finish, "progress": not quiet}
    try:
        done = survey(kind, asked.found, measure, draws=draws, config=config, out=folder, **options)
    except KeyboardInterrupt:
        say("interrupted", f"what is finished is in {folder}; the same command with --out {folder} continues")
        raise typer.Exit(INTERRUPTED) from None
    if quiet:
        typer.echo(done.report)
        return
    from ..report.survey import shared

    for sentence in [f"{_TITLES[kind]} (± 95% over seeds)", *shared(done.tables["arms"]["variant"].tolist())]:
        console().print(sentence, soft_wrap=True)
    console().print(_table(kind, done))
    typer.echo(f"report: {done.report}")


def _table(kind: str, done: "Survey") -> "Table":
    """One row a variant with its interval over seeds; one row a checkpoint."""
    from rich.table import Table

    from ..report.survey import variant_rows

    shown = _SHOWN[kind]
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in shown.values():
        table.add_column(name, justify="right", no_wrap=True)
    for label, cells in variant_rows(done.tables["arms"], done.tables["summary"], measures=tuple(shown)):
        table.add_row(label, *cells)
    return table
