"""The page of ``preference``: which tokens models predict after random sequences, against chance."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

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
    GRID,
    INK,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    without_formulas,
)
from ...text import as_text, token_text
from .survey import (
    MOST_NAMED,
    SUMMARY,
    VARIANTS_LISTED,
    figure_along_training,
    figure_over_seeds,
    legend_name,
    line_styles,
    shared_settings_sentence,
    shorten_model_names,
    show_survey,
    unnamed_variants_sentence,
    variant_names,
)


def _coverage_figure(run: Run) -> tuple[str, Figure]:
    table = run.need(
        "coverage", columns=["model", "variant", "step", "kind", "tokens", "share", "null"]
    )
    see = (
        "Share of the predictions that go to the most frequent tokens. Dotted: chance (as many uniform draws); grey: "
        "its 95% band. A line above the band is a preference. Later checkpoints are darker."
    )
    variants = variant_names(table)
    figure = new_figure(width=9.0, height=3.6)
    for place, kind in enumerate(("argmax", "argmin"), start=1):
        axes = panel(
            figure,
            place=(1, 2, place),
            xlabel="most frequent tokens",
            ylabel=f"share of the {kind}",
        )
        rows = table.loc[table["kind"] == kind]
        chance: Any = rows.groupby("tokens")[["null", "null_low", "null_high"]].mean()
        low, high = (chance[name].to_numpy(float) for name in ("null_low", "null_high"))
        axes.fill_between(
            chance.index.to_numpy(float), low, high, color=QUIET, alpha=0.3, linewidth=0
        )
        axes.plot(
            chance.index, chance["null"], color=INK, linestyle=":", linewidth=1.4, label="chance"
        )
        for variant, style in line_styles(variants).items():
            lines = list(rows.loc[rows["variant"] == variant].groupby("model", sort=False))
            for index, (_, one) in enumerate(lines):
                label = legend_name(variant, among=variants) if index == len(lines) - 1 else None
                is_course = one["step"].notna().any()
                fade = (index + 1) / len(lines) if is_course else 1 / len(lines) ** 0.5
                axes.plot(one["tokens"], one["share"], label=label, alpha=fade, linewidth=1.4,
                          color=style["color"], linestyle=style["linestyle"])  # fmt: skip
        axes.axhline(0.8, color=GRID, linewidth=1)
        log_scale(axes, axis="x")
        axes.set_ylim(0, 1.02)
    legend(figure.axes[0], columns=4, over=figure)
    return see, without_formulas(figure)


_PREFERRED = (
    ("argmax_top_ratio", "top argmax, times chance", True),
    ("argmin_top_ratio", "top argmin, times chance", True),
    ("mean_probability_ratio", "top mean probability × vocabulary", True),
)


def _title(run: Run) -> str:
    summary = run.need("summary", columns=[*SUMMARY, "null_high"])
    rows = summary.loc[summary["measure"] == "argmax_top_ratio"]
    over = int((rows["value"].to_numpy(float) > rows["null_high"].to_numpy(float)).sum())
    strongest: Any = rows.loc[rows["value"].idxmax()]
    ratio, most = (as_text(float(strongest[name])) for name in ("value", "null_high"))
    if len(rows) == 1:
        how = "more often than" if over else "no more often than"
        found = f"The model predicts one token {how} chance would:"
    else:
        found = (
            f"{over} of {len(rows)} models predict one token more often than chance would: up to"
        )
    return f"{found} {ratio} times as often as the average token (chance: up to {most})"


def _headline(run: Run) -> list[str]:
    summary = run.need("summary", columns=[*SUMMARY, "null", "null_high"])
    variants = summary["variant"].unique().tolist()
    sentences = shared_settings_sentence(variants)
    for variant in variants[:MOST_NAMED]:
        rows = summary.loc[summary["variant"] == variant]
        if rows["step"].notna().any():
            sentences += [
                _preference_sentence(rows.loc[rows["model"] == model], str(model))
                for model in rows["model"].unique()[[0, -1]]
            ]
        else:
            sentences.append(_preference_sentence(rows, legend_name(str(variant), among=variants)))
    return [*sentences, *unnamed_variants_sentence(variants)]


def _preference_sentence(rows: pd.DataFrame, name: str) -> str:
    def mean(measure: str, column: str = "value") -> str:
        found = rows.loc[rows["measure"] == measure, column].to_numpy(float).mean()
        return as_text(round(float(found), 1))

    return (
        f"{name}: the most frequent prediction comes {mean('argmax_top_ratio')} times as often as the average token "
        f"(by chance {mean('argmax_top_ratio', 'null')}, at most {mean('argmax_top_ratio', 'null_high')} in 95%); "
        f"{mean('argmax_covering')} tokens cover 80% of the predictions (by chance {mean('argmax_covering', 'null')}); "
        f"the token most often ranked last comes last {mean('argmin_top_ratio')} times as often as the average token."
    )


def _token_table(run: Run) -> tuple[str, PageTable]:
    columns = ["model", "variant", "kind", "token", "text", "count", "share", "probability_ratio"]
    table = run.need("tokens", columns=columns)
    heads = {
        "model": "model",
        "kind": "kind",
        "token": "id",
        "text": "token",
        "count": "times",
        "share": "share",
        "probability_ratio": "mean probability × vocabulary",
    }
    first = shorten_model_names(table.groupby(["model", "kind"], sort=False).head(3))
    first = first.assign(text=[token_text(text) for text in first["text"].tolist()])
    see = "The three tokens that each model predicts most often; tokens.parquet has twenty."
    return see + rest_note(len(first), "tokens", most=60), page_table(first, heads, most=60)


PREFERENCE = Page(
    title=_title,
    headline=_headline,
    figures=(
        Drawn(
            key="coverage",
            title="Do few tokens take most predictions?",
            make=_coverage_figure,
            data=table_reader("coverage"),
        ),
        figure_over_seeds(
            "preference-variants",
            title="How strongly?",
            see="Every dot is a seed, the bar the mean over seeds with its 95% interval; the grey band is chance: "
            "multinomial draws for the counts, shifted vocabularies for the probability.",
            measures=_PREFERRED,
        ),
        figure_along_training(
            "preference-course", see="Preference along training.", measures=_PREFERRED
        ),
    ),
    tables=(Listed(key="tokens", title="Preferred tokens", make=_token_table), VARIANTS_LISTED),
)


def show_preference(found: Result) -> Iterator[str | PageTable]:
    title = (
        "top token relative to chance; tokens that cover 80%; largest mean probability × vocabulary"
    )
    columns = {
        "argmax_top_ratio": "argmax",
        "argmax_covering": "80%",
        "argmin_top_ratio": "argmin",
        "argmin_covering": "80% ",
        "mean_probability_ratio": "mean p",
    }
    return show_survey(found, title=title, measures=columns)
