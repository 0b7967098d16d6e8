"""What stands on the page of a run: every part made, or the reason why it is not there."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sink_lens.errors import SinkLensError
from sink_lens.records import Run
from sink_lens.report import words
from sink_lens.report.drawing import svg
from sink_lens.report.findings import LinkRow, links
from sink_lens.report.pages import PAGES, Drawn, Listed, Page
from sink_lens.report.plotted import plotted
from sink_lens.report.tables import Table, csv, shown_table

_MOST_PROVENANCE = 300
_OF_THE_PAGE = ("report", "report.html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One figure or table of the page, or why it is not there."""

    key: str
    title: str
    see: str = ""
    """What to see in it, in a sentence or two."""
    svg: str = ""
    table: Table | None = None
    wide: bool = False
    missing: str = ""
    csv: str = ""
    """Its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Everything that the page says of one run."""

    run: Run
    name: str
    """What the run is of: its model, else its folder's name."""
    title: str
    headline: list[str]
    notes: list[str]
    incomplete: str
    """What the folder lacks; empty where nothing."""
    chained: bool
    links: list[LinkRow]
    links_missing: str
    figures: list[Shown]
    tables: list[Shown]
    provenance: dict[str, str]

    @property
    def verdicts(self) -> dict[str, str]:
        """Link -> verdict."""
        return {row.link: row.verdict for row in self.links}

    @property
    def chain(self) -> list[tuple[str, str]]:
        """Each node of the chain and the verdict on the link that leaves it."""
        return [(node, self.verdicts.get(link, "")) for node, link in zip(words.NODES, [*words.LINKS, ""], strict=True)]


def content(run: Run, *, prefix: str = "") -> Content:
    """What the page says of a run; ids of its parts begin with the prefix."""
    run = dataclasses.replace(run, tables=run.tables.kept())
    page = page_of(run)
    found, untold = told(run, lambda: links(run)) if page.chained else ([], "")
    name = run_name(run)
    return Content(
        run=run,
        name=words.visible(name),
        title=told(run, lambda: page.title(run))[0] or f"A run of {words.visible(run.kind)}",
        headline=told(run, lambda: page.headline(run))[0] or [],
        notes=[words.visible(note, limit=400) for note in _notes(run)],
        incomplete=_incomplete(run),
        chained=page.chained,
        links=found or [],
        links_missing=untold,
        figures=[_figure(run, of, prefix=prefix) for of in page.figures if belongs(run, of)],
        tables=[_table(run, of, prefix=prefix) for of in page.tables if belongs(run, of)],
        provenance=_provenance(run),
    )


def page_of(run: Run) -> Page:
    """The page of the run's kind; all its tables, as they are, where the kind has none."""
    if run.kind in PAGES:
        return PAGES[run.kind]
    listed = tuple(Listed(key=f"{name}-table", title=name, make=_plain(name)) for name in run.tables)
    return Page(
        title=lambda run: f"A run of {words.visible(run.kind)}", headline=lambda _: [], figures=(), tables=listed
    )


def belongs(run: Run, of: Drawn | Listed) -> bool:
    """Whether a part stands on the run's page; where a damaged table hides that, it does, and says so there."""
    return told(run, lambda: of.when(run))[0] is not False


def _plain(name: str) -> Callable[[Run], tuple[str, Table]]:
    def make(run: Run) -> tuple[str, Table]:
        frame = run.tables[name]
        return f"{words.plural(len(frame), 'row')}.", shown_table(frame, {str(column): str(column) for column in frame})

    return make


def run_name(run: Run) -> str:
    """What a run is of: its model, else its folder's name."""
    model = run.provenance.get("model") or run.config.get("model")
    if isinstance(model, Mapping):
        model = model.get("name") or next(iter(model.values()), None)
    return str(model or run.folder.resolve().name)


def told(run: Run, make: Callable[[], Any]) -> tuple[Any, str]:
    """What is made, or why it cannot be: what a damaged table breaks must not take the rest of the page with it."""
    try:
        return make(), ""
    except SinkLensError as error:
        text = words.visible(str(error).replace(f"{run.folder}{os.sep}", ""), limit=400)
        return None, text[:1].upper() + text[1:] if text.startswith(("this ", "the ", "no ")) else text
    except (LookupError, TypeError, ValueError) as error:
        why = words.visible(f"{type(error).__name__}: {error}", limit=200)
        return None, f"It cannot be made from what the tables of this run hold ({why}). Run again to see it."


def _figure(run: Run, of: Drawn, *, prefix: str) -> Shown:
    key = f"{prefix}{of.key}"

    def behind(figure: Figure) -> pd.DataFrame:
        source = of.data
        data = None if source is None else told(run, lambda: source(run))[0]
        return plotted(figure) if data is None else data

    def make() -> Shown:
        see, figure = of.make(run)
        wide = bool(figure.get_figwidth() > 6)
        return Shown(key=key, title=of.title, see=see, svg=svg(figure, name=key), wide=wide, csv=csv(behind(figure)))

    made, missing = told(run, make)
    return made or Shown(key=key, title=of.title, missing=missing, wide=True)


def _table(run: Run, of: Listed, *, prefix: str) -> Shown:
    key = f"{prefix}{of.key}"
    made, missing = told(run, lambda: of.make(run))
    if made is None:
        return Shown(key=key, title=of.title, missing=missing)
    see, table = made
    return Shown(key=key, title=of.title, see=see, table=table, csv=csv(table.numbers))


def _notes(run: Run) -> list[object]:
    notes = run.provenance.get("notes") or []
    return notes if isinstance(notes, list) else [notes]


def _incomplete(run: Run) -> str:
    missing = [words.visible(name) for name in run.missing if name not in _OF_THE_PAGE]
    ended = {"interrupted": "was interrupted", "failed": "failed", "running": "has not ended"}.get(run.status, "")
    said = [f"This run {ended}"] if ended else []
    if run.error:
        said.append(words.visible(run.error, limit=300))
    if missing:
        said.append(f"Not in this folder: {words.listed(missing, most=20)}")
    if damaged := [words.visible(name) for name in run.tables if told(run, lambda name=name: run.tables[name])[1]]:
        said.append(f"Damaged: {words.listed(damaged, most=20)}")
    return f"{'. '.join(said)}. Everything else is shown." if said else ""


def _provenance(run: Run) -> dict[str, str]:
    run_itself = {"kind": run.kind, "status": run.status, "started": run.started, "ended": run.ended}
    rows = [*_flat(run_itself), *_flat(run.provenance), *_flat(run.config, "config.")]
    shown = {words.visible(name): value for name, value in rows[:_MOST_PROVENANCE]}
    if len(rows) > _MOST_PROVENANCE:
        shown[""] = f"{len(rows) - _MOST_PROVENANCE} more in run.json"
    return shown


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as dotted names, texts cut."""
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            listed = ", ".join(words.visible(one) for one in value) if isinstance(value, list) else value
            rows.append((f"{prefix}{name}", "–" if listed in (None, "") else words.visible(listed, limit=400)))
    return rows
