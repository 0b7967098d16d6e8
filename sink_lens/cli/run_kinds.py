"""The commands that are made from a kind of run, one of each (``sink_lens.kinds``)."""

from collections.abc import Iterable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

from ..kinds import RunKind, all_kinds
from ..lazy import import_object
from ..sweeps.presets import PRESETS
from .console import (
    app,
    console,
    echo,
    frame_table,
    print_message,
    render_lines,
    render_report,
    silence_if_quiet,
    terminal_table,
)
from .options import (
    Answer,
    DryRun,
    File,
    InShard,
    Out,
    Overwrite,
    Quiet,
    add_config_options,
    example_option,
    json_rows,
)


def add_command(kind: RunKind) -> None:
    def command(
        config: Any, *, out: Path | None, overwrite: bool, quiet: bool, **asked: Any
    ) -> Answer:
        view, file, shard = (asked.get(name) for name in ("view", "file", "shard"))
        silence_if_quiet(quiet)
        if out is None and file is not None:
            out = Path("runs") / file.stem
        if shard is not None:
            from ..records.shards import check_shard  # which imports pandas: a dry run does without

            check_shard(shard, out=out, overwrite=overwrite)
        if kind.check:
            import_object(kind.check)(config)
        if asked.get("dry_run"):
            from ..estimate import estimate_cost

            if kind.cost:
                return print_items(import_object(kind.cost)(config))
            return print_items([estimate_cost(config, import_object(kind.passes))])
        how = {"shard": shard} if kind.shards else {}
        result = import_object(kind.run)(
            config, out=out, overwrite=overwrite, progress=not quiet, **how
        )
        if not result.finished:
            from ..records.shards import Shard

            if not quiet:
                echo(result.headline)
            own = str(Shard.parse(str(shard)))  # of an array job, which one it was
            return Answer(found=lambda: {"run": result.folder, "shard": own, "finished": False})
        return _print_result(kind, result, *(() if view is None else (view,)), quiet=quiet)

    annotated = {
        "file": File,
        "out": Out,
        "shard": InShard,
        "overwrite": Overwrite,
        "quiet": Quiet,
        "dry_run": DryRun,
    }
    if kind.example:
        annotated["example"] = Annotated[bool, example_option(import_object(kind.example))]
    has = {"file": kind.example, "shard": kind.shards, "dry_run": kind.passes or kind.cost}
    parameters = [Parameter("config", Parameter.POSITIONAL_OR_KEYWORD)]
    for name, one in annotated.items():
        if has.get(name, True):
            default = None if name in ("file", "out", "shard") else False
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, annotation=one, default=default)
            )
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # the options that this kind has
    command.__name__, command.__doc__ = kind.name, kind.help
    options = add_config_options(
        import_object(kind.config),
        make=import_object(kind.read) if kind.read else None,
        view=import_object(kind.view) if kind.view else None,
    )
    app.command(epilog=f"[bold]Examples[/bold]\n\n{kind.examples}")(options(command))


def _print_result(kind: RunKind, result: Any, *view: Any, quiet: bool) -> Answer:
    folders = getattr(result, "folders", () if result.folder is None else (result.folder,))
    pages = [render_report(folder, quiet=True) for folder in folders]
    if quiet and folders:
        echo(result.folder)
    else:
        said = import_object(kind.show)(result, *view) if kind.show else [result.headline]
        print_items([*said, *(f"report: {page}" for page in pages)])
    for note in getattr(result, "notes", ()):
        print_message("warning", note)
    found = import_object(kind.answer)(result, *view) if kind.answer else result.decision
    where = {"run": result.folder, "report": pages if len(pages) > 1 else pages[0]} if pages else {}
    code = int(import_object(kind.failed)(result)) if kind.failed else 0
    return Answer(found=lambda: where | dict(found), exit_code=code)


def print_items(items: Iterable[Any]) -> Answer:
    """Print each text, table or cost; return the answer for ``--json``: the costs' lines and the tables' rows."""
    from ..estimate import Cost, cost_table

    found: list[Any] = []
    for item in items:
        shown = item
        if isinstance(item, Cost):
            shown = cost_table(item)
            found += render_lines(shown)
        elif hasattr(item, "heads"):  # a page's table
            shown = terminal_table(item.heads, item.rows, wrapped=item.heads)
            found += json_rows(item.numbers)
        # a data frame; its class is not imported, since a dry run does without pandas
        elif hasattr(item, "iloc"):
            shown = frame_table(item, list(item.columns))
        console().print(shown, soft_wrap=isinstance(shown, str))
    return Answer(found=lambda: {"dry_run": found})


for _kind in (*all_kinds().values(), *PRESETS):
    if _kind.run:
        add_command(_kind)
