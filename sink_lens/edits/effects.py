"""Effects of edits: compare the edited run with the baseline, by layer, at the target and at the sink position.

An intervention may remove a sink or move it, so attention is reported at both positions, together with the loss.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..edits.outcome import Outcome
from ..errors import InputError
from ..schema import GAINED_FRAC, LOST_FRAC
from ..stats import Interval, interval, paired_difference

Change = Literal["removed", "relocated", "shared", "unchanged"]


def effect(baseline: Outcome, edited: Outcome, *, generator: np.random.Generator) -> pd.DataFrame:
    """Compare every number that both runs have: baseline, edited, and the paired difference with its 95% interval.

    The table has one row per (quantity, layer, key). The quantities are ``mass`` (mean attention to the key over
    heads), ``norm`` (norm of the residual stream at the key) and ``loss_nats`` (without layer and key). The interval
    is over sequences.

    Raises:
        InputError: the runs read different keys or layers, or have different numbers of sequences.
    """
    _check_pair(baseline, edited)
    rows = []

    def add(quantity: str, layer: int | None, key: int | None, before: Tensor, after: Tensor) -> None:
        found = paired_difference(after.numpy(), before.numpy(), generator=generator)
        numbers = (float(before.nanmean()), float(after.nanmean()), found.estimate, found.low, found.high, found.n)
        rows.append((quantity, layer, key, *numbers))

    for index, layer in enumerate(baseline.layers):
        for place, key in enumerate(baseline.keys):
            masses = [run.mass[index, :, :, place].nanmean(1) for run in (baseline, edited)]
            add("mass", layer, key, *masses)
            norms = [run.state[index, :, place].norm(dim=-1) for run in (baseline, edited)]
            add("norm", layer, key, *norms)
    if baseline.loss is not None and edited.loss is not None:
        add("loss_nats", None, None, baseline.loss, edited.loss)
    columns = ["quantity", "layer", "key", "baseline", "edited", "effect", "ci_low", "ci_high", "n"]
    return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64", "key": "Int64"})


def layer_table(baseline: Outcome, edited: Outcome, *, new: int, old: int) -> pd.DataFrame:
    """Table of attention mass, norm and outlier value by layer, at the target and sink positions, before and after.

    Numbers are means over sequences. The outlier dimension of a layer is the one with the most energy at the sink
    position in the baseline.

    Raises:
        InputError: a position was not read. The errors of ``effect`` also apply.
    """
    _check_pair(baseline, edited)
    for position in (new, old):
        if position not in baseline.keys:
            raise InputError(f"position {position} was not read; need one of {list(baseline.keys)}: pass it as a key")
    dimensions = baseline.state_at(old).double().square().mean(1).argmax(-1)
    columns: dict[str, Tensor] = {"layer": torch.tensor(baseline.layers), "outlier_dimension": dimensions}
    for where, position in (("new", new), ("old", old)):
        for prefix, run in (("baseline_", baseline), ("", edited)):
            state = run.state_at(position)
            values = state.gather(-1, dimensions[:, None, None].expand(-1, state.shape[1], 1))[..., 0]
            columns[f"{prefix}mass_{where}"] = run.mass[..., run.keys.index(position)].nanmean(dim=(1, 2))
            columns[f"{prefix}norm_{where}"] = state.norm(dim=-1).mean(1)
            columns[f"{prefix}value_{where}"] = values.mean(1)
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


def made_share(
    baseline: Outcome,
    edited: Outcome,
    *,
    new: int,
    old: int,
    layers: Sequence[int],
    generator: np.random.Generator,
) -> Interval:
    """Attention that the target position gained, over the sink position's in the baseline; a ratio of means."""
    gained = edited.mass_at(new, layers=layers) - baseline.mass_at(new, layers=layers)
    return _ratio(gained, baseline.mass_at(old, layers=layers), generator=generator)


def removed_share(
    baseline: Outcome, edited: Outcome, *, old: int, layers: Sequence[int], generator: np.random.Generator
) -> Interval:
    """Attention that the sink position lost, over its attention in the baseline; a ratio of means."""
    return share_removed(baseline.mass_at(old, layers=layers), edited.mass_at(old, layers=layers), generator=generator)


def share_removed(before: Tensor, after: Tensor, *, generator: np.random.Generator) -> Interval:
    """What is gone of a quantity, over what there was; a ratio of means over sequences."""
    return _ratio(before - after, before, generator=generator)


def change_of(baseline: Outcome, edited: Outcome, *, new: int, old: int, layers: Sequence[int]) -> Change:
    """Classify what happened to the sink: removed, relocated, shared or unchanged.

    The sink position "lost" the sink if it lost at least half of its mass. The target position "gained" it if it gained
    at least a quarter of the sink position's baseline mass. Removed: lost and not gained. Relocated: lost and gained.
    Shared: gained and not lost. Unchanged: neither.
    """
    had = float(baseline.mass_at(old, layers=layers).nanmean())
    lost = had - float(edited.mass_at(old, layers=layers).nanmean())
    moved = (edited.mass_at(new, layers=layers) - baseline.mass_at(new, layers=layers)).nanmean()
    gone, came = lost >= LOST_FRAC * had, float(moved) >= GAINED_FRAC * had
    if gone:
        return "relocated" if came else "removed"
    return "shared" if came else "unchanged"


def _ratio(above: Tensor, below: Tensor, *, generator: np.random.Generator) -> Interval:
    def ratio(rows: np.ndarray) -> float:
        divisor = rows[:, 1].mean()
        return float(rows[:, 0].mean() / divisor) if divisor else float("nan")

    return interval(torch.stack([above, below], dim=1).numpy(), generator=generator, statistic=ratio, n_resamples=500)


def _check_pair(baseline: Outcome, edited: Outcome) -> None:
    there = (baseline.keys, baseline.layers, baseline.mass.shape[1])
    here = (edited.keys, edited.layers, edited.mass.shape[1])
    if there != here:
        raise InputError(
            f"the baseline read keys, layers and sequences {there} and the edited run {here}; need the same: "
            "give both runs the same tokens, keys and layers"
        )
