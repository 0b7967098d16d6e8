"""``sink-lens isolate``, ``amplify`` and ``ablate``."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..chain.config import BOS_ARMS, TOKEN_KINDS, TraceConfig
from ..errors import InputError
from ..models.bundled import DEFAULT_MODEL
from .console import PACKAGE, app, console, numbers, reported

if TYPE_CHECKING:
    import pandas as pd

    from ..studies.study import Study

_SEQUENCES = 8

Model = Annotated[
    str,
    typer.Argument(
        help="The default model's name, a folder written by save_pretrained, a .gguf file or a hub name.",
        show_default=True,
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/MODEL-DATE-TIME.", metavar="DIR")]
Text = Annotated[
    str | None, typer.Option(help="Text file (UTF-8) to cut the sequences from. Default: prose.", metavar="FILE")
]
Prompt = Annotated[list[str] | None, typer.Option(help="A prompt, one sequence; repeat for several.", metavar="TEXT")]
Tokens = Annotated[
    str, typer.Option(help="Text, uniformly random ids, or one id repeated.", metavar="|".join(TOKEN_KINDS))
]
Bos = Annotated[str, typer.Option(help="The first token, as in trace.", metavar="|".join(BOS_ARMS))]
Sequences = Annotated[int, typer.Option(help="How many sequences.", metavar="N")]
Length = Annotated[int, typer.Option(help="Tokens a sequence, BOS included.", metavar="T")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64. Default: float32.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.", metavar="N")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the folder.")]
Layers = Annotated[str | None, typer.Option(help="In which layers, as 0-11 or 3,5.", metavar="N-N")]

_ISOLATE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens isolate  [dim]a third of the length, in all layers of the default model[/dim]

sink-lens isolate gpt2 --position 9 --position 20 --layers 0-5

sink-lens isolate --prompt "Call me Ishmael. Some years ago, never mind how long" --position 5
"""
_AMPLIFY_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens amplify  [dim]a third of the length, layer 0 to the end of the first growth step[/dim]

sink-lens amplify gpt2 --position 10 --factors 1,2,5,10 --centre values --centre none

sink-lens amplify --position 10 --layers 0-1 --factors 0,0.5  [dim]attenuate[/dim]
"""
_ABLATE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens ablate  [dim]a few minutes on two cores[/dim]

sink-lens ablate ./my-checkpoint --text mine.txt --out runs/ablation
"""


@app.command(epilog=_ISOLATE_EXAMPLES)
def isolate(
    model: Model = DEFAULT_MODEL,
    position: Annotated[
        list[int] | None,
        typer.Option(help="A position to isolate; repeat for several. Default: a third of the length.", metavar="N"),
    ] = None,
    layers: Layers = None,
    out: Out = None,
    text: Text = None,
    prompt: Prompt = None,
    tokens: Tokens = "text",
    bos: Bos = "auto",
    sequences: Sequences = _SEQUENCES,
    length: Length = 64,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Isolate tokens by the attention mask: does a sink come there, is the old one removed or relocated?"""
    config = _config(locals())
    chosen = numbers(layers, option="layers")
    from ..studies.isolation import isolate as run

    study = run(config, positions=position or (), layers=chosen, out=out, overwrite=overwrite, progress=not quiet)
    _shown(study, quiet=quiet, columns=_MASS)


@app.command(epilog=_AMPLIFY_EXAMPLES)
def amplify(
    model: Model = DEFAULT_MODEL,
    position: Annotated[
        int | None, typer.Option(help="The position. Default: a third of the length.", metavar="N")
    ] = None,
    layers: Layers = None,
    factors: Annotated[str | None, typer.Option(help="Factors, as 1,2,5,30.", metavar="F,F")] = None,
    centre: Annotated[
        list[str] | None,
        typer.Option(help="Amplified away from: values, aggregated, none (norm only). Default: all.", metavar="NAME"),
    ] = None,
    out: Out = None,
    text: Text = None,
    prompt: Prompt = None,
    tokens: Tokens = "text",
    bos: Bos = "auto",
    sequences: Sequences = _SEQUENCES,
    length: Length = 64,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Amplify the variance of a token's aggregated values, by factor and centre: does a sink come there?"""
    config = _config(locals())
    chosen = numbers(layers, option="layers")
    options: dict[str, Any] = {}
    if factors is not None:
        options["factors"] = _factors(factors)
    if centre:
        options["centres"] = tuple(centre)
    from ..studies.amplification import amplify as run

    study = run(config, position=position, layers=chosen, out=out, overwrite=overwrite, progress=not quiet, **options)
    _shown(study, quiet=quiet, columns=("centre", "factor", "times", *_MASS[1:]))


@app.command(epilog=_ABLATE_EXAMPLES)
def ablate(
    model: Model = DEFAULT_MODEL,
    out: Out = None,
    text: Text = None,
    prompt: Prompt = None,
    tokens: Tokens = "text",
    bos: Bos = "auto",
    sequences: Sequences = _SEQUENCES,
    length: Length = 64,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Find the smallest set of neurons of each growth step whose joint ablation removes the sink."""
    config = _config(locals())
    from ..studies.ablation import ablate as run

    study = run(config, out=out, overwrite=overwrite, progress=not quiet)
    _shown(study, quiet=quiet, frame=_ablations(study), columns=("step", "kind", "neurons", "edit", "removed", "95%"))


_MASS = (
    "position",
    "baseline_mass_new",
    "mass_new",
    "baseline_mass_old",
    "mass_old",
    "outcome",
    "loss_change_nats",
)


def _config(given: dict[str, Any]) -> TraceConfig:
    """The configuration of a command, from its options by name."""
    if given["quiet"]:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported
        logging.getLogger(PACKAGE).setLevel(logging.WARNING)
    same = ("model", "tokens", "text", "bos", "sequences", "length", "device", "dtype", "seed")
    return TraceConfig(
        prompts=tuple(given["prompt"] or ()),
        cut_sequences=max(1, given["sequences"]),
        cut_length=max(16, given["length"]),
        **{name: given[name] for name in same},
    )


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise InputError(f"--factors is {text!r}; need numbers with commas between them, such as 1,2,5") from None


def _ablations(study: "Study") -> "pd.DataFrame":
    """The chosen sets and their neurons, in few columns; the headline says what random sets do."""
    from ..text import interval, percent

    table = study.frames["ablations"]
    table = table[~table["kind"].str.startswith("random")]
    what = {"column": "columns", "scalar": "outlier entries"}
    edits = zip(table["method"], table["what"], table["where"], strict=True)
    bounds = zip(table["ci_low"], table["ci_high"], strict=True)
    return table.assign(
        edit=[f"{method} of {what[of]}, {where}" for method, of, where in edits],
        removed=[percent(share) for share in table["removed_share"]],
        **{"95%": [interval(low, high, shown=percent) for low, high in bounds]},
    )


def _shown(study: "Study", *, quiet: bool, columns: tuple[str, ...], frame: "pd.DataFrame | None" = None) -> None:
    if quiet:
        reported(study.folder, quiet=True)
        typer.echo(study.folder)
        return
    from rich.table import Table

    from ..text import number

    frame = study.frames["summary"] if frame is None else frame
    heads = [name for name in columns if name in frame.columns]
    shown = Table(*(name.replace("_", " ") for name in heads), box=None, pad_edge=False)
    for row in frame[heads].itertuples(index=False):
        shown.add_row(*(number(value) if isinstance(value, float) else str(value) for value in row))
    console().print(shown)
    console().print(study.headline, soft_wrap=True)
    reported(study.folder)
    typer.echo(f"run: {study.folder}")
