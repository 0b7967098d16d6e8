"""What carries the sink: on the planted model each link from the neuron on, and z entirely."""

import functools
from dataclasses import replace

import pytest
from evidences import random_batch
from rounding import close

from sink_lens.chain.config import CONTROL_LENGTH
from sink_lens.chain.mediate import mediation_table
from sink_lens.chain.setting import make_setting
from sink_lens.edits.constructors import freeze, zero
from sink_lens.engine.forward import run_with
from sink_lens.schema import column_names


@pytest.fixture(scope="module")
def table_of(planted_at, tiny_at, triggered):
    """The builder of the mediation table of a model; of the planted one with the edit that makes a sink."""

    @functools.cache
    def build(name):
        place = planted_at(sink=name == "planted") if name.startswith("planted") else tiny_at(name)
        amplified = triggered if name == "planted" else None
        return mediation_table(place.setting, amplified=amplified)

    return build


def row(table, intervention, name):
    (found,) = table[(table["intervention"] == intervention) & (table["frozen"] == name)].to_dict(
        "records"
    )
    return found


def test_one_row_per_intervention_frozen_link_and_step(table_of):
    table = table_of("planted")
    assert table.columns.tolist() == column_names("trace", "mediation")
    assert (
        table["intervention"].tolist()
        == ["isolation"] * 4 + ["amplification"] * 4 + ["natural"] * 4
    )
    assert table["frozen"].tolist() == ["z", "neurons", "dimensions", "key"] * 3
    assert (table["step"] == 0).all()
    assert table["position"].tolist() == [6] * 8 + [0] * 4
    assert table["size"].tolist() == [5 * 48, 1, 1, 2 * 24] * 3
    assert (table["n_controls"] == 5).all()


def test_z_frozen_at_its_clean_value_takes_everything_away(table_of):
    table = table_of("planted")
    for intervention in ("isolation", "amplification"):
        found = row(table, intervention, "z")
        assert found["mass"] == close(found["baseline_mass"])
    assert row(table, "amplification", "z")["surviving_share"] == close(0.0)


@pytest.mark.parametrize("intervention", ["amplification", "natural"])
@pytest.mark.parametrize("name", ["neurons", "dimensions", "key"])
def test_each_planted_link_carries_the_sink_and_random_ones_do_not(table_of, intervention, name):
    found = row(table_of("planted"), intervention, name)
    assert found["mass_without_freeze"] > 0.3
    assert found["surviving_share"] < 0.2
    assert found["control_surviving_share"] > 0.9
    assert found["control_sd"] < 0.1


def test_shares_are_of_what_the_intervention_added(table_of):
    for found in table_of("planted").to_dict("records"):
        added = found["mass_without_freeze"] - found["baseline_mass"]
        if (
            found["intervention"] == "isolation"
        ):  # the planted sink is a token: isolating an ordinary one makes none
            assert abs(added) < 0.02
            assert found["surviving_share"] != found["surviving_share"]
            continue
        assert found["surviving_share"] == pytest.approx(
            (found["mass"] - found["baseline_mass"]) / added
        )
        control = (found["control_mean"] - found["baseline_mass"]) / added
        assert found["control_surviving_share"] == pytest.approx(control)


def test_no_share_is_told_of_an_intervention_that_takes_attention_away(planted_at):
    place = planted_at(sink=False).setting
    found = row(mediation_table(place, amplified=zero("pattern", keys=[6])), "amplification", "key")
    assert found["mass_without_freeze"] < found["baseline_mass"] - 0.02
    assert found["surviving_share"] != found["surviving_share"]
    assert found["control_surviving_share"] != found["control_surviving_share"]


def test_the_aggregated_value_carries_nothing_of_a_sink_that_is_a_token(table_of):
    found = row(table_of("planted"), "natural", "z")
    assert found["surviving_share"] > 0.99


def test_a_cell_is_the_whole_run_under_both(planted_at, triggered, table_of):
    place = planted_at()
    truth, setting = place.truth, place.setting
    clean = run_with(place.lens, setting.tokens, sites=("neurons",)).tensors["neurons", truth.layer]
    frozen = freeze(
        "neurons",
        {truth.layer: clean[:, [6]][..., [truth.neuron]]},
        positions=[6],
        units=[truth.neuron],
    )
    whole = run_with(place.lens, setting.tokens, [triggered, frozen], positions=(6,)).mass_at(
        6, layers=setting.layers_after_growth
    )
    assert row(table_of("planted"), "amplification", "neurons")["mass"] == close(
        float(whole.mean())
    )


def test_the_natural_sink_is_measured_over_an_ordinary_position(planted_at, table_of):
    setting = planted_at().setting
    ordinary = float(setting.baseline.mass_at(6, layers=setting.layers_after_growth).mean())
    natural = table_of("planted").query("intervention == 'natural'")
    assert (natural["baseline_mass"] == ordinary).all()
    assert (
        natural["mass_without_freeze"]
        == float(setting.baseline.mass_at(0, layers=setting.layers_after_growth).mean())
    ).all()


def test_the_ordinary_level_of_controls_is_read_from_as_many_queries_as_their_sink(tiny_at):
    place = tiny_at("llama")
    config = replace(place.setting.config, intervention_length=64)
    setting = make_setting(
        place.lens, random_batch(3, 64), config=config, location=place.location, super_neurons={}
    )
    of_key = row(mediation_table(setting, amplified=None), "natural", "key")
    target = setting.target_position
    assert target + 2 < CONTROL_LENGTH < 64 - target
    level, sink = (
        float(
            run_with(place.lens, setting.tokens.cut(at + CONTROL_LENGTH), positions=(at,))
            .mass_at(at, layers=setting.layers_after_growth)
            .mean()
        )
        for at in (target, setting.sink_position)
    )
    moved = of_key["control_mean"] - of_key["mass_without_freeze"]
    assert of_key["control_surviving_share"] == close(1 + moved / (sink - level))


def test_without_a_growth_step_z_and_the_key_are_held(table_of):
    table = table_of("planted without")
    assert table["frozen"].tolist() == ["z", "key"] * 2
    assert (table["step"] == -1).all()
    found = row(table, "isolation", "z")
    assert found["mass"] == close(found["baseline_mass"])
    assert (table["layers_from"].unique().tolist(), table["layers_to"].unique().tolist()) == (
        [1],
        [4],
    )


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss"])
def test_z_undoes_isolation_in_every_kind_of_family(table_of, family):
    table = table_of(family)
    found = row(table, "isolation", "z")
    assert found["mass"] == close(found["baseline_mass"])
    assert found["mass_without_freeze"] != found["baseline_mass"]
    assert table[["mass", "control_mean", "size"]].notna().all(axis=None)
