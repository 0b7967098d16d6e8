"""The finders, by hand."""

import math

import pytest
import torch

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.locate import (
    GrowthStep,
    Location,
    feeding_layers,
    find_growth_steps,
    find_location,
    find_outlier_dimensions,
    onset_layer,
)
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.readings import sampled_positions
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted
from sink_lens.studies.observed import ObservedModel
from tests.zoo import build

NAN = math.nan
RATIO = [1.0, 1.0, 3.0, 6.0, 9.0, 18.0]
"""Before layer 0: 1; layer 0 x1; layer 1 x3; layer 2 x2; layer 3 x1.5; layer 4 x2."""


@pytest.mark.parametrize(
    ("ratio", "factor", "layers"),
    [
        (RATIO, 2.0, [(1, 2), (4, 4)]),
        (RATIO, 3.0, [(1, 1)]),
        (RATIO, 1.5, [(1, 4)]),
        ([1.0, 2.0], 2.0, [(0, 0)]),  # reached by equality
        (
            [0.2, 0.5, 0.9],
            2.0,
            [],
        ),  # doubles once but ends under the others: the recovery of a small norm
        ([0.2, 0.5, 1.1], 2.0, [(0, 1)]),
        ([NAN, NAN, NAN, NAN], 2.0, []),
    ],
)
def test_consecutive_layers_of_growth_are_one_step(ratio, factor, layers):
    assert find_growth_steps(torch.tensor(ratio), factor=factor) == layers


def test_onset_is_the_first_layer_over_the_threshold():
    mass = torch.tensor([0.1, 0.3, 0.31, 0.2, 0.9])
    assert onset_layer(mass, threshold=0.3) == 2  # strictly over
    assert onset_layer(mass, threshold=0.8) == 4
    assert onset_layer(mass, threshold=0.95) is None


STATE = torch.tensor([[1.0, -8.0, 1, 1, 6.0, 1, 1, 1, 1, 1]])
"""Energies 64, 36, 1 x 8: 64 of 108 is 59%, 100 of 108 is 93%; dominance 8 / (22 / 10) = 3.6."""


def options(**changes):
    given = {"dominance_threshold": 3.0, "energy_frac": 0.8, "max_outliers": 2} | changes
    return {"thresholds": TraceConfig(**given)}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, (1, 4)),
        ({"energy_frac": 0.5}, (1,)),
        ({"dominance_threshold": 3.7}, ()),
        ({"max_outliers": 1}, ()),
    ],
    ids=str,
)
def test_outlier_dimensions_hold_the_share_of_the_energy_and_are_few(changes, found):
    assert find_outlier_dimensions(STATE, **options(**changes)) == found


def test_energy_is_a_mean_over_sequences():
    # dimension 0: (100 + 0) / 2 = 50; dimension 1: (0 + 16) / 2 = 8
    state = torch.tensor([[10.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]])
    assert find_outlier_dimensions(state, **options(energy_frac=0.5)) == (0,)


def test_a_dimension_that_is_as_large_at_other_tokens_is_no_outlier_of_this_one():
    typical = torch.ones(10) / 2
    assert find_outlier_dimensions(STATE, typical=typical, **options()) == (1, 4)
    # Without dimension 1, 36 of 44 are 82%; dominance 6 / (14 / 10) = 4.3.
    typical[1] = 4.0
    assert find_outlier_dimensions(STATE, typical=typical, **options()) == (4,)
    assert find_outlier_dimensions(STATE, typical=typical, **options(dominance_threshold=4.4)) == ()
    assert (
        find_outlier_dimensions(
            STATE, typical=STATE.abs().amax(0), **options(energy_frac=0.99, max_outliers=9)
        )
        == ()
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["common_dimension", "common_beside_direction", "held_down"])
def test_outlier_dimensions_of_the_zoo_are_the_sinks_own(name, family):
    zoo = build(name, seed=1, family=family)
    tokens = from_tensor(zoo.draw(4, length=28, generator=torch.Generator().manual_seed(1)))
    lens, config = wrap(zoo.model), TraceConfig(model=name, random_init=False)
    for location in (
        scout_and_measure(lens, tokens, config=config).location,
        ObservedModel(lens, tokens).location,
    ):
        assert location.outliers == zoo.truth.outliers
        assert location.growth_layers == zoo.truth.grows


