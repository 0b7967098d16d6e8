"""Variance amplification at the target position: the attention that comes there, by centre and factor."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..edits.amplification import FACTORS, Centre, CentringMeans, amplify, usable_centres
from ..edits.constructors import Edit
from ..edits.outcome import Outcome
from ..schema import column_names
from ..stats import Interval, studentised_interval
from ..text import as_ranges
from .setting import Run, Setting


def amplification_curve(
    setting: Setting,
    *,
    means: CentringMeans,
    factors: Sequence[float] = FACTORS,
    progress: bool = False,
) -> pd.DataFrame:
    """Amplify the variance at the target position by each of ``factors`` and measure the attention to that position.

    The table has a row per (centre, factor): values are moved away from the centre, a mean out of ``means``; the centre
    ``none`` is the norm-only control. Attention is read in the five layers after the first growth step. ``change`` is
    the mass that the edit adds, with its interval over sequences; ``times`` is the ratio to the mass without the edit,
    which may be near 0. The table is empty if no layer with attention comes before the growth.
    """
    layers, reads = setting.layers_until_growth, setting.layers_right_after_growth
    columns, rng = (
        column_names("trace", "amplification"),
        np.random.default_rng(setting.config.seed),
    )
    if not layers:
        return pd.DataFrame(columns=columns)
    cells: list[tuple[Centre, float]] = [
        (one, factor) for one in usable_centres(setting.lens) for factor in factors
    ]
    edits = amplification_edits(setting, cells, layers=layers, means=means)
    runs = [Run(edits=some, layers=reads) for some in edits]
    found = setting.run_each(runs, quiet=False, label="amplification" if progress else None)
    before = setting.baseline.mass_at(setting.target_position, layers=reads)
    always = {
        "layers": as_ranges(layers),
        "target_position": setting.target_position,
        "read_layers": as_ranges(reads),
    }
    always |= {"baseline_mass": float(before.mean()), "n": len(before)}
    rows = [
        {"centre": centre, "factor": factor}
        | always
        | compute_mass_added(setting, run, factor=factor, reads=reads, generator=rng)
        for (centre, factor), run in zip(cells, found, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


def amplification_edits(
    setting: Setting,
    cells: Sequence[tuple[Centre, float]],
    *,
    layers: Sequence[int],
    means: CentringMeans | None,
) -> list[list[Edit]]:
    """Make the edits that amplify variance in ``layers``: a list per (centre, factor) of ``cells``; [] for factor 1.

    Values at the target position move away from the centre's mean in ``means``, which the centre ``none`` does not
    need.
    """
    return [
        [
            amplify(
                factor,
                centre=centre,
                means=means,
                positions=[setting.target_position],
                layers=layers,
                site=setting.lens.family.aggregated_site,
            )
        ]
        if factor != 1
        else []
        for centre, factor in cells
    ]


def compute_mass_added(
    setting: Setting,
    run: Outcome,
    *,
    factor: float,
    reads: Sequence[int],
    generator: np.random.Generator,
) -> dict[str, float]:
    """Compute how much attention the target position gains in the layers ``reads`` in a run amplified by ``factor``.

    Returns the mass, its ratio to the baseline mass, and the change with its interval over sequences (0 if ``factor``
    is 1).
    """
    before, after = (
        one.mass_at(setting.target_position, layers=reads) for one in (setting.baseline, run)
    )
    if factor == 1:
        after, change = before, Interval(estimate=0.0, low=0.0, high=0.0, n=len(before))
    else:
        change = studentised_interval((after - before).numpy(), generator=generator)
    mass, baseline = float(after.mean()), float(before.mean())
    ends = {"change": change.estimate, "change_low": change.low, "change_high": change.high}
    return {"mass": mass, "times": mass / baseline if baseline else math.nan} | ends


def best_factor(curve: pd.DataFrame, *, centre: Centre) -> float:
    """Return the factor that gives the target position the most attention among the rows of ``centre`` in ``curve``."""
    return float(curve.query("centre == @centre").nlargest(1, "mass").iloc[0]["factor"])


def strongest_amplification_edit(
    setting: Setting, *, means: CentringMeans, curve: pd.DataFrame
) -> Edit | None:
    """Make the amplification that gives the target most attention in ``curve``; None if no factor adds any."""
    if not len(curve):
        return None
    top = curve.query("centre != 'none'").nlargest(1, "mass").iloc[0]
    if top["factor"] == 1:
        return None
    cell = (top["centre"], float(top["factor"]))
    return amplification_edits(setting, [cell], layers=setting.layers_until_growth, means=means)[0][
        0
    ]
