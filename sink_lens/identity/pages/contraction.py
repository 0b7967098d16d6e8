"""The page of ``contraction``: how alike models make different sequences, and where, why and along what."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...errors import RunError
from ...records import Result, Run
from ...report.page import (
    Drawn,
    Listed,
    Page,
    PageTable,
    page_table,
    rest_note,
    table_reader,
)
from ...report.style import (
    COLOURS,
    INK,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from ...text import as_text, plural, safe_line
from .survey import (
    MOST_NAMED,
    MOST_SAID,
    SUMMARY,
    VARIANTS_LISTED,
    figure_along_training,
    figure_over_seeds,
    find_mean_row,
    legend_name,
    line_styles,
    mean_text,
    read_variants_and_models,
    seeds_differ,
    shared_settings_sentence,
    shorten_model_names,
    show_survey,
    unnamed_variants_sentence,
    variant_names,
)

_DEPTHS = {"embedding": 1.0, "attention": 0.5, "mlp": 1.0, "final": 0.5}
"""Stage -> its depth in a figure, beside that of its layer; the embedding is of layer -1."""


def _layer_figure(run: Run) -> tuple[str, Figure]:
    layers = _first_and_last_checkpoints(
        run.need("layers", columns=["variant", "layer", "stage", "measure", "excess"])
    )
    see = (
        "Left: the mean cosine of the last positions of two sequences, above its value before the first layer. "
        "Right: the same for two positions of one sequence. Two points per layer: after its attention and after "
        "its MLP; the last point is after the final norm."
    )
    variants = variant_names(layers)
    figure = new_figure(width=9.2, height=3.7)
    sides = (("inter", "between sequences"), ("intra", "between positions"))
    for place, (measure, label) in enumerate(sides, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="layer", ylabel=f"excess cosine {label}")
        rows = layers.loc[layers["measure"] == measure]
        for variant, style in line_styles(variants).items():
            own = rows.loc[rows["variant"] == variant]
            own = own.assign(depth=own["layer"] + own["stage"].map(_DEPTHS))
            spread = own.groupby("depth")["excess"].agg(["mean", "min", "max"])
            x = spread.index.to_numpy(float)
            low, high = spread[["min", "max"]].to_numpy(float).T
            axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
            axes.plot(x, spread["mean"], color=style["color"], linestyle=style["linestyle"], linewidth=1.5,
                      marker=".", markersize=4, label=legend_name(variant, among=variants))  # fmt: skip
        axes.axhline(0, color=QUIET, linewidth=0.9)
    legend(figure.axes[0], columns=4, over=figure)
    return see, without_formulas(figure)


def _first_and_last_checkpoints(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep only the first and the last checkpoint of each training run, as two variants, and all other models."""
    step = rows["step"].to_numpy(float)
    if np.isnan(step).all():
        return rows
    by_variant = rows.assign(step=step).groupby("variant")["step"]
    low, high = (by_variant.transform(name).to_numpy(dtype=float) for name in ("min", "max"))
    kept = np.isnan(step) | (step == low) | (step == high)
    names = [
        variant if np.isnan(one) else f"{variant} step {one:.0f}"
        for variant, one in zip(rows["variant"], step, strict=True)
    ]
    return rows.assign(variant=names).loc[kept]


