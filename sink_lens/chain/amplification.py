"""Variance amplification at the target position: the attention that comes there, by centre and factor."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..edits.amplification import FACTORS, Centre, CentringMeans, amplify, centres_of
from ..edits.constructors import Edit
from ..stats import Interval, studentised_interval
from ..text import span
from .setting import Setting

COLUMNS = (
    "centre",
    "factor",
    "layers",
    "target_position",
    "read_layers",
    "baseline_mass",
    "mass",
    "times",
    "change",
    "change_low",
    "change_high",
    "n",
)


def amplification_curve(
    setting: Setting, *, means: CentringMeans, factors: Sequence[float] = FACTORS, progress: bool = False
) -> pd.DataFrame:
    """Attention to the target position in the five layers after the first growth step, by centre and factor.

    ``change`` is the mass that the edit adds, with its interval over sequences; ``times`` is the mass over that without
    an edit, whose denominator may be near 0. The centre ``none`` is the norm-only control. There are no rows where no
    layer with attention comes before the growth.
    """
    layers, reads, position = setting.early_layers, setting.next_layers, setting.target_position
    if not layers:
        return pd.DataFrame(columns=list(COLUMNS))
    baseline, rng = setting.baseline.mass_at(position, layers=reads), np.random.default_rng(setting.seed)
    before = float(baseline.mean())
    rows = []
    cells: list[tuple[Centre, float]] = [(centre, factor) for centre in centres_of(setting.lens) for factor in factors]
    options = {"positions": [position], "layers": layers, "means": means, "site": setting.lens.family.aggregated}
    edits = [[amplify(factor, centre=centre, **options)] if factor != 1 else [] for centre, factor in cells]
    runs = setting.runs(edits, layers=reads, label="amplification" if progress else None)
    for (centre, factor), run in zip(cells, runs, strict=True):
        mass, change = before, Interval(estimate=0.0, low=0.0, high=0.0, n=len(baseline))
        if factor != 1:
            found = run.mass_at(position, layers=reads)
            mass, change = float(found.mean()), studentised_interval((found - baseline).numpy(), generator=rng)
        times = mass / before if before else math.nan
        edited = (centre, factor, span(layers), position, span(reads))
        rows.append((*edited, before, mass, times, change.estimate, change.low, change.high, len(baseline)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def best_factor(curve: pd.DataFrame, *, centre: Centre) -> float:
    """The factor of a centre at which the target position gets the most attention."""
    return float(curve.query("centre == @centre").nlargest(1, "mass").iloc[0]["factor"])


def strongest_amplification(setting: Setting, *, means: CentringMeans, curve: pd.DataFrame) -> Edit | None:
    """The amplification that makes the strongest sink, of both centres; None where no factor makes any."""
    if not len(curve):
        return None
    top = curve.query("centre != 'none'").nlargest(1, "mass").iloc[0]
    if top["factor"] == 1:
        return None
    at = {
        "positions": [setting.target_position],
        "layers": setting.early_layers,
        "site": setting.lens.family.aggregated,
    }
    return amplify(float(top["factor"]), centre=top["centre"], means=means, **at)
