"""The frame of every command: errors turned into exit codes, the console, messages, tables, the drawing of pages."""

import contextlib
import errno
import io
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import SinkLensError, first_line_of_error, is_panic
from ..kinds import all_kinds
from ..text import safe_for_terminal, safe_line

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType
    from rich.table import Table

BAD_INPUT = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_MEMORY = (
    "OutOfMemoryError",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
)
"""Texts of torch's out-of-memory errors, by device: on the CPU it has no error class for them."""
_LONGEST = 4000
_UsageError: Any = typer.BadParameter.__base__
"""Click's error about the words of a command line, from click or from the copy of it inside typer."""
_PACKAGE = Path(__file__).parent.parent
_OF_TOOLS = {"report": "Where the sink comes from", "isolate": "Intervene", "amplify": "Intervene"}
"""Command that is no kind of run -> its heading in the help; others stand under "Commands"."""
PACKAGE = __name__.split(".")[0]


class _RefusesVisibly:
    """Base of commands and groups: errors spell out invisible characters, and the help shows examples line by line."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        try:
            return super().make_context(*given, **named)  # type: ignore[misc]  # click's
        except _UsageError as error:
            error.message = safe_line(error.message, limit=_LONGEST)
            raise

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        lines: list[str] = []
        texts = (line.strip() for line in (getattr(self, "epilog", "") or "").splitlines())
        for line in filter(None, texts):
            if line.startswith("sink-lens") or line.partition(" ")[0] in ("torchrun", "accelerate"):
                command, _, does = line.partition("[dim]")
                does = textwrap.wrap(does.replace("[/dim]", ""), 66)
                lines += [f"  {command.strip()}", *(f"      {one}" for one in does)]
            else:
                lines.append(line.replace("[bold]", "").replace("[/bold]", ":").replace(r"\[", "["))
        if lines:
            formatter.write("\n" + "\n".join(lines) + "\n")


class Command(_RefusesVisibly, TyperCommand):
    """A command whose help shows no types of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [
                one.get_help_record(ctx)
                for one in self.get_params(ctx)
                if one.param_type_name == kind
            ]
            if shown := [(name.partition(" <")[0], text) for name, text in filter(None, records)]:
                with formatter.section(heading):
                    formatter.write_dl(shown)


class Commands(_RefusesVisibly, TyperGroup):
    """The group of all commands, listed by what they are for; it turns errors into messages and exit codes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        headings = {name: kind.heading for name, kind in all_kinds().items()} | _OF_TOOLS
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = headings.get(name, "Commands")
                panels.setdefault(heading, []).append((name, command.get_short_help_str(200)))
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of sink_lens becomes a message and exit code 2, and Ctrl-C exit code 130."""
        debug = bool(ctx.params.get("debug"))
        with _log_to_stderr(debug=debug):
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                notes = getattr(error, "__notes__", ["nothing was written"])
                print_message("interrupted", "; ".join(notes))
                raise typer.Exit(INTERRUPTED) from None
            except (SinkLensError, OSError, MemoryError, RuntimeError) as error:
                text = user_message(error)
                if text is None:
                    raise
                if debug:
                    traceback.print_exception(error)
                print_message("error", text)
                raise typer.Exit(BAD_INPUT) from None
            except BaseException as error:
                if not is_panic(error):
                    raise
                said = first_line_of_error(error)
                print_message(
                    "error",
                    f"a library panicked: {said}; need files that are whole. Fetch the model or data again",
                )
                raise typer.Exit(BAD_INPUT) from None


class Typer(typer.Typer):
    """An app whose commands are of the class ``Command``."""

    def command(self, name: str | None = None, **given: Any) -> Any:
        named: dict[str, Any] = {"cls": Command} | given
        return super().command(name, **named)


app = Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: four columns leave 16 characters for a sentence on a screen of 80
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextlib.contextmanager
def _log_to_stderr(*, debug: bool) -> Iterator[None]:
    """Within the block, write messages and warnings of sink_lens to stderr; those of others only with debug."""

    def show_warning(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if Path(filename).is_relative_to(_PACKAGE):
            print_message("warning", str(message))
        elif debug:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    logger = logging.getLogger(PACKAGE)
    handler, level = _StderrHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_message(word: str, text: str) -> None:
    """Print ``word: text`` on stderr in one line, so that paths can be copied; the word is coloured."""
    from rich.text import Text

    style = "bold yellow" if word == "warning" else "bold red"
    line = safe_line(" ".join(text.split("\n")), limit=_LONGEST)
    with _pause_bars():
        console(stderr=True).print(Text.assemble((word, style), f": {line}"), soft_wrap=True)


def echo(text: object, *, nl: bool = True) -> None:
    """Print a text on stdout, with invisible characters spelled out."""
    typer.echo(safe_for_terminal(str(text)), nl=nl)


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console that prints no markup and spells out invisible characters."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class VisibleConsole(Console):
        def render_str(self, text: str, **named: Any) -> Text:
            shown = safe_for_terminal(text)  # before a table measures it
            return super().render_str(shown, **named)

        def render(self, *given: Any, **named: Any) -> Iterator[Segment]:  # pyright: ignore[reportIncompatibleMethodOverride]  # passed on as it is
            for one in super().render(*given, **named):
                yield one if one.control else one._replace(text=safe_for_terminal(one.text))

    return VisibleConsole(stderr=stderr, highlight=False, markup=False)


def _pause_bars() -> contextlib.AbstractContextManager[Any]:
    bars = sys.modules.get("tqdm")
    if bars is None:
        return contextlib.nullcontext()
    return bars.tqdm.external_write_mode(file=sys.stderr)


class _StderrHandler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        with _pause_bars():
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return safe_for_terminal(super().format(record))


def render_lines(shown: "RenderableType", *, width: int = 120) -> list[str]:
    from rich.console import Console

    text = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    with text.capture() as captured:
        text.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def render_report(folder: Path, *, quiet: bool = False) -> Path:
    """Draw the page of a run, and print its path unless ``quiet``.

    Ctrl-C loses nothing but the page; a message then names the command that draws it.
    """
    from ..report.html import render

    try:
        path = render(folder)
    except KeyboardInterrupt:
        said = f"the run in {folder} is finished; sink-lens report {folder} draws its page"
        print_message("interrupted", said)
        raise typer.Exit(INTERRUPTED) from None
    if not quiet:
        echo(f"report: {path}")
    return path


def user_message(error: BaseException) -> str | None:
    """Return what to tell the user about an error; None if the error is a bug of the program."""
    if isinstance(error, SinkLensError):
        return str(error)
    said = f"{type(error).__name__} {error}"
    if isinstance(error, MemoryError) or any(sign in said for sign in _NO_MEMORY):
        return "the memory is full; need less at once. Ask for fewer or shorter sequences, or a smaller --batch-size"
    if not isinstance(error, OSError) or error.errno is None or error.errno == errno.EPIPE:
        return None
    if error.errno == errno.ENAMETOOLONG:
        return f"a name is too long ({str(error.filename)[:40]}...); need at most 255 bytes"
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in _FULL:
        return f"{error.strerror}{where}; need room on the disk. Free space, or choose another folder with --out"
    return f"{error.strerror}{where}; need a file or folder that allows it. Check the path and its permissions"


def terminal_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    texts: int = 1,
    wrapped: Sequence[str] = (),
) -> "Table":
    """Return a table for the terminal: ``texts`` columns of text, then numbers; ``wrapped`` ones may take lines."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for place, head in enumerate(heads):
        side: Any = "left" if place < texts else "right"
        table.add_column(head, justify=side, no_wrap=head not in wrapped, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def frame_table(frame: "pd.DataFrame", columns: Sequence[str]) -> "Table":
    from ..report.page import page_table

    shown = page_table(frame, columns, most=len(frame))
    return terminal_table(shown.heads, shown.rows, texts=len(shown.heads), wrapped=shown.heads)


def silence_if_quiet(quiet: bool) -> None:
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported
        logging.getLogger(PACKAGE).setLevel(logging.WARNING)
