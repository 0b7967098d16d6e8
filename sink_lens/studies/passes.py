"""Count the passes that a study makes of its models, without torch."""

from collections.abc import Iterator
from dataclasses import replace

from ..chain.config import ReadConfig
from ..data.described import check_sequences_fit
from ..errors import InputError
from ..estimate import Cost, PassCount, PassCounts, Sizes, estimate_cost, forward_activation_bytes
from .config import CardConfig, QuantiseConfig, is_run_folder

_LAYERS_OF_STEPS = 2
"""Layers of growth steps that are read one by one; a model may have more."""


def count_study_passes(config: CardConfig | QuantiseConfig, sizes: Sizes) -> PassCounts:
    """Count the forward passes that a study makes over its sequences, at most."""
    if isinstance(config, QuantiseConfig):
        # sinks, clean, weights; on three inputs all and each set; on half channels and controls
        forwards = 3 + 3 * (2 + 2 * len(config.channels)) + 0.5 + config.controls / 2
        return passes_over_sequences(config, sizes, forwards=forwards)
    # each of two: read; one: read, BOS, two edits, and one more if its sink is not at 0
    forwards = 2 * (1 + _LAYERS_OF_STEPS) if config.is_comparison else 4 + _LAYERS_OF_STEPS
    fewest = {"fewest passes": "3 without outlier dimensions"}
    return replace(
        passes_over_sequences(config, sizes, forwards=forwards),
        bound="about",
        facts={} if config.is_comparison else fewest,
        others=config.others,
    )


def cost_of_cards(config: CardConfig) -> Iterator[Cost]:
    if not config.makes_table():
        yield estimate_cost(config, count_study_passes)
        return
    models = [name for name in (config.model, *config.others) if not is_run_folder(name)]
    if not models:
        raise InputError(
            "every row is that of a run, so nothing would be computed; need a model to measure"
        )
    for name in models:
        yield estimate_cost(replace(config, model=name, others=()), count_study_passes)


def passes_over_sequences(config: ReadConfig, sizes: Sizes, *, forwards: float) -> PassCounts:
    check_sequences_fit(
        config, n_context=sizes.header.n_context, has_tokenizer=sizes.header.has_tokenizer
    )
    sequences = len(config.prompts) or config.sequences
    tokens = sequences * config.length
    return PassCounts(
        parts=(PassCount(forwards=forwards, tokens=tokens),),
        sequences=sequences,
        positions=config.length,
        bytes=forward_activation_bytes(sizes.header, tokens=tokens),
        bound="at most",
    )
