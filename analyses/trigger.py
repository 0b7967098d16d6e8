"""The trigger task: a transformer with softmax attention needs a sink to solve it (arXiv 2603.11487).

At a trigger token the answer is the mean of the tokens' vectors before it; everywhere else it is nothing. A head that
takes the mean at the trigger must look at something elsewhere, and its row sums to 1: position 0 takes it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

FIRST, TRIGGER = 0, 1
"""Ids of the token that every sequence begins with, and of the trigger; all others are ordinary."""


def trigger_rows(
    vectors: Float[Tensor, "vocab value"],
    *,
    sequences: int,
    length: int,
    generator: torch.Generator,
) -> tuple[Int[Tensor, "batch position"], Float[Tensor, "batch position value"]]:
    """Sequences with one trigger each, and the answer at every position.

    The answer at the trigger is the mean of the vectors between the first token and the trigger; elsewhere it is 0.
    Every id of ``vectors`` from 2 on is as likely as any other.
    """
    tokens = torch.randint(2, len(vectors), (sequences, length), generator=generator)
    tokens[:, 0] = FIRST
    tokens[torch.arange(sequences), torch.randint(2, length, (sequences,), generator=generator)] = (
        TRIGGER
    )
    each = vectors[tokens]
    each[:, 0] = 0
    before = (each.cumsum(1) - each) / (torch.arange(length) - 1).clamp(min=1)[:, None]
    return tokens, before * (tokens == TRIGGER)[..., None]
