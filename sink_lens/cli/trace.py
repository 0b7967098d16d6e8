"""``sink-lens trace``."""

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..chain.config import BOS_ARMS, TOKEN_KINDS, TraceConfig
from ..models.bundled import DEFAULT_MODEL
from .console import INTERRUPTED, PACKAGE, app, console, say

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TraceConfig)}

_TRACE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens trace  [dim]the default model, some four minutes on two cores; with --no-cuts one[/dim]

sink-lens trace gpt2 --sequences 8 --out runs/gpt2  [dim]a hub name, where there is a network[/dim]

sink-lens trace ./my-checkpoint --tokens random --bos without  [dim]a folder written by save_pretrained[/dim]

sink-lens trace model.gguf --prompt "Call me Ishmael." --prompt "It was the best of times"

sink-lens trace --length 1024 --dry-run  [dim]what it would cost; measures nothing[/dim]
"""


@app.command(epilog=_TRACE_EXAMPLES)
def trace(
    model: Annotated[
        str,
        typer.Argument(
            help="The default model's name, a folder written by save_pretrained, a .gguf file or a hub name.",
            show_default=True,
        ),
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; an unfinished run of the same question is continued. "
            "Default: runs/MODEL-DATE-TIME.",
            metavar="DIR",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Text file (UTF-8) to cut the sequences from. Default: bundled prose.", metavar="FILE"),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt, one sequence; repeat for several. Instead of text.", metavar="TEXT"),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(help="Text, uniformly random ids, or one id repeated.", metavar="|".join(TOKEN_KINDS)),
    ] = _DEFAULTS["tokens"],
    bos: Annotated[
        str,
        typer.Option(help="The first token: what the tokenizer does, BOS, or no BOS.", metavar="|".join(BOS_ARMS)),
    ] = _DEFAULTS["bos"],
    sequences: Annotated[int, typer.Option(help="How many sequences.", metavar="N")] = _DEFAULTS["sequences"],
    length: Annotated[int, typer.Option(help="Tokens a sequence, BOS included.", metavar="T")] = _DEFAULTS["length"],
    threshold: Annotated[
        float, typer.Option(help="A head has a sink where its sink score is above this.", metavar="F")
    ] = _DEFAULTS["threshold"],
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU.")
    ] = _DEFAULTS["device"],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64. Default: float32.")
    ] = _DEFAULTS["dtype"],
    seed: Annotated[int, typer.Option(help="Seed of every random choice.", metavar="N")] = _DEFAULTS["seed"],
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences a forward pass. Default: by length.", metavar="N")
    ] = _DEFAULTS["batch_size"],
    position: Annotated[
        int | None,
        typer.Option(help="Interior position at which cuts make a sink. Default: a third of the length.", metavar="N"),
    ] = _DEFAULTS["position"],
    no_cuts: Annotated[
        bool, typer.Option("--no-cuts", help="Only measure: a link is then judged without being cut.")
    ] = False,
    no_twin: Annotated[bool, typer.Option("--no-twin", help="Leave out the randomly initialised twin.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the report's path.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost, and stop.")] = False,
) -> None:
    """Find the sinks of a model and where they come from; write a run folder with tables and a report."""
    config = TraceConfig(
        model=model,
        tokens=tokens,
        text=text,
        prompts=tuple(prompt or ()),
        bos=bos,
        sequences=sequences,
        length=length,
        threshold=threshold,
        device=device,
        dtype=dtype,
        seed=seed,
        batch_size=batch_size,
        twin=not no_twin,
        cuts=not no_cuts,
        position=position,
    )
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported; bars of other libraries too
        logging.getLogger(PACKAGE).setLevel(logging.WARNING)
    if dry_run:
        from ..chain.trace import estimate

        console().print(estimate(config))
        return
    from ..chain.trace import default_folder
    from ..chain.trace import trace as run_trace

    folder = out or default_folder(model)  # named here, so that Ctrl-C can say where things are
    try:
        result = run_trace(config, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        if not (folder / "run.json").exists():
            raise
        say("interrupted", f"what is finished is in {folder}; the same command with --out {folder} continues")
        raise typer.Exit(INTERRUPTED) from None
    if quiet:
        typer.echo(result.report_path)
        return
    console().print(result.table())
    typer.echo(f"report: {result.report_path}")
