"""Every link cut on the planted model, beside random cuts, and the curve of the amplification."""

import dataclasses
import functools
import math

import pandas as pd
import pytest

from sink_lens.chain import cuts
from sink_lens.chain.bench import bench
from sink_lens.chain.cuts import (
    CURVE_COLUMNS,
    EFFECT_COLUMNS,
    amplification_curve,
    amplified_layers,
    best_factor,
    effect_table,
    just_after,
)
from sink_lens.chain.links import cut_verdict
from sink_lens.edits.amplification import amplification, centring_means
from sink_lens.edits.constructors import scalar
from sink_lens.engine.forward import run_with

REMOVING = ["variance_preserved", "variance_neurons", "neurons_dimension", "dimension_key", "key_sink"]


@pytest.fixture(scope="module")
def cut(planted_at, tiny_at):
    """The builder of (means, curve, effects) of a model, over three factors: ``cut("planted")``, ``cut("gpt2")``."""

    @functools.cache
    def build(name):
        place = planted_at(sink=name == "planted") if name.startswith("planted") else tiny_at(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuts, "FACTORS", (1.0, 5.0, 30.0))
            means = centring_means(place.lens, n_tokens=128)
            curve = amplification_curve(place.bench, means=means)
            return means, curve, effect_table(place.bench, supers=place.supers, means=means, curve=curve)

    return build


# --- text and choices, by hand


def test_the_best_factor_is_that_of_most_mass_of_its_centre():
    curve = pd.DataFrame(
        {
            "centre": ["values"] * 3 + ["none"] * 2,
            "factor": [1.0, 2.0, 5.0, 1.0, 9.0],
            "mass": [0.1, 0.4, 0.3, 0.2, 0.9],
        }
    )
    assert best_factor(curve, centre="values") == 2.0
    assert best_factor(curve, centre="none") == 9.0


def test_what_is_amplified_lies_before_what_is_read(planted_at):
    place = planted_at()
    assert amplified_layers(place.bench) == list(range(place.truth.layer + 1))
    assert just_after(place.bench) == tuple(range(place.truth.layer + 1, 5))
    assert amplified_layers(planted_at(sink=False).bench) == [0]


def test_a_model_of_one_layer_is_amplified_in_it(tiny_at):
    bench = tiny_at("llama", n_layers=1).bench
    assert (amplified_layers(bench), just_after(bench)) == ([0], (0,))


# --- the curve


def test_the_curve_has_a_row_for_every_centre_and_factor(cut):
    _, curve, _ = cut("planted")
    assert tuple(curve.columns) == CURVE_COLUMNS
    assert curve["factor"].tolist() == [1.0, 5.0, 30.0] * 3
    assert curve["centre"].tolist() == ["values"] * 3 + ["aggregated"] * 3 + ["none"] * 3
    ones = curve[curve["factor"] == 1]
    assert (ones["mass"] == ones["baseline_mass"]).all()
    assert (curve["times"] == curve["mass"] / curve["baseline_mass"]).all()


def test_a_point_of_the_curve_is_the_whole_run_under_that_edit(planted_at, cut):
    place = planted_at()
    means, curve, _ = cut("planted")
    layers = range(place.truth.layer + 1)
    for centre in ("values", "none"):
        one = amplification(5.0, positions=[6], layers=layers, centre=centre, means=means)
        whole = run_with(place.lens, place.bench.tokens, one, keys=(6,))
        row = curve[(curve["centre"] == centre) & (curve["factor"] == 5)].iloc[0]
        assert row["mass"] == float(whole.mass_at(6, layers=place.bench.late).mean())
        assert (row["layers"], row["read_layers"], row["position"], row["n"]) == ("0-2", "3-4", 6, 3)


# --- the effects


def test_each_link_is_cut_once_in_the_order_of_the_chain(cut):
    _, _, effects = cut("planted")
    assert tuple(effects.columns) == EFFECT_COLUMNS
    primary = effects[effects["is_primary"]]
    assert primary["link"].tolist() == ["aggregation_variance", *REMOVING]
    assert (primary["n_controls"] == 5).all()
    assert primary["edit"].is_unique
    assert (effects["n"] == 3).all()


