"""A command's options, made from its configuration: a frozen dataclass with a docstring under each field.

The command line stays with typer: the group that turns errors into messages and exit codes, the epilogs and the imports
that wait until a command runs are ours already, and only the lists of options were written by hand. What a type says
becomes an option here; ``sink_lens.configuration`` lists what a field's metadata adds.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ..configuration import bare, field_docs, value_of, with_fields

C = TypeVar("C")
_METAVARS = {int: "N", float: "F", str: "TEXT"}
_FILE = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML or JSON file with any of these fields; an option wins over it.", metavar="FILE"
    ),
]

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that DIR holds.")]


def configured(kind: type[C]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a configuration; it is called with the configuration and its own options.

    An option that is given wins over ``--config FILE``, and that over the field's default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # C is a dataclass
        hints, docs = get_type_hints(kind), field_docs(kind)
        made = [_parameter(field, hints[name], docs.get(name, "")) for name, field in known.items()]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def run(*, ctx: typer.Context, **given: Any) -> None:
            asked = {name: given.pop(name) for name in known}
            settings, file = {}, given.pop("config")
            if file is not None:
                from ..data.described import read_settings

                settings = read_settings(file, what="a configuration")
            for name, value in asked.items():
                source = ctx.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    option = option_of(known[name])
                    settings[name] = value_of(known[name], hints[name], value, name=option)
            command(with_fields(kind, None, settings, where="" if file is None else str(file)), **given)

        first = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        file = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, annotation=_FILE, default=None)
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        signature = inspect.Signature([first, *made, file, *own])
        del run.__wrapped__  # typer reads the signature below, not that of the command
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
        return run

    return decorate


def option_of(field: Field[Any]) -> str:
    """``--intervention-length``: a field's option."""
    return "--" + str(field.metadata.get("option", field.name)).replace("_", "-")


def _parameter(field: Field[Any], hint: Any, doc: str) -> inspect.Parameter:
    """A field as a parameter that typer understands."""
    kind, _ = bare(hint)
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    default = None if field.default is MISSING else field.default
    written, choices = field.metadata.get("written", ""), field.metadata.get("choices", ())
    shown: dict[str, Any] = {
        "help": doc.replace("``", "").replace("[", r"\["),
        "show_default": default not in (None, ()),
    }
    metavar = field.metadata.get("metavar") or "|".join(choices) or {"ranges": "N-N"}.get(written, _METAVARS.get(item))
    if get_origin(kind) is tuple:
        kind = str if written else list[item]
        if isinstance(default, tuple):
            default = ",".join(f"{one:g}" if item is float else one for one in default) if written else list(default)
    option = option_of(field)
    if field.metadata.get("positional"):
        info = typer.Argument(metavar=field.metadata.get("metavar"), **shown)
    elif item is bool:
        info = typer.Option(f"{option}/--no-{option[2:]}", **shown)
    else:
        info = typer.Option(option, metavar=metavar, **shown)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, info]
    )
