"""Effects of edits: compare the edited run with the baseline, by layer, at the target and at the sink position."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from torch import Tensor

from ..edits.outcome import Outcome
from ..errors import InputError
from ..schema import GAINED_FRAC, LOST_FRAC
from ..stats import Interval, paired_difference, studentised_interval

Change = Literal["removed", "relocated", "shared", "unchanged"]


def effect(baseline: Outcome, edited: Outcome, *, generator: np.random.Generator) -> pd.DataFrame:
    """Compare every number that both runs have: baseline, edited, and the paired difference with its 95% interval.

    The table has one row per (quantity, layer, position). The quantities are ``mass`` (mean attention to the position
    over heads), ``norm`` (norm of the residual stream there) and ``loss_nats`` (without layer and position). The
    interval is over sequences.

    Raises:
        InputError: the runs read different positions or layers, or have different numbers of sequences.
    """
    there, here = ((run.positions, run.layers, run.mass.shape[1]) for run in (baseline, edited))
    if there != here:
        raise InputError(
            f"the baseline read positions, layers and sequences {there} and the edited run {here}; need the same: "
            "give both runs the same tokens, positions and layers"
        )
    rows = []

    def add(
        quantity: str, layer: int | None, position: int | None, before: Tensor, after: Tensor
    ) -> None:
        found = paired_difference(after.numpy(), before.numpy(), generator=generator)
        numbers = (
            float(before.nanmean()),
            float(after.nanmean()),
            found.estimate,
            found.low,
            found.high,
            found.n,
        )
        rows.append((quantity, layer, position, *numbers))

    for index, layer in enumerate(baseline.layers):
        for index_of, position in enumerate(baseline.positions):
            add(
                "mass",
                layer,
                position,
                *(run.mass[index, :, :, index_of].nanmean(1) for run in (baseline, edited)),
            )
            add(
                "norm",
                layer,
                position,
                *(run.state[index, :, index_of].norm(dim=-1) for run in (baseline, edited)),
            )
    if baseline.loss is not None and edited.loss is not None:
        add("loss_nats", None, None, baseline.loss, edited.loss)
    columns = [
        "quantity",
        "layer",
        "position",
        "baseline",
        "edited",
        "effect",
        "ci_low",
        "ci_high",
        "n",
    ]
    return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64", "position": "Int64"})


def gained_share(
    baseline: Outcome,
    edited: Outcome,
    *,
    target_position: int,
    sink_position: int,
    layers: Sequence[int],
    generator: np.random.Generator,
) -> Interval:
    """Compute the attention that ``target_position`` gained, relative to the baseline's attention to ``sink_position``.

    Means are over ``layers`` and sequences.
    """
    gained = edited.mass_at(target_position, layers=layers) - baseline.mass_at(
        target_position, layers=layers
    )
    had = baseline.mass_at(sink_position, layers=layers)
    return studentised_interval(
        gained.numpy(), over=had.numpy(), generator=generator, n_resamples=1000
    )


def removed_share(
    baseline: Outcome,
    edited: Outcome,
    *,
    sink_position: int,
    layers: Sequence[int],
    generator: np.random.Generator,
) -> Interval:
    """Compute the share of the mean attention to ``sink_position`` in ``layers`` that is lost in the edited run."""
    before, after = (run.mass_at(sink_position, layers=layers) for run in (baseline, edited))
    return fraction_lost(before, after, generator=generator)


def fraction_lost(before: Tensor, after: Tensor, *, generator: np.random.Generator) -> Interval:
    """Compute the mean of ``before - after`` over that of ``before``, with its interval over sequences."""
    return studentised_interval(
        (before - after).numpy(), over=before.numpy(), generator=generator, n_resamples=1000
    )


def classify_change(
    baseline: Outcome,
    edited: Outcome,
    *,
    target_position: int,
    sink_position: int,
    layers: Sequence[int],
) -> Change:
    """Classify what happened to the sink: removed, relocated, shared or unchanged.

    The sink position "lost" the sink if it lost at least half of its mean attention in ``layers``. The target position
    "gained" it if it gained at least a quarter of the sink position's in the baseline. Removed: lost and not gained.
    Relocated: lost and gained. Shared: gained and not lost. Unchanged: neither.
    """
    had = float(baseline.mass_at(sink_position, layers=layers).nanmean())
    lost = had - float(edited.mass_at(sink_position, layers=layers).nanmean())
    after, before = (run.mass_at(target_position, layers=layers) for run in (edited, baseline))
    came = float((after - before).nanmean()) >= GAINED_FRAC * had
    if lost >= LOST_FRAC * had:
        return "relocated" if came else "removed"
    return "shared" if came else "unchanged"
