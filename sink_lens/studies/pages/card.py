"""The page of ``card``."""

import pandas as pd
from matplotlib.figure import Figure

from ...records import Run
from ...report.page import (
    Drawn,
    Listed,
    Page,
    PageTable,
    ci_texts,
    page_table,
    rest_note,
    summary_lines,
    table_maker,
    table_reader,
)
from ...report.style import (
    BLUE,
    ORANGE,
    log_scale,
    new_figure,
    panel,
    set_integer_ticks,
    without_formulas,
)
from ...text import interval_text, join_and, percent, safe_line

_LOSSES = {
    "clean": "as it is",
    "zeroed": "outlier dimensions set to zero",
    "mean_aligned": "outlier dimensions set to their mean over sequences",
}


def _sink_figure(run: Run) -> tuple[str, Figure]:
    layers = run.need("layers", columns=["layer", "sink_attention", "norm_ratio"])
    see = (
        "Layer by layer: when heads begin to attend to the studied token (the sink, or the first token without one), "
        "and when its norm grows. The layer where the norm jumps writes the outlier dimension."
    )
    figure = new_figure(width=7.4, height=2.8)
    for place, column, label, colour in (
        (1, "sink_attention", "attention to the studied token", BLUE),
        (2, "norm_ratio", "its norm ÷ that of the others", ORANGE),
    ):
        axes = panel(figure, place=(1, 2, place), xlabel="layer", ylabel=label)
        rows = layers[column].to_numpy(float)
        axes.plot(layers["layer"], rows, color=colour, marker="o", markersize=3.5)
        if column == "norm_ratio":
            log_scale(axes, axis="y")
        else:
            axes.set_ylim(bottom=0)
        set_integer_ticks(axes, y=False)
    return see, without_formulas(figure)


def _title(run: Run) -> str:
    table = run.optional("summary", columns=["sink_positions", "outlier_dimensions"])
    if table is None or table.empty:
        return "A model's sinks"
    row = table.astype("string").fillna("").to_dict("records")[0]
    sinks, dims = (
        str(row[name]).split(",") if row[name] else []
        for name in ("sink_positions", "outlier_dimensions")
    )
    numbers = table.to_dict("records")[0]
    bounds = interval_text(
        numbers.get("sink_rate_low"), numbers.get("sink_rate_high"), shown=percent
    )
    rate = f"{percent(float(numbers.get('sink_rate', float('nan'))))} {bounds}".strip()
    sink = f"No position is a sink ({rate} of heads)"
    if sinks:
        weaker = f" (weaker ones at {join_and(sinks[1:])})" * (len(sinks) > 1)
        sink = f"A sink at position {sinks[0]} in {rate} of heads{weaker}"
    named = f"outlier dimension{'s' * (len(dims) > 1)} {join_and(dims)}"
    return safe_line(f"{sink}, {named if dims else 'no outlier dimension'}", limit=200)


def _headline(run: Run) -> list[str]:
    sentences = summary_lines(run, limit=900)
    sinks = run.need("summary", columns=["sink_positions"])["sink_positions"].astype("string")
    if any(sinks.fillna("").tolist()[:1]):
        places = join_and(f"position {place}" for place in str(sinks.iloc[0]).split(","))
        sentences.append(f"A KV cache that evicts must keep {places}.")
    if (run.folder / "card.md").exists():
        sentences.append(
            "In the run's folder, card.md is the block for a model card and card.json the same for programs."
        )
    return sentences


def _dimension_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("dimensions", columns=["kind", "dimension", "layers", "value", "coverage"])
    see = (
        "Outlier dimensions dominate the studied token; residual ones are large on most other tokens. Which of them "
        "a number format must keep is measured by quantise." + rest_note(len(table), "dimensions")
    )
    heads = {"kind": "kind", "dimension": "dimension", "layers": "after layers", "value": "value"}
    shown = table.assign(
        coverage=["" if pd.isna(one) else f"{one:.0%}" for one in table["coverage"]]
    )
    return see, page_table(shown, heads | {"coverage": "of tokens"})


def _writer_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("writers", columns=["layer", "dimension", "part", "unit", "share"])
    see = (
        "What writes the dimension in the layers where the token's norm grows. A share is a share of the "
        "dimension's change; for a super weight (arXiv 2411.07191), a share of what the MLP writes there."
        + rest_note(len(table), "writers")
    )
    shown = table.assign(unit=["" if pd.isna(one) else str(int(one)) for one in table["unit"]])
    heads = {
        "layer": "layer",
        "dimension": "dimension",
        "part": "part",
        "unit": "expert, neuron or column",
    }
    return see, page_table(shown, heads | {"share": "share"})


def _loss_table(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "losses", columns=["condition", "loss_nats", "change_nats", "change_low", "change_high"]
    )
    shown = table.assign(
        condition=[_LOSSES.get(str(name), safe_line(name)) for name in table["condition"]],
        interval=ci_texts(table, "change_low", "change_high"),
    )
    see = "The loss with the outlier dimensions set to zero, and set to their mean. No other dimensions were tried."
    heads = {
        "condition": "condition",
        "loss_nats": "loss, nats",
        "change_nats": "change",
        "interval": "95%",
    }
    return see, page_table(shown, heads)


CARD = Page(
    title=_title,
    headline=_headline,
    figures=(
        Drawn(
            key="sink",
            title="The studied token by layer",
            make=_sink_figure,
            data=table_reader("layers"),
        ),
    ),
    tables=(
        Listed(key="dimension-table", title="Large dimensions", make=_dimension_table),
        Listed(key="writer-table", title="What writes them", make=_writer_table),
        Listed(key="loss-table", title="What removing them costs", make=_loss_table),
        Listed(
            key="maximum-table",
            title="Largest activations",
            make=table_maker(
                "maxima",
                "The largest entry of every site in all layers and tokens: what a number format must be able to hold.",
                ("site", "value", "layer", "position", "channel", "over_median"),
            ),
        ),
    ),
)
