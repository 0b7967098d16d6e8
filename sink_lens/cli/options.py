"""A command's options, made from its configuration (a dataclass with a docstring under each field), and its answer.

``sink_lens.configuration`` lists what a field's metadata adds.
"""

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer

from ..configuration import (
    allowed_texts,
    convert_field_value,
    flatten_tables,
    make_config,
    read_settings,
    split_off_none,
)
from ..errors import InputError, SinkLensError, UndrawnError
from ..signatures import field_docs
from .console import render_report, user_message

if TYPE_CHECKING:
    import pandas as pd

C = TypeVar("C")
_LONGEST = 60
"""Longer lists of choices do not fit beside their option."""
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML or JSON file with any of these options; an option on the command line overrides it.",
        metavar="FILE",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What ``--json`` prints, beside the command's name, and the exit code."""

    found: Callable[[], Mapping[str, Any]]
    exit_code: int = 0


def add_config_options(
    kind: type[C],
    *,
    make: Callable[[Mapping[str, Any], str], C] | None = None,
    view: type | None = None,
) -> Callable[[Callable[..., Answer | None]], Callable[..., None]]:
    """Return a decorator that adds a configuration's options to a command, and ``--config`` and ``--json``.

    A given option wins over ``--config FILE``, and the file over the field's default. A command with a parameter
    ``file`` takes the file as its argument too. ``make`` returns the configuration for the settings (field -> value)
    and the name of their file, or "" without one. The fields of ``view`` become options that no file gives.
    """

    def decorate(command: Callable[..., Answer | None]) -> Callable[..., None]:
        known = {field.name: field for field in fields(kind) if "file_only" not in field.metadata}  # type: ignore[arg-type]  # C is a dataclass
        seen, docs = {}, field_docs(kind)
        if view is not None:
            seen, docs = {field.name: field for field in fields(view)}, docs | field_docs(view)
        shown = [_typer_parameter(one, docs.get(name, "")) for name, one in (known | seen).items()]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run_with_settings(ctx: typer.Context, given: dict[str, Any]) -> Answer | None:
            asked = {name: given.pop(name) for name in known}
            if view is not None:
                given["view"] = view(**{name: given.pop(name) for name in seen})
            settings, file = {}, given.pop("config_file")
            if given.get("file") is not None and file is not None:
                raise InputError(
                    f"two files were given, {given['file']} and {file}; need one of them"
                )
            file = given.get("file") if file is None else file
            if "file" in given:
                given["file"] = file
            if file is not None:
                found = read_settings(file, what=f"a configuration of {command.__name__}")
                settings = flatten_tables(kind, found, where=str(file))
            for name, field in known.items():
                if "imports" in field.metadata and ":" in str(settings.get(name, "")):
                    raise InputError(
                        f"{file} has {name} = {settings[name]!r}, which is code to import; need it on the command "
                        f"line, as {option_name(field)} {settings[name]}"
                    )
            for name, value in asked.items():
                source = ctx.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    field = known[name]
                    if field.metadata.get("written") in ("commas", "ranges"):
                        value = ",".join(value)  # the option may be given several times
                    option = option_name(field)
                    settings[name] = convert_field_value(field, field.type, value, name=option)
            where = "" if file is None else str(file)
            return command(build_config(kind, settings, where=where, make=make), **given)

        @functools.wraps(command)
        def run(*, ctx: typer.Context, **given: Any) -> None:
            as_json = bool(given.pop("as_json"))
            run_and_answer(ctx, functools.partial(run_with_settings, ctx, given), as_json=as_json)

        by_name = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        file = by_name("config_file", annotation=_CONFIG, default=None)
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        last = by_name("as_json", annotation=Json, default=False)
        every = [by_name("ctx", annotation=typer.Context), *shown, file, *own, last]
        signature = inspect.Signature(every)
        run.configuration = kind  # type: ignore[attr-defined]  # what its options are made from
        del run.__wrapped__  # typer reads the signature below, not that of the command
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
        return run

    return decorate


def run_and_answer(
    ctx: typer.Context, command: Callable[[], Answer | None], *, as_json: bool
) -> None:
    """Run a command; with ``as_json`` print one JSON object on stdout and all other output on stderr."""
    name, shown = ctx.command_path.partition(" ")[2], sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            answer = command()
        except UndrawnError as error:  # all but the page was done before
            page, folder = render_report(error.folder, quiet=True), error.folder
            typer.echo(f"{folder} was finished but had no page; the page is drawn now")
            answer = Answer(found=lambda: {"run": folder, "report": page})
        except KeyboardInterrupt as error:
            if notes := getattr(error, "__notes__", None):
                notes[:] = [say_with_options(note, ctx) for note in notes]
            raise
        except (SinkLensError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, SinkLensError):
                error.args = (say_with_options(str(error), ctx), *error.args[1:])
            text = user_message(error)
            if as_json and text is not None:
                _print_json({"command": name, "error": text}, file=shown)
            raise
        if as_json:
            _print_json({"command": name} | dict(answer.found() if answer else {}), file=shown)
    if answer is not None and answer.exit_code:
        raise typer.Exit(answer.exit_code)


