"""One self-contained HTML page of a run, or of several beside each other: verdicts, figures, tables, provenance.

Nothing is fetched, and its content security policy lets no other script run. Rendering needs the run folder and no
model.
"""

import dataclasses
import json
import os
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

from ..errors import InputError, RunError
from ..files import check_file_name
from ..records import PAGE_FILE, Run, read_run, refuse_file_of_run
from ..records.writing import is_own_page, write_part
from ..schema import column_meanings
from ..text import capitalise, edge_label, join_and, safe_line
from . import explorer
from .offline import script_hashes, template_environment
from .page import Content, Drawn, Listed, Shown, csv_text, try_make
from .pages import is_on_page, page_of_run
from .patterns import MOST_BYTES, tokens_for_page
from .side_by_side import RunsCompared, check_comparable, compare_contents
from .style import UNWRITABLE, figure_svg, thin_lines

_MOST_PROVENANCE = 300
_STORED_NAME = re.compile(r"\b[am]\d+(?:\.(?:h|kv)\d+|\.n)?(?:->[am]\d+)?\b")
MOST_READ = 100_000
"""Rows of a table from which on a page is made from some of them."""
_HERE = Path(__file__).parent


def page_content(run: Run, *, prefix: str = "", beside: Sequence[Run] = ()) -> Content:
    """Collect everything that the page of a run shows; the HTML ids of its figures and tables begin with the prefix.

    If this run lacks a figure or table that a run in ``beside`` has, the reason stands in its place.
    """
    run = dataclasses.replace(run, tables=run.tables.cached_copy(most=MOST_READ))
    page = page_of_run(run)

    def stands(of: Drawn | Listed) -> bool:
        return any(is_on_page(one, of) for one in (run, *beside))

    incomplete = _incomplete_sentences(run)  # reads every table
    first = page.first_screen(run) if page.first_screen else None
    model = run.provenance.get("model") or run.config.get("model")
    if isinstance(model, Mapping):
        model = model.get("name") or next(iter(model.values()), None)
    notes = []
    for name, one in run.tables.shortened.items():
        which = "evenly spaced ones and the extremes"
        if one.steps:
            which = f"whole steps of {one.steps:,}, the first, the last ones and evenly spaced ones between them"
        notes.append(
            f"{name} has {one.rows:,} rows; this page is made from {one.kept:,} of them ({which})"
        )
    own = run.provenance.get("notes") or []
    notes += [*(own if isinstance(own, list) else [own]), *(first.notes if first else ())]
    itself = {name: getattr(run, name) for name in ("kind", "status", "started", "ended")}
    rows = _dotted_entries(itself) + _dotted_entries(run.provenance)
    rows += _dotted_entries(run.config, "config.")
    provenance = {safe_line(name): value for name, value in rows[:_MOST_PROVENANCE]}
    if len(rows) > _MOST_PROVENANCE:
        provenance[""] = f"{len(rows) - _MOST_PROVENANCE} more in run.json"
    return Content(
        run=run,
        name=safe_line(str(model or run.folder.resolve().name)),
        title=_title(run),
        headline=try_make(run, lambda: page.headline(run))[0] or [],
        notes=[capitalise(safe_line(note, limit=400)) for note in notes],
        incomplete=incomplete,
        first=first,
        figures=[
            _figure_for_page(run, of, prefix=prefix)
            for of in page.figures
            if of.on_page and stands(of)
        ],
        tables=[_table_for_page(run, of, prefix=prefix) for of in page.tables if stands(of)],
        provenance=provenance,
    )


def page_title(folder: str | os.PathLike[str]) -> str:
    """Return the title of a run's page: a sentence that says what the run found."""
    run = read_run(folder)
    return _title(dataclasses.replace(run, tables=run.tables.cached_copy(most=MOST_READ)))


def _title(run: Run) -> str:
    found, _ = try_make(run, lambda: page_of_run(run).title(run))
    return found or f"A run of {safe_line(run.kind)}"


def compare_runs(
    runs: Sequence[Run], *, group_by: Sequence[str] = ()
) -> tuple[list[Content], RunsCompared]:
    """Return (the page content of each run, the comparison of the runs); settings named in ``group_by`` may differ."""
    check_comparable(runs, group_by=group_by)
    parts = [
        page_content(run, prefix=f"run-{index}-", beside=runs)
        for index, run in enumerate(runs, start=1)
    ]
    return parts, compare_contents(parts)


def _figure_for_page(run: Run, drawn: Drawn, *, prefix: str) -> Shown:
    key = f"{prefix}{drawn.key}"

    def make() -> Shown:
        see, figure = drawn.make(run)
        see += thin_lines(figure)
        wide = bool(figure.get_figwidth() > 6)
        data, _ = try_make(run, lambda: drawn.data(run))
        return Shown(
            key=key,
            title=drawn.title,
            see=see,
            svg=figure_svg(figure, name=key),
            wide=wide,
            csv="" if data is None else csv_text(data),
        )

    made, missing = try_make(run, make)
    return made or Shown(key=key, title=drawn.title, missing=missing, wide=True)


