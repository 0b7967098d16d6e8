"""The page of ``streaming``: the loss beyond a cache by how many first tokens it keeps."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_lens.records import Run
from sink_lens.report.page import Drawn, Listed, Page, PageTable, intervals, shown_table, whole
from sink_lens.report.style import BLUE, COLOURS, GREEN, INK, ORANGE, QUIET, canvas, finished, legend, panel
from sink_lens.text import costs, interval, number, percent, plural, visible

_COLUMNS = ["part", "kept", "tokens", "loss_nats"]
_NAMES = {"full": "full cache", "sink_mask": "sink tokens", "0": "none"}
_MOST_BLOCKS = 32


def loss_by_kept(losses: pd.DataFrame) -> Figure:
    """Loss beyond the window by the number of kept first tokens, between no cache limit and other tokens.

    Args:
        losses: kept, tokens, loss_nats; rows of one part of the text.
    """
    first = losses.loc[losses["kept"].str.isdecimal()].sort_values("tokens", kind="stable")
    places = {name: at for at, name in enumerate(first["kept"].tolist())}
    figure = canvas(width=6.4, height=3.2)
    axes = panel(figure, xlabel="first tokens kept", ylabel="loss beyond the window, nats")
    axes.plot(range(len(first)), first["loss_nats"].to_numpy(float), color=BLUE, marker="o", markersize=5)
    full = losses.loc[losses["kept"] == "full", "loss_nats"].to_numpy(float)
    if len(full) and {"change_low", "change_high"} <= set(first.columns):  # 95% of the change from a full cache
        low, high = (full[0] + first[name].to_numpy(float) for name in ("change_low", "change_high"))
        axes.vlines(np.arange(len(first)), low, high, color=BLUE, linewidth=1.4, alpha=0.5)
    for name, label, colour, style in (
        ("full", "a full cache", GREEN, "--"),
        ("sink_mask", "the sink tokens kept", ORANGE, ":"),
    ):
        level = losses.loc[losses["kept"] == name, "loss_nats"].to_numpy(float)
        if len(level):
            axes.axhline(level[0], color=colour, linestyle=style, linewidth=1.2, label=label)
    random = losses.loc[losses["kept"] == "random"]
    at = [places.get(f"{count:g}", 0) for count in random["tokens"].to_numpy(float)]
    if len(random):
        axes.scatter(at, random["loss_nats"], color=QUIET, marker="x", s=22, label="random tokens kept")
    axes.set_xticks(range(len(first)), first["kept"].tolist())
    legend(axes, columns=3)
    return finished(figure)


def loss_by_position(positions: pd.DataFrame, *, window: int) -> Figure:
    """Loss by position, in blocks of neighbouring positions, a line for each set of kept tokens.

    Args:
        positions: kept, position, loss_nats.
        window: size of the cache, drawn as a line.
    """
    figure = canvas(width=7.4, height=3.4)
    axes = panel(figure, xlabel="position", ylabel="loss, nats")
    last = int(positions["position"].to_numpy().max()) + 1 if len(positions) else 1
    step = max(1, last // _MOST_BLOCKS)
    names = list(dict.fromkeys(positions["kept"].tolist()))
    for place, name in enumerate(names):
        part = positions.loc[positions["kept"] == name]
        block = part["position"].to_numpy() // step
        mean = part["loss_nats"].groupby(block).mean()
        label = _NAMES.get(name, f"first {name}")
        style, colour = ("--", INK) if name == "full" else ("-", COLOURS[(place - 1) % len(COLOURS)])
        axes.plot((mean.index + 0.5) * step, mean, color=colour, linestyle=style, label=label)
    axes.axvline(window, color=QUIET, linewidth=0.8)
    legend(axes, columns=4)
    return finished(figure)


def _title(run: Run) -> str:
    """Head the page with the number of first tokens to keep, and what that closes."""
    table = run.optional("summary", columns=["recommended", "window"])
    if table is None or table.empty:
        return "A cache that evicts"
    row = table.to_dict("records")[0]
    n = int(row["recommended"])
    many = {0: "no first token", 1: "the first token"}.get(n, f"the first {n} tokens")
    title = f"A cache of {row['window']} tokens: keep {many}"
    closed, cost = (float(row.get(name, np.nan)) for name in ("closed_share", "cost_nats"))
    if n == 0 and np.isfinite(cost):
        low, high = (float(row.get(f"cost_{end}", np.nan)) for end in ("low", "high"))
        if not (low > 0 or high < 0):
            return f"{title}; evicting has no cost that can be told from 0"
        return f"{title}; evicting {costs(cost, row.get('cost_low'), row.get('cost_high'))}"
    if n == 0 or not np.isfinite(closed):
        return title
    bounds = interval(row.get("closed_low"), row.get("closed_high"), shown=percent)
    return f"{title}, which closes {percent(closed)} {bounds} of the gap to a full cache".replace("  ", " ")


def _judged_rows(run: Run) -> pd.DataFrame:
    """The losses on the half of the text that judges."""
    losses = run.need("losses", columns=_COLUMNS)
    return losses.loc[losses["part"] == "judge"]


def _headline(run: Run) -> list[str]:
    """The decision, and what keeping the sink tokens would give."""
    table = run.need("summary", columns=["sentence", "positions", "sink_mask_tokens", "sink_mask_loss_nats"])
    if table.empty:
        return []
    row = table.to_dict("records")[0]
    sentences = [visible(row["sentence"], limit=900)]
    if not np.isnan(float(row["sink_mask_loss_nats"])):
        sentences.append(
            f"Keeping the sink tokens instead ({row['sink_mask_tokens']:.3g} a sequence) gives "
            f"{row['sink_mask_loss_nats']:.3g} nats."
        )
    stay = row["positions"] == "stay"
    sentences.append(
        "Cached tokens keep the positions that they have in the text."
        if stay
        else "A token's position is its place in the cache, as in StreamingLLM (arXiv 2309.17453)."
    )
    return sentences


def _kept_curve(run: Run) -> tuple[str, Figure]:
    """Draw the loss by the number of first tokens kept."""
    see = (
        "Loss at the positions where the cache has evicted something, on the half of the text that was not used "
        "to choose. All caches have the same size, so that keeping more first tokens leaves room for fewer of the "
        "newest. Bars: 95% intervals of the change from a full cache, over sequences."
    )
    return see, loss_by_kept(_judged_rows(run))


def _position_curve(run: Run) -> tuple[str, Figure]:
    """Draw the loss by position."""
    see = (
        "Loss by position. The vertical line is the size of the cache; before it nothing is evicted and all lines "
        "coincide."
    )
    positions = run.need("positions", columns=["kept", "position", "loss_nats"])
    return see, loss_by_position(positions, window=int(run.config.get("window", 0)))


def _loss_table(run: Run) -> tuple[str, PageTable]:
    """The table of held-out losses beyond the window."""
    every = _judged_rows(run)
    judged, random = every.loc[every["kept"] != "random"], every.loc[every["kept"] == "random", "loss_nats"]
    see = "Held-out loss beyond the window, compared with a full cache at the same positions."
    if len(random):
        see += (
            f" With as many random tokens ({plural(len(random), 'draw')}) it is {number(random.min())} to "
            f"{number(random.max())}."
        )
    if not {"change_low", "change_high", "closed_low", "closed_high"} <= set(judged.columns):
        return see, shown_table(judged, {"kept": "kept", "loss_nats": "loss, nats"})
    shown = judged.assign(
        cost_interval=intervals(judged, "change_low", "change_high"),
        closed=["" if np.isnan(share) else percent(share) for share in judged["closed_share"].to_numpy(float)],
        tokens=["all" if np.isnan(count) else number(count) for count in judged["tokens"].to_numpy(float)],
        kept=[_NAMES.get(name, f"first {name}") for name in judged["kept"]],
        closed_interval=intervals(judged, "closed_low", "closed_high", shown=percent),
    )
    heads = {
        "kept": "kept",
        "tokens": "tokens per sequence",
        "loss_nats": "loss, nats",
        "perplexity": "perplexity",
        "change_nats": "above a full cache, nats",
        "cost_interval": "95%",
        "closed": "gap closed",
        "closed_interval": "95% of it",
    }
    return see, shown_table(shown, heads)


STREAMING = Page(
    title=_title,
    headline=_headline,
    figures=(
        Drawn(key="kept", title="How many first tokens?", make=_kept_curve, data=_judged_rows),
        Drawn(key="positions", title="Where the loss rises", make=_position_curve, data=whole("positions")),
    ),
    tables=(Listed(key="loss-table", title="Losses", make=_loss_table),),
)