def _position_figure(run: Run) -> tuple[str, Figure]:
    table = run.need(
        "positions", columns=["variant", "step", "layer", "stage", "position", "excess", "norm"]
    )
    positions = _first_and_last_checkpoints(table)
    see = (
        "Left: how alike sequences are at each position after the last layer. Position 0 averages "
        "nothing; its difference to the last position is the positional discrepancy. Right: the norm of the states."
    )
    variants = variant_names(positions)
    figure = new_figure(width=9.2, height=3.5)
    quantities = (
        ("excess", "excess cosine between sequences"),
        ("norm", "norm ÷ that of position 0"),
    )
    for place, (quantity, label) in enumerate(quantities, start=1):
        axes = panel(figure, place=(1, 2, place), xlabel="position", ylabel=label)
        for variant, style in line_styles(variants).items():
            rows = positions.loc[(positions["variant"] == variant) & (positions["stage"] == "mlp")]
            rows = rows.loc[rows["layer"] == rows["layer"].to_numpy(float).max()]
            means: Any = rows.groupby("position")[quantity].mean()
            values = means / means.iloc[0] if quantity == "norm" else means
            axes.plot(means.index.to_numpy(float) + 1, values, markersize=4, linewidth=1.4,
                      label=legend_name(variant, among=variants), **style)  # fmt: skip
        log_scale(axes, axis="x")
        last = int(positions["position"].to_numpy(float).max())
        ticks = [0, *(4**power for power in range(9) if 4**power < last / 1.5), last]
        axes.set_xticks([tick + 1 for tick in ticks], [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.axhline(1.0 if quantity == "norm" else 0.0, color=QUIET, linewidth=0.9)
    legend(figure.axes[0], columns=4, over=figure)
    return see, without_formulas(figure)


def _agreement_figure(run: Run) -> tuple[str, Figure]:
    pairs = run.need("agreement", columns=["a", "b", "stage", "cosine", "chance"])
    facts = _models_by_name(run)
    see = "The grey band is what two random directions have (twice the standard deviation); bars are means."
    groups: dict[str, list[float]] = {}
    for row in pairs.loc[pairs["stage"] == "last"].to_dict("records"):
        if {row["a"], row["b"]} <= set(facts):
            relation = relation_text(facts[row["a"]], facts[row["b"]])
            groups.setdefault(relation, []).append(float(row["cosine"]))
    if not groups:
        raise RunError("this figure needs two models of one width; there are none.")
    figure = new_figure(width=7.6, height=1.2 + 0.45 * len(groups))
    axes = panel(figure, xlabel="cosine of the contraction directions after the last layer")
    chance = pairs["chance"].to_numpy(float).max()
    axes.axvspan(-2 * chance, 2 * chance, color=QUIET, alpha=0.25, linewidth=0)
    for line, values in enumerate(groups.values()):
        offsets = np.linspace(-0.22, 0.22, len(values)) if len(values) > 1 else np.zeros(1)
        axes.scatter(values, line + offsets, color=COLOURS[line % len(COLOURS)], s=14, alpha=0.7)
        axes.plot(
            [np.mean(values)], [line], color=INK, marker="|", markersize=16, markeredgewidth=2
        )
    names = [f"{group} ({len(values)})" for group, values in groups.items()]
    axes.set_yticks(range(len(groups)), names)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return see, without_formulas(figure)


def _models_by_name(run: Run) -> dict[str, dict[Any, Any]]:
    models = run.need("models", columns=["model", "variant", "seed"])
    return {row["model"]: row for row in models.to_dict("records")}


def relation_text(a: dict[Any, Any], b: dict[Any, Any]) -> str:
    variants = "one variant" if a["variant"] == b["variant"] else "two variants"
    if seeds_differ(a, b):
        return f"{variants}, two seeds"
    if a["seed"] != b["seed"]:
        return f"{variants}, seeds not known"
    return "one training, two steps" if a["variant"] == b["variant"] else "two variants, one seed"


_BETWEEN_SEQUENCES = ("inter_excess", "excess between sequences", False)
_EXCESS = (
    _BETWEEN_SEQUENCES,
    ("inter_by_attention", "… gained at attention", False),
    ("inter_by_mlp", "… gained at MLPs", False),
)
_BESIDE = (
    _BETWEEN_SEQUENCES,
    ("intra_excess", "excess between positions", False),
    ("discrepancy", "last position − first", False),
    ("sink_mass", "attention to position 0", False),
    ("s2_ratio", "S2: first token ÷ others", True),
    ("dominance_ratio", "dominance ratio", True),
)


def _title(run: Run) -> str:
    variants, summary = read_variants_and_models(run)
    if not len(variants):
        rows = summary.loc[summary["measure"] == "inter_excess"].drop_duplicates("variant")
        return f"The contraction of {plural(len(rows), 'training')}, checkpoint by checkpoint"
    rows = variants.loc[variants["measure"] == "inter_excess"].sort_values("mean", ascending=False)
    names = variant_names(variants)
    best = rows.to_dict("records")[0]
    several = len(names) > 1
    name = legend_name(str(best["variant"]), among=names) if several else names[0].split(",")[0]
    name = safe_line(name)
    cosine = (
        f"the cosine between two sequences' states rises by {mean_text(best)} through the layers"
    )
    if float(best["low"]) > 0:
        return f"{name} makes different sequences {'most' if len(rows) > 1 else 'more'} alike: {cosine}"
    if len(rows) > 1:
        return f"No model is shown to make different sequences alike: {cosine} at most, in {name}"
    return f"{name} is not shown to make different sequences alike: {cosine}"


def _headline(run: Run) -> list[str]:
    variants, summary = read_variants_and_models(run)
    names = variant_names(variants)
    sentences = shared_settings_sentence(names) if names else []
    for variant in names[:MOST_NAMED]:
        own = {
            name: find_mean_row(variants, variant, name)
            for name in ("inter_floor", "inter_excess", "intra_excess", "discrepancy")
        }
        sentences.append(
            f"{legend_name(variant, among=names)}: the cosine between sequences changes by "
            f"{mean_text(own['inter_excess'])} from {as_text(float(own['inter_floor']['mean']))}, and the cosine "
            f"between positions by {mean_text(own['intra_excess'])}. At the last position, sequences become more "
            f"alike than at position 0 by {mean_text(own['discrepancy'])}."
        )
    sentences += unnamed_variants_sentence(names)
    courses = summary.loc[summary["step"].notna() & (summary["measure"] == "inter_excess")]
    for variant, rows in list(courses.groupby("variant", sort=False))[:MOST_SAID]:
        value, step = rows["value"].to_numpy(float), rows["step"].to_numpy(float)
        most = int(np.argmax(value))
        sentences.append(
            f"{variant}: the cosine between sequences is {as_text(value[0])} above the floor at step {step[0]:.0f}, "
            f"at most {as_text(value[most])} (step {step[most]:.0f}), and {as_text(value[-1])} at step "
            f"{step[-1]:.0f}."
        )
    pairs = run.need("agreement", columns=["a", "b", "stage", "cosine", "chance"])
    models = _models_by_name(run)
    apart = [
        (abs(row["cosine"]), 2 * row["chance"])
        for row in pairs.loc[pairs["stage"] == "last"].to_dict("records")
        if seeds_differ(models[row["a"]], models[row["b"]])
    ]
    if apart:
        most, chance = max(apart)
        over = sum(cosine > own for cosine, own in apart)
        sentences.append(
            f"In {plural(len(apart), 'pair')} of models with different seeds, the contraction directions have a "
            f"cosine of at most {as_text(most)} (two random directions: {as_text(chance)} in 95%, which "
            f"{over or 'none'} of these exceed)."
        )
    return sentences


def _measure_table(run: Run) -> tuple[str, PageTable]:
    summary = run.need("summary", columns=SUMMARY)
    index = ["model", "variant"]
    wide = summary.pivot_table(index=index, columns="measure", values="value", sort=False)
    wide = shorten_model_names(wide.reset_index())
    heads = {
        "model": "model",
        "discrepancy": "last − first",
        "inter_excess": "inter",
        "intra_excess": "intra",
        "sink_mass": "sink mass",
        "uniform_mass": "uniform",
        "sink_rate": "sink rate",
        "s2_ratio": "S2 ratio",
        "norm_ratio": "norm ratio",
        "dominance_ratio": "dominance",
    }
    see = "The positional discrepancy beside the sink measures at position 0; uniform: the mass under equal attention."
    return see + rest_note(len(wide), "summary.csv", most=60), page_table(wide, heads, most=60)


def _alignment_table(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "alignment",
        columns=["model", "variant", "what", "which", "cosine", "rank", "of", "event_frac"],
    )
    heads = {
        "model": "model",
        "what": "the direction beside",
        "which": "which",
        "cosine": "cosine",
        "rank": "rank",
        "of": "of",
        "event_frac": "share of predictions",
    }
    see = (
        "How well the contraction direction aligns with the unembedding of the preferred tokens, and with the "
        "first token's largest dimension. Rank 1: nothing aligns better."
    )
    see += rest_note(len(table), "alignment", most=60)
    return see, page_table(shorten_model_names(table), heads, most=60)


CONTRACTION = Page(
    title=_title,
    headline=_headline,
    figures=(
        Drawn(
            key="by-layer",
            title="Where do states become alike?",
            make=_layer_figure,
            data=table_reader("layers"),
        ),
        figure_over_seeds(
            "contraction-variants",
            title="What makes sequences alike?",
            see="Every dot is a seed, the bar the mean with its 95% interval. Attention's and MLPs' gains add up to "
            "the excess.",
            measures=_EXCESS,
        ),
        Drawn(
            key="positions",
            title="Does it depend on the position?",
            make=_position_figure,
            data=table_reader("positions"),
        ),
        Drawn(
            key="agreement",
            title="Does the seed set the direction?",
            make=_agreement_figure,
            data=table_reader("agreement"),
        ),
        figure_along_training(
            "contraction-course",
            see="The contraction and its difference between positions, beside the sink measures of the same "
            "checkpoints.",
            measures=_BESIDE,
        ),
    ),
    tables=(
        Listed(key="beside", title="Contraction beside the sink", make=_measure_table),
        Listed(key="alignment", title="What the direction points at", make=_alignment_table),
        VARIANTS_LISTED,
    ),
)


def show_contraction(found: Result) -> Iterator[str | PageTable]:
    title = "cosine between sequences: before layer 0, gained, by MLPs; between positions: gained, by attention"
    columns = {
        "inter_floor": "floor",
        "inter_excess": "inter",
        "inter_by_mlp": "by MLP",
        "intra_excess": "intra",
        "intra_by_attention": "by att.",
    }
    return show_survey(found, title=title, measures=columns)
