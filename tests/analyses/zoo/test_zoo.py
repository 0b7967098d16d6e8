"""How the zoo is built: names, families, places that move with the seed, and sequences."""

import pytest
import torch

from analyses.zoo import LINKS, ZOO, build
from sink_lens.errors import InputError, ModelError
from sink_lens.models.tiny import planted


def weights(zoo):
    return torch.cat([parameter.detach().flatten() for parameter in zoo.model.parameters()])


@pytest.mark.parametrize("name", ZOO)
def test_same_seed_same_weights_and_other_seed_other_weights(name):
    first, again, other = build(name, seed=1), build(name, seed=1), build(name, seed=2)
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    assert (first.name, first.family, first.seed) == (name, ZOO[name].families[0], 1)
    assert first.truth.makers == again.truth.makers
    assert tuple(first.truth.links) == LINKS
    assert all(parameter.dtype == torch.float32 for parameter in first.model.parameters())
    assert not first.model.training


def test_every_letter_of_the_list_is_there():
    letters = [kind.letter for kind in ZOO.values()]
    letters = list(dict.fromkeys(letter for letter in letters if letter != "broken"))
    assert letters == [*"abcdefghijklmnopqrstuvwxyz", *(f"a{letter}" for letter in "abcdefghijklm")]
    assert [name.removeprefix("broken_") for name in ZOO if name.startswith("broken_")] == list(LINKS)


@pytest.mark.parametrize("name", [name for name, kind in ZOO.items() if kind.letter in (*"bcdefhjlpqrstuvwx", "af")])
def test_places_move_with_the_seed(name):
    truths = [build(name, seed=seed).truth for seed in range(8)]
    neurons = {tuple(maker for maker in truth.makers if maker.kind == "neuron") for truth in truths}
    assert len(neurons) == 8
    layers = {tuple(maker.layer for maker in truth.makers) for truth in truths}
    assert len(layers) > 1 or name in ("slow_growth", "eraser", "regrowth")  # in every layer, or in the second
    if name != "direction":
        assert len({tuple(truth.outliers.values())[-1] for truth in truths}) > 4


def test_a_neuron_that_bos_triggers_is_planted_but_for_what_values_read():
    zoo, known = build("bos_neuron", seed=3), planted(seed=3)
    other = dict(known.model.named_parameters())
    for name, value in zoo.model.named_parameters():
        differs = (value != other[name]).sum(0).count_nonzero()
        assert differs == (1 if name.endswith("v_proj.weight") else 0), name  # one column
    assert [(maker.layer, maker.index) for maker in zoo.truth.makers] == [(known.layer, known.neuron)]


def test_the_callers_random_state_is_untouched():
    state = torch.get_rng_state()
    zoo = build("variance")
    zoo.draw(2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_sequences_hold_no_token_twice_and_delimiters_are_sinks():
    zoo = build("delimiter", seed=4)
    tokens = zoo.draw(8, length=40, generator=torch.Generator().manual_seed(0))
    sinks = zoo.sinks(tokens)
    assert tokens.shape == (8, 40)
    assert (sinks.sum(1) == 3).all()
    assert not sinks[:, 0].any()
    for row, at in zip(tokens, sinks, strict=True):
        assert len(row[~at].unique()) == 37
        assert set(row[at].tolist()) <= set(zoo.delimiters)


def test_sequences_begin_with_bos_where_a_model_has_one():
    generator = torch.Generator().manual_seed(0)
    assert (build("redundant").draw(3, generator=generator)[:, 0] == 1).all()
    assert (build("variance").draw(3, generator=generator) > 2).all()


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ModelError, match=r"no model 'sinkhole' in the zoo; need one of embedding, "):
        build("sinkhole")
    with pytest.raises(ModelError, match=r"'sigmoid' cannot be written in 'llama'; need one of headnorm"):
        build("sigmoid", family="llama")
    with pytest.raises(InputError, match=r"length is 400; need 8 to 297"):
        build("variance").draw(1, length=400, generator=torch.Generator())
