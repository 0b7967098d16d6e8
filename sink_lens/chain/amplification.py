"""Variance amplification at the target position: the attention that comes there, by centre and factor."""

import math
from collections.abc import Sequence

import pandas as pd

from ..edits.amplification import CENTRES, FACTORS, Centre, CentringMeans, amplify
from ..edits.constructors import Edit
from ..text import span
from .setting import Setting, bar

COLUMNS = ("centre", "factor", "layers", "target_position", "read_layers", "baseline_mass", "mass", "times", "n")


def amplification_curve(
    setting: Setting, *, means: CentringMeans, factors: Sequence[float] = FACTORS, progress: bool = False
) -> pd.DataFrame:
    """Attention to the target position in the five layers after the first growth step, by centre and factor.

    ``times`` is the mass over that without an edit. The centre ``none`` is the norm-only control. Monotone or not,
    the curve is what it is.
    """
    layers, reads, position = setting.early_layers, setting.next_layers, setting.target_position
    before = float(setting.baseline.mass_at(position, layers=reads).mean())
    rows = []
    cells: list[tuple[Centre, float]] = [(centre, factor) for centre in CENTRES for factor in factors]
    for centre, factor in bar(cells, label="amplification", progress=progress):
        mass = before
        if factor != 1:
            one = amplify(factor, positions=[position], layers=layers, centre=centre, means=means)
            mass = float(setting.run([one], layers=reads).mass_at(position, layers=reads).mean())
        times = mass / before if before else math.nan
        rows.append(
            (centre, factor, span(layers), position, span(reads), before, mass, times, setting.tokens.n_sequences)
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def best_factor(curve: pd.DataFrame, *, centre: Centre) -> float:
    """The factor of a centre at which the target position gets the most attention."""
    return float(curve.query("centre == @centre").nlargest(1, "mass").iloc[0]["factor"])


def strongest(setting: Setting, *, means: CentringMeans, curve: pd.DataFrame) -> Edit | None:
    """The amplification that makes the strongest sink, of both centres; None where no factor makes any."""
    top = curve.query("centre != 'none'").nlargest(1, "mass").iloc[0]
    if top["factor"] == 1:
        return None
    at = {"positions": [setting.target_position], "layers": setting.early_layers}
    return amplify(float(top["factor"]), centre=top["centre"], means=means, **at)
