"""The causal half of a trace: its cuts, the curve of the amplification, the mediation matrix, position or token."""

import functools
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import pandas as pd
from torch import Tensor

from ..data.tokens import TokenBatch
from ..edits.amplification import CentringMeans, amplification, centring_means
from ..edits.constructors import Edit
from ..models.lens import LensModel
from .bench import Bench, bench, cannot_cut
from .config import TraceConfig
from .cuts import CURVE_COLUMNS, EFFECT_COLUMNS, amplification_curve, amplified_layers, effect_table
from .locate import Finding
from .mediation import COLUMNS as MEDIATION_COLUMNS
from .mediation import mediation_table
from .placement import COLUMNS as PLACEMENT_COLUMNS
from .placement import placement_table

TABLES = {
    "amplification": CURVE_COLUMNS,
    "effects": EFFECT_COLUMNS,
    "mediation": MEDIATION_COLUMNS,
    "placement": PLACEMENT_COLUMNS,
}
"""Table of a run -> its columns. Where nothing can be cut, they are empty."""


@runtime_checkable
class Once(Protocol):
    """Makes a table unless an interrupted run has left it."""

    def __call__(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame: ...  # noqa: D102


def cause_tables(
    lens: LensModel,
    batch: TokenBatch,
    *,
    finding: Finding,
    supers: Mapping[int, Tensor],
    config: TraceConfig,
    once: Once,
    keep_means: Callable[[CentringMeans], object],
    progress: bool = False,
) -> None:
    """Make the tables of ``TABLES``, each through ``once``.

    Args:
        lens: the model.
        batch: the sequences of the trace, of which the first few are used.
        finding: where the sink is.
        supers: layer -> mask of its super neurons.
        config: the question.
        once: makes a table, unless it is there.
        keep_means: called with the centring means where they are computed.
        progress: show bars.
    """
    if cannot_cut(lens, batch) is not None:
        for name, columns in TABLES.items():
            once(name, lambda columns=columns: pd.DataFrame(columns=list(columns)))
        return

    @functools.cache
    def place() -> Bench:
        return bench(lens, batch, finding=finding, config=config, position=config.position)

    @functools.cache
    def means() -> CentringMeans:
        found = centring_means(lens, seed=config.seed, progress=progress)
        keep_means(found)
        return found

    curve = once("amplification", lambda: amplification_curve(place(), means=means(), progress=progress))

    def strongest() -> Edit | None:
        """The amplification that makes the strongest sink, of both centres; None where no factor makes any."""
        top = curve.query("centre != 'none'").nlargest(1, "mass").iloc[0]
        if top["factor"] == 1:
            return None
        return amplification(
            float(top["factor"]),
            positions=[place().new],
            layers=amplified_layers(place()),
            centre=top["centre"],
            means=means(),
        )

    once("effects", lambda: effect_table(place(), supers=supers, means=means(), curve=curve, progress=progress))
    once("mediation", lambda: mediation_table(place(), supers=supers, amplified=strongest(), progress=progress))
    once("placement", lambda: placement_table(place(), progress=progress))
