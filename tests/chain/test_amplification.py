"""The curve of the variance amplification at the target position."""

import pandas as pd
import pytest
from rounding import CLOSE

from sink_lens.chain.amplification import (
    amplification_curve,
    best_factor,
    strongest_amplification_edit,
)
from sink_lens.edits.amplification import amplify, centring_means
from sink_lens.engine.forward import run_with
from sink_lens.schema import column_names


@pytest.fixture(scope="module")
def made(planted_at):
    """Centring means and curve of the planted model, over three factors."""
    place = planted_at()
    means = centring_means(place.lens, n_tokens=128)
    return means, amplification_curve(place.setting, means=means, factors=(1.0, 5.0, 30.0))


def test_the_best_factor_is_that_of_most_mass_of_its_centre():
    rows = [
        ("values", 1.0, 0.1),
        ("values", 2.0, 0.4),
        ("values", 5.0, 0.3),
        ("none", 1.0, 0.2),
        ("none", 9.0, 0.9),
    ]
    curve = pd.DataFrame(rows, columns=["centre", "factor", "mass"])
    assert best_factor(curve, centre="values") == 2.0
    assert best_factor(curve, centre="none") == 9.0


def test_what_is_amplified_lies_before_what_is_read(planted_at, tiny_at):
    place = planted_at()
    assert place.setting.layers_until_growth == tuple(range(place.truth.layer + 1))
    assert place.setting.layers_right_after_growth == tuple(range(place.truth.layer + 1, 5))
    assert planted_at(sink=False).setting.layers_until_growth == (0,)
    setting = tiny_at("llama", n_layers=1).setting
    assert (setting.layers_until_growth, setting.layers_right_after_growth) == ((0,), (0,))


def test_the_curve_has_a_row_for_every_centre_and_factor(made):
    _, curve = made
    assert curve.columns.tolist() == column_names("trace", "amplification")
    assert curve["factor"].tolist() == [1.0, 5.0, 30.0] * 3
    assert curve["centre"].tolist() == ["values"] * 3 + ["aggregated"] * 3 + ["none"] * 3
    ones = curve[curve["factor"] == 1]
    assert (ones["mass"] == ones["baseline_mass"]).all()
    assert (curve["times"] == curve["mass"] / curve["baseline_mass"]).all()


def test_a_point_of_the_curve_is_the_whole_run_under_that_edit(planted_at, made):
    place = planted_at()
    means, curve = made
    layers = range(place.truth.layer + 1)
    for centre in ("values", "none"):
        one = amplify(5.0, positions=[6], layers=layers, centre=centre, means=means)
        whole = run_with(place.lens, place.setting.tokens, one, positions=(6,))
        row = curve[(curve["centre"] == centre) & (curve["factor"] == 5)].iloc[0]
        wanted = float(whole.mass_at(6, layers=place.setting.layers_after_growth).mean())
        assert row["mass"] == pytest.approx(wanted, rel=CLOSE)
        assert (row["layers"], row["read_layers"], row["target_position"], row["n"]) == (
            "0-2",
            "3-4",
            6,
            3,
        )


@pytest.mark.parametrize("centre", ["values", "aggregated", "none", ""])
def test_the_strongest_is_of_a_centre_at_which_some_factor_makes_more(planted_at, made, centre):
    means, curve = made
    curve = curve.assign(mass=[0.1 if factor == 1 else 0.05 for factor in curve["factor"]])
    curve.loc[(curve["centre"] == centre) & (curve["factor"] == 5), "mass"] = 0.9
    found = strongest_amplification_edit(planted_at().setting, means=means, curve=curve)
    if centre in ("values", "aggregated"):
        assert found.label == f"amplification x 5 from {centre}"
        assert (found.positions, found.layers) == ((6,), (0, 1, 2))
    else:  # no factor makes more, or the norm alone does
        assert found is None
