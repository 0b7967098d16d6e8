"""Many models in one table: a row per model, or per folder of a card or a trace, and the columns that are chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from ..chain.page.story import judged_links
from ..configuration import make_config, refuse_unknown_names
from ..data.tokens import Tokens
from ..errors import InputError, RunError
from ..models.load import ModelLike, as_lens
from ..records import Run, read_run
from ..text import interval_text, json_value, number, visible
from .card import card, rows_of_card
from .config import CardConfig, is_run
from .study import Study

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_COLUMNS = ("model", "sink_rate", "sink_positions", "outlier_dimensions", "loss", "zeroing_cost")
"""Columns where none are chosen; those that no run has are left out."""
_OF_RUN = ("family", "dtype", "n_layers", "d_model", "bos", "token_source", "sequences", "length")
_LISTS = ("outlier_dimensions", "growth_steps", "other_sink_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A number with its interval, or a text."""

    value: Any
    low: Any = None
    high: Any = None

    @property
    def shown(self) -> str:
        """The number to three digits with its interval."""
        if self.value is None or self.value == "":
            return ""
        return f"{number(self.value)} {interval_text(self.low, self.high)}".strip()


Row = Mapping[str, Cell]


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
        out: folder of the cards that are made, one folder each; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the cards that it holds.
        progress: show bars.
        **fields: fields of ``CardConfig``, such as ``length=128``; they win over those of ``config``.

    Returns:
        The table: numbers in full, and the ends of an interval in columns of their own (``sink_rate_low``).

    Raises:
        InputError: no model, a column that no row has, or what ``card`` refuses.
        RunError: a folder that holds a run of another kind, or what ``card`` refuses.
    """
    asked = make_config(CardConfig, config, fields)
    rows = rows_of(models, asked, tokens=tokens, out=out, overwrite=overwrite, progress=progress)
    return full_table(rows, chosen_columns(rows, columns or asked.columns))


def rows_of(
    models: Sequence[ModelLike],
    config: CardConfig,
    *,
    tokens: Tokens | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> list[Row]:
    """One row for each model or folder, in their order; the arguments and errors are those of ``cards``."""
    if not models:
        raise InputError("no model was given; need models, or folders of cards or traces")
    if out is not None and all(map(is_run, models)):
        raise InputError("out was given and every row is that of a run; need a model, whose card it is the folder for")
    one = replace(config, others=(), columns=())
    rows = []
    for place, model in enumerate(models, start=1):
        if is_run(model):
            rows.append(row_of(read_run(str(model))))
            continue
        name = str(model) if isinstance(model, str | Path) else as_lens(model).name
        folder = None if out is None else Path(out) / f"{place}-{PurePath(name).name}"
        made = card(model, config=one, tokens=tokens, out=folder, overwrite=overwrite, progress=progress)
        rows.append(row_of(read_run(made.folder)))
    return rows


def row_of(run: Run) -> dict[str, Cell]:
    """Collect the facts that a run has of its model: name -> cell; cards and traces share the names of what both have.

    Raises:
        RunError: the run is neither a card nor a trace, or lacks its summary.
    """
    if run.kind not in ("card", "trace"):
        raise RunError(f"{run.folder} holds a run of {visible(run.kind)}; need one of card or trace")
    name = str(run.provenance.get("model") or run.folder.resolve().name)
    shown = PurePath(name).name if PurePath(name).is_absolute() else name
    row = {"model": Cell(value=visible(shown)), "run": Cell(value=run.kind)}
    row |= {name: Cell(value=run.provenance.get(name)) for name in _OF_RUN}
    return row | (_card_cells(run) if run.kind == "card" else _trace_cells(run))


def _trace_cells(run: Run) -> dict[str, Cell]:
    """Column -> cell of the row that a trace's run folder gives."""
    table = run.need("summary", columns=["quantity", "value", "ci_low", "ci_high", "note"])
    row = {}
    for one in table.to_dict("records"):
        name, value = str(one["quantity"]), _float_if_number(one["value"])
        if name in _LISTS and isinstance(value, float):  # a list of one, which was read as a number
            value = f"{value:.0f}"
        row[name] = Cell(value=value, low=one["ci_low"], high=one["ci_high"])
    noted = table.loc[table["quantity"] == "sink_position", "note"].fillna("")
    if (noted == "").any():  # without a sink the note says so of the position that was studied
        others = str(row.get("other_sink_positions", Cell(value="")).shown)
        row["sink_positions"] = Cell(value=", ".join(filter(None, [row["sink_position"].shown, others])))
    if run.optional("links", columns=["link", "verdict"]) is not None:
        links = judged_links(run, columns=["link", "verdict"])
        row |= {str(one["link"]): Cell(value=str(one["verdict"])) for one in links.to_dict("records")}
    return row


