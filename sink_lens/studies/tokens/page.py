"""The page of ``sink-lens tokens``, and what its command prints."""

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
    table_maker,
    table_reader,
)
from ...report.style import (
    BLUE,
    COLOURS,
    MARKS,
    ORANGE,
    QUIET,
    legend,
    log_scale,
    new_figure,
    panel,
    set_integer_ticks,
    without_formulas,
)
from ...text import as_text, capitalise, join_and, percent, plural, token_text


def _histogram_figure(run: Run) -> tuple[str, Figure]:
    histogram = run.need("histogram", columns=["by", "low", "high", "tokens"])
    thresholds = run.need("thresholds", columns=["by", "threshold", "gap_low", "gap_high"])
    see = (
        "Both scores are 1 at an ordinary token. A token is marked if a gap parts its score from the others; without a "
        "gap, none is."
    )
    figure = new_figure(width=9.0, height=3.0)
    for place, by, label, colour in (
        (1, "attention", "fair shares of attention", ORANGE),
        (2, "norm", "norm ÷ the sequence's median", BLUE),
    ):
        bins = histogram.loc[histogram["by"] == by]
        axes = panel(figure, place=(1, 2, place), xlabel=label, ylabel="tokens" * (place == 1))
        low, high = bins["low"].to_numpy(float), bins["high"].to_numpy(float)
        axes.bar(
            low,
            bins["tokens"].to_numpy(float),
            width=high - low,
            align="edge",
            color=colour,
            alpha=0.8,
        )
        for row in thresholds.loc[thresholds["by"] == by].to_dict("records"):
            if np.isfinite(row["gap_low"]):
                axes.axvspan(
                    row["gap_low"],
                    row["gap_high"],
                    color=QUIET,
                    alpha=0.15,
                    linewidth=0,
                    label="gap",
                )
            if np.isfinite(threshold := row["threshold"]):
                shown = f"threshold {as_text(threshold)}"
                axes.axvline(threshold, color=QUIET, linestyle="--", linewidth=1.4, label=shown)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_yticks([0, 1, 10, 100, 1000, 10000], ["0", "1", "10", "100", "1,000", "10,000"])
        axes.set_ylim(0, 1.5 * max(float(bins["tokens"].max() or 1), 1.0))
        log_scale(axes, axis="x")
        legend(axes, columns=2)
    return see, without_formulas(figure)


def _position_figure(run: Run) -> tuple[str, Figure]:
    positions = run.need("positions", columns=["position", "sink_rate", "massive_rate"])
    figure = new_figure(width=7.4)
    axes = panel(figure, xlabel="position", ylabel="share of sequences, %")
    lines = (
        ("sink_rate", "sinks", ORANGE, "o"),
        ("massive_rate", "massive activations", BLUE, "x"),
    )
    for name, label, colour, mark in lines:
        rate = 100 * positions[name].to_numpy(float)
        axes.plot(
            positions["position"],
            rate,
            color=colour,
            marker=mark,
            markersize=3.5,
            linewidth=0.8,
            label=label,
        )
    axes.set_ylim(-2, 102)
    set_integer_ticks(axes, y=False)
    legend(axes, columns=2)
    return "Where in the sequence the marked tokens are.", without_formulas(figure)


def _coverage_figure(run: Run) -> tuple[str, Figure]:
    dimensions = run.need("dimensions", columns=["kind", "dimension", "layer", "coverage"])
    if dimensions.empty:
        raise RunError(
            "no dimension is an outlier on most tokens of a kind, so there is nothing to draw."
        )
    see = (
        f"A dimension is an outlier on a token if it exceeds {run.config.get('dimension_factor', 20):g} times the "
        "token's median magnitude. Residual sinks (left) are outliers on most ordinary tokens; the outliers of "
        "marked tokens (right) are different dimensions."
    )
    layers = range(int(dimensions["layer"].to_numpy(int).max(initial=0)) + 1)
    figure = new_figure(width=9.0, height=3.2)
    for place, kind, where in ((1, "residual", "ordinary"), (2, "sink token", "marked")):
        part = dimensions.loc[dimensions["kind"] == kind]
        ylabel = "share of these tokens, %" * (place == 1)
        axes = panel(figure, place=(1, 2, place), xlabel=f"layer ({where} tokens)", ylabel=ylabel)
        for index, dimension in enumerate(_widest_dimensions(part)):
            rows = part.loc[part["dimension"] == dimension].set_index("layer")["coverage"]
            axes.plot(
                layers,
                100 * rows.reindex(layers, fill_value=0).to_numpy(float),
                color=COLOURS[index % len(COLOURS)],
                marker=MARKS[index % len(MARKS)],
                markersize=3.5,
                label=str(dimension),
            )
        axes.axhline(
            100 * float(run.config.get("coverage", 0.5)), color=QUIET, linestyle=":", linewidth=1
        )
        axes.set_ylim(0, 104)
        set_integer_ticks(axes, y=False)
        legend(axes, columns=6)
    return see, without_formulas(figure)


def _dimension_sentences(dimensions: pd.DataFrame) -> list[str]:
    sentences = []
    for kind, on in (("residual", "tokens that are not marked"), ("sink token", "marked tokens")):
        part = dimensions.loc[dimensions["kind"] == kind]
        names = _widest_dimensions(part, most=len(part))
        if names:
            best = part.loc[part["coverage"].idxmax()]
            name = "residual sinks" if kind == "residual" else "dimensions of marked tokens"
            sentences.append(
                f"{name}: {join_and(names)}; {int(best['dimension'])} is an outlier on {percent(best['coverage'])} of "
                f"the {on} after layer {int(best['layer'])}, at {as_text(best['ratio'])} times their median magnitude"
            )
        elif kind == "residual":
            sentences.append("no residual sink: no dimension is an outlier on most tokens")
    return sentences