_PYTHON = re.compile(r"\b([a-z_]+)=(\.\.\.|True\b|False\b|'([^']*)'|\(([^()]*)\))")
_SUBJECT = re.compile(r"(?:^|(?<= and ))([a-z_]+)(?= (?:is|are|has|was)\b| [-\d.([{'])")
"""A field as the subject of a sentence, such as ``most_loss is 0.0; need`` or ``and n_heads 3``."""


def say_with_options(text: str, ctx: typer.Context) -> str:
    """Rewrite the arguments in an error's text, such as ``dtype='auto'``, as options of the command (--dtype auto).

    The subject of a sentence (``most_loss is 0``) is rewritten if its option was given: else a file has the field.
    """
    options = {one.name: one for one in ctx.command.params}
    given = {
        name
        for name in options
        if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }

    def option(found: re.Match[str]) -> str:
        if (known := options.get(found[1])) is None or not known.opts[-1].startswith("-"):
            return found[0]
        value = found[2]
        if value == "False" and known.secondary_opts:
            return known.secondary_opts[0]
        if value in ("...", "True", "False"):
            return known.opts[0]
        return f"{known.opts[0]} {found[3] or (found[4] or '').replace(' ', '')}"

    def subject(found: re.Match[str]) -> str:
        known = options[found[1]].opts[0] if found[1] in given else ""
        return known if known.startswith("-") else found[0]

    return _SUBJECT.sub(subject, _PYTHON.sub(option, text))


def json_rows(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _print_json(found: Mapping[str, Any], *, file: Any) -> None:
    from ..records.provenance import plain_json

    found = {
        name: json_rows(value) if hasattr(value, "to_dict") else value
        for name, value in found.items()
    }
    typer.echo(json.dumps(plain_json(found), allow_nan=False), file=file)


def build_config(
    kind: type[C],
    settings: Mapping[str, Any],
    *,
    where: str,
    make: Callable[[Mapping[str, Any], str], C] | None,
) -> C:
    return make_config(kind, None, settings, where=where) if make is None else make(settings, where)


def option_name(field: Field[Any]) -> str:
    return "--" + str(field.metadata.get("option", field.name)).replace("_", "-")


def off_option_name(field: Field[Any]) -> str:
    off = field.metadata.get("off")
    return f"--no-{option_name(field)[2:]}" if off is None else f"--{off}"


def _typer_parameter(field: Field[Any], doc: str) -> inspect.Parameter:
    kind, _ = split_off_none(field.type)
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    default = None if field.default is MISSING else field.default
    written, choices = field.metadata.get("written", ""), allowed_texts(field.type)
    item = str if choices else item
    shown: dict[str, Any] = {
        "help": doc.replace("``", ""),
        "show_default": default not in (None, ()),
    }
    listed = "|".join(choices)
    metavar = (
        field.metadata.get("metavar")
        or (listed if len(listed) <= _LONGEST else "NAME" if listed else "")
        or {"ranges": "N-N"}.get(written, {int: "N", float: "F", str: "TEXT"}.get(item))
    )
    if get_origin(kind) is tuple:
        as_text = bool(written) and written != "pairs"
        kind = list[str] if as_text else list[item]
        if isinstance(default, tuple) and as_text:
            default = [",".join(f"{one:g}" if item is float else str(one) for one in default)]
        elif isinstance(default, tuple):
            default = list(default)
    else:
        kind = item
    option = option_name(field)
    if field.metadata.get("positional"):
        info = typer.Argument(metavar=field.metadata.get("metavar", field.name.upper()), **shown)
    elif item is bool and "flag" in field.metadata:
        info = typer.Option(option, *field.metadata["flag"], **shown)
    elif item is bool:
        info = typer.Option(f"{option}/{off_option_name(field)}", **shown)
    else:
        info = typer.Option(option, metavar=metavar, **shown)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None, info],
    )


File = Annotated[
    Path | None,
    typer.Argument(help="The same as --config FILE.", metavar="FILE", show_default=False),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder of the run; an unfinished run with the same settings goes on. Default: a new folder in runs/.",
        metavar="DIR",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in DIR.")]
InShard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="Compute one of several parts, such as 3/8, or slurm; all parts need the same --out.",
        metavar="I/N|slurm",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="Print only the folder of the run: no result, no progress, no tables."
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on stdout, and everything else on stderr."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what it would cost, and write nothing.")
]


def example_option(text: str) -> Any:
    def print_example(asked: bool) -> None:
        if asked:
            typer.echo(text, nl=False)
            raise typer.Exit

    return typer.Option(
        "--example",
        help="Print an example file to start from.",
        is_eager=True,
        callback=print_example,
    )
