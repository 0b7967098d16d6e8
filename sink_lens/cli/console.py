"""What every command shares: the group that turns errors into exit codes, the console, and how sizes are shown."""

import contextlib
import errno
import io
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import SinkLensError
from ..renamed import current_options

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType
    from rich.table import Table

BAD_INPUT = 2
"""Exit code of everything that the user can put right."""
INTERRUPTED = 130
"""Exit code of Ctrl-C: 128 + SIGINT, as shells have it."""

_EXPECTED = (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG)
"""Errors of the file system that the user can put right."""
_PACKAGE = Path(__file__).parent.parent
_HEADINGS = {
    "Where the sink comes from": ("trace", "tokens", "report"),
    "Intervene": ("isolate", "amplify", "ablate", "patch", "sweep"),
    "Decide": ("quantise", "streaming", "card", "verify", "diff", "table"),
    "Train": ("data", "train", "watch", "compare"),
    "Whose model is it": ("preference", "contraction", "fingerprint"),
    "The tool itself": ("examples", "measures", "cache"),
}
"""Heading of the help -> its commands; others stand under "Commands"."""
PACKAGE = __name__.split(".")[0]
"""Name of the logger that commands hear."""


class Command(TyperCommand):
    """A command whose help names no types, and keeps the examples as they are written, one a line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the arguments and the options, without ``<str>`` and the like."""
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [one.get_help_record(ctx) for one in self.get_params(ctx) if one.param_type_name == kind]
            if shown := [(name.partition(" <")[0], text) for name, text in filter(None, records)]:
                with formatter.section(heading):
                    formatter.write_dl(shown)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples; what ``[dim]`` marks stands under its command."""
        _write_examples(self.epilog or "", formatter)


class Group(TyperGroup):
    """A group of commands whose help lists them by what they are for."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as commands do."""
        _write_examples(self.epilog or "", formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under headings, in whole sentences."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = next((one for one, names in _HEADINGS.items() if name in names), "Commands")
                panels.setdefault(heading, []).append((name, command.get_short_help_str(200)))
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class Commands(Group):
    """The group of all commands, which turns errors into messages and exit codes."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A command and its words, of which options of 0.1 get their names now."""
        name, command, words = super().resolve_command(ctx, args)
        return name, command, current_options(name or "", words)

    def invoke(self, ctx: Any) -> Any:
        """Run one command."""
        debug = bool(ctx.params.get("debug"))
        with _heard(debug=debug):
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                say("interrupted", "nothing was written")
                raise typer.Exit(INTERRUPTED) from None
            except (SinkLensError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _EXPECTED:
                    raise
                if debug:
                    traceback.print_exception(error)
                text = str(error) if isinstance(error, SinkLensError) else _disk_full(error)
                say("error", text)
                raise typer.Exit(BAD_INPUT) from None


class Typer(typer.Typer):
    """Makes commands of ours."""

    def command(self, name: str | None = None, **given: Any) -> Any:
        """Put a command on the app, as typer does."""
        return super().command(name, **{"cls": Command} | given)


app = Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: four columns leave 16 characters for a sentence on a screen of 80
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _write_examples(epilog: str, formatter: Any) -> None:
    """Examples one a line and not wrapped, so that they can be copied; what each does, indented under it."""
    lines: list[str] = []
    for line in filter(None, (line.strip() for line in epilog.splitlines())):
        if line.startswith("sink-lens") or line.partition(" ")[0] in ("torchrun", "accelerate"):
            command, _, does = line.partition("[dim]")
            does = textwrap.wrap(does.replace("[/dim]", ""), 66)
            lines += [f"  {command.strip()}", *(f"      {one}" for one in does)]
        else:
            lines.append(line.replace("[bold]", "").replace("[/bold]", ":").replace(r"\[", "["))
    if lines:
        formatter.write("\n" + "\n".join(lines) + "\n")


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
            say("warning", str(message))
        elif debug:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    logger = logging.getLogger(PACKAGE)
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


def say(word: str, text: str) -> None:
    """One coloured word and a plain text, on stderr; never wrapped, so that paths can be copied."""
    from rich.text import Text

    style = "bold yellow" if word == "warning" else "bold red"
    console(stderr=True).print(Text.assemble((word, style), f": {text}"), soft_wrap=True)


def console(*, stderr: bool = False) -> "Console":
    """Where results go, or messages."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def lines(shown: "RenderableType") -> list[str]:
    """What is printed, as plain lines."""
    from rich.console import Console

    text = Console(file=io.StringIO(), width=120, highlight=False, markup=False)
    with text.capture() as captured:
        text.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def reported(folder: Path, *, quiet: bool = False) -> Path:
    """Render a run's page, and say where it is.

    Ctrl-C meanwhile loses nothing but the page, and says how it is drawn.
    """
    from ..report.html import render

    try:
        path = render(folder)
    except KeyboardInterrupt:
        say("interrupted", f"the run in {folder} is finished; sink-lens report {folder} draws its page")
        raise typer.Exit(INTERRUPTED) from None
    if not quiet:
        typer.echo(f"report: {path}")
    return path


def _disk_full(error: OSError) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return f"a name is too long ({str(error.filename)[:40]}...); need at most 255 bytes. Give a shorter one"
    where = f" at {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}; need room on the disk. Free space, or choose another folder with --out"


def columns_of(frame: "pd.DataFrame", columns: Sequence[str]) -> "Table":
    """Some columns of a table, as far as it has them, a row a line."""
    from rich.table import Table

    from ..text import number

    heads = [name for name in columns if name in frame.columns]
    shown = Table(*(name.replace("_", " ") for name in heads), box=None, pad_edge=False)
    for row in frame[heads].itertuples(index=False):
        shown.add_row(*(number(value) if isinstance(value, float) else str(value) for value in row))
    return shown


def hush(quiet: bool) -> None:
    """Show no progress bar, of ours or of other libraries, and no message, if that is asked for."""
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported
        logging.getLogger(PACKAGE).setLevel(logging.WARNING)


def shown_size(size: int) -> str:
    """Bytes in decimal megabytes."""
    return f"{size / 1e6:,.1f} MB"
