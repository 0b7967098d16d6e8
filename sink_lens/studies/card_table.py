"""Many models in one table, a row each; and ``sink-lens card``, which makes a card, a comparison or such a table."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from ..configuration import make_config, refuse_unknown_names
from ..data.tokens import Tokens
from ..errors import InputError, RunError
from ..files import parse_json
from ..models.inputs import refuse_beside_tokens
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..records import Run, default_run_folder, read_run
from ..signatures import takes
from ..text import as_text, interval_text, safe_line
from .card import card, card_text_rows
from .card_pair import refuse_one_model
from .config import CardConfig, is_run_folder
from .study import Study

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_COLUMNS = (
    "model",
    "sink_rate",
    "sink_positions",
    "outlier_dimensions",
    "loss",
    "zeroing_cost",
)
"""Columns where none are chosen; those that no run has are left out."""
_ALIKE = ("threshold", "dtype", "bos", "token_source", "length")
"""Columns of what the main numbers hang on: where rows differ in one, the main columns have it too."""
_OF_RUN = ("family", "dtype", "n_layers", "d_model", "bos", "token_source", "sequences", "length")
_LISTS = ("outlier_dimensions", "growth_steps", "other_sink_positions")

Row = dict[str, Any]
"""Column -> value; a number with an interval has its ends as ``NAME_low`` and ``NAME_high``."""


@takes(CardConfig)
def cards(
    models: Sequence[ModelLike],
    tokens: Tokens | str | None = None,
    *,
    columns: Sequence[str] = (),
    config: CardConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> pd.DataFrame:
    """Put many models into one table, one row per model or run folder.

    A model's row is that of its card, which is made first; the folder of a card or a trace is read.

    Args:
        models: models, as ``card`` takes one, or folders of cards and traces.
        columns: such as ``("model", "sink_rate", "loss")``; the main ones if empty.
        config: the configuration of the cards that are made; the default one if None.
        tokens: the sequences, instead of those of the configuration.
        out: folder of the cards that are made, one folder each; nothing is written if None.
        overwrite: replace the cards that it holds.
        progress: show bars.
        **fields: fields of ``CardConfig``, such as ``length=128``; they win over those of ``config``.

    Returns:
        The table: numbers in full, and the ends of an interval in columns of their own (``sink_rate_low``).

    Raises:
        InputError: no model, a column that no row has, or what ``card`` refuses.
        RunError: a folder that holds a run of another kind, or what ``card`` refuses.
    """
    if tokens is not None and not isinstance(tokens, str):
        refuse_beside_tokens(fields)
    asked = make_config(CardConfig, config, fields)
    rows = make_table_rows(
        models, asked, tokens=tokens, out=out, overwrite=overwrite, progress=progress
    )
    return _unrounded_table(rows, choose_columns(rows, columns or asked.columns))


def make_table_rows(
    models: Sequence[ModelLike],
    config: CardConfig,
    *,
    tokens: Tokens | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    write: bool = False,
) -> list[Row]:
    """Return a row for each model, whose card is made first, or run folder; as in ``cards``."""
    if not models:
        raise InputError("no model was given; need models, or folders of cards or traces")
    if all(map(is_run_folder, models)):
        if out is not None:
            raise InputError(
                "out was given and every row is that of a run; need a model, whose card it is the folder for"
            )
        default = replace(CardConfig(), model=config.model, others=config.others)
        for name in (one.name for one in fields(CardConfig) if one.name != "columns"):
            if getattr(config, name) != getattr(default, name):
                raise InputError(
                    f"{name}=... was given and every row is that of a run, as it was measured; need a model to measure"
                )
    models = [one if isinstance(one, str | Path) else as_lens(one) for one in models]
    for pair in itertools.combinations([one for one in models if isinstance(one, LensModel)], 2):
        refuse_one_model(*pair)
    one = replace(config, others=(), columns=())
    rows = []
    for place, model in enumerate(models, start=1):
        if is_run_folder(model):
            rows.append(read_table_row(read_run(str(model))))
            continue
        name = str(model) if isinstance(model, str | Path) else as_lens(model).name
        folder = default_run_folder(name) if write else None
        folder = folder if out is None else Path(out) / f"{place}-{PurePath(name).name}"
        made = card(
            model, config=one, tokens=tokens, out=folder, overwrite=overwrite, progress=progress
        )
        rows.append(read_table_row(made.run))
    return rows


def read_table_row(run: Run) -> Row:
    """Return the row of a card or trace in the table of cards; RunError for another run, or one without summary."""
    if run.kind not in ("card", "trace"):
        raise RunError(
            f"{run.folder} holds a run of {safe_line(run.kind)}; need one of card or trace"
        )
    name = str(run.provenance.get("model") or run.folder.resolve().name)
    name = PurePath(name).name if PurePath(name).is_absolute() else name
    row = {"model": safe_line(name), "run": run.kind}
    row |= {name: run.provenance.get(name) for name in _OF_RUN}
    row["threshold"] = run.config.get("threshold")
    return row | (_read_card_row(run) if run.kind == "card" else _read_trace_row(run))


def _interval_columns(name: str, found: Mapping[str, Any]) -> Row:
    value, low, high = (found.get(end) for end in ("value", "low", "high"))
    return {name: value} | (
        {f"{name}_low": low, f"{name}_high": high} if interval_text(low, high) else {}
    )


def _read_trace_row(run: Run) -> Row:
    table = run.need("summary", columns=["quantity", "value", "ci_low", "ci_high", "note"])
    row: Row = {}
    for one in table.rename(columns={"ci_low": "low", "ci_high": "high"}).to_dict("records"):
        name, value = str(one["quantity"]), _float_if_number(one["value"])
        if name in _LISTS and isinstance(value, float):  # a list of one, which was read as a number
            value = f"{value:.0f}"
        row |= _interval_columns(name, {"value": value, "low": one["low"], "high": one["high"]})
    noted = table.loc[table["quantity"] == "sink_position", "note"].fillna("")
    cut = {"at_token", "aligned_position"} & row.keys()  # then it is a position in cut sequences
    if (noted == "").any() and not cut:  # without a sink the note says that this one is studied
        positions = [f"{row['sink_position']:.0f}", row.get("other_sink_positions")]
        row["sink_positions"] = ", ".join(filter(None, positions))
    links = run.optional("links", columns=["link", "verdict"])
    if links is not None:
        row |= dict(zip(links["link"].map(str), links["verdict"].map(str), strict=True))
    return row


def _read_card_row(run: Run) -> Row:
    try:
        card = parse_json((run.folder / "card.json").read_text(encoding="utf-8"))
        sink, loss, bos = card["sink"], card["loss"], card["bos"]
        entries = (
            f"{one['layer']} [{one['row']}, {one['column']}]" for one in card["super_weights"]
        )
        row = {
            "sentence": card["sentence"],
            "sink_positions": ", ".join(map(str, sink["positions"])),
            "first_sink_layer": sink["first_layer"],
            "super_weights": "; ".join(entries),
            "bos_needed": bos["needed"],
        }
        for name in ("outlier_dimensions", "residual_sinks"):
            row[name] = ", ".join(str(one["dimension"]) for one in card[name])
        for name, found in (
            ("sink_rate", sink["rate"]),
            ("sink_mass", sink["attention"]),
            ("to_no_key", sink["to_no_key"]),
            ("loss", loss["clean"]),
            ("zeroing_cost", loss.get("zeroed", {}).get("change", {})),
            ("mean_cost", loss.get("mean_aligned", {}).get("change", {})),
            ("bos_cost", bos.get("cost_without_nats", {})),
        ):
            row |= _interval_columns(name, found)
        row |= {f"max_{one['site']}": one["value"] for one in card["largest_activations"]}
        return row | card["chain"].get("links", {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{run.folder}/card.json cannot be read ({error}); need the card of a finished run"
        ) from error


def _float_if_number(value: Any) -> Any:
    if isinstance(value, Real):
        return None if value != value else value  # nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def choose_columns(rows: Sequence[Row], asked: Sequence[str]) -> list[str]:
    """Return the columns ``asked`` for; else the main ones that a row has, and those in which rows are not alike."""
    there = list(dict.fromkeys(name for row in rows for name in row))
    if asked:
        refuse_unknown_names(asked, there, where="columns")
        return list(asked)
    unlike = [
        name for name in _ALIKE if len({row[name] for row in rows if row.get(name) is not None}) > 1
    ]
    return [*(name for name in DEFAULT_COLUMNS if name in there), *unlike]


def _unrounded_table(rows: Sequence[Row], columns: Sequence[str]) -> pd.DataFrame:
    known = {*columns, *(name for row in rows for name in row)}
    names = [
        one for name in columns for one in (name, f"{name}_low", f"{name}_high") if one in known
    ]
    return pd.DataFrame(
        [[row.get(name) for name in names] for row in rows], columns=names, dtype=object
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTable:
    """Table of cards and traces, which has no run folder."""

    folder: ClassVar[None] = None
    finished: ClassVar[bool] = True
    rows: list[Row]
    columns: list[str]


def run_card(config: CardConfig, *, out: str | Path | None, **how: Any) -> Study | CardTable:
    if not config.makes_table():
        folder = default_run_folder(config.model) if out is None else out
        return card(config.model, config=config, out=folder, **how)
    models = (config.model, *config.others)
    rows = make_table_rows(models, config, out=out, write=True, **how)
    return CardTable(rows=rows, columns=choose_columns(rows, config.columns))


def show_card(found: Study | CardTable) -> "Iterator[RenderableType | pd.DataFrame]":
    if isinstance(found, CardTable):
        shown = [[_value_with_interval(row, name) for name in found.columns] for row in found.rows]
        yield pd.DataFrame(shown, columns=found.columns)
        return
    yield found.headline
    if "changes" in found.tables:
        from .pages.diff import name_neurons

        changes = found.tables["changes"]
        is_text = changes["unit"].isin(["index", "text"])
        numbers = ("quantity", "first", "second", "change", "change_low", "change_high", "changed")
        shown = changes.loc[~is_text].filter(items=numbers)
        yield shown.rename(columns={"changed": "beyond its interval"})
        texts = ("quantity", "first_indices", "second_indices", "changed")
        yield name_neurons(changes.loc[is_text]).filter(items=texts)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in card_text_rows(found.decision):
        table.add_row(name, text)
    yield table
    yield f"block for a model card: {found.run.folder / 'card.md'}"


def _value_with_interval(row: Row, name: str) -> str:
    if row.get(name) in (None, ""):
        return ""
    ends = interval_text(row.get(f"{name}_low"), row.get(f"{name}_high"))
    return f"{as_text(row[name])} {ends}".strip()


def answer_of_card(found: Study | CardTable) -> Mapping[str, Any]:
    if not isinstance(found, CardTable):
        return found.decision
    return {"columns": found.columns, "rows": _unrounded_table(found.rows, found.columns)}


def is_loss_above_bound(found: Study | CardTable) -> bool:
    """Check whether the loss rose by more than the bound; then the command fails."""
    return not isinstance(found, CardTable) and not found.decision.get("within_bound", True)
