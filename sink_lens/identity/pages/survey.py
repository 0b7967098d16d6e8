"""Surveys of models, trained and not: what their pages share."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...errors import RunError
from ...records import Result, Run
from ...report.page import Drawn, Listed, PageTable, page_table, rest_note
from ...report.style import (
    COLOURS,
    INK,
    MARKS,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from ...text import as_text, name_in_words, plural, safe_line

MOST_VARIANTS = 10
_DASHES = ("-", "--", ":")
_WORDS = {"attention=False": "no attention", "mlp=False": "no MLP", "gated=False": "no gate"}
"""Field of an untrained model -> what a legend says."""


def variant_names(table: pd.DataFrame) -> list[str]:
    return [str(variant) for variant in table["variant"].unique()][:MOST_VARIANTS]


def legend_name(variant: str, *, among: Sequence[str]) -> str:
    """Return a variant's name in plain words, without the parts that all names in ``among`` have."""
    shared = _shared_parts(among)
    own = [
        _WORDS.get(part.strip(), part.strip().removeprefix("activation="))
        for part in variant.split(",")
        if part not in shared
    ]
    return safe_line(", ".join(part for part in own if part) or "as it is", limit=44, counted=False)


def _shared_parts(variants: Sequence[str]) -> list[str]:
    if len(variants) < 2:
        return []
    first, *others = (variant.split(",") for variant in variants)
    return [part for part in first if all(part in other for other in others)]


def line_styles(variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        variant: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKS[index % len(MARKS)],
            "linestyle": _DASHES[index // len(COLOURS) % len(_DASHES)],
        }
        for index, variant in enumerate(variants)
    }


Measures = Sequence[tuple[str, str, bool]]
"""Measures of a figure's panels: name, label, and whether the scale is logarithmic."""


