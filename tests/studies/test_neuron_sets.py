"""The smallest set of neurons: on the planted model the planted one, alone and unaided."""

import dataclasses
import functools

import pytest
import torch

from sink_lens.chain.locate import GrowthStep
from sink_lens.chain.setting import find_segments
from sink_lens.edits.constructors import zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.schema import column_names
from sink_lens.studies import neuron_sets
from sink_lens.studies.neuron_sets import find_smallest_sets, neuron_names, rank_neurons


@pytest.fixture(scope="module")
def sets_of(planted_at):
    """The builder of a planted model's sets: ``sets_of(seed)``."""
    return functools.cache(lambda seed=0: find_smallest_sets(planted_at(seed=seed).setting))


def test_the_set_is_ablated_in_every_way_and_against_random_ones(sets_of):
    _, table = sets_of()
    assert table.columns.tolist() == column_names("ablate", "ablations")
    counts = {"set": 6, "random, same layers": 5, "random, same ranks outside": 5}
    assert table["kind"].value_counts().to_dict() == counts
    of_set = table[table["kind"] == "set"]
    assert len(of_set.drop_duplicates(["method", "what", "where"])) == 6
    assert of_set["loss_nats"].notna().all()
    assert (of_set["removed_share"] > 0.8).all()
    random = table[table["kind"] != "set"]
    assert (random["removed_share"].abs() < 0.02).all()
    assert (table["size"] == 1).all()
    assert (table["removed_share"] - (1 - table["mass"] / table["baseline_mass"])).abs().max() < 1e-6


def test_a_row_is_the_whole_run_under_the_ablation(planted_at, sets_of):
    place = planted_at()
    one = zero("neurons", layers=[place.truth.layer], units=[place.truth.neuron])
    whole = run_with(place.lens, place.setting.tokens, one, positions=(0,))
    _, table = sets_of()
    row = table.query("method == 'zero' and what == 'column' and where == 'everywhere'").iloc[0]
    assert row["mass"] == pytest.approx(float(whole.mass_at(0, layers=place.setting.layers_after_growth).mean()))
    assert row["loss_nats"] == pytest.approx(float(whole.loss.mean()))


def test_random_sets_are_of_the_same_layer_and_of_the_same_rank_outside(planted_at, sets_of):
    truth = planted_at().truth
    _, table = sets_of()
    same = table[table["kind"] == "random, same layers"]["neurons"]
    assert {name.split(".")[0] for name in same} == {str(truth.layer)}
    assert neuron_names([(truth.layer, truth.neuron)]) not in set(same)
    outside = table[table["kind"] == "random, same ranks outside"]["neurons"]
    assert str(truth.layer) not in {name.split(".")[0] for name in outside}


def test_neurons_are_ranked_by_what_they_write(planted_at):
    place = planted_at()
    step = place.location.steps[0]
    order = rank_neurons(place.setting, layers=[step.first_layer], step=step)
    assert len(order) == 80
    assert order[0] == (place.truth.layer, place.truth.neuron)
    active = run_with(place.lens, place.setting.tokens, sites=("neurons",)).tensors["neurons", place.truth.layer][:, 0]
    column = place.truth.model.model.layers[place.truth.layer].mlp.down_proj.weight[step.dimension].detach()
    by_hand = (active * column).mean(0).abs().argsort(descending=True)
    assert [neuron for _, neuron in order[:10]] == by_hand[:10].tolist()


def test_in_the_first_layer_the_change_is_over_the_embedding(tiny_at):
    place = tiny_at("llama")
    step = GrowthStep(first_layer=0, last_layer=1, ratio_before=1.0, ratio_after=2.0, dimension=7)
    order = rank_neurons(place.setting, layers=[0, 1], step=step)
    old, model = place.setting.sink_position, place.lens.plain
    found = run_with(place.lens, place.setting.tokens, sites=("neurons", "resid_pre", "resid_post")).tensors
    shares = {}
    for layer in (0, 1):
        change = (found["resid_post", layer] - found["resid_pre", layer])[:, old, 7].mean()
        column = model.model.layers[layer].mlp.down_proj.weight[7].detach()
        terms = (found["neurons", layer][:, old] * column).mean(0) / change
        shares |= {(layer, index): abs(float(term)) for index, term in enumerate(terms)}
    assert order[:12] == sorted(shares, key=shares.get, reverse=True)[:12]


def others_than_planted(planted_at):
    truth = planted_at().truth
    return [(truth.layer, neuron) for neuron in range(5) if neuron != truth.neuron]


def test_neurons_that_are_not_needed_are_dropped(planted_at, monkeypatch):
    place, others = planted_at(), others_than_planted(planted_at)
    planted = place.truth.layer, place.truth.neuron
    monkeypatch.setattr(neuron_sets, "rank_neurons", lambda setting, *, layers, step: [*others, planted])
    (found,), _ = find_smallest_sets(place.setting)
    assert (found.neurons, found.ranks[planted]) == ((planted,), len(others))


def test_a_sink_that_no_set_removes_is_said_so(planted_at, monkeypatch):
    place, others = planted_at(), others_than_planted(planted_at)
    monkeypatch.setattr(neuron_sets, "rank_neurons", lambda setting, *, layers, step: others)
    monkeypatch.setattr(neuron_sets, "MOST_IN_SET", 3)
    (found,), table = find_smallest_sets(place.setting)
    assert not found.removes
    assert len(found.neurons) == 3
    assert table["kind"].value_counts()[["single", "leave one out"]].tolist() == [3, 3]
    assert (table[table["kind"] == "leave one out"]["size"] == 2).all()
    assert (table["removed_share"] < 0.5).all()


def test_a_model_without_a_growth_step_is_refused(planted_at):
    with pytest.raises(InputError, match=r"has no growth step on these tokens.*lower growth_factor"):
        find_smallest_sets(planted_at(sink=False).setting)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt"])
def test_families_without_a_gate_or_with_a_norm_behind_are_ranked_and_ablated(tiny_at, family, monkeypatch):
    place = tiny_at(family)
    step = GrowthStep(first_layer=0, last_layer=0, ratio_before=1.0, ratio_after=2.0, dimension=7)
    location = dataclasses.replace(place.location, steps=(step,))
    setting = dataclasses.replace(
        place.setting, location=location, segments=find_segments(location, n_layers=2, attention=range(2))
    )
    monkeypatch.setattr(neuron_sets, "MOST_IN_SET", 2)
    (found,), table = find_smallest_sets(setting)
    assert 1 <= len(found.neurons) <= 2
    assert table[["mass", "removed_share"]].notna().all(axis=None)
    assert torch.tensor(table["mass"].to_numpy()).isfinite().all()
