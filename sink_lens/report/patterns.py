"""Attention patterns as a page embeds them: as many heads as fit, the strongest first, and which they are."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report.captions import drawn_tokens
from sink_lens.report.columns import at, need
from sink_lens.report.figures import by_layer_and_head
from sink_lens.report.findings import find_story, studied
from sink_lens.report.words import number, token

MOST_BYTES = 2_000_000
"""Of patterns in a page, as they stand in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The patterns of a run's heads, packed for a page."""

    data: dict[str, Any]
    """For the page's script: JSON."""
    said: str
    """Which heads are there, in a sentence."""


def embedded(run: Run, *, most_bytes: int = MOST_BYTES) -> Embedded:
    """The patterns of a run's first sequence, strongest heads first, up to a number of bytes.

    A pattern is the lower triangle of query by key, row by row, a byte each (255 is all of a query's attention);
    all of them after each other, in base64.

    Raises:
        RunError: The run has no patterns, or no sink scores to rank them by.
    """
    position = studied(find_story(run))
    stacks = [tensor for tensor in run.tensors("patterns").values() if tensor.ndim == 4]
    if not stacks:
        raise RunError("patterns.safetensors holds no array of layer, head, query and key. Run again to see it.")
    patterns = stacks[0]
    heads = at(need(run, "heads", columns=["layer", "head", "position", "sink_score"]), position)
    scores = by_layer_and_head(heads, "sink_score", position=position)
    length = patterns.shape[-1]
    past = np.tril_indices(length)
    fit = int(most_bytes * 3 / 4) // len(past[0])
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=None, kind="stable")
    ranked = [divmod(int(flat), scores.shape[1]) for flat in order]
    there = [(layer, head) for layer, head in ranked if layer < patterns.shape[0] and head < patterns.shape[1]]
    chosen = there[:fit]
    packed = b"".join(patterns[layer, head][past].astype(np.uint8).tobytes() for layer, head in chosen)
    said = f"Patterns of all {len(chosen):,} heads are in this page"
    if len(chosen) < len(there):
        weakest = number(float(scores[chosen[-1]])) if chosen else "none"
        said = (
            f"Patterns of {len(chosen):,} of {len(there):,} heads are in this page, those with the highest sink score "
            f"({weakest} and above): more would make it too large"
        )
    texts = [token(text, counted=False) for _, text in drawn_tokens(run, most=length)]
    return Embedded(
        data={
            "length": length,
            "layers": scores.shape[0],
            "heads": scores.shape[1],
            "position": position,
            "scores": [[None if np.isnan(one) else round(float(one), 3) for one in row] for row in scores],
            "chosen": [layer * scores.shape[1] + head for layer, head in chosen],
            "tokens": texts if len(texts) == length else [""] * length,
            "patterns": base64.b64encode(packed).decode(),
        },
        said=f"{said}; each is of one sequence, its first {length} positions.",
    )
