"""Many models in one table: one row per run folder of ``card`` or ``trace``, chosen columns, in four formats."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import PurePath
from typing import Any

import pandas as pd

from sink_lens.configuration import check_known
from sink_lens.errors import InputError, RunError
from sink_lens.records import Run, read_run
from sink_lens.report.config import TableFormat
from sink_lens.report.html import run_name
from sink_lens.text import interval, number, visible

DEFAULT_COLUMNS = ("model", "sink_rate", "sink_positions", "outlier_dimensions", "loss", "zeroing_cost")
"""Columns where none are chosen; those that no run has are left out."""
_OF_RUN = ("family", "dtype", "n_layers", "d_model", "bos", "token_source", "sequences", "length")
_LISTS = ("outlier_dimensions", "growth_steps", "other_sink_positions")
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


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
        return f"{number(self.value)} {interval(self.low, self.high)}".strip()


Row = Mapping[str, Cell]


def row_of(run: Run) -> dict[str, Cell]:
    """Collect the facts that a run has of its model: name -> cell; cards and traces share the names of what both have.

    Raises:
        RunError: the run is neither a card nor a trace, or lacks its summary.
    """
    if run.kind not in ("card", "trace"):
        raise RunError(f"{run.folder} holds a run of {visible(run.kind)}; need one of card or trace")
    name = run_name(run)
    shown = PurePath(name).name if PurePath(name).is_absolute() else name
    row = {"model": Cell(value=visible(shown)), "run": Cell(value=run.kind)}
    row |= {name: Cell(value=run.provenance.get(name)) for name in _OF_RUN}
    return row | (_of_card(run) if run.kind == "card" else _of_trace(run))


def _of_trace(run: Run) -> dict[str, Cell]:
    """One model's row from the summary of a trace."""
    table = run.need("summary", columns=["quantity", "value", "ci_low", "ci_high", "note"])
    row = {}
    for one in table.to_dict("records"):
        name, value = str(one["quantity"]), _number(one["value"])
        if name in _LISTS and isinstance(value, float):  # a list of one, which was read as a number
            value = f"{value:.0f}"
        row[name] = Cell(value=value, low=one["ci_low"], high=one["ci_high"])
    noted = table.loc[table["quantity"] == "sink_position", "note"].fillna("")
    if (noted == "").any():  # without a sink the note says so of the position that was studied
        others = str(row.get("other_sink_positions", Cell(value="")).shown)
        row["sink_positions"] = Cell(value=", ".join(filter(None, [row["sink_position"].shown, others])))
    links = run.optional("links", columns=["link", "verdict"])
    if links is not None:
        row |= {str(one["link"]): Cell(value=str(one["verdict"])) for one in links.to_dict("records")}
    return row


