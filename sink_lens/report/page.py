"""One self-contained page of a run, or of several beside each other: verdicts, figures, tables, provenance.

The page is HTML with its style, script, figures and numbers inside: nothing is fetched, and its content security
policy lets no other script run. What a partial run lacks is said where it would stand, and the rest is shown.
Rendering needs the run folder and no model.
"""

import functools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl

from sink_lens.errors import RunError
from sink_lens.records import PAGE_FILE, check_not_of_run, read_run
from sink_lens.report import frame, views, words
from sink_lens.report.captions import drawn_tokens
from sink_lens.report.content import Content, content, told
from sink_lens.report.patterns import MOST_BYTES, embedded
from sink_lens.report.several import side_by_side

_HERE = Path(__file__).parent


def render(folder: str | os.PathLike[str], *others: str | os.PathLike[str], out: Path | None = None) -> Path:
    """Write the page of a run, or of several side by side, whole or not at all, and return its path.

    Args:
        folder: Of a run.
        *others: Of further runs, of the same kind, on the same tokens and with the same settings.
        out: The page; report.html in the folder if None, of several runs report.html here.

    Raises:
        RunError: A folder has no run, its run.json is damaged, the runs are not comparable, or the page cannot be
            written.
        InputError: Too many runs, or the page would be written over a file that belongs to a run.
    """
    path = Path(out) if out is not None else Path(PAGE_FILE) if others else Path(folder) / PAGE_FILE
    check_not_of_run(path, replaceable=(".html", ".htm"))
    text, part = html(folder, *others), path.with_name(f"{path.name}.part")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); need a folder with room. The numbers are safe: make room, "
            f"then draw the page with {_again(folder, *others, out=out)}"
        ) from error
    return path


def _again(*folders: str | os.PathLike[str], out: Path | None) -> str:
    """The command that draws a page."""
    to = [] if out is None else ["--out", str(out)]
    return shlex.join(["sink-lens", "report", *map(str, folders), *to])


def html(*folders: str | os.PathLike[str]) -> str:
    """The page of a run folder, or of several.

    Raises:
        RunError: There is no run in a folder, its run.json is damaged, or the runs are not comparable.
        InputError: Too many runs.
    """
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 1:
        parts, beside = [content(runs[0])], None
    else:
        parts, beside = side_by_side(runs)
    patterns = [_patterns(part, most_bytes=MOST_BYTES // len(parts)) for part in parts]
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    shown = _views(parts[0]) if beside is None and parts[0].chained else {}
    vis = views.script({key: view for key, (_, view) in shown.items()}) if shown else ""
    template = _environment().get_template("page.html")
    return template.render(
        parts=parts,
        beside=beside,
        words=words,
        tokens=[drawn_tokens(part.run) for part in parts],
        embedded=patterns,
        data=_json({"csv": _numbers(parts, beside), "colours": _colours()}),
        patterns=_json([one["data"] for one in patterns]),
        views={key: title for key, (title, _) in shown.items()},
        views_script=vis,
        script=script,
        script_hashes=frame.hashes(script, *((vis, views.bundle()) if vis else ())),
    )


def _patterns(part: Content, *, most_bytes: int) -> dict[str, Any]:
    """Patterns for the script, and which; none where the run has none, or its kind has none."""
    nothing = {"data": None, "said": ""}
    if not part.chained:
        return nothing
    found, _ = told(part.run, lambda: embedded(part.run, most_bytes=most_bytes))
    return nothing if found is None else {"data": found.data, "said": found.said}


def _views(part: Content) -> dict[str, tuple[str, views.View]]:
    """What CircuitsVis shows of a run: id of its element -> title and view."""
    asked = {
        "view-heads": ("Attention heads, the strongest", views.attention_heads),
        "view-tokens": ("Tokens, by the attention that they get", views.colored_tokens),
        "view-neurons": ("Tokens, by what super neurons read there", views.neuron_activations),
    }
    made = {key: (title, told(part.run, lambda make=make: make(part.run))[0]) for key, (title, make) in asked.items()}
    return {key: (title, view) for key, (title, view) in made.items() if view is not None}


def _numbers(parts: Sequence[Content], beside: Any) -> dict[str, str]:
    shown = [one for part in parts for one in (*part.figures, *part.tables)]
    return {one.key: one.csv for one in (*shown, *(beside.tables if beside else ())) if one.csv}


def _json(value: Any) -> str:
    """JSON that can stand in a script element, whatever it holds."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _colours() -> str:
    """Viridis, 256 colours of six digits."""
    rows = (mpl.colormaps["viridis"](range(256))[:, :3] * 255).round().astype(int)
    return "".join(f"{red:02x}{green:02x}{blue:02x}" for red, green, blue in rows.tolist())


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
