"""Every model of the zoo does what its truth says, on 20 seeds; read and broken by hand, with no finder of ours."""

import by_hand
import pytest
import torch

from sink_lens.models.zoo import LINKS, ZOO, build

SEEDS = range(20)
SPREAD = SEEDS[::3]
"""Seeds of the longer checks in all but a model's first family."""
EVERY = [(name, family) for name, kind in ZOO.items() for family in kind.families]
WRITTEN = [(name, family) for name, family in EVERY if name != "untrained"]
WITH_KEY = [(name, family) for name, family in WRITTEN if ZOO[name].letter in tuple("abcdefghjn")]
BROKEN = [(name, family) for name, family in EVERY if name.startswith("broken")]

NO_BELOW = dict(zip(LINKS, (1.3, 1.3, 3.0, 0.3, 0.3, 0.2), strict=True))
"""What a quantity is under where it does not stand out."""
YES_ABOVE = dict(zip(LINKS, (1.5, 1.5, 7.0, 0.7, 0.7, 0.8), strict=True))
"""What it is over where it does. Ratios to other positions; shares; cosine; attention."""


def drawn(zoo):
    return zoo.draw(4, length=32, generator=torch.Generator().manual_seed(zoo.seed))


def seeds_of(name, family):
    return SEEDS if family == ZOO[name].families[0] else SPREAD


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_the_sink_is_where_the_truth_says_and_nowhere_else(name, family):
    for seed in SEEDS:
        zoo = build(name, seed=seed, family=family)
        tokens, truth = drawn(zoo), zoo.truth
        ran, at = by_hand.run(zoo.model, tokens), by_hand.studied(zoo, tokens)
        mass = by_hand.mass(zoo, ran, at)
        locked = list(truth.locked)
        if truth.sink == "sink logit":
            null = by_hand.null_mass(ran)
            assert (null[locked] > 0.8).all(), seed
            assert (null[[layer for layer in range(len(null)) if layer not in locked]] < 0.05).all(), seed
        elif truth.sink == "none":
            # Relative to what a row sums to: 1 for a softmax, about half the keys for a sigmoid.
            whole = ran.pattern[..., by_hand.EARLIEST :, :].sum(-1).mean((1, 3))
            assert (mass / whole < 0.2).all(), seed
            key = (ran.pattern / ran.pattern.sum(-1, keepdim=True))[..., by_hand.EARLIEST :, :].mean((1, 3))
            assert key.max() < 0.25, seed
        else:
            assert (mass[locked] > 0.8).all(), seed
            assert (mass[: min(locked)].max(-1).values < 0.5).all() if name == "slow_growth" else True, seed
            if name != "slow_growth":  # there it grows from layer to layer
                assert (mass[[layer for layer in range(len(mass)) if layer not in locked]] < 0.2).all(), seed


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_what_stands_out_is_what_the_truth_says(name, family):
    for seed in SEEDS:
        zoo = build(name, seed=seed, family=family)
        found = by_hand.present(zoo, drawn(zoo))
        for link in LINKS:
            said = zoo.truth.links[link].present
            if said == "yes":
                assert found[link] > YES_ABOVE[link], (seed, link)
            elif said == "no" and link in found:
                assert found[link] < NO_BELOW[link] or (link, name) == ("neurons_dimension", "direction"), (seed, link)


@pytest.mark.parametrize(("name", "family"), WITH_KEY)
def test_what_removes_the_sink_is_what_the_truth_says(name, family):
    for seed in seeds_of(name, family):
        zoo = build(name, seed=seed, family=family)
        _agree(zoo, by_hand.shares_removed(zoo, drawn(zoo)), "necessary_or_sufficient", over=0.3)


@pytest.mark.parametrize(("name", "family"), WITH_KEY)
def test_what_carries_the_sink_is_what_the_truth_says(name, family):
    for seed in seeds_of(name, family):
        zoo = build(name, seed=seed, family=family)
        _agree(zoo, by_hand.shares_carried(zoo, drawn(zoo)), "carries", over=0.6)


def _agree(zoo, found, question, *, over):
    for link in LINKS:
        said = getattr(zoo.truth.links[link], question)
        if said == "yes":
            assert found[link] > over, (zoo.seed, link)
        elif said == "no" and link in found:
            assert abs(found[link]) < 0.1, (zoo.seed, link)
