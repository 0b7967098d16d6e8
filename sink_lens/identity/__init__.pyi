"""The public names, each from the module that defines it: `__init__.py` reads this file."""

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from sink_lens.models.load import ModelLike

from .config import ContractionConfig as ContractionConfig
from .config import FingerprintConfig as FingerprintConfig
from .config import PreferenceConfig as PreferenceConfig
from .contraction import Contraction as Contraction
from .contraction import contraction as contraction
from .fingerprint import Fingerprint as Fingerprint
from .fingerprint import fingerprint as _fingerprint
from .preference import Preference as Preference
from .preference import preference as preference
from .untrained_models import UntrainedConfig as UntrainedConfig
from .untrained_models import untrained as untrained

def fingerprint(
    models: Sequence[ModelLike] = (),
    *,
    config: FingerprintConfig | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    untrained: Iterable[str] = (),
    seeds: Iterable[int] | str = (0, 1),
    device: str | None = None,
    dtype: str | None = None,
    inputs: Literal["tokens", "embeddings", "released_embeddings"] = "tokens",
    sequences: int = 2000,
    length: int = 16,
    coordinates: int | None = None,
    temperature: float = 10.0,
    draws: int = 100,
    relabellings: int = 1999,
    alpha: float = 0.01,
    decides: Literal["analytical", "matrices", "pipeline", "shuffled", "relabelled"] = "relabelled",
    cache: bool = True,
    seed: int = 0,
) -> Fingerprint: ...
