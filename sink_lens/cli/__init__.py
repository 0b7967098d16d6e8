"""The command line: the commands of all kinds of run, and ``report``."""

import io
import os
import sys
from typing import Annotated, Any

import typer

# Each module puts its commands on the app, in the order of --help.
# isort: off
from . import run_kinds  # noqa: F401
from . import train  # noqa: F401
from . import watch  # noqa: F401
from . import tools  # noqa: F401

# isort: on
from .console import BAD_INPUT, INTERRUPTED, app

__all__ = ["BAD_INPUT", "INTERRUPTED", "app", "main"]

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Where a hub cannot be reached, the error at the end says what its retries met."""
_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""Turns that a waiting thread of libgomp, which torch uses on Linux, spins before it sleeps; 300,000 by itself.

A thread that spins takes the core from the one that it waits for where another program is busy.
"""


def main() -> None:
    """Run the ``sink-lens`` command with the words of the command line."""
    for name, value in (_QUIET if "OMP_WAIT_POLICY" in os.environ else _QUIET | _SPIN).items():
        os.environ.setdefault(name, value)  # read when the libraries are first imported
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and not stream.isatty():
            stream = io.TextIOWrapper(
                io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False)),
                encoding=stream.encoding,
                line_buffering=stream.line_buffering,
            )
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without a character shows its number
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="sink-lens")


class _Output(io.FileIO):
    """Standard output whose reader may go away, as ``head`` does; the work goes on."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"sink-lens {version('sink-lens')}")
        raise typer.Exit


@app.callback()
def global_options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, and all warnings.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Where do a language model's attention sinks come from? Traces the causal chain, link by link."""