def _seed_figure(run: Run, measures: Measures) -> Figure:
    variants, summary = read_variants_and_models(run)
    names = variant_names(variants)
    if not names:
        raise RunError("this figure needs models that are no checkpoints; there is none.")
    figure = new_figure(width=9.2, height=1.1 + 0.3 * len(names))
    for place, (measure, label, log) in enumerate(measures, start=1):
        axes = panel(figure, place=(1, len(measures), place), xlabel=label)
        of_models, of_variants = (one.loc[one["measure"] == measure] for one in (summary, variants))
        for line, (variant, style) in enumerate(line_styles(names).items()):
            values = of_models.loc[of_models["variant"] == variant, "value"].to_numpy(float)
            axes.scatter(
                values, np.full(len(values), line + 0.16), color=style["color"], s=12, alpha=0.6
            )
            for row in of_variants.loc[of_variants["variant"] == variant].to_dict("records"):
                axes.plot([row["low"], row["high"]], [line, line], color=INK, linewidth=1.6)
                axes.plot(
                    [row["mean"]],
                    [line],
                    color=style["color"],
                    marker=style["marker"],
                    markersize=6,
                )
        if "null_high" in of_models.columns and len(of_models):
            low = of_models["null_low"].to_numpy(float).min()
            high = of_models["null_high"].to_numpy(float).max()
            axes.axvspan(low, high, color=QUIET, alpha=0.25, linewidth=0)
        if log:
            log_scale(axes, axis="x")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=max(2, 9 // len(measures))))
            axes.axvline(0, color=QUIET, linewidth=0.9)
        shown = [legend_name(one, among=names) if place == 1 else "" for one in names]
        axes.set_yticks(range(len(names)), shown)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
    return without_formulas(figure)


def _step_figure(run: Run, measures: Measures) -> Figure:
    rows = _select_measures(run, measures=measures, with_step=True)
    if not len(rows):
        raise RunError("this figure needs the checkpoints of a training; there is none.")
    down, across = -(-len(measures) // 3), min(3, len(measures))
    figure = new_figure(width=9.2, height=2.9 * down)
    variants = variant_names(rows)
    for place, (measure, label, log) in enumerate(measures, start=1):
        axes = panel(figure, place=(down, across, place), xlabel="step", ylabel=label)
        of_measure = rows.loc[rows["measure"] == measure]
        for variant, style in line_styles(variants).items():
            course = of_measure.loc[of_measure["variant"] == variant].sort_values("step")
            axes.plot(
                np.maximum(course["step"].to_numpy(float), 0.5),  # step 0 has no logarithm
                course["value"].to_numpy(float),
                markersize=4,
                linewidth=1.4,
                label=legend_name(variant, among=variants),
                **style,
            )
        log_scale(axes, axis="x")
        ticks = [0.5, *(10**power for power in range(8) if 10**power <= axes.get_xlim()[1])]
        axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
        axes.set_xticks([], minor=True)
        if log:
            log_scale(axes, axis="y")
    legend(figure.axes[0], columns=4, over=figure)
    return without_formulas(figure)


SUMMARY = ("model", "variant", "seed", "step", "measure", "value", "low", "high")
VARIANTS = ("measure", "variant", "n", "mean", "low", "high")
MOST_SAID = 8
MOST_NAMED = 4


def _mean_with_half_width(row: dict) -> str:
    mean, half = float(row["mean"]), (float(row["high"]) - float(row["low"])) / 2
    places = 3 if abs(mean) < 10 else 0
    text = f"{mean:,.{places}f}".replace("-", "−")
    if np.isnan(half):
        return text
    return f"{text} ±{half:,.{max(places - 1, 0)}f}".replace("±0.", "±.")


def unnamed_variants_sentence(variants: Sequence[str]) -> list[str]:
    rest = len(variants) - MOST_NAMED
    said = f"{plural(rest, 'more variant')}: see the figures and tables below."
    return [said] if rest > 0 else []


def read_variants_and_models(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read both tables; a model without a seed, alone in its variant, has its interval over sequences."""
    variants = run.need("variants", columns=VARIANTS)
    summary = run.need("summary", columns=SUMMARY)
    alone = summary.loc[summary["seed"].isna(), ["variant", "measure", "low", "high"]]
    alone = alone.loc[~alone.duplicated(["variant", "measure"], keep=False)]
    own = variants[["variant", "measure"]].merge(alone, how="left", on=["variant", "measure"])
    return variants.fillna(own[["low", "high"]]), summary


def _variant_table(run: Run) -> tuple[str, PageTable]:
    variants = run.need("variants", columns=VARIANTS)
    among = variants["variant"].unique().tolist()
    heads = {
        "variant": "model",
        "measure": "measure",
        "n": "seeds",
        "mean": "mean",
        "low": "95% from",
        "high": "to",
        "difference": "− first",
        "difference_low": "95% from",
        "difference_high": "to ",
    }
    see = "Means and 95% t intervals over seeds, and the difference from the first line of its kind, paired by seed."
    shown = variants.assign(
        variant=[legend_name(variant, among=among) for variant in variants["variant"].tolist()],
        measure=[name_in_words(str(name)) for name in variants["measure"]],
    )
    see += rest_note(len(variants), "variants.csv", most=200)
    return see, page_table(shown, heads, most=200)


def find_mean_row(variants: pd.DataFrame, variant: str, measure: str) -> dict[Any, Any]:
    rows = variants.loc[(variants["variant"] == variant) & (variants["measure"] == measure)]
    return next(iter(rows.to_dict("records")), {})


def mean_text(row: Mapping[Any, Any]) -> str:
    if not row:
        return "not measured"
    mean, low, high = (float(row[name]) for name in ("mean", "low", "high"))
    if np.isnan(low) or np.isnan(high):
        return as_text(mean)
    return f"{as_text(mean)} ({as_text(low)} to {as_text(high)})"


def shorten_model_names(frame: pd.DataFrame) -> pd.DataFrame:
    among = frame["variant"].unique().tolist()
    pairs = zip(frame["model"].tolist(), frame["variant"].tolist(), strict=True)
    return frame.assign(
        model=[model.replace(one, legend_name(one, among=among), 1) for model, one in pairs]
    )


def shared_settings_sentence(variants: Sequence[str]) -> list[str]:
    shared = _shared_parts(list(dict.fromkeys(variants)))
    return [f"All models: {', '.join(shared)}."] if shared else []


def _select_measures(run: Run, *, measures: Measures, with_step: bool = False) -> pd.DataFrame:
    summary = run.need("summary", columns=SUMMARY)
    rows = summary.loc[summary["measure"].isin([name for name, *_ in measures])]
    return rows.dropna(subset=["step"]) if with_step else rows


def _has_variants(run: Run) -> bool:
    return "variants" in run.tables and len(run.tables["variants"]) > 0


def seeds_differ(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return bool(pd.notna(a["seed"]) and pd.notna(b["seed"]) and a["seed"] != b["seed"])


def figure_over_seeds(key: str, *, title: str, see: str, measures: Measures) -> Drawn:
    return Drawn(
        key=key,
        title=title,
        make=lambda run: (see, _seed_figure(run, measures)),
        data=partial(_select_measures, measures=measures),
        when=_has_variants,
    )


def figure_along_training(key: str, *, see: str, measures: Measures) -> Drawn:
    return Drawn(
        key=key,
        title="Along training",
        make=lambda run: (see, _step_figure(run, measures)),
        data=partial(_select_measures, measures=measures, with_step=True),
        when=lambda run: (
            "summary" in run.tables and bool(run.tables["summary"]["step"].notna().any())
        ),
    )


VARIANTS_LISTED = Listed(
    key="variants", title="Over seeds", make=_variant_table, when=_has_variants
)


def show_survey(
    found: Result, *, title: str, measures: Mapping[str, str]
) -> Iterator[str | PageTable]:
    variants, summary = found.tables["variants"], found.tables["summary"]
    yield found.headline
    yield f"{title} (± 95% over seeds)"
    yield from shared_settings_sentence(variants["variant"].tolist())
    among, lines = variants["variant"].unique().tolist(), []
    for variant, rows in variants.groupby("variant", sort=False):
        texts = {row["measure"]: _mean_with_half_width(row) for row in rows.to_dict("records")}
        name = legend_name(str(variant), among=among)
        lines.append((name, *(texts.get(one, "") for one in measures)))
    for model, rows in summary.loc[summary["step"].notna()].groupby("model", sort=False):
        texts = {row["measure"]: as_text(row["value"]) for row in rows.to_dict("records")}
        lines.append((str(model), *(texts.get(one, "") for one in measures)))
    numeric = (False, *(True for _ in measures))
    yield PageTable(heads=("", *measures.values()), numeric=numeric, rows=lines)


def answer_of_survey(found: Result) -> dict[str, pd.DataFrame]:
    return {name: found.tables[name] for name in ("variants", "summary")}
