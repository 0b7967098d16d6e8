"""A link, and its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from ...activations.record import Reading
from ...edits.amplification import CentringMeans
from ..config import TraceConfig
from ..evidence import Evidence, Statistic
from ..readings import MeasuringPass
from ..setting import Edits, FrozenQuantity, Segment, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """It makes a sink at the target position, or removes the model's own."""

    name: str
    edits: Edits
    position: int
    """Position that is edited, at which the sink should appear or vanish."""
    reads: tuple[int, ...]
    """The layers in which the sink is read."""
    controls: tuple[Edits, ...] = ()
    """The same edits at matched random places."""
    control_of: str = ""
    """The intervention that this one is a control of."""
    is_primary: bool = True
    """It answers the question *necessary or sufficient*."""
    carries: bool = False
    """It answers the question *carries*: the quantity at the link's target is mean ablated."""


def make_mean_ablation(
    kept: FrozenQuantity, *, setting: Setting, name: str, is_primary: bool = True
) -> Intervention:
    return Intervention(
        name=name,
        edits=kept.edits,
        controls=kept.controls,
        position=setting.sink_position,
        reads=setting.sink_layers,
        is_primary=is_primary,
        carries=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The setting and the draws from which a link builds its interventions."""

    setting: Setting
    generator: torch.Generator
    """The links draw their random controls from it in their order."""
    means: CentringMeans
    """Means that amplification moves aggregated values away from."""
    curve: pd.DataFrame
    """Attention to the target by centre and factor of the amplification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Edits for mediation: the quantity that the link leads to keeps the value that it has without the sink."""

    name: str
    """As in the column ``frozen``."""
    make: Callable[[Setting, Segment, int, torch.Generator], FrozenQuantity | None]
    """From the setting, the layers that are read, the position and the controls' generator; None where there is
    nothing to freeze. At the sink position the mean over ordinary tokens stands for the baseline value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of the chain: its texts, and the functions that measure it and intervene on it."""

    name: str
    source: str
    target: str
    arrow: str
    """Both ends, as short as a line of the terminal needs."""
    sentence: str
    """Its claim, as the report shows it."""
    question: str
    """The question that its primary statistic answers."""
    statistics: Callable[[Evidence, np.random.Generator], list[Statistic]]
    """The primary one is first; the generator is for the bootstrap of their intervals."""
    floor: Callable[[TraceConfig, int, int], float]
    """Least value of the primary statistic, from the configuration, the mean length of the sequences and the sink
    position."""
    readings: Callable[[MeasuringPass], list[Reading]] = lambda _: []
    """Those that this link alone needs; the others are in ``readings.py``."""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Readings that the table ``key_split`` shows by layer -> the columns of their last axis."""
    interventions: Callable[[Trial], list[Intervention]] = lambda _: []
    """They make or break the link, with matched controls; none if the model lacks the parts to edit."""
    freeze: Freeze | None = None
    own_direction: tuple[str, str] = ("", "")
    """Interventions that answer if it is necessary, and if it carries the sink, where the sink token has a direction of
    its own in place of dimensions (``own_direction_statistics``)."""
    can_start: bool = False
    """In a model without a sink, it is asked even if no link before it is present."""
