"""The quantities of a card against an independent computation on the raw Hugging Face model, or a planted truth."""

import copy
import functools

import numpy as np
import pytest
import scipy.stats
import torch

from sink_lens.activations.views import LayerView
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_text
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.studies import card as make_card
from sink_lens.studies import quantities
from sink_lens.studies.card import card_contents
from sink_lens.studies.observed import ObservedModel

N, T = 4, 24
TRUTH = planted()


@functools.cache
def seen():
    """The planted model on text with BOS."""
    lens = wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))
    return ObservedModel(
        lens, from_text(bundled_text(), lens.tokenizer, sequences=N, length=T, bos="with")
    )


@functools.cache
def raw():
    """Attention [layer, batch, head, query, key], states [layer, batch, position, d] and losses [batch, target]."""
    model, tokens = seen().lens.plain, seen().tokens.tokens
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    states = []
    hooks = [
        layer.register_forward_hook(lambda m, a, out: states.append(out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        out = model(tokens, output_attentions=True)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(before)
    losses = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    return torch.stack(out.attentions), torch.stack(states), losses


def mass():
    return raw()[0][..., 1:, 0].mean(-1)


def ratio_of_norms():
    norms = raw()[1].norm(dim=-1)
    return (norms[..., 0] / norms[..., 8:].quantile(0.5, dim=-1)).mean(1).max()


NUMBERS = {
    "sink_rate": lambda: (raw()[0][..., 0].mean(-1) > 0.3).float().mean(),  # the own query included
    "first_token_attention": lambda: mass().mean(),
    "attention_to_no_key": lambda: torch.tensor(0.0),
    "first_token_norm_ratio": ratio_of_norms,
    "largest_activation": lambda: raw()[1].abs().amax((0, 2, 3)).mean(),
    "kurtosis": lambda: np.mean(scipy.stats.kurtosis(raw()[1].double().numpy(), axis=-1)),
}
"""Quantity of two models -> its value on the planted model, by another way."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_quantity_is_what_the_raw_model_gives(name):
    assert quantities.COMPARED.keys() == NUMBERS.keys()
    found = quantities.COMPARED[name][1](seen())
    assert found.shape == (N,)
    assert float(found.mean()) == pytest.approx(float(NUMBERS[name]()), rel=1e-3, abs=1e-5)


def test_indices_are_the_planted_ones():
    assert quantities.found_sink_positions(seen()) == [0]
    assert quantities.writing_neurons(seen()) == [(TRUTH.layer, TRUTH.neuron)]
    assert quantities.sink_onset_layer(seen(), threshold=0.3) == int(
        (mass().mean((1, 2)) > 0.3).nonzero()[0]
    )
    assert [row["mlp_out"] for row in seen().outlier_writers] == pytest.approx([1], abs=1e-3)


def test_a_card_of_one_or_two_models_says_these_numbers(tmp_path):
    card, number = card_contents(seen()), {name: float(NUMBERS[name]()) for name in NUMBERS}
    said = [card["sink"][name]["value"] for name in ("rate", "attention", "to_no_key")]
    assert said == pytest.approx(
        list(number.values())[:3], rel=1e-3, abs=1e-6
    )  # a card has four digits
    assert card["loss"]["clean"]["value"] == pytest.approx(float(raw()[2].mean()), rel=1e-3)
    other = wrap(copy.deepcopy(seen().lens.plain), tokenizer=seen().lens.tokenizer)
    study = make_card(
        seen().lens, other, tokens=seen().tokens, out=tmp_path / "diff", progress=False
    )
    changes = study.tables["changes"].set_index("quantity")["first"]
    assert {name: changes.get(name, 0.0) for name in number} == pytest.approx(
        number, rel=1e-3, abs=1e-5
    )
    assert changes["loss"] == pytest.approx(float(raw()[2].mean()), rel=1e-5)


def test_the_scores_of_tokens_do_not_hang_on_the_order_in_which_layers_are_read():
    tokens, rows = seen().tokens, torch.arange(T)
    attention = raw()[0][..., rows, :]
    scores = []
    for order in (range(len(attention)), reversed(range(len(attention)))):
        own, layers = ObservedModel(seen().lens, tokens), list(order)
        for layer in layers * 2:  # of two passes
            view = {"layer": layer, "tensors": {"rows": attention[layer]}, "rows": rows}
            own._read_attention(LayerView(**view, valid=tokens.valid, tokens=tokens.tokens))
        assert len(own._received) == 2
        scores.append(own._received[1].scores(tokens.valid))
    torch.testing.assert_close(*scores, equal_nan=True)
