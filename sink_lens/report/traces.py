"""The page of a trace: what was found, its figures, and its tables from the run's tables."""

import pandas as pd

from sink_lens.records import Run
from sink_lens.report import causal, words
from sink_lens.report.captions import FIGURES
from sink_lens.report.columns import at, by_size, flags, floats, need, select
from sink_lens.report.findings import find_story, links, outliers, real, setting, studied
from sink_lens.report.pages import Listed, Page
from sink_lens.report.tables import Table, more, shown_table
from sink_lens.report.words import interval, number


def _step_table(run: Run) -> tuple[str, Table]:
    heads = {
        "step": "step",
        "first_layer": "first layer",
        "last_layer": "last layer",
        "ratio_before": "ratio before",
        "ratio_after": "ratio after",
        "position": "position",
        "outlier_dimension": "outlier dimension",
    }
    table = need(run, "growth_steps", columns=["first_layer", "last_layer", "ratio_before", "ratio_after"])
    factor = real(setting(run, "growth_factor"))
    see = "Runs of layers in each of which the norm of the sink token, over the median of other tokens, "
    see += f"grows at least {factor:g}-fold." if factor else "grows at once."
    return (see if len(table) else f"{see} There are none."), shown_table(table, heads)


def _super_table(run: Run) -> tuple[str, Table]:
    heads = {
        "layer": "layer",
        "neuron": "neuron",
        "outlier_dimension": "dimension",
        "contribution": "contribution",
        "contribution_share": "share of change",
        "activation": "activation",
        "spike_ratio": "÷ other positions",
        "gate_norm_rank": "gate rank",
        "up_norm_rank": "up rank",
        "column_kurtosis": "column kurtosis",
    }
    table = at(
        need(run, "neurons", columns=["layer", "neuron", "position", "contribution", "is_super"]),
        studied(find_story(run)),
    )
    chosen = by_size(select(table, flags(table, "is_super")), "contribution")
    see = "Neurons that write the outlier dimension at the sink token, the largest contribution first."
    see += more(len(chosen), "neurons") if len(chosen) else " There are none."
    return see, shown_table(chosen, heads)


def _outlier_table(run: Run) -> tuple[str, Table]:
    columns = ["layer", "position", "dimension", "value", "dominance_ratio", "is_outlier"]
    table = at(need(run, "dimensions", columns=columns), studied(find_story(run)))
    table = by_size(select(table, flags(table, "is_outlier")), "value")
    rows = []
    for dimension in outliers(table, None):
        one = select(table, floats(table, "dimension") == dimension)
        layer = floats(one, "layer")
        rows.append(
            (
                dimension,
                len(one),
                int(layer.min()),
                int(layer.max()),
                floats(one, "value")[0],
                int(layer[0]),
                floats(one, "dominance_ratio")[0],
            )
        )
    heads = {
        name: name
        for name in (
            "dimension",
            "layers",
            "first layer",
            "last layer",
            "largest value",
            "at layer",
            "÷ mean |value|",
        )
    }
    see = "Dimensions that hold most of the sink token's energy, and after how many layers they do."
    see += more(len(rows), "dimensions") if rows else " There are none."
    return see, shown_table(pd.DataFrame(rows, columns=list(heads)), heads)


def _arm_table(run: Run) -> tuple[str, Table]:
    heads = {
        "arm": "BOS",
        "chosen": "studied",
        "sink_rate": "sink rate",
        "s2_ratio": "S2 ratio",
        "outlier_dimensions": "outlier dimensions",
        "growth_steps": "growth layers",
        "loss_nats": "loss, nats",
    }
    table = need(run, "arms", columns=["arm", "sink_rate"])
    see = "The same text with and without a first BOS token. S2 ratio: spread of z at the sink over the others."
    return see, shown_table(table, heads)


def _summary_table(run: Run) -> tuple[str, Table]:
    table = need(run, "summary", columns=["quantity", "value"])
    if {"ci_low", "ci_high"} <= set(table.columns):
        bounds = zip(floats(table, "ci_low"), floats(table, "ci_high"), strict=True)
        table = table.assign(interval=[interval(low, high) for low, high in bounds])
    values = zip(table["value"].tolist(), floats(table, "value").tolist(), strict=True)
    table = table.assign(value=[number(value) if value == value else text for text, value in values])
    heads = {"quantity": "quantity", "value": "value", "interval": "interval", "unit": "unit", "note": "note"}
    return "The run in numbers, as in summary.csv.", shown_table(table, heads, most=100)


def _criteria_table(run: Run) -> tuple[str, Table]:
    heads = {
        "layer": "layer",
        "criterion": "criterion",
        "n_super": "super neurons",
        "found": "found",
        "missed": "missed",
        "invented": "invented",
    }
    table = need(run, "criteria", columns=["layer", "criterion", "found"])
    see = "Of the super neurons of a layer, how many the same number of top neurons by another criterion finds."
    return see, shown_table(table, heads)


def _beside_table(run: Run) -> tuple[str, Table]:
    rows = [
        (
            row.link,
            row.statistic,
            row.value,
            row.interval,
            "; ".join(" ".join(null) for null in row.nulls),
            row.own,
        )
        for row in links(run)
        if not row.primary
    ]
    heads = ("link", "statistic", "value", "interval", "compare", "verdict")
    see = "What else was measured of each link, beside the statistic that its verdict rests on."
    numeric = (False, False, True, False, False, False)
    width = 6 if any(row[-1] for row in rows) else 5
    table = Table(heads=heads[:width], numeric=numeric[:width], rows=[row[:width] for row in rows])
    return (see if rows else f"{see} Nothing."), table


_TABLES = (
    Listed(key="beside-table", title="Further statistics of the links", make=_beside_table),
    Listed(key="growth-table", title="Growth steps", make=_step_table),
    Listed(key="outlier-table", title="Outlier dimensions", make=_outlier_table),
    Listed(key="super-table", title="Super neurons", make=_super_table),
    Listed(key="criteria-table", title="Do other criteria agree?", make=_criteria_table),
    Listed(key="arm-table", title="With and without BOS", make=_arm_table),
    Listed(key="summary-table", title="Summary", make=_summary_table),
)

TRACE = Page(
    title=lambda run: words.title(find_story(run)),
    headline=lambda run: words.headline(find_story(run)),
    figures=(*FIGURES, *causal.FIGURES),
    tables=(*causal.TABLES, *_TABLES),
    chained=True,
)
