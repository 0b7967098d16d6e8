"""The command line: ``sink-lens trace``, ``report``, ``cache`` and ``measures``.

Nothing heavy is imported before a command needs it, so that ``--help`` answers at once. Every error that
sink_lens raises on purpose becomes one message and exit code 2; Ctrl-C becomes exit code 130.
"""

import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from .chain.config import BOS_ARMS, TOKEN_KINDS, TraceConfig
from .errors import SinkLensError
from .models.bundled import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT = 2
"""Exit code of everything that the user can put right."""
INTERRUPTED = 130
"""Exit code of Ctrl-C: 128 + SIGINT, as shells have it."""

_PACKAGE = Path(__file__).parent
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TraceConfig)}


class _Commands(TyperGroup):
    """The group of commands, which turns errors into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run one command."""
        debug = bool(ctx.params.get("debug"))
        with _heard(debug=debug):
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                _say("interrupted", "nothing was written")
                raise typer.Exit(INTERRUPTED) from None
            except (SinkLensError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if debug:
                    traceback.print_exception(error)
                text = str(error) if isinstance(error, SinkLensError) else _disk_full(error)
                _say("error", text)
                raise typer.Exit(BAD_INPUT) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TRACE_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens trace  [dim]the default model, about a minute after its first use[/dim]

sink-lens trace gpt2 --sequences 8 --out runs/gpt2  [dim]a hub name, where there is a network[/dim]

sink-lens trace ./my-checkpoint --tokens random --bos without  [dim]a folder written by save_pretrained[/dim]

sink-lens trace model.gguf --prompt "Call me Ishmael." --prompt "It was the best of times"

sink-lens trace --length 1024 --dry-run  [dim]what it would cost; measures nothing[/dim]
"""


def main() -> None:
    """The ``sink-lens`` command."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)  # read when the libraries are first imported
    app(prog_name="sink-lens")


def _show_version(asked: bool) -> bool:
    if asked:
        from importlib.metadata import version

        typer.echo(f"sink-lens {version('sink-lens')}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and all warnings.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Where do a language model's attention sinks come from? Traces the causal chain, link by link."""


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
    )
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported; bars of other libraries too
        logging.getLogger(__package__).setLevel(logging.WARNING)
    if dry_run:
        from .chain.trace import estimate

        _console().print(estimate(config))
        return
    from .chain.trace import default_folder
    from .chain.trace import trace as run_trace

    folder = out or default_folder(model)  # named here, so that Ctrl-C can say where things are
    try:
        result = run_trace(config, out=folder, overwrite=overwrite, progress=not quiet)
    except KeyboardInterrupt:
        if not (folder / "run.json").exists():
            raise
        _say("interrupted", f"what is finished is in {folder}; the same command with --out {folder} continues")
        raise typer.Exit(INTERRUPTED) from None
    if quiet:
        typer.echo(result.report)
        return
    _console().print(result.table())
    typer.echo(f"report: {result.report}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as written by sink-lens trace.", metavar="RUN")],
) -> None:
    """Render report.html of a run again, from its tables."""
    from .report.page import render

    typer.echo(f"report: {render(run)}")


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove converted models.")] = False,
    name: Annotated[
        str | None, typer.Option(help="With --clear: only this one, by the name shown.", metavar="NAME")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")] = False,
) -> None:
    """Show the converted models in the cache (SINK_LENS_CACHE says where), or clear them."""
    from .models.bundled import cache_entries, cache_folder, clear_cache

    if (name or yes) and not clear:
        raise typer.BadParameter("--name and --yes go with --clear")
    entries = cache_entries()
    if not entries and name is None:
        typer.echo(f"{cache_folder()} holds no converted model")
        return
    if not clear:
        from rich.table import Table

        table = Table("model", "size", "state", "folder", title=f"{cache_folder()}", title_justify="left", box=None)
        for entry in entries:
            state = "whole" if entry.complete else "unfinished or damaged"
            table.add_row(entry.name, _size(entry.bytes), state, entry.path.name[:12])
        _console().print(table)
        return
    size = sum(entry.bytes for entry in entries if name in (None, entry.name))
    what = name or f"{len(entries)} converted model{'s' if len(entries) > 1 else ''}"
    if not yes:
        typer.confirm(f"Remove {what} ({_size(size)}) from {cache_folder()}?", abort=True)
    typer.echo(f"freed {_size(clear_cache(name=name))}")


@app.command()
def measures() -> None:
    """Show every measure with its unit, range and reference."""
    from rich.table import Table

    from .measures.table import MEASURES

    table = Table("measure", "unit", "range", "reference", "meaning", box=None, pad_edge=False)
    for measure in MEASURES.values():
        limits = f"{measure.low:g} to {measure.high:g}"
        table.add_row(measure.name, measure.unit, limits, measure.reference, measure.meaning)
    _console().print(table)


@contextlib.contextmanager
def _heard(*, debug: bool) -> Iterator[None]:
    """While a command runs: our messages and warnings on stderr; those of others only in debugging."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if Path(filename).is_relative_to(_PACKAGE):
            _say("warning", str(message))
        elif debug:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    logger = logging.getLogger(__package__)
    handler, level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _say(word: str, text: str) -> None:
    """One coloured word and a plain text, on stderr; never wrapped, so that paths can be copied."""
    from rich.text import Text

    style = "bold yellow" if word == "warning" else "bold red"
    _console(stderr=True).print(Text.assemble((word, style), f": {text}"), soft_wrap=True)


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def _disk_full(error: OSError) -> str:
    where = f" at {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}; need room on the disk. Free space, or choose another folder with --out"


def _size(size: int) -> str:
    """Bytes in decimal megabytes."""
    return f"{size / 1e6:,.1f} MB"
