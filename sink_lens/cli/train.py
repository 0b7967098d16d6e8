"""``sink-lens train``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import INTERRUPTED, app, console, reported

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens train --example > train.toml  [dim]a file to begin with[/dim]

sink-lens train train.toml --dry-run  [dim]parameters, tokens, time and memory[/dim]

sink-lens train train.toml --out runs/softmax-0  [dim]again after an interruption: it goes on[/dim]

sink-lens train train.toml --seed 1 --set value_norm=shared --out runs/headnorm-1

torchrun --nproc_per_node 4 --no-python sink-lens train train.toml

accelerate launch --multi_gpu --num_processes 4 --no_python sink-lens train train.toml

Exit codes: 0 trained to the end, 2 bad input, 130 interrupted.
"""


@app.command(epilog=_EXAMPLES)
def train(
    config: Annotated[Path | None, typer.Argument(help="What to train, as TOML or JSON.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/CONFIG-SEED.", metavar="DIR")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights, instead of the file's.", metavar="N", min=0)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field instead of the file's; again for more.", metavar="KEY=VALUE"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, mps. Default: the first GPU.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take; write nothing.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a file to begin with.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no summary: only the folder.")] = False,
) -> None:
    """Train a model with any attention and value norm, from scratch; resumable, with the chain watched if asked."""
    from ..errors import InputError
    from ..training.config import EXAMPLE, read_train, setting

    if example:
        typer.echo(EXAMPLE, nl=False)
        return
    if config is None:
        raise InputError("no file was given; need one that says what to train: sink-lens train --example > train.toml")
    changes: dict[str, Any] = dict(setting(text) for text in settings or ())
    changes |= {name: value for name, value in (("seed", seed), ("device", device)) if value is not None}
    asked = read_train(config, **changes)
    if dry_run:
        from ..training.estimate import dry_run as cost

        console().print(cost(asked))
        return
    from ..records import RUN_FILE
    from ..training.trainer import train as run

    folder = Path("runs") / f"{config.stem}-{asked.seed}" if out is None else out
    try:
        result = run(asked, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        kept = f"the checkpoints are in {folder}: the same command goes on from there"
        said = kept if (folder / RUN_FILE).exists() else "nothing was written"
        console(stderr=True).print(f"stopped; {said}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    if not result.first:
        return
    if not quiet:
        console().print(result.headline, soft_wrap=True)
    reported(result.folder, quiet=quiet)
    typer.echo(str(result.folder))
