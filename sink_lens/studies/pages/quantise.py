"""The page of ``quantise``, and what its command prints."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from ...records import Result, Run
from ...report.page import (
    INTERVALS,
    Listed,
    Page,
    PageTable,
    ci_texts,
    page_table,
    rest_note,
    summary_lines,
)
from ...text import as_ranges, name_in_words, percent, plural, safe_line

_SHARES = ["closed_share", "closed_low", "closed_high", "chosen"]
_COLUMNS = ["part", "kept", "sink_tokens", "channels", "loss_nats", *_SHARES]


def _title(run: Run) -> str:
    table = run.optional("summary", columns=["verdict", "format"])
    if table is None or table.empty:
        return "What a low-precision format costs"
    row = table.to_dict("records")[0]
    kept = safe_line(row.get("sentence", row["verdict"]), limit=160).partition(": ")[0].rstrip(".")
    return f"{name_in_words(safe_line(row['format']))}: {kept[:1].lower()}{kept[1:]}"


def _condition_text(row: Mapping[Any, Any]) -> str:
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
    conditions = run.need("conditions", columns=_COLUMNS)
    judged = conditions.loc[conditions["part"] == "judge"]
    named = judged.loc[judged["kept"] != "random"]
    random = judged.loc[judged["kept"] == "random"]
    shown = named.assign(
        what=[
            _condition_text(row) + " (chosen)" * bool(row["chosen"])
            for row in named.to_dict("records")
        ],
        closed=[percent(share) for share in named["closed_share"].to_numpy(float)],
        interval=ci_texts(named, "closed_low", "closed_high", shown=percent),
    )
    heads = {
        "what": "what is kept",
        "loss_nats": "loss, nats",
        "perplexity": "perplexity",
        "change_nats": "cost, nats",
    }
    see = "Held-out loss of every condition, and how much of the cost of rounding everything it wins back."
    if len(random):
        shares = random["closed_share"].to_numpy(float)
        see += (
            f" {len(random)} random sets of that size close {percent(shares.min())} "
            f"to {percent(shares.max())} of it."
        )
    table = page_table(shown, heads | {"closed": "gap closed", "interval": "95%"}, most=40)
    return see + rest_note(len(shown), "conditions", most=40), table


def _kept_channel_rows(run: Run) -> pd.DataFrame:
    kept = run.need("channels", columns=["site", "layer", "channel"])
    layers: dict[tuple[str, int], list[int]] = {}
    for row in kept.to_dict("records"):
        layers.setdefault((safe_line(row["site"]), int(row["channel"])), []).append(
            int(row["layer"])
        )
    ordered = sorted(layers, key=lambda one: -len(layers[one]))
    rows = [(site, channel, as_ranges(layers[site, channel])) for site, channel in ordered]
    return pd.DataFrame(rows, columns=["site", "channel", "layers"])


def _channel_table(run: Run) -> tuple[str, PageTable]:
    shown = _kept_channel_rows(run)
    see = (
        "The channels that stay in 16 bit: each site's largest, by layer. "
        f"channels.csv in the run folder has a row for each layer{_names_text(run)}."
    )
    heads = {"site": "site", "channel": "channel", "layers": "in layers"}
    return see + rest_note(len(shown), "channels", most=40), page_table(shown, heads, most=40)


def _names_text(run: Run) -> str:
    names = run.need("channels", columns=["modules"])["modules"]
    named = (names.notna() & (names != "")).any()  # the stream and the cache have no names
    return ", with the names of the linear layers that read it" * bool(named)


def _keeps_channels(run: Run) -> bool:
    table = run.optional("channels", columns=["site"])
    return table is not None and not table.empty


_MADE = INTERVALS | {
    "what": "Tokens and channels that stay in 16 bit.",
    "closed": "Share of the cost that is recovered.",
}
QUANTISE = Page(
    title=_title,
    headline=lambda run: summary_lines(run, limit=900),
    figures=(),
    tables=(
        Listed(key="condition-table", title="Conditions", make=_condition_table, meanings=_MADE),
        Listed(
            key="channel-table", title="Channels to keep", make=_channel_table, when=_keeps_channels
        ),
    ),
)


_SHOWN = 8
"""Rows of channels in the terminal."""


def show_quantise(found: Result) -> Iterator[str | pd.DataFrame]:
    yield found.headline
    held_out = found.tables["conditions"].query("part == 'judge' and kept != 'random'")
    columns = ("kept", "channels", "loss_nats", "change_nats", *_SHARES)
    marked = ["chosen" if one else "" for one in held_out["chosen"]]
    yield held_out.assign(chosen=marked).filter(items=columns if any(marked) else columns[:-1])
    if _keeps_channels(found.run):
        shown = _kept_channel_rows(found.run)
        yield shown.head(_SHOWN)
        n = len(found.tables["channels"])
        yield (
            f"{plural(n, 'channel')} to keep in all, each counted in its layer{_names_text(found.run)}: "
            f"{found.run.folder / 'channels.csv'}"
        )
