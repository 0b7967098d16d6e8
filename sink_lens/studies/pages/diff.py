"""The page of ``card`` with two models."""

from pathlib import Path

import pandas as pd

from ...records import Run
from ...report.page import (
    Listed,
    Page,
    PageTable,
    ci_texts,
    has_table,
    page_table,
    summary_lines,
    table_maker,
)
from ...text import as_text, interval_text, label_parts, safe_line


def name_neurons(rows: pd.DataFrame) -> pd.DataFrame:
    """Write neurons as ``L11.N1229`` in the rows of ``changes`` that hold indices."""
    shown = {
        name: [
            label_parts(text) if unit == "index" and not pd.isna(text) else text
            for text, unit in zip(rows[name], rows["unit"], strict=True)
        ]
        for name in ("first_indices", "second_indices")
    }
    return rows.assign(**shown)


def _title(run: Run) -> str:
    table = run.optional(
        "summary", columns=["loss_change_nats", "loss_change_low", "loss_change_high"]
    )
    if table is None or table.empty:
        return "Two models compared"
    row = table.to_dict("records")[0]
    ends = interval_text(row["loss_change_low"], row["loss_change_high"])
    change = f"{as_text(row['loss_change_nats'])} {ends}".rstrip()
    others = run.config.get("others") or [None]
    other = Path(str(others[0] or "the second model"))
    second = other.name if other.is_absolute() else other
    said = f"The loss changes by {change} nats"
    changes = run.optional("changes", columns=["quantity", "changed"])
    if changes is not None:
        of_loss = changes.loc[changes["quantity"].eq("loss"), "changed"]
        if not of_loss.astype(bool).any():
            said = f"No change of the loss is shown ({change} nats)"
    return f"{said}, from the first model to {safe_line(second)}"


def _number_table(run: Run) -> tuple[str, PageTable]:
    table = run.need(
        "changes",
        columns=["quantity", "unit", "first", "second", "change", "change_low", "change_high"],
    )
    table = table.loc[~table["unit"].isin(["index", "text"])]
    shown = table.assign(
        quantity=[str(name).replace("_", " ") for name in table["quantity"]],
        interval=ci_texts(table, "change_low", "change_high"),
    )
    see = (
        "Both models on the same tokens, paired by sequence, without controls. A change counts if its interval "
        "excludes 0 and it is above rounding."
    )
    heads = {
        "quantity": "quantity",
        "first": "first",
        "second": "second",
        "change": "change",
        "interval": "95%",
    }
    return see, page_table(shown, heads)


def _text_table(run: Run) -> tuple[str, PageTable]:
    table = run.need("changes", columns=["quantity", "unit", "first_indices", "second_indices"])
    table = name_neurons(table.loc[table["unit"].isin(["index", "text"])])
    shown = table.assign(quantity=[str(name).replace("_", " ") for name in table["quantity"]])
    see = "Positions, dimensions and neurons of both, their BOS tokens, and fields of the configuration that differ."
    return see, page_table(
        shown, {"quantity": "what", "first_indices": "first", "second_indices": "second"}
    )


DIFF = Page(
    title=_title,
    headline=lambda run: summary_lines(run, limit=1500),
    figures=(),
    tables=(
        Listed(key="change-table", title="What changed", make=_number_table),
        Listed(key="index-table", title="Indices, BOS and configurations", make=_text_table),
        Listed(
            key="tensor-table",
            title="Weights that changed most",
            make=table_maker(
                "tensors",
                "The weights that changed most: norm of the difference relative to the norm.",
                {"tensor": "tensor", "change": "relative change"},
            ),
            when=has_table("tensors"),
        ),
    ),
)
