"""Fingerprints in words, a figure and a page: which models share a seed."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...errors import RunError
from ...records import Run
from ...report.page import Drawn, Listed, Page, PageTable, page_table, rest_note
from ...report.style import (
    COLOURS,
    FONT,
    INK,
    QUIET,
    add_colour_scale,
    new_figure,
    panel,
    without_formulas,
)
from ...schema import FINGERPRINT_ERRORS
from ...text import as_text, join_and, plural, safe_line
from ..config import NO_ANSWER, NOT_SHOWN, SAME

_PAIRS = ("a", "b", "verdict", "why", "shared", "tau_bar", "too_narrow", "shares_scale")
_NULLS = ("a", "b", "null", "mean", "sd", "z", "log10_p_paper", "log10_p_code", "p_draws")
_FEW, _MOST_SHORT = 4, 34
"""Pairs up to which each is drawn against its nulls, and characters of a name beside an axis."""


def pair_sentences(
    pairs: pd.DataFrame, *, inputs: str, decides: str, alpha: float
) -> tuple[str, ...]:
    """Return sentences: which pairs of models share an initialisation, and how often such an answer is wrong."""
    names, shared = short_names(list(dict.fromkeys([*pairs["a"].tolist(), *pairs["b"].tolist()])))
    pairs = _rename_models(pairs, names)
    said = [f"All models: {', '.join(shared)}."] if shared else []
    if len(pairs) <= _FEW:
        said += [_sentence_of_pair(row) for row in pairs.to_dict("records")]
    else:
        same = pairs.loc[pairs["verdict"] == SAME]
        which = join_and((f"{row['a']} with {row['b']}" for row in same.to_dict("records")), most=6)
        look = "looks" if len(same) == 1 else "look"
        began = f"{len(same)} of {plural(len(pairs), 'pair')} {look} as if they began with the same weights"
        said.append(f"{began}{f': {which}' if which else ''}.")
        silent = pairs.loc[pairs["verdict"] == NO_ANSWER, "why"]
        if len(silent):
            why = join_and(sorted(set(map(str, silent))), most=3)
            said.append(
                f"{plural(len(silent), 'pair')} {'has' if len(silent) == 1 else 'have'} no answer: {why}."
            )
    if NOT_SHOWN in pairs["verdict"].tolist():
        said.append(
            "Models for which nothing is shown may still have begun with the same weights: more inputs (sequences) "
            "show more."
        )
    if (inputs, decides, alpha) == ("tokens", "relabelled", 0.01):
        said.append(FINGERPRINT_ERRORS)
    return tuple(said)


def _sentence_of_pair(row: dict) -> str:
    pair = f"{row['a']} and {row['b']}"
    if row["verdict"] == NO_ANSWER:
        return f"{pair} have no answer: {row['why']}."
    found = f"Nothing shows that {pair} began with the same weights"
    if row["verdict"] == SAME:
        found = f"{pair} look as if they began with the same weights"
    return (
        f"{found} ({row['why']}; mean tau {as_text(row['tau_bar'])} over {row['shared']} shared coordinates, of which "
        f"chance gives {as_text(row['expected'])})."
    )


def draw_pairs(pairs: pd.DataFrame, nulls: pd.DataFrame, *, names: Sequence[str]) -> Figure:
    """Draw ``tau_bar`` of a few pairs on its nulls, or of more as a heat map of the models ``names``."""
    few = len(pairs) <= _FEW
    tall = 1.0 + 1.1 * len(pairs) if few else min(max(3.2, 1.2 + 0.22 * len(names)), 8.0)
    figure = new_figure(width=6.4, height=tall)
    if few:
        _draw_against_nulls(figure, pairs, nulls)
    else:
        _draw_matrix(figure, pairs, names=names)
    return without_formulas(figure)


def _draw_against_nulls(figure: Figure, pairs: pd.DataFrame, nulls: pd.DataFrame) -> None:
    axes = panel(figure, xlabel="mean tau over the shared coordinates")
    tau_of = {(row["a"], row["b"]): row["tau_bar"] for row in pairs.to_dict("records")}
    kinds = nulls["null"].unique().tolist()
    ticks: list[str] = []
    for row in nulls.to_dict("records"):
        pair, kind = (row["a"], row["b"]), row["null"]
        if kind == kinds[0] and len(tau_of) > 1:
            ticks.append(f"{_shorten_at_front(pair[0])} · {_shorten_at_front(pair[1])}")
        line, mean, reach = len(ticks), row["mean"], 1.96 * row["sd"]
        colour = COLOURS[kinds.index(kind)]
        axes.hlines(line, mean - reach, mean + reach, color=colour, linewidth=4)
        axes.plot([tau_of[pair]], [line], marker="|", color=INK, markersize=11, linestyle="none")
        ticks.append(kind)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.set_ylim(max(len(ticks), 1) - 0.5, -0.5)
    axes.axvline(0, color=QUIET, linewidth=1, linestyle=":")
    axes.grid(visible=False, axis="y")


def _draw_matrix(figure: Figure, pairs: pd.DataFrame, *, names: Sequence[str]) -> None:
    axes = panel(figure, grid=False)
    table = np.full((len(names), len(names)), np.nan)
    at = {name: index for index, name in enumerate(names)}
    for row in pairs.to_dict("records"):
        i, j = at[row["a"]], at[row["b"]]
        table[i, j] = table[j, i] = row["tau_bar"]
        if row["verdict"] == SAME:
            axes.plot([i, j], [j, i], ".", color="white", markersize=4)
    top = max(0.05, float(np.nanmax(table))) if np.isfinite(table).any() else 0.05
    image = axes.imshow(table, cmap="viridis", vmin=0, vmax=top, interpolation="none")
    ticks = range(0, len(names), max(1, -(-len(names) // 30)))
    axes.set_yticks(ticks, [_shorten_at_front(names[tick]) for tick in ticks], fontsize=FONT - 2.5)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=FONT - 2.5)
    add_colour_scale(figure, image, axes, label="mean tau (dot: same lineage)")


def _shorten_at_front(name: str) -> str:
    text = safe_line(name)
    return text if len(text) <= _MOST_SHORT else f"…{text[1 - _MOST_SHORT :]}"


def short_names(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return name -> short name, without the parts that all names share, and a list of these parts.

    Names stay whole, and the list is empty, if short names would be empty or equal.
    """
    parts = {name: re.findall(r"(?:seed|step) \d+|[^ ,]+", name) for name in names}
    first = next(iter(parts.values()), [])
    shared = [part for part in first if all(part in own for own in parts.values())]
    short = {
        name: " ".join(part for part in own if part not in shared) for name, own in parts.items()
    }
    if len(short) < 2 or not all(short.values()) or len(set(short.values())) < len(short):
        return {name: name for name in names}, []
    return short, shared


