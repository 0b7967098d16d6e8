"""The tiny models have their family's parts, a test can see each, and the planted sink is there."""

import random

import pytest
import torch
from lenses import tokens

from sink_lens.errors import InputError, ModelError
from sink_lens.models.tiny import BOS_ID, VOCAB_SIZE, planted, tiny_tokenizer
from tests.tiny_families import TINY_FAMILIES, WINDOW, tiny

WINDOWED = ("mistral", "gemma2", "gemma3", "phi3", "gpt_oss")
LENGTH = 24


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


@torch.no_grad()
def patterns(model, ids):
    model.set_attn_implementation("eager")
    return torch.stack(model(ids, output_attentions=True).attentions)


def with_bos(bos_id):
    return tokens(4).index_fill_(1, torch.tensor([0]), bos_id)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_attention_is_far_from_uniform(family):
    pattern = patterns(tiny(family), tokens())[..., -1, :]
    # Uniform over the visible keys of the last query: 1/24, or 1/8 inside a window.
    visible = (pattern > 0).sum(-1)
    assert (pattern.max(-1).values * visible).mean() > 2.5


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_of_8_is_met_within_24_tokens(family):
    model = tiny(family)
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * 3
    assert "sliding_attention" in types
    for layer_type, pattern in zip(types, patterns(model, tokens()), strict=True):
        seen = (pattern[..., -1, :] > 0).sum(-1)
        assert (seen == (WINDOW if layer_type == "sliding_attention" else LENGTH)).all()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_no_bias_or_gain_is_a_constant_and_dropping_any_of_them_is_seen(family):
    model, ids = tiny(family), tokens()
    expected = logits(model, ids)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.endswith("bias"):
            continue
        assert parameter.std() > 0.03, name
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(kept.mean())
            effect = (logits(model, ids) - expected).abs().max()
            parameter.copy_(kept)
        # Without rotation, softmax does not see a key bias: it adds the same q.b to every key of a query.
        if not name.endswith("k_proj.bias") or family != "opt":
            assert effect > 1e-3, name
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("build", [lambda: tiny("llama"), planted, tiny_tokenizer])
def test_the_callers_random_state_is_untouched(build):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    build()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_unknown_families_and_fields_are_refused():
    with pytest.raises(
        ModelError, match=r"no tiny model of the family 'bert'; need one of llama, mistral"
    ):
        tiny("bert")
    with pytest.raises(
        InputError, match=r"n_layers: no field of LlamaConfig; use the names of Hugging Face"
    ):
        tiny("llama", n_layers=2)


@pytest.mark.parametrize(
    "text", ["the thing and the other", "héllo 🦊 \n\t  two  spaces", "<b>&amp;</b>", ""]
)
def test_tokenizer_round_trips_any_text_and_adds_bos_only_when_asked(text):
    plain, with_bos = tiny_tokenizer(), tiny_tokenizer(adds_bos=True)
    ids = plain(text)["input_ids"]
    assert plain.decode(ids) == text
    assert all(3 <= index < VOCAB_SIZE for index in ids)
    assert with_bos(text)["input_ids"] == [BOS_ID, *ids]
    assert with_bos(text, add_special_tokens=False)["input_ids"] == ids


@pytest.mark.parametrize("seed", range(4))
def test_planted_bos_draws_all_later_heads_and_only_with_its_neuron(seed):
    """Uniform attention gives (1/2 + 1/3 + ... + 1/24) / 23 = 0.12."""
    truth, without = planted(seed=seed), planted(seed=seed, sink=False)
    mass, *others = (
        patterns(model, ids)[..., 1:, 0].mean(dim=(1, 3))  # [layer, head], on position 0
        for model, ids in (
            (truth.model, with_bos(truth.bos_id)),
            (without.model, with_bos(truth.bos_id)),
            (truth.model, tokens(4)),
        )
    )
    assert (mass[truth.layer + 1 :] > 0.8).all()
    assert (mass[: truth.layer + 1] < 0.2).all()
    assert all((one < 0.2).all() for one in others)


@pytest.mark.parametrize("seed", range(4))
def test_each_link_of_the_planted_chain_is_where_it_says(seed):
    truth = planted(seed=seed)
    mlp = truth.model.model.layers[truth.layer].mlp
    neurons = {}
    handle = mlp.down_proj.register_forward_pre_hook(
        lambda _, inputs: neurons.update(value=inputs[0])
    )
    with torch.no_grad():
        stream = truth.model(with_bos(truth.bos_id), output_hidden_states=True).hidden_states
    handle.remove()
    activation = neurons["value"].abs()  # [batch, position, neuron]
    # BOS -> neuron: the largest of its layer at position 0, and quiet elsewhere.
    assert (activation[:, 0].argmax(-1) == truth.neuron).all()
    assert (activation[:, 0, truth.neuron] > 100 * activation[:, 1:, truth.neuron].amax(-1)).all()
    # neuron -> dimension: it writes nearly all of that dimension's change.
    before, after = stream[truth.layer][:, 0], stream[truth.layer + 1][:, 0]
    written = (
        neurons["value"][:, 0, truth.neuron]
        * mlp.down_proj.weight[truth.outlier_dimension, truth.neuron]
    )
    change = (after - before)[:, truth.outlier_dimension]
    torch.testing.assert_close(written, change, rtol=0.05, atol=0.0)
    # dimension: one dominates the token, and the token is no larger than others before.
    top = after.abs().topk(2)
    assert (top.indices[:, 0] == truth.outlier_dimension).all()
    assert (top.values[:, 0] > 10 * top.values[:, 1]).all()
    for sizes, token in ((stream[truth.layer], before), (stream[truth.layer + 1], after)):
        ratio = token.norm(dim=-1) / sizes[:, 8:].norm(dim=-1).median(1).values
        assert ((ratio > 8.0) if token is after else (ratio < 2.0)).all()
