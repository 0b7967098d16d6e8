"""A trace's first sequence, for its page: tokens, studied position, sink scores, attention patterns."""

import base64
from typing import Any

import numpy as np
import pandas as pd

from ..errors import RunError
from ..records import Run
from ..stats import sort_by_magnitude
from ..text import as_text, token_text

MOST_BYTES = 2_000_000


def sink_rate_by_position(run: Run) -> dict[int, float]:
    """Return sink position -> sink rate, the mean over layers and heads, the studied position first."""
    heads = run.optional("heads", columns=["layer", "head", "sink_position", "sink_rate"])
    if heads is None:
        return {}
    numbers = heads[["sink_position", "sink_rate"]].astype(float)
    rates = pd.Series(numbers.groupby("sink_position", sort=False)["sink_rate"].mean()).dropna()
    places = zip(rates.index, rates.to_numpy(float), strict=True)
    return {int(place): float(rate) for place, rate in places}


def studied_position(run: Run) -> int:
    """Return the position that a trace studies, which is in the first rows of its table ``heads``."""
    rates = sink_rate_by_position(run)
    if not rates:
        raise RunError(
            "the sink position is not known without the table 'heads'. Run again to see it."
        )
    return next(iter(rates))


def read_patterns(run: Run) -> np.ndarray:
    """Read the patterns of a run's first sequence, as an array (layer, head, query, key) from 0 to 255."""
    kept = next((tensor for tensor in run.tensors("patterns").values() if tensor.ndim == 4), None)
    if kept is None:
        raise RunError(
            "patterns.safetensors holds no array of layer, head, query and key. Run again to see it."
        )
    return kept


def strongest_and_weakest_heads(
    run: Run, *, strongest: int, weakest: int
) -> list[tuple[int, int, float]]:
    """Return (layer, head, sink score at the studied position) of the strongest heads, then of the weakest."""
    n_layers, n_heads = read_patterns(run).shape[:2]
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score"])
    studied = heads.loc[heads["sink_position"] == studied_position(run)]
    ranked = sort_by_magnitude(studied, "sink_score")
    known = [
        (int(layer), int(head), score)
        for layer, head, score in ranked[["layer", "head", "sink_score"]].itertuples(index=False)
        if layer < n_layers and head < n_heads and np.isfinite(score)
    ]
    if not known:
        raise RunError("no head of patterns.safetensors has a sink score. Run again to see it.")
    return known[:strongest] + known[strongest:][-weakest:]


def first_token_texts(run: Run, *, most: int | None = None) -> dict[int, str]:
    """Return position -> text of the first ``most`` tokens of a run's first sequence; empty without a table."""
    table = run.optional("tokens", columns=["sequence", "position", "text"])
    if table is None:
        return {}
    table = table.dropna(subset=["position", "text"])  # a table from elsewhere may lack some
    table = table.loc[table["sequence"] == table["sequence"].min()].sort_values("position")
    table = table.head(most or len(table))
    return {
        int(place): str(text) for place, text in zip(table["position"], table["text"], strict=True)
    }


def tokens_for_page(run: Run, *, most: int = 64) -> list[tuple[int, str]]:
    """Return (position, text) of the first ``most`` tokens, texts escaped for a page."""
    return [(place, token_text(text)) for place, text in first_token_texts(run, most=most).items()]


def layer_head_grid(heads: pd.DataFrame, name: str, *, position: int) -> np.ndarray:
    """Return a column of the table ``heads`` at one sink position as an array (layer, head); nan where no row is."""
    table = heads.loc[heads["sink_position"] == position]
    layer, head = (table[one].to_numpy(float).astype(int) for one in ("layer", "head"))
    grid = np.full((layer.max(initial=0) + 1, head.max(initial=0) + 1), np.nan)
    grid[layer, head] = table[name].to_numpy(float)
    return grid


def embed_patterns(run: Run, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Encode the attention patterns of a run's strongest heads for its page, as many as fit into ``most_bytes``.

    Returns a dict: ``data`` is for the page's script, and ``said`` is a sentence that says which heads are there.

    Each pattern is of the first sequence: the lower triangle of query by key, row by row, with one byte per value (255
    is all of a query's attention). The patterns stand after each other, in base64.
    """
    position, patterns = studied_position(run), read_patterns(run)
    heads = run.need("heads", columns=["layer", "head", "sink_position", "sink_score"])
    scores = layer_head_grid(heads, "sink_score", position=position)
    length = patterns.shape[-1]
    past = np.tril_indices(length)
    fit = int(most_bytes * 3 / 4) // len(past[0])
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=None, kind="stable")
    ranked = [divmod(int(flat), scores.shape[1]) for flat in order]
    there = [
        (layer, head)
        for layer, head in ranked
        if layer < patterns.shape[0] and head < patterns.shape[1]
    ]
    chosen = there[:fit]
    packed = b"".join(
        patterns[layer, head][past].astype(np.uint8).tobytes() for layer, head in chosen
    )
    sentence = f"Patterns of all {len(chosen):,} heads are in this page"
    if len(chosen) < len(there):
        weakest = as_text(float(scores[chosen[-1]])) if chosen else "none"
        sentence = (
            f"Patterns of {len(chosen):,} of {len(there):,} heads are in this page, those with the highest sink score "
            f"({weakest} and above): more would make it too large"
        )
    texts = [token_text(text, counted=False) for _, text in tokens_for_page(run, most=length)]
    data = {
        "length": length,
        "layers": scores.shape[0],
        "heads": scores.shape[1],
        "position": position,
        "scores": [
            [None if np.isnan(one) else round(float(one), 3) for one in row] for row in scores
        ],
        "chosen": [layer * scores.shape[1] + head for layer, head in chosen],
        "tokens": texts if len(texts) == length else [""] * length,
        "patterns": base64.b64encode(packed).decode(),
    }
    said = f"{sentence}; each is of one sequence, its first {length} positions."
    return {"data": data, "said": said}