def test_a_card_locates_a_sink_at_a_position_that_is_not_sampled_as_a_trace_does():
    lens = wrap(planted().model)
    tokens = from_tensor(
        torch.randint(3, 300, (2, 160), generator=torch.Generator().manual_seed(2))
    )
    at = next(one for one in range(20, 100) if one not in sampled_positions(160).tolist())
    tokens.tokens[:, 0], tokens.tokens[:, at] = 7, BOS_ID
    traced = scout_and_measure(lens, tokens, config=TraceConfig(random_init=False)).location
    location = ObservedModel(lens, tokens).location
    assert location.sink_positions == traced.sink_positions == (at,)
    assert location.outliers == traced.outliers
    assert [step.ratio_after for step in location.steps] == pytest.approx(
        [step.ratio_after for step in traced.steps]
    )
    assert location.steps


def found(ratio, states, forced=None):
    return find_location(
        positions=(0,),
        sink_found=True,
        ratio=torch.tensor(ratio),
        states=states,
        thresholds=TraceConfig(
            growth_factor=2.0, dominance_threshold=3.0, energy_frac=0.8, max_outliers=2
        ),
        forced=forced,
    )


def planted_states():
    """Before layer 0, after layers 0 and 1; only after layer 1 does dimension 3 stand out."""
    states = torch.ones(3, 2, 6)
    states[1, :, 2] = 1.5
    states[2, :, 3] = -50.0
    return states


def test_find_names_the_step_and_the_dimension_after_it():
    location = found([1.0, 1.2, 30.0], planted_states())
    assert [(s.first_layer, s.last_layer, s.dimension) for s in location.steps] == [(1, 1, 3)]
    assert (location.steps[0].ratio_before, location.steps[0].ratio_after) == pytest.approx(
        (1.2, 30.0)
    )
    assert location.outliers == {1: (3,)}
    location = found([1.0, 1.0, 1.0], planted_states(), forced=((0, 0),))
    assert [(s.first_layer, s.dimension) for s in location.steps] == [(0, 2)]
    assert location.outliers == {-1: (0,), 0: (2,), 1: (3,)}


def test_what_feeds_the_growth_is_read_up_to_its_first_layer_or_in_the_first_quarter():
    steps = tuple(
        GrowthStep(
            first_layer=first, last_layer=last, ratio_before=1.0, ratio_after=9.0, dimension=0
        )
        for first, last in ((1, 2), (5, 5))
    )
    location = Location(sink_positions=(0,), sink_found=True, steps=steps, outliers={})
    assert feeding_layers(location.growth_layers, attention=range(8)) == (0, 1)
    assert feeding_layers((), attention=range(8)) == (0, 1)
    assert feeding_layers((), attention=range(2)) == (0,)


@pytest.mark.parametrize(
    ("width", "shares", "found"),
    [
        (64, [0.88], 1),  # the largest is 20 times the mean
        (64, [0.333] * 3, 3),
        (96, [0.75, 0.1], 0),  # the second is hardly larger than the largest of a random token
        (
            64,
            [0.1] * 8,
            0,
        ),  # eight random dimensions of 64 hold half: they leave more than a quarter of the rest
        (576, [0.11] * 8, 8),
        (32, [0.85 / 8] * 8, 0),
    ],
)
def test_dimensions_that_hold_nearly_all_of_a_narrow_token_are_outliers(width, shares, found):
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(1, width, generator=generator)
    state[:, : len(shares)] = 0
    state *= ((1 - sum(shares)) / state.square().sum()) ** 0.5
    state[0, : len(shares)] = torch.tensor(shares).sqrt()
    assert len(find_outlier_dimensions(state, thresholds=TraceConfig())) == found


@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 576])
def test_a_random_token_has_no_outlier_dimension(width):
    states = torch.randn(400, width, generator=torch.Generator().manual_seed(width))
    assert not any(find_outlier_dimensions(one[None], thresholds=TraceConfig()) for one in states)
