"""``sink-lens sweep``."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..sweeps.config import SweepConfig, sweep_config
from .console import INTERRUPTED, app, console, echo, render_report, table_of
from .options import (
    Answer,
    DryRun,
    File,
    InShard,
    Overwrite,
    Quiet,
    configured,
    example_of,
    print_cost,
    rows,
    unfinished,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..sweeps.results import SweepResult

FAILED_CELLS = 1
"""Exit code where the sweep was finished and some of its cells failed."""
_SHOWN = 8

_EXAMPLE = """\
# A sweep of sink-lens. Everything but the edits has a default.
model = "SmolLM2-135M-Instruct"  # or a folder, a .gguf file, a hub name
controls = 5                     # random draws of as many units (heads, positions) for each cell
seed = 0

[tokens]
kind = "text"                    # text, random, repeated; or text = "mine.txt", or prompts = ["...", "..."]
sequences = 8
length = 64

[[metrics]]                      # sink_mass, loss, logit_difference, kl, norm, dominance; several are read at once
name = "sink_mass"
sink_position = 0
layers = "12-29"

[[edits]]                    # zero, mean_ordinary, mean_all, mean_aligned, resample, scale, add, set, isolate, amplify
kind = "zero"
site = "neurons"
layers = 11                      # each: one at a time (the default); all: together; "0-3,7": each of these
units = "0-31"                   # a list inside a list is a set that is edited together: [[1229, 1487], 3]

[[edits]]
kind = "zero"
site = "z"
heads = "each"                   # in every layer
"""

_ENGINE_HELP = "Where the blocks are computed; ray sends tokens, cells and metrics to the cluster of RAY_ADDRESS."
_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens sweep --example > sweep.toml  [dim]a file to begin with[/dim]

sink-lens sweep sweep.toml --dry-run  [dim]cells, forwards, time and memory[/dim]

sink-lens sweep sweep.toml --out runs/neurons  [dim]again after an interruption: it goes on[/dim]

sink-lens sweep sweep.toml --model gpt2 --sequences 32 --controls 19 --out runs/gpt2

sink-lens sweep sweep.toml --devices cuda:0,cuda:1

sink-lens sweep sweep.toml --out runs/one --shard 3/8  [dim]in each of 8 jobs; --shard slurm in an array job[/dim]

sink-lens sweep sweep.toml --engine ray --workers 16  [dim]on the cluster of RAY_ADDRESS[/dim]

Exit codes: 0 all cells, 1 some cells failed, 2 bad input, 130 interrupted.
"""


def _config(settings: Mapping[str, Any], where: str) -> SweepConfig:
    if not where:
        raise InputError("no file was given; need one that says what to sweep: sink-lens sweep --example > sweep.toml")
    return sweep_config(settings, where=where)


@app.command(epilog=_EXAMPLES)
@configured(SweepConfig, make=_config)
def sweep(
    config: SweepConfig,
    file: File = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the run; an unfinished run with the same settings goes on. Default: runs/ and the name of "
            "FILE.",
            metavar="DIR",
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="Several devices of this machine, one process each.", metavar="D,D")
    ] = None,
    engine: Annotated[str, typer.Option(help=_ENGINE_HELP, metavar="local|ray")] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Number of Ray workers. Default: one for each GPU.", metavar="N", min=1)
    ] = None,
    shard: InShard = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Compute the failed cells again.")] = False,
    dry_run: DryRun = False,
    example: Annotated[bool, example_of(_EXAMPLE)] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Answer:
    """Edit a model in every cell of a grid: neurons, heads, layers, positions, factors; resumable."""
    assert file is not None
    named = [name.strip() for name in (devices or "").split(",") if name.strip()]
    config = replace(config, device=named[0]) if named else config
    if dry_run:
        from ..sweeps.passes import passes

        return print_cost(config, passes)
    from ..records import RUN_FILE
    from ..sweeps.sweep import sweep as run

    folder = Path("runs") / file.stem if out is None else out
    how: dict[str, Any] = {"out": folder, "shard": shard, "overwrite": overwrite, "retry_failed": retry_failed}
    how |= {"engine": engine, "devices": named, "workers": workers, "progress": not quiet}
    try:
        result = run(config, **how)
    except KeyboardInterrupt:
        kept = f"the finished blocks are in {folder}: the same command goes on from there"
        said = kept if (folder / RUN_FILE).exists() else "nothing was written"
        console(stderr=True).print(f"stopped; {said}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    if not result.finished:
        return unfinished(folder, shard=shard, quiet=quiet)
    return Answer(found=_show(result, quiet=quiet), exit_code=FAILED_CELLS if len(result.failed) else 0)


def _show(result: "SweepResult", *, quiet: bool) -> Callable[[], Mapping[str, Any]]:
    """Print the result; return what makes its JSON."""
    from ..sweeps.results import cell_name

    if not quiet:
        console().print(result.headline, soft_wrap=True)
        for metric in dict.fromkeys(result.frame["metric"].tolist()):
            console().print(_strongest(result, str(metric)))
        for row in result.failed.head(3).to_dict("records"):
            console(stderr=True).print(f"failed: {cell_name(row)}: {row['error']}", soft_wrap=True)
    page = render_report(result.folder, quiet=quiet)
    echo(str(result.folder))

    def found() -> dict[str, Any]:
        metrics = dict.fromkeys(map(str, result.frame["metric"]))
        strongest = {metric: rows(result.top(_SHOWN, metric=metric)) for metric in metrics}
        answer = {"run": result.folder, "report": page, "sentence": result.headline, "failed": len(result.failed)}
        return {**answer, "cells": len(result.frame["cell"].unique()), "strongest": strongest}

    return found


def _strongest(result: "SweepResult", metric: str) -> "Table":
    from ..sweeps.results import cell_name
    from ..text import number

    def between(row: dict[Any, Any], low: str, high: str) -> str:
        """The ends of an interval as text."""
        return "none" if math.isnan(float(row[low])) else f"{number(float(row[low]))} to {number(float(row[high]))}"

    heads = ("edit", "effect", "95%", "controls", "above controls, 95%")
    lines = [
        (
            cell_name(row),
            number(float(row["effect"])),
            between(row, "ci_low", "ci_high"),
            "none" if math.isnan(float(row["control_effect"])) else number(float(row["control_effect"])),
            between(row, "over_low", "over_high"),
        )
        for row in result.top(_SHOWN, metric=metric).to_dict("records")
    ]
    return table_of(heads, lines, title=f"strongest effects on {metric}", wrapped=heads[:1])
