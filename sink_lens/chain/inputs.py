"""The other BOS condition of a trace's sequences, and its run's record."""

import logging

from ..data.tokens import TokenBatch
from ..data.tokens import bos_id as bos_id_of
from ..errors import InputError
from ..models.inputs import provenance_of, tokens_of
from ..models.lens import LensModel
from .config import TraceConfig

log = logging.getLogger(__name__)


def other_condition(lens: LensModel, batch: TokenBatch, *, config: TraceConfig) -> TokenBatch | None:
    """The same sequences with BOS where they have none, without it where they have it; None where there is no BOS."""
    if lens.tokenizer is None or bos_id_of(lens.tokenizer) is None:
        return None
    try:
        return tokens_of(lens, config=config, bos="without" if batch.bos else "with")
    except InputError as error:
        log.warning("the other BOS condition is left out: %s", error)
        return None


def provenance(lens: LensModel, batch: TokenBatch, *, config: TraceConfig, kernel: str) -> dict[str, object]:
    """What a run was made on, for its ``run.json``."""
    thresholds = ("threshold", "min_sink_rate", "growth_factor", "dominance_threshold", "energy_frac", "max_outliers")
    return provenance_of(lens, batch, kernel=kernel) | {
        "seeds": {
            "tokens": batch.seed,
            "bootstrap": config.seed,
            "controls": config.seed,
            "random_init": config.seed,
            "centring": config.seed,
        },
        "thresholds": {name: getattr(config, name) for name in (*thresholds, "super_share")},
    }
