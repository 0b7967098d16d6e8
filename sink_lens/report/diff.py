"""The page of ``card`` with two models: what changed, what is alarming, and the line to change."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.records import Run
from sink_lens.report.page import (
    Drawn,
    Listed,
    Page,
    PageTable,
    has_table,
    intervals,
    listed_table,
    more,
    shown_table,
    whole,
)
from sink_lens.report.style import BLUE, QUIET, canvas, finished, panel
from sink_lens.text import interval, listed, named_parts, number, plural, visible, words

_CHANGES = ["quantity", "first", "second", "change", "change_low", "change_high", "alarm"]
_SIGNS = {True: "✗ alarm", False: "✓"}


def loss_change_by_position(positions: pd.DataFrame) -> Figure:
    """Change of the loss by position, with its interval.

    Args:
        positions: position, change, change_low, change_high.
    """
    figure = canvas(width=7.4, height=3.0)
    axes = panel(figure, xlabel="position of the predicted token", ylabel="change of the loss, nats")
    low, high = (positions[name].to_numpy(float) for name in ("change_low", "change_high"))
    axes.fill_between(positions["position"], low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(positions["position"], positions["change"].to_numpy(float), color=BLUE)
    axes.axhline(0, color=QUIET, linewidth=0.8)
    return finished(figure)


def _title(run: Run) -> str:
    """Head the page with the number of alarms and the change of the loss."""
    table = run.optional("summary", columns=["alarms", "by"])
    if table is None or table.empty:
        return "Two models compared"
    row = table.to_dict("records")[0]
    by = {"dtype": f" in {visible(run.config.get('other_dtype', 'another type'))}", "bos": " by BOS"}
    result = plural(int(row["alarms"]), "alarm") if row["alarms"] else "Nothing is broken"
    change, low, high = (float(row.get(f"loss_change_{end}", np.nan)) for end in ("nats", "low", "high"))
    if row["alarms"]:
        tables = [("checks", "check"), ("changes", "quantity")]
        found_in = [(run.optional(name, columns=[column, "alarm"]), column) for name, column in tables]
        alarmed = [
            name
            for table, column in found_in
            if table is not None
            for name in table.loc[table["alarm"].eq(True), column]
        ]
        result += f" ({listed([words(str(name)) for name in alarmed], most=3)})" if alarmed else ""
    loss = f"; the loss changes by {number(change)} {interval(low, high)} nats" if np.isfinite(change) else ""
    if row["by"] == "bos" and not row["alarms"]:
        loss = loss.replace("the loss", "over all positions the loss")
        return f"{visible(row.get('sentence', ''), limit=200).partition(':')[0] or result}{loss}"
    others = run.config.get("others") or [run.config.get("other")]  # a run of 0.2 has one
    other = Path(str(others[0] or ""))
    whose = f" in {visible(other.name if other.is_absolute() else other)}" if other.name else ""
    return f"{result}{whose}{by.get(str(row['by']), '')}{loss}"


def _headline(run: Run) -> list[str]:
    """The verdict in the run's own words."""
    return [visible(text, limit=1500) for text in run.need("summary", columns=["sentence"])["sentence"].tolist()[:1]]


def _by_position(run: Run) -> tuple[str, Figure]:
    """Draw the change of the loss by position."""
    see = (
        "Paired over sequences, with 95% intervals. A rise that ends after the first positions suggests a lost BOS or "
        "sink; one at all positions damage to the weights, or another text."
    )
    columns = ["position", "change", "change_low", "change_high"]
    return see, loss_change_by_position(run.need("positions", columns=columns))


def _numbers(run: Run) -> tuple[str, PageTable]:
    """The table of quantities that are numbers."""
    table = run.need("changes", columns=[*_CHANGES, "unit"])
    table = table.loc[table["unit"] != "index"].sort_values("alarm", ascending=False, kind="stable")
    shown = table.assign(
        verdict=[_SIGNS[bool(alarm)] for alarm in table["alarm"]],
        quantity=[str(name).replace("_", " ") for name in table["quantity"]],
        interval=intervals(table, "change_low", "change_high"),
    )
    heads = {"quantity": "quantity", "first": "first", "second": "second", "change": "change", "interval": "95%"}
    return "Numbers of both models on the same tokens.", shown_table(shown, heads | {"verdict": ""})


def _indices(run: Run) -> tuple[str, PageTable]:
    """The table of quantities that are indices."""
    table = run.need("changes", columns=["quantity", "first_indices", "second_indices", "alarm", "unit"])
    table = table.loc[table["unit"] == "index"]
    texts = {
        name: ["" if pd.isna(one) else named_parts(one) for one in table[name]]
        for name in ("first_indices", "second_indices")
    }
    shown = table.assign(
        **texts,
        verdict=[_SIGNS[bool(one)] for one in table["alarm"]],
        quantity=[str(name).replace("_", " ") for name in table["quantity"]],
    )
    heads = {"quantity": "what", "first_indices": "first", "second_indices": "second", "verdict": ""}
    return "Positions and dimensions of the sink and the outliers in both models.", shown_table(shown, heads)


def _checks(run: Run) -> tuple[str, PageTable]:
    """The table of checks, the alarms first."""
    table = run.need("checks", columns=["check", "alarm", "said", "line"])
    shown = table.sort_values("alarm", ascending=False, kind="stable")
    shown = shown.assign(
        verdict=[_SIGNS[bool(one)] for one in shown["alarm"]], check=shown["check"].str.replace("_", " ")
    )
    heads = {"verdict": "", "check": "check", "said": "what it found", "line": "line to change"}
    return "BOS, vocabularies, configurations and weights." + more(len(shown), "checks"), shown_table(shown, heads)


DIFF = Page(
    title=_title,
    headline=_headline,
    figures=(Drawn(key="positions", title="Loss by position", make=_by_position, data=whole("positions")),),
    tables=(
        Listed(key="check-table", title="Checks", make=_checks),
        Listed(key="change-table", title="What changed", make=_numbers),
        Listed(key="index-table", title="Positions and dimensions", make=_indices),
        Listed(
            key="tensor-table",
            title="Weights that changed most",
            make=listed_table(
                "tensors",
                "The weights that changed most: norm of the difference relative to the norm.",
                {"tensor": "tensor", "change": "relative change"},
            ),
            when=has_table("tensors"),
        ),
    ),
)
