"""Mask isolation: make a token attend only to itself, so that its output varies as much as the first token's.

In arXiv 2605.06611 this is an additive mask whose row p sees only column p; later tokens see everything.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from .constructors import At, Edit, edit


def isolate(
    positions: Sequence[int], *, layers: Sequence[int] | None = None, label: str = "isolation"
) -> Edit:
    """Make an edit that isolates ``positions`` in ``layers`` (None: all): each of them sees no token before it.

    The edit changes the scores after the model's own mask, so sliding windows and padding keep their effect. A learned
    sink logit (gpt-oss) keeps its share. Positions are 1 or later: position 0 is always isolated.

    Raises:
        InputError: no position is given, or one below 1.
    """
    chosen = sorted({int(position) for position in positions})
    if not chosen:
        raise InputError("no position was given to isolate; need at least one, from 1 on")
    if chosen[0] < 1:
        raise InputError(
            f"position {chosen[0]} cannot be isolated; need positions from 1 on: the first token attends only to itself"
        )

    def change(scores: Tensor, at: At) -> Tensor:
        earlier = (
            torch.arange(scores.shape[-1], device=scores.device)
            < at.positions.to(scores.device)[:, None]
        )
        return scores.masked_fill(earlier, torch.finfo(scores.dtype).min)

    return replace(edit("scores", change, positions=chosen, layers=layers, label=label), hides=True)
