"""``sink-lens train``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from ..training.config import EXAMPLE, TrainConfig, build_train_config
from .console import INTERRUPTED, app, console, echo, render_report
from .options import Answer, DryRun, File, Out, Overwrite, Quiet, add_config_options, example_option
from .run_kinds import print_items

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens train --example > train.toml  [dim]a file to begin with[/dim]

sink-lens train train.toml --dry-run  [dim]parameters, tokens, time and memory[/dim]

sink-lens train train.toml --out runs/softmax-0  [dim]again after an interruption: it goes on[/dim]

sink-lens train train.toml --seed 1 --value-norm shared --out runs/headnorm-1

torchrun --nproc_per_node 4 --no-python sink-lens train train.toml

accelerate launch --multi_gpu --num_processes 4 --no_python sink-lens train train.toml

Exit codes: 0 trained to the end, 2 bad input, 130 interrupted.
"""


def _build_train_config(settings: Mapping[str, Any], where: str) -> TrainConfig:
    if not settings and not where:
        raise InputError(
            "no file was given; need one that says what to train: sink-lens train --example > train.toml"
        )
    return build_train_config(settings, where=where or "train")


@app.command("train", epilog=_EXAMPLES)
@add_config_options(TrainConfig, make=_build_train_config)
def train_command(
    config: TrainConfig,
    file: File = None,
    out: Out = None,
    dry_run: DryRun = False,
    example: Annotated[bool, example_option(EXAMPLE)] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Answer | None:
    """Train a model from scratch, with any attention and value norm; the same command goes on after a stop."""
    if dry_run:
        from ..training.passes import estimate_training_cost

        return print_items([estimate_training_cost(config)])
    from ..records import RUN_FILE
    from ..training.arguments import leave_process_group
    from ..training.checkpoint_files import list_checkpoints
    from ..training.train import train

    folder = out
    if folder is None:
        folder = Path("runs") / f"{'train' if file is None else file.stem}-{config.seed}"
    try:
        result = train(config=config, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        step = max(list_checkpoints(folder / "checkpoints"), default=0)
        kept = f"the last whole step that was saved is {step}: the same command goes on from there, in {folder}"
        said = kept if (folder / RUN_FILE).exists() else "nothing was written"
        console(stderr=True).print(f"stopped; {said}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    leave_process_group()
    if not result.first:
        return None
    if not quiet:
        console().print(result.headline, soft_wrap=True)
    page = render_report(result.folder, quiet=quiet)
    echo(str(result.folder))
    return Answer(found=lambda: {"run": result.folder, "report": page, "sentence": result.headline})
