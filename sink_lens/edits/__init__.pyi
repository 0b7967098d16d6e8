"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sink_lens.data.tokens import Prompts
from sink_lens.edits.constructors import Change
from sink_lens.models.load import ModelLike

from ..models.sites import Site as Site
from ..schema import MEANS as MEANS
from . import metrics as metrics
from .amplification import CentringMeans as CentringMeans
from .amplification import amplify as amplify
from .amplification import centring_means as centring_means
from .constructors import At as At
from .constructors import Edit as Edit
from .constructors import add as _add
from .constructors import clamp as _clamp
from .constructors import edit as _edit
from .constructors import freeze as _freeze
from .constructors import resample as _resample
from .constructors import scalar as scalar
from .constructors import scale as _scale
from .constructors import set_value as _set_to
from .constructors import zero as _zero
from .effects import effect as effect
from .eviction import window as window
from .hooks import from_hook as from_hook
from .hooks import fwd_hooks as fwd_hooks
from .isolation import isolate as isolate
from .mean_ablation import mean_aligned as _mean_aligned
from .mean_ablation import mean_all as _mean_all
from .mean_ablation import mean_ordinary as _mean_ordinary
from .normalisation import head_rms_norm as normalise
from .normalisation import variance_calibration as calibrate
from .outcome import Outcome as Outcome
from .part import Part as Part
from .quantisation import quantisation as quantise
from .quantisation import quantised_weights as quantised_weights

def add(
    site: str,
    vector: Tensor | float,
    *,
    factor: float = 1.0,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def clamp(
    site: str,
    *,
    low: float | None = None,
    high: float | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def edit(
    site: str,
    change: Change,
    *,
    reads: str | None = None,
    whole_batch: bool = False,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def freeze(
    site: str,
    values: Mapping[int, Tensor],
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def resample(
    site: str,
    values: Mapping[int, Tensor],
    *,
    generator: torch.Generator,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def scale(
    site: str,
    factor: float,
    *,
    layers: Sequence[int] | Literal["each"] | None = None,
    positions: Sequence[int] | Literal["each"] | None = None,
    heads: Sequence[int] | Literal["each"] | None = None,
    units: Sequence[int] | Literal["each"] | None = None,
    keys: Sequence[int] | Literal["each"] | None = None,
    label: str = "",
) -> Edit: ...
def set_to(
    site: str,
    value: float,
    *,
    layers: Sequence[int] | Literal["each"] | None = None,
    positions: Sequence[int] | Literal["each"] | None = None,
    heads: Sequence[int] | Literal["each"] | None = None,
    units: Sequence[int] | Literal["each"] | None = None,
    keys: Sequence[int] | Literal["each"] | None = None,
    label: str = "",
) -> Edit: ...
def zero(
    site: str,
    *,
    layers: Sequence[int] | Literal["each"] | None = None,
    positions: Sequence[int] | Literal["each"] | None = None,
    heads: Sequence[int] | Literal["each"] | None = None,
    units: Sequence[int] | Literal["each"] | None = None,
    keys: Sequence[int] | Literal["each"] | None = None,
    label: str = "",
) -> Edit: ...
def mean_aligned(
    model: ModelLike,
    tokens: Prompts,
    site: str,
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def mean_all(
    model: ModelLike,
    tokens: Prompts,
    site: str,
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
def mean_ordinary(
    model: ModelLike,
    tokens: Prompts,
    site: str,
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    label: str = "",
) -> Edit: ...