def _widest_dimensions(part: pd.DataFrame, *, most: int = 6) -> list[int]:
    order = part.sort_values("coverage", ascending=False, kind="stable")["dimension"]
    return order.astype(int).unique().tolist()[:most]


def _title(run: Run) -> str:
    table = run.optional("agreement", columns=["kind", "tokens", "sinks", "massive"])
    if table is None:
        return "Sink tokens"
    row: dict[Any, Any] = table.loc[table["kind"] == "all"].iloc[0].to_dict()
    if not row["sinks"] and not row["massive"]:
        return "No sink and no massive activation"
    first = table.loc[table["kind"] == "first", ["sinks", "massive", "tokens"]].sum()
    of = f"of {int(row['tokens']):,} tokens in {plural(int(first['tokens']), 'sequence')}"
    all_first = bool((first[["sinks", "massive"]] == [row["sinks"], row["massive"]]).all())
    sinks = plural(int(row["sinks"]), "sink")
    massive = plural(int(row["massive"]), "massive activation")
    return f"{sinks} and {massive} {of}" + ", all at position 0" * all_first


def _headline(run: Run) -> list[str]:
    sentences: list[str] = []
    thresholds = run.optional("thresholds", columns=["statement"])
    if thresholds is not None:
        sentences += thresholds["statement"].astype(str).tolist()
    columns = ["kind", "dimension", "layer", "coverage", "ratio"]
    dimensions = run.optional("dimensions", columns=columns)
    if dimensions is not None:
        sentences += _dimension_sentences(dimensions)
    return [f"{capitalise(text)}." for text in sentences]


def _marked_table(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "sink_tokens", columns=["sequence", "position", "text", "norm_ratio", "share_score"]
    )
    shown = table.sort_values(["share_score", "norm_ratio"], ascending=False, kind="stable")
    heads = {
        "sequence": "sequence",
        "position": "position",
        "text": "token",
        "kind": "kind",
        "sink": "sink",
        "massive": "massive",
        "share_score": "fair shares",
        "received": "attention",
        "norm_ratio": "norm ratio",
        "sink_layers": "sink in layers",
        "massive_layers": "massive in layers",
        "dimensions": "dimensions",
    }
    see = "Every marked token, the most attended first." if len(table) else "No token is marked."
    return see + rest_note(len(table), "sink_tokens"), page_table(_make_text_readable(shown), heads)


def _token_id_table(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "token_ids", columns=["token_id", "text", "tokens", "sink_rate", "massive_rate"]
    )
    heads = {
        "text": "token",
        "token_id": "id",
        "kind": "kind",
        "tokens": "occurrences",
        "sink_rate": "sink rate",
        "massive_rate": "massive rate",
        "median_share": "fair shares, median",
        "largest_share": "largest",
        "median_norm": "norm ratio, median",
        "largest_norm": "largest ",
    }
    see = "Tokens after position 0 by id: the most often marked first, then the most attended."
    return see + rest_note(len(table), "token_ids"), page_table(_make_text_readable(table), heads)


def _make_text_readable(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(text=table["text"].map(token_text))


AGREEMENT = {
    "kind": "tokens",
    "tokens": "all",
    "sinks": "sinks",
    "massive": "massive",
    "both": "both",
    "sink_only": "sinks only",
    "massive_only": "massive only",
    "jaccard": "agreement",
}


TOKENS = Page(
    title=_title,
    headline=_headline,
    figures=(
        Drawn(
            key="scores",
            title="Is there a gap?",
            make=_histogram_figure,
            data=table_reader("histogram"),
        ),
        Drawn(
            key="positions",
            title="At which positions",
            make=_position_figure,
            data=table_reader("positions"),
        ),
        Drawn(
            key="dimensions",
            title="Which dimensions are large",
            make=_coverage_figure,
            data=table_reader("dimensions"),
        ),
    ),
    tables=(
        Listed(
            key="agreement-table",
            title="Sinks and massive activations",
            make=table_maker(
                "agreement",
                "Agreement: of the tokens that are a sink or massive, the share that are both.",
                AGREEMENT,
                need=("kind", "tokens", "sinks", "massive", "both"),
            ),
        ),
        Listed(key="sink-tokens", title="Marked tokens", make=_marked_table),
        Listed(key="token-ids", title="By token", make=_token_id_table),
    ),
)


def show_tokens(found: Result) -> Iterator[str | PageTable]:
    yield found.headline
    yield page_table(found.tables["agreement"], AGREEMENT)
    ids = {
        "text": "after position 0",
        "token_id": "id",
        "tokens": "occurrences",
        "sink_rate": "sink",
        "massive_rate": "massive",
        "largest_share": "shares, at most",
        "largest_norm": "norm, at most",
    }
    yield page_table(_make_text_readable(found.tables["token_ids"].head(8)), ids)
    yield from _dimension_sentences(found.tables["dimensions"])


def answer_of_tokens(found: Result) -> dict[str, Any]:
    ids = found.tables["token_ids"]
    return {
        "sentence": " ".join(found.sentences),
        **{name: found.tables[name] for name in ("thresholds", "agreement", "dimensions")},
        "token_ids": ids.loc[(ids["sink_rate"] > 0) | (ids["massive_rate"] > 0)],
    }
