import math

import pytest
import torch
from drawn import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.errors import InputError
from sink_lens.measures.dimensions import (
    dominance_ratio,
    dominance_ratio_fixed,
    growth_ratio,
    massive_activations,
    massive_ratio,
    outlier_dimensions,
    residual_outliers,
    token_kurtosis,
)


def test_dominance_by_hand():
    # Magnitudes 6 1 1: 6 over 8/3 = 2.25. Equal magnitudes: 1. One of three alone: 3. Zeros: nan.
    h = torch.tensor([[-6.0, 1.0, 1.0], [2.0, -2.0, 2.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    found = dominance_ratio(h)
    assert found[:3].tolist() == pytest.approx([2.25, 1.0, 3.0])
    assert found[3].isnan()


def test_the_fixed_variant_is_a_ratio_of_sample_means_over_the_other_dimensions():
    # Dimension 0: |-6| and |2|, mean 4. The others: (1 + 3) / 2 = 2 and (1 + 1) / 2 = 1, mean 1.5. 4 / 1.5.
    h = torch.tensor([[-6.0, 1.0, 3.0], [2.0, 1.0, -1.0]])
    assert dominance_ratio_fixed(h, dimension=0) == pytest.approx(4 / 1.5)
    assert math.isnan(dominance_ratio_fixed(h[:, :1], dimension=0))


def test_outlier_dimensions_are_the_fewest_that_hold_the_share():
    # Energies 1 60 4 30 5 of 100: 60 is short of 0.8, 60 + 30 is not; 0.6 needs one; 0.95 needs 60 30 5.
    energy = torch.tensor([1.0, 60.0, 4.0, 30.0, 5.0])
    assert outlier_dimensions(energy).tolist() == [1, 3]
    assert outlier_dimensions(energy, energy_frac=0.6).tolist() == [1]
    assert outlier_dimensions(energy, energy_frac=0.95).tolist() == [1, 3, 4]
    assert outlier_dimensions(energy, energy_frac=1.0).tolist() == [1, 3, 4, 2, 0]


@pytest.mark.parametrize(
    "energy", [torch.zeros(3), torch.tensor([1.0, math.nan, 2.0]), torch.ones(0)]
)
def test_no_energy_has_no_outlier_dimension(energy):
    assert outlier_dimensions(energy).shape == (0,)


def test_a_dimension_outside_the_stream_and_a_share_outside_zero_and_one_are_refused():
    for dimension in (-1, 3):
        with pytest.raises(
            InputError, match=f"dimension {dimension} is outside the residual stream; need 0 to 2"
        ):
            dominance_ratio_fixed(torch.ones(1, 3), dimension=dimension)
    for frac in (0.0, 1.5):
        with pytest.raises(
            InputError, match=rf"found energy_frac = {frac}; need a share in \(0, 1\]"
        ):
            outlier_dimensions(torch.ones(3), energy_frac=frac)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.01, 1.0))
def test_no_smaller_set_holds_the_share(seed, frac):
    energy = draw(seed, 15).square()
    found = outlier_dimensions(energy, energy_frac=frac)
    total = energy.double().sum()
    assert energy[found].double().sum() >= (frac - 1e-12) * total
    # The largest n - 1 dimensions are the best set of that size, and they fall short.
    assert energy[found[:-1]].double().sum() < frac * total


def test_massive_needs_both_thresholds():
    # Medians 1 and 0.01. 2000 passes both; 150 is 150 medians; 50 is 5,000 medians but under 100; 100 exactly
    # is not over 100.
    h = torch.tensor([[2000.0, 1.0, 1.0, 1.0, -150.0], [50.0, 0.01, 0.01, 0.01, -100.0]])
    assert massive_activations(h).tolist() == [[True] + [False] * 4, [False] * 5]
    assert massive_activations(h, absolute=10.0).tolist()[1] == [True, False, False, False, True]


def test_thresholds_and_ratios_at_their_ends():
    h = torch.tensor([[-1000.0, 1.0, 1.0, 1.0]])
    assert massive_activations(h)[0, 0]
    assert massive_ratio(h).item() == 1000.0
    # Magnitudes 1 2 4 9: median 3; 9 / 3.
    assert massive_ratio(torch.tensor([[1.0, -2.0, 4.0, -9.0]])).item() == 3.0
    assert massive_ratio(torch.tensor([[0.0, 0.0, 0.0, 1.0]])).item() == math.inf
    assert massive_ratio(torch.zeros(1, 4)).isnan().all()


@pytest.mark.parametrize("threshold", [5.0, 10.0, 20.0, 50.0, 100.0])
def test_an_outlier_planted_in_one_layer_is_found_at_thresholds_5_to_100(threshold):
    # Layer by layer; a maximum over the layers before the median would put 400 against the others' maxima.
    layers = draw(0, 12, 1, 96).clamp(-2, 2)
    layers[7, 0, 40] = 400.0
    found = [bool(massive_activations(h, absolute=20.0, relative=threshold).any()) for h in layers]
    assert found == [layer == 7 for layer in range(12)]


def test_growth_by_hand():
    # Positions from 2 on: 2, 4, 9 -> median 4; 40 / 4 = 10. With the last one padding: (2 + 4) / 2 = 3.
    norms = torch.tensor([[40.0, 77.0, 2.0, 4.0, 9.0]]).repeat(2, 1)
    valid = torch.tensor([[True] * 5, [True] * 4 + [False]])
    norms[1, 4] = math.nan
    assert growth_ratio(norms, valid=valid, key=0, others_from=2).tolist() == pytest.approx(
        [10.0, 40 / 3]
    )
    # A key among the others is not counted among them: 2 and 9, median 5.5; 4 / 5.5.
    assert growth_ratio(norms[:1], valid=valid[:1], key=3, others_from=2).item() == pytest.approx(
        4 / 5.5
    )


def test_growth_is_undefined_for_a_padded_key_or_a_short_sequence():
    valid = torch.tensor([[True] * 10, [True] * 8 + [False] * 2])
    found = growth_ratio(torch.ones(2, 10), valid=valid, key=9)
    assert found[0] == 1.0
    assert found[1].isnan()
    assert growth_ratio(torch.ones(2, 10), valid=valid, key=0)[1].isnan()


def test_entries_over_the_median_by_hand():
    # Median magnitude 1: 21 is over 20 times it, 20 is not. The last token is padding.
    h = torch.tensor([[[1.0, -21.0, 1.0], [20.0, 1.0, -1.0], [1.0, 99.0, 1.0]]])
    over = residual_outliers(h, valid=torch.tensor([[True, True, False]]))
    assert over.tolist() == [[[False, True, False], [False, False, False], [False, False, False]]]
    even = torch.tensor(
        [[[1.0, 39.0, 3.0, -1.0]]]
    )  # the median of 1 1 3 39 is 2, and 39 is not over 40
    assert not residual_outliers(even, valid=torch.ones(1, 1).bool()).any()


def test_kurtosis_by_hand():
    # One entry of n: variance (n - 1)/n^2, fourth moment (n - 1)(n^2 - 3n + 3)/n^5; for n = 4: 7/3 - 3. Two equal
    # halves: 1 - 3. A million times as large in half precision: the same.
    h = torch.tensor([[[1.0, 0, 0, 0], [1.0, -1.0, 1.0, -1.0]]])
    assert token_kurtosis(h)[0].tolist() == pytest.approx([7 / 3 - 3, -2.0])
    assert token_kurtosis(h.half() * 6e4)[0].tolist() == pytest.approx([7 / 3 - 3, -2.0])
    for constant in (torch.ones(1, 1, 4), torch.full((1, 1, 5), 0.1)):  # whose mean is rounded
        assert token_kurtosis(constant).isnan().all()