def _of_card(run: Run) -> dict[str, Cell]:
    """One model's row from its card."""
    try:
        card = json.loads((run.folder / "card.json").read_text(encoding="utf-8"))
        sink, loss, bos = card["sink"], card["loss"], card["bos"]
        row = {
            "sentence": Cell(value=card["sentence"]),
            "sink_positions": Cell(value=", ".join(map(str, sink["positions"]))),
            "sink_rate": _cell(sink["rate"]),
            "sink_mass": _cell(sink["attention"]),
            "to_no_key": _cell(sink["to_no_key"]),
            "first_sink_layer": Cell(value=sink["first_layer"]),
            "outlier_dimensions": _join(card["outlier_dimensions"], "dimension"),
            "residual_sinks": _join(card["residual_sinks"], "dimension"),
            "super_weights": Cell(
                value="; ".join(f"{one['layer']} [{one['row']}, {one['column']}]" for one in card["super_weights"])
            ),
            "loss": _cell(loss["clean"]),
            "zeroing_cost": _cell(loss.get("zeroed", {}).get("change", {})),
            "mean_cost": _cell(loss.get("mean_aligned", loss.get("set_to_mean", {})).get("change", {})),
            "bos_needed": Cell(value=bos["needed"]),
            "bos_cost": _cell(bos.get("cost_without_nats", {})),
            "inactive_heads": Cell(value=len(card["inactive_heads"])),
        }
        row |= {f"max_{one['site']}": Cell(value=one["value"]) for one in card["largest_activations"]}
        return row | {name: Cell(value=verdict) for name, verdict in card["chain"].get("links", {}).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{run.folder}/card.json cannot be read ({error}); need the card of a finished run") from error


def _cell(found: Mapping[str, Any]) -> Cell:
    """A cell from a number with its interval."""
    return Cell(value=found.get("value"), low=found.get("low"), high=found.get("high"))


def _join(rows: Sequence[Mapping[str, Any]], name: str) -> Cell:
    """Values of one key of several rows, joined by commas."""
    return Cell(value=", ".join(str(row[name]) for row in rows))


def _number(value: Any) -> Any:
    """The value as a number if it is one; None for nan."""
    if isinstance(value, Real):
        return None if value != value else value  # nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def rows_of(folders: Sequence[str]) -> list[Row]:
    """The row of every folder, in their order.

    Raises:
        InputError: there is no folder.
        RunError: a folder has no run, or one of another kind.
    """
    if not folders:
        raise InputError("no run was given; need folders of cards or traces: sink-lens table runs/*")
    return [row_of(read_run(folder)) for folder in folders]


def chosen_columns(rows: Sequence[Row], asked: Sequence[str]) -> list[str]:
    """The columns of the table.

    Raises:
        InputError: a column that no run has.
    """
    there = list(dict.fromkeys(name for row in rows for name in row))
    if asked:
        check_known(asked, there, where="--columns")
        return list(asked)
    return [name for name in DEFAULT_COLUMNS if name in there]


def table_text(rows: Sequence[Row], columns: Sequence[str], *, form: TableFormat) -> str:
    """The table as CSV (numbers in full, intervals in columns of their own), LaTeX or Markdown."""
    shown = [[row[name].shown if name in row else "" for name in columns] for row in rows]
    if form == "markdown":
        cells = [[text.replace("|", "\\|") for text in line] for line in [list(columns), *shown]]
        ruled = [cells[0], ["---"] * len(columns), *cells[1:]]
        return "\n".join(f"| {' | '.join(line)} |" for line in ruled) + "\n"
    if form == "latex":
        lines = [
            " & ".join(map(_latex, line)) + r" \\" for line in [[name.replace("_", " ") for name in columns], *shown]
        ]
        body = "\n".join(lines[1:])
        spec = "l" * len(columns)
        return f"\\begin{{tabular}}{{{spec}}}\n\\hline\n{lines[0]}\n\\hline\n{body}\n\\hline\n\\end{{tabular}}\n"
    return _csv(rows, columns)


def _csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as CSV, with columns for the ends of intervals."""
    bounded = {name for name in columns if any(interval(row[name].low, row[name].high) for row in rows if name in row)}
    heads = [one for name in columns for one in ([name, f"{name}_low", f"{name}_high"] if name in bounded else [name])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    for row in rows:
        line: list[Any] = []
        for name in columns:
            cell = row.get(name, Cell(value=None))
            line += [cell.value, cell.low, cell.high] if name in bounded else [cell.value]
        writer.writerow(["" if one is None or (isinstance(one, float) and pd.isna(one)) else one for one in line])
    return out.getvalue()


def _latex(text: str) -> str:
    """The text with the characters that LaTeX reads otherwise escaped."""
    return "".join(_LATEX.get(character, character) for character in text.replace("−", "-"))


def as_objects(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows for a program: value, and its interval where it has one."""
    objects = []
    for row in rows:
        values = {}
        for name in columns:
            cell = row.get(name, Cell(value=None))
            bounded = bool(interval(cell.low, cell.high))
            values[name] = {"value": cell.value, "low": cell.low, "high": cell.high} if bounded else cell.value
        objects.append(values)
    return objects
