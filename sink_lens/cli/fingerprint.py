"""``sink-lens fingerprint``."""

import os
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import INTERRUPTED, app, console, numbers, reported, say, shown_size

if TYPE_CHECKING:
    from rich.table import Table

    from ..identity.fingerprints import Fingerprint

_SHOWN = 20
_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens fingerprint ./base ./finetuned  [dim]two models: one seed?[/dim]

sink-lens fingerprint runs/softmax-0 runs/softmax-1 runs/softmax-2  [dim]first and last checkpoint of each[/dim]

sink-lens fingerprint A B C D --lineages x,x,y,y  [dim]a matrix, AUC and TPR at 1% FPR[/dim]

sink-lens fingerprint --untrained gpt2,n_layers=4,d_model=192 --seeds 0-14  [dim]105 unrelated pairs[/dim]

sink-lens fingerprint A B --dry-run  [dim]time and memory; again later: states are cached, so that it goes on[/dim]
"""


@app.command(epilog=_EXAMPLES)
def fingerprint(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two or more: names, folders of save_pretrained, .gguf files, or folders of sink-lens train.",
            metavar="[MODEL]...",
            show_default=False,
        ),
    ] = None,
    untrained: Annotated[
        list[str] | None,
        typer.Option(help="An untrained model, as gpt2,n_layers=4: with each of --seeds; repeat.", metavar="STYLE"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the untrained models' weights.", metavar="0-4")] = "0,1",
    lineages: Annotated[
        str | None,
        typer.Option(help="A label a model, in order: equal ones are known to be related.", metavar="X,X,Y"),
    ] = None,
    every_checkpoint: Annotated[
        bool, typer.Option("--every-checkpoint", help="Of a training, all; else the first and the last.")
    ] = False,
    sequences: Annotated[int, typer.Option(help="Random inputs, 50 at least.", metavar="N")] = 2000,
    length: Annotated[int, typer.Option(help="Tokens of each.", metavar="T")] = 16,
    coordinates: Annotated[
        int | None, typer.Option(help="A model's own. Default: 400, or all of a narrower one.", metavar="M")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the softmax over the shared coordinates.")] = 10.0,
    draws: Annotated[int, typer.Option(help="Of each simulated null.", metavar="N")] = 100,
    alpha: Annotated[float, typer.Option(help="Same lineage where p is under it.")] = 0.01,
    null: Annotated[
        str, typer.Option(help="Decides: relabelled, shuffled, pipeline, matrices or analytical.", metavar="NULL")
    ] = "relabelled",
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Random embeddings instead of tokens; equal widths only.")
    ] = False,
    any_tokenizer: Annotated[
        bool, typer.Option("--any-tokenizer", help="Compare on equal ids where tokenizers differ.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Read every input again, and keep nothing.")] = False,
    seed: Annotated[int, typer.Option(help="Of the inputs and every draw.", metavar="N", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/fingerprint-DATE-TIME.", metavar="DIR")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the first GPU.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of models that are loaded. Default: float32.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the sentences.")] = False,
) -> None:
    """Do two models come from one initialisation? SeedPrint on each pair of models, with nulls that hold.

    Read tau_bar, the effect, first: a p only says how sure it is that the effect is not 0.

    With --embeddings unrelated untrained models look related under every null: the stream carries an embedding's own
    coordinates to the end.
    """
    from datetime import datetime

    if quiet:
        os.environ.setdefault("TQDM_DISABLE", "1")
    from ..identity.fingerprints import FingerprintConfig, cost
    from ..identity.fingerprints import fingerprint as compared
    from ..identity.measured_models import subjects
    from ..identity.untrained_models import read_untrained

    config = FingerprintConfig(
        inputs="embeddings" if embeddings else "tokens",
        sequences=sequences,
        length=length,
        coordinates=coordinates,
        temperature=temperature,
        draws=draws,
        alpha=alpha,
        decides=null,
        any_tokenizer=any_tokenizer,
        seed=seed,
    )
    drawn = [read_untrained(text) for text in untrained or ()]
    made = subjects((), configs=drawn, seeds=numbers(seeds, option="seeds") or ()) if drawn else []
    given: list[Any] = [*(models or ()), *made]
    options: dict[str, Any] = {
        "config": config,
        "every_checkpoint": every_checkpoint,
        "device": device,
        "dtype": dtype,
        "cache": not no_cache,
    }
    if dry_run:
        console().print(_cost(cost(given, **options)))
        return
    folder = Path("runs") / f"fingerprint-{datetime.now():%Y%m%d-%H%M%S}" if out is None else out
    labels = None if lineages is None else [label.strip() for label in lineages.split(",")]
    try:
        found = compared(given, lineages=labels, out=folder, overwrite=overwrite, progress=not quiet, **options)
    except KeyboardInterrupt:
        kept = "nothing was kept" if no_cache else "the states of finished models are cached: the same command goes on"
        say("interrupted", kept)
        raise typer.Exit(INTERRUPTED) from None
    if not quiet:
        console().print(_table(found))
        console().print()
    for sentence in found.sentences:
        console().print(sentence, soft_wrap=True)
    for note in found.notes:
        say("warning", note)
    typer.echo(str(reported(folder, quiet=True)))


def _cost(frame: Any) -> "Table":
    """A model a row, and the whole in the title."""
    from rich.table import Table

    n, seconds = len(frame), float(frame["seconds"].sum())
    pairs = n * (n - 1) // 2
    title = f"{n} models, {pairs} pairs; about {seconds:,.0f} s to read the inputs, a second or so a pair"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("width", "inputs", "tokens", "seconds", "states"):
        table.add_column(name, justify="right")
    for row in frame.to_dict("records"):
        time = "cached" if row["cached"] else f"{row['seconds']:,.1f}"
        size = shown_size(round(1e6 * row["megabytes"]))
        table.add_row(row["model"], str(row["d_model"]), f"{row['inputs']:,}", f"{row['tokens']:,}", time, size)
    return table


def _table(found: "Fingerprint") -> "Table":
    """A pair a row, the strongest effects first."""
    from rich.table import Table

    from ..text import number

    rows = found.pairs.sort_values("tau_bar", ascending=False).head(_SHOWN)
    over = f"; {_SHOWN} of {len(found.pairs)} pairs, by effect" if len(found.pairs) > _SHOWN else ""
    table = Table(title=f"log10 p under each null (1 − Φ){over}", title_justify="left", box=None, pad_edge=False)
    for name in ("model", "and"):
        table.add_column(name, overflow="fold", ratio=1)
    table.add_column("verdict", no_wrap=True)
    for name in ("tau_bar", "shared", "relabelled", "shuffled", "pipeline", "matrices", "analytical"):
        table.add_column(name, justify="right")
    short = _apart({*rows["a"], *rows["b"]})
    for row in rows.to_dict("records"):
        shown = [
            number(row[f"log10_p_{name}"]) for name in ("relabelled", "shuffled", "pipeline", "matrices", "analytical")
        ]
        table.add_row(
            short[row["a"]], short[row["b"]], row["verdict"], number(row["tau_bar"]), str(row["shared"]), *shown
        )
    return table


def _apart(names: Iterable[str]) -> dict[str, str]:
    """Each name without the folders that all have in common."""
    parts = {name: Path(name).parts for name in names}
    levels = zip(*(one[:-1] for one in parts.values()), strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return {name: str(Path(*one[shared:])) for name, one in parts.items()}