def _table_for_page(run: Run, listed: Listed, *, prefix: str) -> Shown:
    key = f"{prefix}{listed.key}"
    made, missing = try_make(run, lambda: listed.make(run))
    if made is None:
        return Shown(key=key, title=listed.title, missing=missing)
    see, table = made
    known = column_meanings(run.kind, table.columns)
    named = [known.get(name) or listed.meanings.get(name, "") for name in table.columns]
    meanings = tuple(_STORED_NAME.sub(lambda found: edge_label(found[0]), text) for text in named)
    explained = dataclasses.replace(table, meanings=meanings)
    return Shown(key=key, title=listed.title, see=see, table=explained, csv=csv_text(table.numbers))


def _incomplete_sentences(run: Run) -> str:
    missing = [safe_line(name) for name in run.missing if name not in ("report", "report.html")]
    ends = {"interrupted": "was interrupted", "failed": "failed", "running": "has not ended"}
    ended = ends.get(run.status, "")
    sentences = [f"This run {ended}"] if ended else []
    if run.error:
        sentences.append(safe_line(run.error, limit=300))
    if missing:
        sentences.append(f"Not in this folder: {join_and(missing, most=20)}")
    if damaged := [
        safe_line(name)
        for name in run.tables
        if try_make(run, lambda name=name: run.tables[name])[1]
    ]:
        sentences.append(f"Damaged: {join_and(damaged, most=20)}")
    return f"{'. '.join(sentences)}. Everything else is shown." if sentences else ""


def _dotted_entries(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _dotted_entries(value, f"{prefix}{name}.")
        else:
            listed = value
            if isinstance(value, list):
                listed = ", ".join(safe_line(one) for one in value)
            text = "–" if listed in (None, "") else safe_line(listed, limit=400)
            rows.append((f"{prefix}{name}", text))
    return rows


def render(
    folder: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    out: Path | None = None,
    group_by: Sequence[str] = (),
) -> Path:
    """Write the page of a run, or of several side by side, whole or not at all, and return its path.

    Args:
        folder: the folder of a run.
        *others: those of further runs, of the same kind, on the same tokens and with the same settings.
        out: the page, whose name gets .html if it has no such ending; a folder gets report.html. If None: report.html
            in the run's folder, of several runs here.
        group_by: what several runs may differ in: dtype, bos, tokens, thresholds.

    Raises:
        RunError: a folder has no run, its run.json is damaged, the runs are not comparable, or the page cannot be
            written.
        InputError: too many runs, or the page would be written over a file that belongs to a run.
    """
    path = Path(out or (PAGE_FILE if others else Path(folder) / PAGE_FILE))
    if path.is_dir():
        path /= PAGE_FILE
    elif path.suffix.lower() not in (".html", ".htm"):
        path = path.with_name(f"{path.name}.html")
    check_file_name(path, what="the name of the page")
    refuse_file_of_run(path, replaceable=(".html", ".htm"))
    if out is None and os.path.lexists(path) and not is_own_page(path):
        raise InputError(
            f"{path} is no page of a run; need its name for the page. Move it away, or name another: out"
        )
    text = page_html(folder, *others, group_by=group_by)
    # others may draw it too
    own = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = write_part(own, text.encode("utf-8", "backslashreplace"))
        try:
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        command = ["sink-lens", "report", *map(str, [folder, *others])]
        if out is not None:
            command += ["--out", str(out)]
        raise RunError(
            f"{path} cannot be written ({error.strerror}); need a folder with room. The numbers are safe: make room, "
            f"then draw the page with {shlex.join(command)}"
        ) from error
    return path


def page_html(*folders: str | os.PathLike[str], group_by: Sequence[str] = ()) -> str:
    """Return the HTML of the page of a run folder, or of several, which may differ in what ``group_by`` names."""
    runs = [read_run(folder) for folder in folders]
    beside = None
    if len(runs) == 1:
        parts = [page_content(runs[0])]
    else:
        parts, beside = compare_runs(runs, group_by=group_by)
    embedded, room = [], MOST_BYTES // len(parts)
    for part in parts:
        found, why = None, ""
        if (embed := page_of_run(part.run).patterns) is not None and part.first is not None:
            found, why = try_make(part.run, partial(embed, part.run, most_bytes=room))
        embedded.append(found or {"data": None, "said": why})
    explore = page_of_run(parts[0].run).explore
    made = [try_make(part.run, partial(explore, part.run)) for part in parts[:2]] if explore else []
    graphs = [graph for graph, _ in made if graph]
    exploring = explorer.explorer_script(graphs) if graphs else ""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    copied = [one for part in parts for one in (*part.figures, *part.tables)]
    copied += beside.tables if beside else ()
    csv = {one.key: one.csv for one in copied if one.csv}
    viridis = (mpl.colormaps["viridis"](range(256))[:, :3] * 255).round().astype("uint8")
    scripts = [script, exploring, explorer.explorer_javascript()] if graphs else [script]
    template = template_environment().get_template("page.html")
    text = template.render(
        parts=parts,
        beside=beside,
        leads=parts[0].first.leads if parts[0].first and beside is None else (),
        tokens=[tokens_for_page(part.run) for part in parts],
        embedded=embedded,
        data=_script_json({"csv": csv, "colours": viridis.tobytes().hex()}),
        patterns=_script_json([one["data"] for one in embedded]),
        script=script,
        exploring=exploring,
        unexplored=" ".join(why for _, why in made if why),
        script_hashes=script_hashes(*scripts),
    )
    return UNWRITABLE.sub("\ufffd", text)


def _script_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
