"""Variance amplification at the target position: the attention that comes there, by centre and factor."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..edits.amplification import Centre, CentringMeans, amplify, usable_centres
from ..edits.constructors import Edit
from ..schema import column_names
from ..stats import Interval, studentised_interval
from ..text import as_ranges
from .setting import Run, Setting


def amplification_curve(
    setting: Setting,
    *,
    means: CentringMeans,
    factors: Sequence[float],
    progress: bool = False,
) -> pd.DataFrame:
    """Amplify the variance at the target position and measure the attention to it: a row per (centre, factor).

    The centre ``none`` is the norm-only control. The table is empty if no layer with attention comes before the growth.
    """
    layers, reads = setting.layers_until_growth, setting.layers_right_after_growth
    target, rng = setting.target_position, np.random.default_rng(setting.config.seed)
    centres = usable_centres(setting.lens) if layers else ()
    cells = list(itertools.product(centres, factors))
    runs = []
    for centre, factor in cells:
        edits = []
        if factor != 1:
            edits = [amplification_edit(setting, centre=centre, factor=factor, means=means)]
        runs.append(Run(edits=edits, layers=reads))
    found = setting.run_each(runs, quiet=False, label="amplification" if progress else None)
    before = setting.baseline.mass_at(target, layers=reads)
    baseline, rows = float(before.mean()), []
    for (centre, factor), run in zip(cells, found, strict=True):
        after = run.mass_at(target, layers=reads)
        change = Interval(estimate=0.0, low=0.0, high=0.0, n=len(before))
        if factor != 1:
            change = studentised_interval((after - before).numpy(), generator=rng)
        mass = float(after.mean())
        rows.append(
            {
                "centre": centre,
                "factor": factor,
                "layers": as_ranges(layers),
                "target_position": target,
                "read_layers": as_ranges(reads),
                "baseline_mass": baseline,
                "n": len(before),
                "mass": mass,
                "times": mass / baseline if baseline else math.nan,
                "change": change.estimate,
                "change_low": change.low,
                "change_high": change.high,
            }
        )
    return pd.DataFrame(rows, columns=column_names("trace", "amplification"))


def amplification_edit(
    setting: Setting, *, centre: Centre, factor: float, means: CentringMeans
) -> Edit:
    return amplify(
        factor,
        centre=centre,
        means=means,
        positions=[setting.target_position],
        layers=setting.layers_until_growth,
        site=setting.lens.family.aggregated_site,
    )


def best_factor(curve: pd.DataFrame, *, centre: Centre) -> float:
    return float(curve.query("centre == @centre").nlargest(1, "mass").iloc[0]["factor"])


def strongest_amplification_edit(
    setting: Setting, *, means: CentringMeans, curve: pd.DataFrame
) -> Edit | None:
    """Make the amplification that gives the target most attention; None if no factor adds any."""
    if not len(curve):
        return None
    top = curve.query("centre != 'none'").nlargest(1, "mass").iloc[0]
    if top["factor"] == 1:
        return None
    return amplification_edit(
        setting, centre=top["centre"], factor=float(top["factor"]), means=means
    )
