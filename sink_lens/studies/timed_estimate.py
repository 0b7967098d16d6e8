"""Estimate what a study costs from one timed pass of the model: on a GPU, and where the headers do not say it all."""

from ..activations.forward import check_tokens
from ..engine.cost import BACKWARD, peak_bytes, seconds_of
from ..engine.forward import run_with
from ..models.inputs import model_of, tokens_of
from ..models.load import load
from ..patching.config import PatchConfig
from ..patching.run_pair import prepare_runs, run_for_metric
from .card_pair import second_of
from .config import CardConfig
from .estimate import Estimable, StudyCost, most_passes

_TIMED = 8
"""Most sequences of the timed pass."""
_COMPARED = 30
"""Forwards that compare a plan of patches with the bridge, where several plans are tried."""


def timed_cost(config: Estimable | PatchConfig) -> StudyCost:
    """The cost of a study or of ``patch``, by a timed pass."""
    return cost_of_patches(config) if isinstance(config, PatchConfig) else cost_of(config)


def cost_of(config: Estimable) -> StudyCost:
    """The cost of a study; loads the model and times one pass over a few sequences.

    Raises:
        ModelError, InputError: what the study would refuse before it measures.
    """
    lens = model_of(config)
    batch = tokens_of(lens, config=config, bos=config.bos)
    check_tokens(lens, batch)
    few = batch[:_TIMED]
    other = None  # held beside the first, for the peak of memory
    if isinstance(config, CardConfig) and (config.others or config.by == "dtype"):
        other = second_of(lens, config, None)
    seconds = seconds_of(lambda: run_with(other or lens, few, layers=[0], quiet=True), device=lens.device, warm_up=1)
    passes = most_passes(config)
    return StudyCost(
        passes=passes,
        tokens=round(passes * batch.tokens.numel()),
        seconds=passes * seconds * batch.n_sequences / few.n_sequences,
        bytes_peak=peak_bytes(lens.device),
    )


def cost_of_patches(config: PatchConfig) -> StudyCost:
    """The cost of ``patch``; runs both sequences, so that cells with equal values are not counted.

    Several patches share a forward and begin at their own layer, so that the time is too much for
    many patches.

    Raises:
        ModelError, SiteError, InputError: what ``patch`` would refuse before it measures.
    """
    lens = load(config.model, device=config.device, dtype=config.dtype)
    runs, grid, _ = prepare_runs(lens, None, None, metric=None, config=config)
    patches = sum(runs.changes(cell) for cell in grid)
    passes = 4 + _COMPARED  # the site and the metric, of both runs
    if config.approximate or config.screen:
        passes += BACKWARD * config.steps
        patches = min(patches, config.check if config.approximate else config.screen)
    passes += patches
    seconds = seconds_of(lambda: run_for_metric(lens, runs.run, metric=runs.metric), device=lens.device, warm_up=1)
    return StudyCost(
        passes=passes,
        tokens=passes * runs.run.tokens.numel(),
        seconds=passes * seconds,
        bytes_peak=peak_bytes(lens.device),
    )
