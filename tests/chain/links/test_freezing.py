"""Links frozen on the planted model: what is kept, and random ones of the same size."""

import dataclasses

import pytest
import torch

from sink_lens.chain.links import LINKS

FREEZES = {link.freeze.name: link.freeze for link in LINKS if link.freeze is not None}


def frozen(name, setting, position):
    return FREEZES[name].make(setting, setting.segments[0], position, setting.make_generator())


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_frozen_is_the_planted_truth_and_controls_are_others(planted_at, seed):
    """Mediation shows that it carries the sink, and that controls do not."""
    setting, truth = planted_at(seed=seed).setting, planted_at(seed=seed).truth
    one, dims, key = (frozen(name, setting, 0) for name in ("neurons", "dimensions", "key"))
    assert [(edit.layers, edit.units) for edit in one.edits] == [((truth.layer,), (truth.neuron,))]
    assert [(edit.layers, edit.units) for edit in dims.edits] == [
        ((truth.layer,), (truth.outlier_dimension,))
    ]
    assert all(control[0].units != (truth.neuron,) for control in one.controls)
    assert {control[0].positions for control in key.controls} == {
        (place,) for place in setting.control_positions(0)
    }
    assert frozen("z", setting, setting.target_position).edits[0].layers == tuple(range(5))


def test_what_is_not_there_is_not_frozen(planted_at):
    setting = planted_at().setting
    for masks in ({}, {2: torch.zeros(80).bool()}):
        assert frozen("neurons", dataclasses.replace(setting, super_neurons=masks), 0) is None
    assert frozen("dimensions", planted_at(sink=False).setting, 0) is None
