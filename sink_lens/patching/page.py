"""A sweep of patches between two prompts: its heat map and its page."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..edits.effect_table import rows_beyond_chance, shown_rows
from ..errors import RunError
from ..records import Run
from ..report.diagram import Style
from ..report.page import (
    INTERVALS,
    Drawn,
    Listed,
    Page,
    PageTable,
    ci_texts,
    page_table,
    rest_note,
    table_reader,
)
from ..report.style import (
    FONT,
    INK,
    Picture,
    add_colour_scale,
    draw_map,
    new_figure,
    with_serifs,
    without_formulas,
)
from ..stats import sort_by_magnitude
from ..text import (
    as_text,
    by_chance_text,
    capitalise,
    join_and,
    name_in_words,
    percent,
    safe_line,
    site_label,
    token_text,
)
from .carried import (
    AXES,
    UNLIKE,
    carrying_positions_text,
    comparable_rows,
    unlike_places,
    unlike_text,
)

_ALIKE = 0.95
"""Patches whose effect is at least this share of the strongest one are as good as it."""
_COLUMNS = (
    *AXES,
    "baseline",
    "value",
    "effect",
    "95%",
    "control_effect",
    "over_control",
    "95% above controls",
    "normalised_effect",
    "approximation",
    "changed",
    "n",
    "alike",
)
_HEADS = {
    "control_effect": "controls",
    "over_control": "above controls",
    "normalised_effect": "of the way",
}


def patch_map(
    frame: pd.DataFrame,
    *,
    by: Sequence[str],
    value: str = "effect",
    labels: Mapping[int, str] | None = None,
    title: str = "",
    unit: str = "",
    style: Style = "page",
    width: float | None = None,
) -> Picture:
    """Draw a sweep's effects (or another column) as heat maps over its swept columns; red is above 0, blue below.

    One or two swept columns give one panel. More give one panel for each further column against the first; there a
    pixel shows the value of largest magnitude along the columns that the panel leaves out. Undefined values are left
    empty. ``labels``: position -> the text beside its number. ``width`` is in inches; None is 3.25 for a paper, and
    what the axes need for a page.

    Raises:
        RunError: the frame lacks a column, or nothing was swept.
    """
    absent = [name for name in (*by, value) if name not in frame.columns]
    if absent or not by:
        raise RunError(
            f"a heat map needs swept columns and a value; found by={list(by)} and no column {absent} in "
            f"{list(frame.columns)}. Sweep at least one thing, and draw one of the columns"
        )
    pairs = [(name, by[0]) for name in by[1:]] or [(by[0], None)]  # down, across
    sizes = [len(set(frame[down].tolist())) for down, _ in pairs]
    height = sum(min(max(1.9, 0.6 + 0.17 * size), 6.5) for size in sizes)
    across = 1 if pairs[0][1] is None else len(set(frame[by[0]].tolist()))
    width = width or (3.25 if style == "paper" else min(max(5.0, 2.2 + 0.13 * across), 11.0))
    lines = [
        line
        for part in title.split("\n")
        for line in textwrap.wrap(part, int(width * 72 / (0.52 * FONT)))
    ]
    figure = new_figure(width=width, height=height + 0.5 + 0.17 * max(len(lines) - 1, 0))
    limit = float(np.nanmax(np.abs(frame[value].to_numpy(float)), initial=0.0)) or 1.0
    drawn = [
        draw_map(
            figure,
            frame,
            pair,
            place=(len(pairs), 1, 1 + index),
            value=value,
            limit=limit,
            labels=labels or {},
        )
        for index, pair in enumerate(pairs)
    ]
    label = value.replace("_", " ") + f" ({unit})" * bool(unit and value != "normalised_effect")
    add_colour_scale(figure, drawn[0][1], [axes for axes, _ in drawn], label=label)
    if title:
        figure.suptitle("\n".join(lines), fontsize=FONT, color=INK, x=0.01, ha="left")
    return without_formulas(figure if style == "page" else with_serifs(figure))


def mapped_column(frame: pd.DataFrame) -> str:
    there = "normalised_effect" in frame and bool(frame["normalised_effect"].notna().any())
    return "normalised_effect" if there else "effect"


def _position_labels(run: Run) -> dict[int, str]:
    tokens = run.optional("tokens", columns=["position", "text"])
    if tokens is None:
        return {}
    return dict(zip(tokens["position"].map(int), tokens["text"].map(token_text), strict=True))


def _put(run: Run) -> str:
    return str(run.config.get("put", "source"))


def _is_approximate(run: Run) -> bool:
    return bool(run.config.get("approximate"))


def _effects(run: Run) -> pd.DataFrame:
    """Return the table of patches; if they were only approximated, the approximations are the effects."""
    name = "approximation" if _is_approximate(run) else "effect"
    return run.need("patches", columns=[name]).rename(columns={name: "effect"})


def _unlike_places(run: Run) -> list[int]:
    return unlike_places(run.need("patches", columns=[]), chosen=run.config.get("positions"))


def _title(run: Run) -> str:
    site = run.config.get("site", "activations")
    direction = safe_line(run.config.get("direction", ""))
    title = f"Patching the {site_label(site)}, {direction}"
    title += ", to first order" * _is_approximate(run)
    try:
        table = _effects(run)
    except RunError:
        return title
    if not len(table):
        return title
    if "changed" in table.columns and not bool(table["changed"].any()):
        return f"{title}: no patch changed anything"
    metric, labels = _metric_text(run), _position_labels(run)
    if moved := carrying_positions_text(table, site=str(site), put=_put(run), labels=labels):
        return capitalise(f"{metric} {moved}")
    table = sort_by_magnitude(comparable_rows(table), "effect")
    if not len(table):
        return f"{title}: no position is the same place in all pairs of prompts"
    if bool(table["effect"].isna().all()):
        return f"{title}: no patch has a defined effect on {metric}"
    shown = shown_rows(table)
    if not len(shown):
        of = "all that were screened" if "approximation" in table.columns else len(table)
        beyond = f" beyond what chance makes the largest of {of}"
        beyond *= bool(rows_beyond_chance(table).any())
        largest = f"the largest effect is at {_strongest_text(table)}"
        return f"{title}: no patch is shown to move {metric}{beyond}; {largest}"
    strongest = shown["effect"].to_numpy(float)
    alike = int((strongest / (strongest[0] or 1.0) >= _ALIKE).sum()) - 1
    also = f"; {alike} more within {1 - _ALIKE:.0%} of it" * (alike > 0)
    return f"{title}: {metric} is moved most at {_strongest_text(shown)}{also}"


def _metric_text(run: Run) -> str:
    name = safe_line(
        run.config.get("metric_name") or name_in_words(str(run.config.get("metric", "the metric")))
    )
    both = run.config.get("correct"), run.config.get("incorrect")
    if name != "logit difference" or not all(isinstance(one, str | int) for one in both):
        return name  # answers by pair are in the run's configuration
    return f"{name} ({token_text(both[0])} − {token_text(both[1])})"


def _strongest_text(table: pd.DataFrame) -> str:
    best = table.to_dict("records")[0]
    where = ", ".join(f"{name} {as_text(best[name])}" for name in AXES if name in best)
    text = f"{where}: {as_text(float(best['effect']))}"
    share = float(best.get("normalised_effect", np.nan))
    if not np.isfinite(share):
        return text
    if abs(share) <= 2.0:
        return f"{text}, {percent(share)} of the way"
    return f"{text}, {as_text(share)} times the whole difference between the prompts"


def _prompt_sentences(run: Run) -> list[str]:
    sentences = []
    for name in ("clean", "corrupted"):
        if texts := run.config.get(name):
            more = f" and {len(texts) - 1} more" * (len(texts) > 1)
            sentences.append(f"{name}: “{safe_line(texts[0], limit=90)}”{more}")
    table = run.optional("differences", columns=["position", "clean", "corrupted"])
    if table is not None and len(table):
        changed = [
            f"{int(row['position'])} {token_text(row['clean'])}/{token_text(row['corrupted'])}"
            for row in table.drop_duplicates("position").to_dict("records")
        ]
        sentences.append(f"changed (clean/corrupted): {join_and(changed, most=4)}")
    return sentences


def _headline(run: Run) -> list[str]:
    table = sort_by_magnitude(_effects(run), "effect")
    prompts = "; ".join(_prompt_sentences(run))
    sentences = [f"{capitalise(prompts)}."] if prompts else []
    if bool((comparable := comparable_rows(table))["effect"].notna().any()):
        sentences.append(f"Largest effect at {_strongest_text(comparable)}.")
    if unlike := unlike_text(_unlike_places(run)):
        sentences.append(f"{unlike}.")
    site = site_label(run.config.get("site", "a site"))
    done = "approximated to first order, not patched" if _is_approximate(run) else "patched"
    how = safe_line(run.config.get("direction", ""))
    places = (
        f"{len(table)} places of the {site} were {done}{f' ({how})' * bool(how)}, one at a time"
    )
    if "changed" in table.columns and (same := table["changed"].ne(True).to_numpy().sum()):
        places += f"; {same} patches changed nothing: what they put in is there, or the metric reads nothing after it"
    sentences.append(f"{places}.")
    if "ci_low" in table.columns:
        known = int(np.isfinite(table["ci_low"].to_numpy(float)).sum())
        if chance := by_chance_text(known):
            sentences.append(chance)
    return sentences


def _heatmap_figure(run: Run) -> tuple[str, Figure]:
    table = _effects(run)
    if not len(table):
        raise RunError("the table 'patches' has no rows. Run again to see it.")
    value = mapped_column(table)
    by = [name for name in AXES if name in table.columns]
    by = [name for name in by if len(set(table[name].tolist())) > 1] or by[:1]
    put = "given what it holds in the other prompt"
    put = put if _put(run) == "source" else f"edited ({safe_line(_put(run))})"
    way = "moves the metric towards its value in the other prompt, blue away from it. 1 restores that value completely"
    way = way if value == "normalised_effect" else "raises the metric, blue lowers it"
    each = "To first order, each" if _is_approximate(run) else "Each"
    see = f"{each} cell is a place that was {put}; red {way}."
    texts = _position_labels(run) | dict.fromkeys(_unlike_places(run), UNLIKE)
    prompts = [] if texts and "position" in by else _prompt_sentences(run)  # else axes name them
    title = "\n".join([_metric_text(run), *prompts])
    return see, patch_map(table, by=by, value=value, labels=texts, title=title)


def _patch_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("patches", columns=[])
    table = sort_by_magnitude(table, "approximation" if _is_approximate(run) else "effect")
    for name, low, high in (
        ("95%", "ci_low", "ci_high"),
        ("95% above controls", "over_low", "over_high"),
    ):
        if {low, high} <= set(table.columns):
            table = table.assign(**{name: ci_texts(table, low, high)})
    heads = {
        name: _HEADS.get(name, name.replace("_", " "))
        for name in _COLUMNS
        if name in table.columns and bool(table[name].notna().any())
    }
    see = "The patches, the largest effect first; controls are random parts of the same size."
    return see + rest_note(len(table), "patches"), page_table(table, heads)


def _difference_table(run: Run) -> tuple[str, PageTable]:
    columns = ("sequence", "position", "clean", "corrupted")
    table = run.need("differences", columns=columns)
    shown = table.assign(**{name: table[name].map(token_text) for name in columns[2:]})
    see = "Where the two prompts differ (a dot is a space)." + rest_note(len(table), "differences")
    return see, page_table(shown, columns)


PATCH = Page(
    title=_title,
    headline=_headline,
    figures=(
        Drawn(
            key="map",
            title="Where it is decided",
            make=_heatmap_figure,
            data=table_reader("patches"),
        ),
    ),
    tables=(
        Listed(
            key="patch-table",
            title="Strongest patches",
            make=_patch_table,
            meanings={
                **INTERVALS,
                "95% above controls": "95% interval of the effect minus the mean effect of the controls.",
            },
        ),
        Listed(key="difference-table", title="The prompts", make=_difference_table),
    ),
)
