"""The makers of the sink: found on every model of the zoo whose makers were written by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiers import first

from sink_lens.chain import makers
from sink_lens.chain import setting as places_of
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.inputs import align_sinks
from sink_lens.chain.locate import mark_writing_layers
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.setting import Maker, make_setting
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from tests.zoo import build

CONFIG = TraceConfig(model="zoo", random_init=False, intervention_sequences=8, controls=3)
KNOWN = [
    ("embedding", "llama"),
    ("bos_neuron", "qwen3"),
    ("variance", "llama"),
    ("slow_growth", "llama"),
    ("two_dimensions", "olmo2"),
    ("direction", "llama"),
    ("key_bias", "qwen3"),
    ("delimiter", "llama"),
    ("sink_logit", "gpt_oss"),
    ("spike", "llama"),
    ("first_window", "mistral"),
    ("broken_dimension_key", "qwen3"),
    (
        "embedding_or_neuron",
        "llama",
    ),  # the embedding alone removes more than half: the neuron reads it too
    (
        "either_embedding",
        "llama",
    ),  # no set of neurons and heads removes anything while the embedding is there
    ("variance", "olmo2"),
    ("key_bias", "llama"),
    ("redundant", "qwen3"),
]
"""Models of the zoo; the last three are kinds that tests above, or in this file, have in another family."""


def places(name, *, family, seed=0, sequences=14):
    """The model, and the settings in which its makers are chosen and tested."""
    zoo = build(name, seed=seed, family=family)
    lens = replace(wrap(zoo.model), name=name)
    tokens = from_tensor(
        zoo.draw(sequences, length=40, generator=torch.Generator().manual_seed(seed))
    )
    panel = scout_and_measure(lens, tokens, config=CONFIG)
    rate, position = panel["rate_by_key"], panel.location.sink_position
    moved = align_sinks(tokens, rate, position=position, min_sink_rate=CONFIG.min_sink_rate)
    if moved is not None:
        tokens, panel = moved, scout_and_measure(lens, moved, config=CONFIG)
    settings = [
        make_setting(
            lens,
            tokens,
            location=panel.location,
            config=CONFIG,
            chosen=some(tokens.n_sequences, config=CONFIG),
        )
        for some in (places_of.sequences_to_choose_by, places_of.sequences_to_test)
    ]
    return zoo, panel, settings


@pytest.mark.parametrize(("name", "family"), first(KNOWN, stay=len(KNOWN) - 3))
def test_the_makers_are_those_that_were_written(name, family):
    zoo, panel, (choosing, _) = places(name, family=family)
    target = makers.choose_makers_target(choosing, lacks_sink=panel.lacks_sink)
    assert target is not None
    found = set(makers.find_makers(choosing, target=target).sets[makers.ALL])
    true = {
        Maker(kind=m.kind, layer=-1 if m.layer is None else m.layer, unit=m.index)
        for m in zoo.truth.makers
    }
    f1 = 2 * len(found & true) / (len(found) + len(true))
    assert f1 >= 0.95, (sorted(map(str, found - true)), sorted(map(str, true - found)))


def test_makers_are_searched_among_the_parts_and_for_the_layers_that_were_named():
    zoo, _, (choosing, _) = places("redundant", family="llama")
    true = {Maker(kind=one.kind, layer=one.layer, unit=one.index) for one in zoo.truth.makers}
    layers = {one.layer for one in true}
    behind = replace(choosing, read_layers=choosing.sink_layers[-1:])
    found = makers.find_makers(behind, kinds=["neuron"], layers=layers)
    assert set(found.sets["half"]) == true
    assert {*found.ranking["kind"]} == {"neuron"}
    assert {*found.ranking["layer"]} == layers
    assert behind.sink_layers == choosing.sink_layers[-1:]
    assert not makers.find_makers(choosing, kinds=["head"]).sets["half"]


def test_sets_are_tested_on_other_sequences_beside_random_sets_of_their_size_with_their_loss():
    zoo, _, (choosing, testing) = places("redundant", family="llama")
    assert not set(map(tuple, choosing.tokens.tokens.tolist())) & set(
        map(tuple, testing.tokens.tokens.tolist())
    )
    tables = makers.maker_tables(makers.find_makers(choosing, target="sink"), testing)
    sets = tables["maker_sets"]
    own = sets[sets["control_of"] == ""].set_index("set")
    pair = {f"{maker.layer}.{maker.index}" for maker in zoo.truth.makers}
    for name in ("half", "four fifths", "all makers"):
        assert set(own.loc[name, "parts"].split(", ")) == pair
        assert own.loc[name, "removed"] > 0.8
        assert own.loc[name, "control_largest"] < 0.1
    assert own.loc["half", "n_controls"] == CONFIG.controls
    random = sets[sets["set"] == "random"]
    assert (random["size"] == 2).all()
    assert np.isfinite(random["loss_nats"]).all()
    assert not any(set(parts.split(", ")) & pair for parts in random["parts"])
    listed = tables["makers"]
    assert listed.loc[listed["is_maker"], "removed_alone"].max() < 0.5  # either is enough
    assert listed["rank"].is_monotonic_increasing


def test_what_sink_logits_take_is_summed_in_float32_in_a_model_of_half_precision():
    pattern = torch.tensor([0.25, 0.25, 2**-10], dtype=torch.bfloat16).expand(
        2, 1, 3, 3
    )  # their sum rounds to 0.5
    config = SimpleNamespace(threshold=0.3)
    setting = SimpleNamespace(
        null_mass=torch.eye(5)[4][:, None], config=config
    )  # layer 4 alone has a sink logit
    found = makers._target_size(
        setting, SimpleNamespace(tensors={("pattern", 4): pattern}), "sink logit"
    )
    assert found.numpy().tolist() == [0.5 - 2**-10] * 2


def test_a_dimension_is_written_wherever_its_own_value_grows_whatever_its_rate():
    # Grows by 1.45 a layer: over a tenth of what it is then. The last layer adds 5%, the second column falls.
    values = torch.tensor([[0.0, 9.0], [1.0, 5.0], [1.45, 2.0], [2.1, 1.0], [2.2, 0.0]])
    grows = mark_writing_layers(values)
    assert grows.tolist() == [[True, False], [True, False], [True, False], [False, False]]
    small = torch.tensor([[0.0], [0.001], [1.0]])
    assert mark_writing_layers(small)[:, 0].tolist() == [
        False,
        True,
    ]  # a thousandth of its largest value


def test_sequences_whose_sinks_stand_elsewhere_are_cut_so_that_they_stand_at_one_position():
    zoo, panel, (_, testing) = places("delimiter", family="llama")
    position = panel.location.sink_position
    assert panel.location.sink_found
    assert torch.isin(testing.tokens.tokens[:, position], torch.tensor(zoo.truth.tokens)).all()
    assert float(panel["rate_by_key"].nanmean(0)[:, position].min()) > 0.3
    assert not testing.averaged.mask[:, position].any()
