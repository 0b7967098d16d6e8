"""One self-contained page of a run: what was found in plain words, the verdicts, figures, tables, provenance.

The page is HTML with its style and figures inside: no script, no address, nothing fetched. What a partial run
lacks is said where it would stand, and the rest is shown. Rendering needs the run folder and no model.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from sink_lens.errors import RunError
from sink_lens.records import Run, read_run
from sink_lens.report import causal, words
from sink_lens.report.captions import FIGURES, Drawn, drawn_tokens
from sink_lens.report.drawing import svg
from sink_lens.report.findings import find_story, links
from sink_lens.report.tables import TABLES, Listed, Table

_NAME = "report.html"
_MOST_PROVENANCE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One figure or table of the page, or why it is not there."""

    key: str
    title: str
    see: str
    """What to see in it, in a sentence or two."""
    svg: str = ""
    table: Table | None = None
    wide: bool = False
    missing: str = ""


def render(folder: Path) -> Path:
    """Write report.html into a run folder, whole or not at all, and return its path.

    Raises:
        RunError: There is no run in the folder, its run.json is damaged, or the page cannot be written.
    """
    folder = Path(folder)
    text = html(folder)
    path, part = folder / _NAME, folder / f"{_NAME}.part"
    try:
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); need room there. Make room, or copy the run."
        ) from error
    return path


def html(folder: str | os.PathLike[str]) -> str:
    """The page of a run folder.

    Raises:
        RunError: There is no run in the folder, or its run.json is damaged.
    """
    run = read_run(folder)
    story = find_story(run)
    rows, untold = _told(run, lambda: links(run))
    cut = bool(run.config.get("cuts"))
    verdicts = {row.link: row.verdict for row in rows or ()}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.render(
        model=words.visible(story.model),
        title=words.title(story),
        headline=words.headline(story),
        notes=[words.visible(note, limit=400) for note in _notes(run)],
        incomplete=_incomplete(run),
        links=rows or (),
        links_missing=untold,
        chain=[(node, verdicts.get(link, "")) for node, link in zip(words.NODES, [*words.LINKS, ""], strict=True)],
        signs=words.VERDICTS,
        traced=words.traced(verdicts) if verdicts else "",
        figures=[_figure(run, story, of) for of in (*FIGURES, *(causal.FIGURES if cut else ()))],
        tables=[_table(run, story, of) for of in (*(causal.TABLES if cut else ()), *TABLES)],
        tokens=drawn_tokens(run),
        provenance=_provenance(run),
    )


def _told(run: Run, make: Callable[[], Any]) -> tuple[Any, str]:
    """What is made, or why it cannot be."""
    try:
        return make(), ""
    except RunError as error:
        text = words.visible(str(error).replace(f"{run.folder}{os.sep}", ""), limit=400)
        return None, text[:1].upper() + text[1:] if text.startswith(("this ", "the ", "no ")) else text


def _figure(run: Run, story: words.Story, of: Drawn) -> Shown:
    made, missing = _told(run, lambda: of.make(run, story))
    if made is None:
        return Shown(key=of.key, title=of.title, see="", missing=missing, wide=True)
    see, figure = made
    return Shown(
        key=of.key,
        title=of.title,
        see=see,
        svg=svg(figure, name=of.key),
        wide=bool(figure.get_figwidth() > 6),
    )


def _table(run: Run, story: words.Story, of: Listed) -> Shown:
    made, missing = _told(run, lambda: of.make(run, story))
    if made is None:
        return Shown(key=of.key, title=of.title, see="", missing=missing)
    see, table = made
    return Shown(key=of.key, title=of.title, see=see, table=table)


def _notes(run: Run) -> list[object]:
    notes = run.provenance.get("notes") or []
    return notes if isinstance(notes, list) else [notes]


def _incomplete(run: Run) -> str:
    missing = [words.visible(name) for name in run.missing if name not in (_NAME, Path(_NAME).stem)]
    ended = {"interrupted": "was interrupted", "failed": "failed"}.get(run.status, "")
    said = [f"This run {ended}"] if ended else []
    if run.error:
        said.append(words.visible(run.error, limit=300))
    if missing:
        said.append(f"Not in this folder: {words.listed(missing, most=20)}")
    return f"{'. '.join(said)}. Everything else is shown." if said else ""


def _provenance(run: Run) -> list[tuple[str, str]]:
    run_itself = {"kind": run.kind, "status": run.status, "started": run.started, "ended": run.ended}
    rows = [*_flat(run_itself), *_flat(run.provenance), *_flat(run.config, "config.")]
    shown = [(words.visible(name), value) for name, value in rows[:_MOST_PROVENANCE]]
    if len(rows) > len(shown):
        shown.append(("", f"{len(rows) - len(shown)} more in run.json"))
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