def test_the_planted_links_hold_under_their_cuts(cut):
    _, _, effects = cut("planted")
    rows = {row["link"]: row for row in effects.to_dict("records") if row["is_primary"]}
    for link in REMOVING[1:]:
        row = rows[link]
        assert row["baseline_mass_old"] > 0.95, link
        assert row["sink_mass_old"] < 0.2, link
        assert row["share"] > 0.8, link
        assert row["ci_low"] <= row["share"] <= row["ci_high"], link
        assert row["control_mean"] > 0.95, link  # random ones leave it where it is
        assert abs(row["control_share"]) < 0.02, link
        assert row["outcome"] == "removed", link
        assert cut_verdict(row) == "holds", link


def test_what_the_planted_model_has_no_part_in_fails_under_its_cut(cut):
    # its sink is a token, not a variance: an ordinary token that sees itself only is none
    _, _, effects = cut("planted")
    rows = {row["link"]: row for row in effects.to_dict("records") if row["is_primary"]}
    for link in ("aggregation_variance", "variance_preserved"):
        assert abs(rows[link]["share"]) < 0.02
        assert rows[link]["outcome"] == "unchanged"
        assert cut_verdict(rows[link]) == "fails"


def test_the_entries_of_the_planted_neuron_are_cut_one_by_one(planted_at, cut):
    place, (_, _, effects) = planted_at(), cut("planted")
    truth, late = place.truth, place.bench.late
    one = scalar(
        place.lens, layer=truth.layer, neurons=[truth.neuron], dimensions=[truth.outlier_dimension], positions=[0]
    )
    whole = run_with(place.lens, place.bench.tokens, one, keys=(6, 0))
    row = effects.set_index("link").loc["neurons_dimension"]
    assert row["sink_mass_old"] == pytest.approx(float(whole.mass_at(0, layers=late).mean()))
    assert row["loss_nats"] == pytest.approx(float(whole.loss.mean()))
    share = 1 - row["sink_mass_old"] / row["baseline_mass_old"]
    assert row["share"] == pytest.approx(share, rel=1e-5)
    assert (row["layers"], row["position"], row["read_layers"]) == ("2", 0, "3-4")


def test_a_model_without_a_sink_has_no_cut_that_holds(cut):
    _, _, effects = cut("planted without")
    rows = [row for row in effects.to_dict("records") if row["is_primary"]]
    assert [row["link"] for row in rows] == ["aggregation_variance", "variance_preserved", "key_sink"]
    assert "holds" not in {cut_verdict(row) for row in rows}


def test_an_amplification_is_a_row_where_some_factor_over_1_makes_more(cut):
    for name in ("planted", "gpt2", "gpt_oss"):
        _, curve, effects = cut(name)
        amplified = effects[~effects["is_primary"]]
        factors = [best_factor(curve, centre=centre) for centre in ("values", "aggregated")]
        controls = amplified[amplified["control_of"] != ""]
        assert len(amplified) == 2 * len(controls) == 2 * sum(factor > 1 for factor in factors)
        assert (amplified["n_controls"] == 0).all()
        assert controls["edit"].tolist() == [f"norm x {factor:g}" for factor in factors if factor > 1]
        for row in controls.to_dict("records"):
            amplification = effects.set_index("edit").loc[row["control_of"]]
            assert not amplification["is_primary"]
            assert f"x {row['edit'].removeprefix('norm x ')} " in row["control_of"]  # at the same factor


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_links_without_neurons_or_dimensions_are_not_cut(cut, name):
    _, _, effects = cut(name)
    primary = effects[effects["is_primary"]]
    assert primary["link"].tolist() == ["aggregation_variance", "variance_preserved", "key_sink"]
    assert primary[["share", "sink_mass_old", "loss_nats", "control_mean"]].notna().all(axis=None)


def test_one_sequence_has_shares_without_intervals(planted_at, config):
    place = planted_at()
    alone = bench(place.lens, place.tokens, finding=place.finding, config=dataclasses.replace(config, cut_sequences=1))
    means = centring_means(place.lens, n_tokens=64)
    curve = pd.DataFrame({"centre": ["values", "aggregated", "none"], "factor": [1.0] * 3, "mass": [0.1] * 3})
    effects = effect_table(alone, supers=place.supers, means=means, curve=curve)
    assert effects["share"].notna().all()
    assert effects["ci_low"].isna().all()
    assert {cut_verdict(row) for row in effects.to_dict("records")} == {"undecided"}
    assert math.isclose(effects.set_index("link").loc["key_sink", "share"], 0.88, abs_tol=0.1)
