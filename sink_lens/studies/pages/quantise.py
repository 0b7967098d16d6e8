"""The page of ``quantise``: what a format costs, and what keeping a small set gives back."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.records import Result, Run
from sink_lens.report.page import Drawn, Listed, Page, PageTable, intervals, more, sentence_of, shown_table
from sink_lens.report.style import BLUE, GREEN, ORANGE, QUIET, canvas, legend, panel, without_formulas
from sink_lens.text import costs, interval, number, percent, plural, visible, words

_LINES = ((False, "channels alone", BLUE, "o"), (True, "with the sink tokens", ORANGE, "s"))
_COLUMNS = ["part", "kept", "sink_tokens", "channels", "loss_nats", "closed_share", "closed_low", "closed_high"]


def loss_by_channels(conditions: pd.DataFrame) -> Figure:
    """Held-out loss by the number of kept channels, without and with the sink tokens, between clean and all rounded.

    Args:
        conditions: kept, sink_tokens, channels, loss_nats; rows of one part of the text.
    """
    figure = canvas(width=6.4, height=3.4)
    axes = panel(figure, xlabel="channels kept at each site", ylabel="loss, nats")
    kept = conditions.loc[conditions["kept"].isin(["all", "tokens", "channels", "both"])]
    sizes = sorted(kept["channels"].unique().tolist())
    for tokens, label, colour, mark in _LINES:
        part = kept.loc[kept["sink_tokens"] == tokens].sort_values("channels", kind="stable")
        at = [sizes.index(size) for size in part["channels"].tolist()]
        axes.plot(at, part["loss_nats"].to_numpy(float), color=colour, marker=mark, markersize=4.5, label=label)
    random = conditions.loc[conditions["kept"] == "random"]
    if len(random):
        at = [sizes.index(size) for size in random["channels"].tolist()]
        axes.scatter(at, random["loss_nats"], color=QUIET, marker="x", s=20, label="random of that size")
    for name, colour, style in (("clean", GREEN, "--"), ("weights", QUIET, ":")):
        level = conditions.loc[conditions["kept"] == name, "loss_nats"].to_numpy(float)
        if len(level):
            label = "not rounded" if name == "clean" else "weights rounded only"
            axes.axhline(level[0], color=colour, linestyle=style, linewidth=1, label=label)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    legend(axes, columns=2)
    return without_formulas(figure)


def _title(run: Run) -> str:
    """Head the page with what to keep and what that closes, or with the cost of the format."""
    table = run.optional("summary", columns=["verdict", "format"])
    if table is None or table.empty:
        return "What a low-precision format costs"
    row = table.to_dict("records")[0]
    form = words(visible(row["format"]))
    title = f"{form}: {visible(row['verdict'])}"
    closed, cost = (float(row.get(name, np.nan)) for name in ("closed_share", "cost_nats"))
    if not np.isfinite(cost):
        return title
    kept, colon, _ = visible(row.get("sentence", ""), limit=160).partition(": ")
    if np.isfinite(closed) and colon and kept.startswith("Keep"):
        bounds = interval(row.get("closed_low"), row.get("closed_high"), shown=percent)
        share = "all" if closed >= 1 else f"{percent(closed)} {bounds}".rstrip()
        return f"{form}: k{kept[1:]}, which closes {share} of the {number(cost)} nats that it costs"
    return f"{title}; the format {costs(cost, row.get('cost_low'), row.get('cost_high'))}"


def _has_tried(run: Run) -> bool:
    """Check whether something was kept: where the format costs nothing, nothing is tried."""
    table = run.optional("conditions", columns=["kept"])
    return table is None or bool(table["kept"].isin(["tokens", "channels", "both"]).any())


def _judged_rows(run: Run) -> pd.DataFrame:
    """The conditions on the half of the text that judges."""
    conditions = run.need("conditions", columns=_COLUMNS)
    return conditions.loc[conditions["part"] == "judge"]


def _loss_curve(run: Run) -> tuple[str, Figure]:
    """(caption, figure) of the held-out loss by number of kept channels."""
    see = (
        "Loss on the half of the text that was not used to choose. Lines that fall to the dashed one give back all "
        "that the format costs; crosses are random tokens and channels of the chosen number, and should stay where "
        "nothing is kept."
    )
    return see, loss_by_channels(_judged_rows(run))


def _what(row: Mapping[Any, Any]) -> str:
    """Describe what a condition keeps."""
    names = {
        "clean": "nothing is rounded",
        "weights": "only the weights are rounded",
        "all": "everything is rounded",
        "tokens": "sink tokens kept",
        "channels": f"{plural(int(row['channels']), 'channel')} per site kept",
        "both": f"sink tokens and {plural(int(row['channels']), 'channel')} per site kept",
    }
    return names.get(str(row["kept"]), str(row["kept"]))


def _condition_table(run: Run) -> tuple[str, PageTable]:
    """(caption, table) of the conditions on the half of the text that judges."""
    judged = _judged_rows(run)
    named = judged.loc[judged["kept"] != "random"]
    random = judged.loc[judged["kept"] == "random"]
    shown = named.assign(
        what=[_what(row) for row in named.to_dict("records")],
        closed=[percent(share) for share in named["closed_share"].to_numpy(float)],
        interval=intervals(named, "closed_low", "closed_high", shown=percent),
    )
    heads = {"what": "what is kept", "loss_nats": "loss, nats", "perplexity": "perplexity", "change_nats": "cost, nats"}
    see = "Held-out loss of every condition, and how much of the cost of rounding everything it wins back."
    if len(random):
        shares = random["closed_share"].to_numpy(float)
        see += (
            f" {len(random)} random sets of that size close {percent(shares.min())} to {percent(shares.max())} of it."
        )
    table = shown_table(shown, heads | {"closed": "gap closed", "interval": "95%"}, most=40)
    return see + more(len(shown), "conditions", most=40), table


QUANTISE = Page(
    title=_title,
    headline=lambda run: sentence_of(run, limit=900),
    figures=(
        Drawn(
            key="kept",
            title="What keeping tokens and channels gives back",
            make=_loss_curve,
            data=_judged_rows,
            when=_has_tried,
        ),
    ),
    tables=(Listed(key="condition-table", title="Conditions", make=_condition_table),),
)

_CLOSED = ("loss_nats", "change_nats", "closed_share", "closed_low", "closed_high")


def show(found: Result) -> Iterator[str | pd.DataFrame]:
    """Terminal output: the held-out rows without random draws."""
    yield found.headline
    held_out = found.tables["conditions"].query("part == 'judge' and kept != 'random'")
    yield held_out.filter(items=("kept", "channels", *_CLOSED))
