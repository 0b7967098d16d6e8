"""Links frozen on the planted model: what is kept, and random ones of the same size."""

import dataclasses

import pytest
import torch
from rounding import assert_close

from sink_lens.chain.links import LINKS

FREEZES = {link.freeze.name: link.freeze for link in LINKS if link.freeze is not None}


def frozen(name, setting, position, *, segment=None):
    return FREEZES[name].make(setting, segment or setting.segments[0], position, setting.generator())


def mass(setting, edits, position):
    return float(setting.run(edits, layers=setting.late_layers).mass_at(position, layers=setting.late_layers).mean())


# --- the planted chain


@pytest.mark.parametrize("seed", [0, 1])
def test_freezing_the_super_neuron_removes_the_sink_and_random_ones_do_not(planted_at, seed):
    place = planted_at(seed=seed)
    setting, truth = place.setting, place.truth
    one = frozen("neurons", setting, 0)
    assert (one.size, len(one.controls)) == (1, 5)
    assert [(edit.layers, edit.units) for edit in one.edits] == [((truth.layer,), (truth.neuron,))]
    before = float(setting.baseline.mass_at(0, layers=setting.late_layers).mean())
    assert before > 0.9
    assert mass(setting, one.edits, 0) < 0.2 * before
    for control in one.controls:
        assert control[0].units != (truth.neuron,)
        assert mass(setting, control, 0) == pytest.approx(before, rel=1e-3)


def test_freezing_the_outlier_dimension_or_the_key_removes_it_too(planted_at):
    place = planted_at()
    setting, truth = place.setting, place.truth
    dims, key = frozen("dimensions", setting, 0), frozen("key", setting, 0)
    assert (dims.size, dims.edits[0].units, dims.edits[0].layers) == (1, (truth.outlier_dimension,), (truth.layer,))
    assert key.size == 2 * 2 * 12  # layers x key-value heads x head size
    for one in (dims, key):
        assert mass(setting, one.edits, 0) < 0.2
        assert len(one.controls) == 5
        for control in one.controls:
            assert mass(setting, control, 0) > 0.95
    assert {control[0].positions for control in key.controls} == {(place,) for place in setting.control_positions(0)}


def test_freezing_z_undoes_an_induced_sink(planted_at, triggered):
    setting = planted_at().setting
    (segment,) = setting.segments
    layers = list(segment.layers)
    made = setting.run([triggered], layers=layers).mass_at(setting.target_position, layers=layers)
    clean = setting.baseline.mass_at(setting.target_position, layers=layers)
    assert (made > 0.3).all()
    assert (clean < 0.01).all()
    one = frozen("z", setting, setting.target_position)
    assert one.edits[0].layers == tuple(range(5))
    undone = setting.run([triggered, *one.edits], layers=layers)
    assert_close(undone.mass, setting.baseline.mass[3:])
    for control in one.controls:
        assert mass(setting, [triggered, *control], setting.target_position) == pytest.approx(
            float(made.mean()), rel=0.01
        )


# --- what is not there


def test_what_is_not_there_is_not_frozen(planted_at):
    setting = planted_at().setting
    for masks in ({}, {2: torch.zeros(80).bool()}):
        assert frozen("neurons", dataclasses.replace(setting, super_neurons=masks), 0) is None
    setting = planted_at(sink=False).setting
    (segment,) = setting.segments
    assert segment.steps == ()
    assert frozen("dimensions", setting, 0) is None


def test_the_links_that_are_frozen_are_named_in_order():
    assert list(FREEZES) == ["z", "neurons", "dimensions", "key"]
