"""The exact split of growth layers by neurons, and the super neurons in it."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evidences import planted_evidence
from lenses import lens_of

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.evidence import steps_of_neurons
from sink_lens.chain.links.variance_neurons import _spike_ratio
from sink_lens.chain.locate import GrowthStep, Location
from sink_lens.chain.measure import measure
from sink_lens.chain.neurons import (
    mlp_contributions,
    neuron_table,
    neurons_of_same_experts,
    selectivity_table,
    split_growth_layers,
    super_neurons_of_layer,
)
from sink_lens.chain.setting import draw_other_indices
from sink_lens.data.tokens import from_tensor
from sink_lens.models.tiny import planted
from sink_lens.models.weights import mlp_weights
from tests.tiny_families import TINY_FAMILIES


@functools.cache
def panel_of(family, positions=(0,)):
    """A panel whose growth step is said to be the layers 1 and 2, on six sequences of 16 tokens."""
    lens, spans = lens_of(family), ((1, 2),)
    step = GrowthStep(first_layer=1, last_layer=2, ratio_before=1.0, ratio_after=9.0, dimension=4)
    aim = Location(sink_positions=positions, sink_found=True, steps=(step,), outliers={})
    tokens = from_tensor(torch.randint(3, 300, (6, 16), generator=torch.Generator().manual_seed(0)))
    panel = measure(
        lens,
        tokens,
        plan=aim.measuring_plan(lens.attention_layers),
        config=TraceConfig(model=family),
        forced=spans,
    )
    return replace(panel, location=replace(panel.location, sink_positions=positions))


def panel_at(family, dimension, positions=(0,)):
    panel = panel_of(family, positions)
    steps = tuple(replace(step, dimension=dimension) for step in panel.location.steps)
    return replace(panel, location=replace(panel.location, steps=steps))


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("dimension", [0, 31])
def test_contributions_and_bias_sum_to_the_mlp_output(family, dimension):
    lens, panel = lens_of(family), panel_at(family, dimension, (0, 2))
    splits = split_growth_layers(lens, panel, super_share=0.05)
    assert [(split.layer, split.position) for split in splits] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    for split in splits:
        index = panel.sink_positions.index(split.position)
        weights = mlp_weights(lens, layer=split.layer)
        activations = panel.at_layer("neurons_at_sinks", split.layer)[:, index]
        terms, bias = mlp_contributions(
            lens, weights, layer=split.layer, activations=activations, dimension=dimension
        )
        output = panel.at_layer("mlp_out_at_sinks", split.layer)[:, index, dimension]
        assert (terms.sum(1) + bias - output).abs().max() < 1e-4
        torch.testing.assert_close(split.terms, terms)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_change_is_that_of_the_stream(family):
    lens, panel = lens_of(family), panel_at(family, 7)
    states = panel.sink_states()
    for split in split_growth_layers(lens, panel, super_share=0.05):
        moved = states[split.layer + 1, :, 7] - states[split.layer, :, 7]
        torch.testing.assert_close(split.change, moved, rtol=1e-4, atol=1e-4)


def test_biases_are_no_neurons():
    for family, has in (("gpt2", True), ("opt", True), ("gpt_neox", True), ("llama", False)):
        lens = lens_of(family)
        weights = mlp_weights(lens, layer=1)
        silent = torch.zeros(2, weights.w_down.shape[1])
        terms, bias = mlp_contributions(lens, weights, layer=1, activations=silent, dimension=5)
        assert terms.abs().sum() == 0
        assert bool((bias != 0).all()) == has, family


def test_a_super_neuron_is_one_at_any_position():
    one = planted_evidence().splits[0]
    splits = [replace(one, is_super=torch.arange(len(one.is_super)) == neuron) for neuron in (0, 2)]
    assert super_neurons_of_layer(splits, layer=one.layer).nonzero().flatten().tolist() == [0, 2]


def test_only_the_planted_neuron_is_super():
    truth, evidence = planted(), planted_evidence()
    lens, panel, splits = evidence.lens, evidence.panel, evidence.splits
    assert super_neurons_of_layer(splits, layer=truth.layer).nonzero().flatten().tolist() == [
        truth.neuron
    ]
    table = neuron_table(lens, panel, splits).set_index("neuron")
    assert table["spike_ratio"].idxmax() == truth.neuron
    assert table["column_kurtosis"].idxmax() == truth.neuron
    assert table.loc[truth.neuron, "top_dimension"] == truth.outlier_dimension
    assert table.loc[truth.neuron, "gate_norm_rank"] > 0
    selective = selectivity_table(lens, panel, splits)
    assert set(selective["neuron"]) == {truth.neuron}
    by_position = selective.set_index("position")
    assert by_position["gate"][0] > 5 * by_position["gate"][1:].abs().max()
    fires = panel.at_layer("neurons_at_sinks", truth.layer)[:, 0, truth.neuron].mean()
    assert by_position["activation"][0] == pytest.approx(float(fires), rel=1e-5)
    assert by_position["activation"][0] > 5 * by_position["activation"][1:].abs().max()


def test_a_gateless_mlp_has_no_gate_rank():
    lens, panel = lens_of("gpt2"), panel_of("gpt2")
    table = neuron_table(lens, panel, split_growth_layers(lens, panel, super_share=0.05))
    assert table["gate_norm_rank"].isna().all()
    assert sorted(table.loc[table["layer"] == 1, "up_norm_rank"]) == list(range(1, 81))


def test_random_neurons_are_of_other_experts_and_a_silent_place_counts_as_little():
    lens = lens_of("mixtral")
    size, n = lens.d_expert, lens.n_neurons(1)
    assert neurons_of_same_experts(lens, [size + 1], layer=1) == list(range(size, 2 * size))
    assert neurons_of_same_experts(lens, [*range(0, n, size)], layer=1) == []  # no other is left
    assert neurons_of_same_experts(lens_of("llama"), [1], layer=1) == []
    drawn = draw_other_indices([0], n=4, generator=torch.Generator().manual_seed(0), without=[1, 2])
    assert drawn == [3]
    rows = np.array(
        [[[8.0, 0.004], [0.0, 0.0]]]
    )  # a strong neuron and a weak one of its expert: both silent elsewhere
    assert _spike_ratio(rows[..., :1], least=8e-6) == pytest.approx(1e6)
    assert _spike_ratio(rows[..., 1:], least=8e-6) == pytest.approx(500)


@pytest.mark.parametrize(
    ("written", "asked"), [((10.0, 0.1), [0]), ((0.1, 10.0), [1]), ((0.1, 0.2), [0, 1])]
)
def test_a_step_that_attention_makes_is_not_asked_for_neurons(written, asked):
    steps = [
        GrowthStep(
            first_layer=layer, last_layer=layer, ratio_before=1.0, ratio_after=9.0, dimension=0
        )
        for layer in (1, 3)
    ]
    splits = [
        SimpleNamespace(
            layer=step.first_layer,
            position=0,
            terms=torch.tensor([[one]]),
            change=torch.tensor([10.0]),
        )
        for step, one in zip(steps, written, strict=True)
    ]
    panel = SimpleNamespace(location=SimpleNamespace(steps=steps, sink_position=0))
    evidence = SimpleNamespace(panel=panel, splits_of=lambda step: [splits[steps.index(step)]])
    assert [number for number, _ in steps_of_neurons(evidence)] == asked