def _title(run: Run) -> str:
    if "pairs" not in run.tables:
        return "Fingerprints"
    pairs = run.tables["pairs"]
    verdicts = pairs["verdict"].tolist()
    if len(pairs) == 1:
        unshown = "Nothing shows that the two models began with the same weights"
        answers = {
            SAME: "The two models look as if they began with the same weights",
            NO_ANSWER: "No answer",
        }
        return answers.get(verdicts[0], unshown)
    n = verdicts.count(SAME)
    look = "looks" if n == 1 else "look"
    return f"{n} of {plural(len(pairs), 'pair')} of models {look} as if they began with the same weights"


def _headline(run: Run) -> list[str]:
    if "pairs" not in run.tables:
        return []
    usual = {"inputs": "tokens", "decides": "relabelled", "alpha": 0.01}
    asked = {name: run.config.get(name, own) for name, own in usual.items()}
    return list(pair_sentences(run.tables["pairs"], **asked))


def _rename_models(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    return table.assign(**{end: [names[name] for name in table[end]] for end in "ab"})


def _pair_figure(run: Run) -> tuple[str, Figure]:
    pairs, nulls = run.need("pairs", columns=_PAIRS), run.need("nulls", columns=_NULLS)
    models = run.need("models", columns=("model",))
    if not np.isfinite(pairs["tau_bar"].to_numpy(float)).any():
        raise RunError(
            "no pair has an answer, so there is nothing to draw; the table of pairs says why"
        )
    see = (
        "The effect is the mean tau over the shared coordinates: a vertical tick beside the middle 95% of each null, "
        "or for many models a matrix, in which a dot marks the same lineage."
    )
    names, _ = short_names(models["model"].tolist())
    pairs, nulls = _rename_models(pairs, names), _rename_models(nulls, names)
    return see, draw_pairs(pairs, nulls, names=list(names.values()))


def _pairs_by_null(run: Run) -> pd.DataFrame:
    pairs = run.need("pairs", columns=_PAIRS)[["a", "b", "tau_bar", "verdict"]]
    return pairs.merge(run.need("nulls", columns=_NULLS), on=["a", "b"], how="left")


def _pair_table(run: Run) -> tuple[str, PageTable]:
    pairs = run.need("pairs", columns=_PAIRS)
    heads = {
        "a": "model",
        "b": "and",
        "verdict": "verdict",
        "why": "because",
        "tau_bar": "mean tau",
        "shared": "shared",
        "expected": "by chance",
        "log10_p_relabelled": "log10 p, relabelled",
        "log10_p_pipeline": "pipeline",
        "log10_p_analytical": "analytical",
        "too_narrow": "analytical too narrow by",
    }
    scaled = len(pairs.loc[pairs["shares_scale"].eq(True)])
    see = (
        "The effect is the mean tau; p only says how sure it is that the effect is not 0. A pair with an effect "
        "near 0 may still share a seed."
    )
    if scaled:
        see += (
            f" In {plural(scaled, 'pair')} an input scales all coordinates of both models alike, so the analytical p "
            "(the published one) means nothing."
        )
    ordered = pairs.sort_values("tau_bar", ascending=False, kind="stable")
    return see + rest_note(len(pairs), "pairs"), page_table(ordered, heads)


def _null_table(run: Run) -> tuple[str, PageTable]:
    nulls = run.need("nulls", columns=_NULLS)
    heads = {
        "a": "model",
        "b": "and",
        "null": "null",
        "mean": "mean",
        "sd": "sd",
        "z": "z",
        "log10_p_paper": "log10 p (1 − Φ)",
        "log10_p_code": "log10 p (2 (1 − Φ))",
        "p_draws": "p by draws",
    }
    see = (
        "Published nulls: analytical, matrices, pipeline. Ours: shuffled keeps the correlations between a model's "
        "coordinates, relabelled also keeps what both models share about an input. p is given by both conventions: "
        "that of the paper's text and that of its code."
    )
    return see + rest_note(len(nulls), "nulls"), page_table(nulls, heads)


FINGERPRINT = Page(
    title=_title,
    headline=_headline,
    figures=(Drawn(key="fingerprint", title="One seed?", make=_pair_figure, data=_pairs_by_null),),
    tables=(
        Listed(key="fingerprint-pairs", title="Pair by pair", make=_pair_table),
        Listed(key="fingerprint-nulls", title="Under every null", make=_null_table),
    ),
)


def show_fingerprint(found: Any) -> Iterator[str | PageTable]:
    names, _ = short_names(found.tables["models"]["model"].tolist())
    pairs = _rename_models(found.frame, names).sort_values("tau_bar", ascending=False)
    decides = found.config.decides
    heads = {
        "a": "model",
        "b": "and",
        "verdict": "verdict",
        "tau_bar": "mean tau",
        "shared": "shared",
        f"log10_p_{decides}": f"log10 p, {decides}",
    }
    yield page_table(pairs, heads, most=20)
    yield rest_note(len(pairs), "pairs", most=20).strip()
    yield from found.sentences