def _card_cells(run: Run) -> dict[str, Cell]:
    """Column -> cell of the row that a card's run folder gives, from ``card.json``."""
    try:
        card = json_value((run.folder / "card.json").read_text(encoding="utf-8"))
        sink, loss, bos = card["sink"], card["loss"], card["bos"]
        row = {
            "sentence": Cell(value=card["sentence"]),
            "sink_positions": Cell(value=", ".join(map(str, sink["positions"]))),
            "sink_rate": _interval_cell(sink["rate"]),
            "sink_mass": _interval_cell(sink["attention"]),
            "to_no_key": _interval_cell(sink["to_no_key"]),
            "first_sink_layer": Cell(value=sink["first_layer"]),
            "outlier_dimensions": _joined_cell(card["outlier_dimensions"], "dimension"),
            "residual_sinks": _joined_cell(card["residual_sinks"], "dimension"),
            "super_weights": Cell(
                value="; ".join(f"{one['layer']} [{one['row']}, {one['column']}]" for one in card["super_weights"])
            ),
            "loss": _interval_cell(loss["clean"]),
            "zeroing_cost": _interval_cell(loss.get("zeroed", {}).get("change", {})),
            "mean_cost": _interval_cell(loss.get("mean_aligned", loss.get("set_to_mean", {})).get("change", {})),
            "bos_needed": Cell(value=bos["needed"]),
            "bos_cost": _interval_cell(bos.get("cost_without_nats", {})),
        }
        row |= {f"max_{one['site']}": Cell(value=one["value"]) for one in card["largest_activations"]}
        return row | {name: Cell(value=verdict) for name, verdict in card["chain"].get("links", {}).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{run.folder}/card.json cannot be read ({error}); need the card of a finished run") from error


def _interval_cell(found: Mapping[str, Any]) -> Cell:
    """A number of ``card.json`` with the ends of its interval as a cell."""
    return Cell(value=found.get("value"), low=found.get("low"), high=found.get("high"))


def _joined_cell(rows: Sequence[Mapping[str, Any]], name: str) -> Cell:
    """A cell that lists one field of every row, with commas."""
    return Cell(value=", ".join(str(row[name]) for row in rows))


def _float_if_number(value: Any) -> Any:
    """The value as a float if it reads as one, else unchanged; None for a nan."""
    if isinstance(value, Real):
        return None if value != value else value  # nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def chosen_columns(rows: Sequence[Row], asked: Sequence[str]) -> list[str]:
    """The columns of the table.

    Raises:
        InputError: a column that no run has.
    """
    there = list(dict.fromkeys(name for row in rows for name in row))
    if asked:
        refuse_unknown_names(asked, there, where="--columns")
        return list(asked)
    return [name for name in DEFAULT_COLUMNS if name in there]


def full_table(rows: Sequence[Row], columns: Sequence[str]) -> pd.DataFrame:
    """The table with numbers in full; an interval's ends are in the columns ``NAME_low`` and ``NAME_high``."""
    made: dict[str, list[Any]] = {}
    for name in columns:
        cells = [row.get(name, Cell(value=None)) for row in rows]
        made[name] = [cell.value for cell in cells]
        if any(interval_text(cell.low, cell.high) for cell in cells):
            made |= {f"{name}_low": [cell.low for cell in cells], f"{name}_high": [cell.high for cell in cells]}
    return pd.DataFrame(made, dtype=object)


def as_objects(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, Any]]:
    """One dict per row for ``--json``: column -> value, or value, low and high if it has an interval."""
    objects = []
    for row in rows:
        values = {}
        for name in columns:
            cell = row.get(name, Cell(value=None))
            bounded = bool(interval_text(cell.low, cell.high))
            values[name] = {"value": cell.value, "low": cell.low, "high": cell.high} if bounded else cell.value
        objects.append(values)
    return objects


# --- the command: one model, what changed from one to another, or many in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTable:
    """A table of cards and traces; it has no folder of its own."""

    folder: ClassVar[None] = None
    finished: ClassVar[bool] = True
    rows: list[Row]
    config: CardConfig

    @property
    def columns(self) -> list[str]:
        """The columns of the table, or, where they are asked for, all that there are."""
        if self.config.columns == ("?",):
            return sorted({name for row in self.rows for name in row})
        return chosen_columns(self.rows, self.config.columns)


def run(config: CardConfig, *, out: str | Path | None, overwrite: bool, progress: bool) -> Study | CardTable:
    """A card, a comparison, or a table, as the configuration asks."""
    if not config.makes_table():
        return card(config, out=out, overwrite=overwrite, progress=progress)
    names = (config.model, *config.others)
    return CardTable(rows=rows_of(names, config, out=out, overwrite=overwrite, progress=progress), config=config)


def show(found: Study | CardTable) -> "Iterator[RenderableType | pd.DataFrame]":
    """Terminal output of a card, a comparison or a table."""
    if isinstance(found, CardTable):
        yield _terminal_table(found)
        return
    yield found.headline
    if "changes" in found.tables:
        yield from _change_tables(found.tables["changes"])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows_of_card(found.decision):
        table.add_row(name, text)
    yield table
    yield f"block for a model card: {found.folder / 'card.md'}"


def _terminal_table(found: CardTable) -> "str | pd.DataFrame":
    """The table as texts, numbers to three digits with their intervals; the names alone where they are asked for."""
    rows, columns = found.rows, found.columns
    if found.config.columns == ("?",):
        return "\n".join(columns)
    shown = [[row[name].shown if name in row else "" for name in columns] for row in rows]
    return pd.DataFrame(shown, columns=columns)


def _change_tables(changes: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Two tables for the terminal: rows with numbers of both models, then rows with indices or texts."""
    from .pages.diff import with_names

    is_text = changes["unit"].isin(["index", "text"])
    yield changes.loc[~is_text].filter(
        items=("quantity", "first", "second", "change", "change_low", "change_high", "changed")
    )
    yield with_names(changes.loc[is_text]).filter(items=("quantity", "first_indices", "second_indices", "changed"))


def answer(found: Study | CardTable) -> Mapping[str, Any]:
    """Answer of ``--json``."""
    if not isinstance(found, CardTable):
        return found.decision
    rows = {} if found.config.columns == ("?",) else {"rows": as_objects(found.rows, found.columns)}
    return {"columns": found.columns, **rows}


def failed(found: Study | CardTable) -> bool:
    """Check whether two models were compared and the loss changed by more than it may."""
    return not isinstance(found, CardTable) and not found.decision.get("within_bound", True)
