"""What the studies share: from the arguments to configuration, model and sequences, and the result's run folder."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ..activations.forward import resolve
from ..chain.config import ReadConfig
from ..configuration import make_config
from ..data.tokens import TokenBatch, Tokens, as_batch, decode_tokens
from ..models.inputs import check_sequences, config_of_given, describe_provenance
from ..models.lens import LensModel, check_plain_layers
from ..models.load import ModelLike, as_lens
from ..records import Result as Study
from ..records import check_folder_free, create_run, default_run_folder, place_of_run, utc_now_text
from ..schema import table_of
from ..signatures import takes

C = TypeVar("C", bound=ReadConfig)


def short_model_name(name: str) -> str:
    """Return the last part of a model's name if the name is a path, else the whole name."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def resolve_inputs(
    wanted: type[C],
    model: ModelLike,
    *,
    config: C | None,
    tokens: Tokens | str | None,
    fields: Mapping[str, Any],
    every_layer: bool = True,
) -> tuple[C, LensModel, TokenBatch]:
    """Return a study's configuration, model and sequences; with ``every_layer``, refuse layers without attention."""
    given = None if tokens is None or isinstance(tokens, str) else as_batch(tokens)
    is_named = isinstance(model, str | Path)
    model = model if is_named else as_lens(model)
    text = {"tokens": tokens} if isinstance(tokens, str) else {}
    name = str(model) if is_named else as_lens(model).name
    where = wanted.__name__.removesuffix("Config").lower()
    config = make_config(wanted, config, {**fields, **text, "model": name}, where=where)
    if given is not None:
        config = config_of_given(config, given, asked=fields)
    elif is_named:
        check_sequences(config)  # before the weights are read
    lens, batch = resolve(model, given, config=config)
    if every_layer:
        check_plain_layers(lens)
    return config, lens, batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a study, before it is written."""

    frames: Mapping[str, pd.DataFrame]
    headline: str
    kernel: str = "eager"
    decision: Mapping[str, Any] = field(default_factory=dict)
    """Output of ``--json``."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Name -> content; what is no text is written as JSON."""


_ARGUMENTS = """
Args:
    model: what ``load`` takes, or a ``LensModel``.
    tokens: the sequences, instead of those of the configuration; token ids, a row per sequence, are a batch.
    config: the study's configuration; the default one if None.
    out: the run folder; nothing is written if None.
    overwrite: replace the run that the folder holds.
    progress: show bars.
    **fields: fields of ``{config}``, such as ``sequences=8``; they win over those of ``config``.

Raises:"""


def study(
    asked: type[C], *, kind: str = "", result: type[Study] = Study, every_layer: bool = False
) -> Callable[[Callable[..., Measured]], Callable[..., Study]]:
    """Decorate a measuring function, so that it becomes the study that users call and writes a run folder.

    The decorated function takes ``lens, batch, *, config, progress``. The study keeps its name and docstring.
    ``every_layer`` refuses models that have layers without attention.
    """

    def wrap(measure: Callable[..., Measured]) -> Callable[..., Study]:
        def function(
            model: ModelLike,
            tokens: Tokens | str | None = None,
            *,
            config: C | None = None,
            out: str | Path | None = None,
            overwrite: bool = False,
            progress: bool = True,
            **fields: Any,
        ) -> Study:
            check_folder_free(out, overwrite=overwrite)
            started = utc_now_text()
            settled, lens, batch = resolve_inputs(
                asked, model, config=config, tokens=tokens, fields=fields, every_layer=every_layer
            )
            return write_study(
                kind or measure.__name__,
                lens,
                batch,
                settled,
                measure(lens, batch, config=settled, progress=progress),
                out=out,
                overwrite=overwrite,
                result=result,
                started=started,
            )

        said = inspect.cleandoc(measure.__doc__ or "")
        function.__doc__ = said.replace("\nRaises:", _ARGUMENTS.format(config=asked.__name__))
        function.__name__ = function.__qualname__ = measure.__name__
        function.__module__ = measure.__module__
        return takes(asked, returns="" if result is Study else result.__name__)(function)

    return wrap


def command_of(function: Callable[..., Study]) -> Callable[..., Study]:

    def run(config: ReadConfig, **how: Any) -> Study:
        how["out"] = how["out"] or default_run_folder(config.model)
        return function(config.model, config=config, **how)

    return run


def write_study(
    kind: str,
    lens: LensModel,
    batch: TokenBatch,
    config: ReadConfig,
    found: Measured,
    *,
    out: str | Path | None,
    overwrite: bool,
    started: str,
    result: type[Study] = Study,
) -> Study:
    frames = {"tokens": decode_tokens(batch, lens.tokenizer)} | dict(found.frames)
    seeds = {"tokens": batch.seed, "bootstrap": config.seed, "controls": config.seed}
    with (
        place_of_run(out, name=lens.name) as place,
        create_run(
            place.folder,
            kind=kind,
            config=dataclasses.asdict(config),
            provenance=describe_provenance(lens, batch, kernel=found.kernel) | {"seeds": seeds},
            expects=(*frames, *dict.fromkeys(name.partition(".")[0] for name in found.files)),
            overwrite=overwrite,
            started=started,
        ) as writer,
    ):
        for name, frame in frames.items():
            described = table_of(kind, name)
            is_csv = described is not None and described.file == "csv"
            (writer.write_csv if is_csv else writer.write_table)(name, frame)
        for name, content in found.files.items():
            text = (
                content
                if isinstance(content, str)
                else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            )
            writer.write_text(name, text)
    return result(
        folder=place.named,
        place=place,
        tables=frames,
        headline=found.headline,
        decision=found.decision,
    )
