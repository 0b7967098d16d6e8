"""What a survey would take, before it is begun: a few sequences of each variant's first model, timed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd

from ..activations.record import stream
from ..data.tokens import TokenBatch
from ..engine.cost import held_bytes, now, seconds_of
from ..models.lens import LensModel
from .measured_models import Draws, Subject
from .state_contraction import passes
from .token_preference import Votes, last_logits, size_of_forward

_FLOPS = 2e11
"""Largest number of sequences that are timed."""
Step = Callable[[TokenBatch], None]


def preference_step(lens: LensModel, draws: Draws) -> Step:
    """What ``preference`` does with some sequences."""
    votes = Votes.of(lens, seed=draws.seed)
    return lambda part: votes.add(last_logits(lens, part))


def contraction_step(lens: LensModel, draws: Draws) -> Step:
    """What ``contraction`` does with some sequences."""

    def step(part: TokenBatch) -> None:
        stream(lens, part, passes(lens, draws)[2])

    return step


def calibration_step(lens: LensModel, draws: Draws) -> Step:
    """Some five times what ``contraction`` does: a pass of the bridge for each calibration, and one to set the norm."""
    step = contraction_step(lens, draws)

    def steps(part: TokenBatch) -> None:
        for _ in range(5):
            step(part)

    return steps


STEPS: Mapping[str, Callable[[LensModel, Draws], Step]] = {
    "preference": preference_step,
    "contraction": contraction_step,
    "calibration": calibration_step,
}
"""Kind of survey -> what it does with some sequences."""


def estimate(
    kind: str,
    found: Sequence[Subject],
    *,
    draws: Draws,
    device: str | None = None,
    dtype: str | None = None,
) -> pd.DataFrame:
    """One row a variant: variant, models, parameters, tokens and seconds of all its models, memory (bytes, now).

    Memory is that of this process after a forward; what is summed is among it, and no number of sequences changes it.

    Raises:
        SinkLensError: what measuring the first model of a variant would raise.
    """
    rows = []
    for variant in dict.fromkeys(one.variant for one in found):
        of_variant = [one for one in found if one.variant == variant]
        begun = now("cpu")
        lens = of_variant[0].open(device=device, dtype=dtype)
        opened = now(lens.device) - begun
        draws.check(lens)
        n_parameters = lens.plain.num_parameters()
        affordable = max(1, int(_FLOPS / (2 * n_parameters * draws.length)))
        size = min(size_of_forward(lens, length=draws.length), affordable, draws.sequences)
        part = next(iter(draws.chunk(lens, 0).batches(size)))
        step = STEPS[kind](lens, draws)
        seconds = seconds_of(partial(step, part), device=lens.device, warm_up=1)
        each = opened + seconds / part.n_sequences * draws.sequences
        rows.append(
            {
                "variant": variant,
                "models": len(of_variant),
                "parameters": n_parameters,
                "tokens": len(of_variant) * draws.sequences * draws.length,
                "seconds": len(of_variant) * each,
                "memory": held_bytes(),
            }
        )
    return pd.DataFrame(rows)
