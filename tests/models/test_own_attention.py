"""A model runs one attention function: the user's own is hooked as it is, or refused; changes of it are noticed."""

import pytest
import torch
from own_attention import FUNCTIONS, batch, use
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from sink_lens import capture, run_with, wrap
from sink_lens.errors import ModelError
from tests.tiny_families import tiny


def refused(lens, text):
    for door in (lambda: run_with(lens, batch()), lambda: capture(lens, batch(), sites=["z"])):
        with pytest.raises(ModelError, match=text):
            door()


def test_a_function_without_a_mask_is_refused_and_told_how_to_get_one():
    def all_keys(module, query, key, value, mask, **given):
        return FUNCTIONS["softmax1"](module, query, key, value, query.new_zeros(1) if mask is None else mask)

    model = tiny("llama")
    with (
        use(model, "all_keys", function=all_keys, mask=None),
        pytest.raises(ModelError, match="AttentionMaskInterface"),
    ):
        wrap(model)
    with use(model, "all_keys", function=all_keys):
        assert wrap(model).own_attention.name == "all_keys"


def test_a_function_that_a_class_never_calls_is_refused():
    model = tiny("gptj")
    model.config._attn_implementation = "softmax1"
    with use(tiny("llama"), "softmax1"), pytest.raises(ModelError, match=r"never calls 'softmax1'"):
        wrap(model)


@pytest.mark.parametrize("name", ["softmax1", "sdpa"])
def test_a_function_that_comes_after_wrap_is_noticed(name):
    model = tiny("llama")
    lens = wrap(model)
    run_with(lens, batch())
    with use(model, name):
        refused(lens, "the attention function is 'softmax1'|the attention function is 'sdpa'")
    run_with(lens, batch())


def test_one_exact_kernel_for_another_is_no_change():
    model = tiny("llama")
    lens = wrap(model)
    model.set_attn_implementation("eager")
    run_with(lens, batch())


def test_attention_that_differs_from_token_9_on_is_found(monkeypatch):
    """Sinks and a window, the way of StreamingLLM: patched into the class before the model is wrapped."""
    before = LlamaAttention.forward

    def windowed(self, hidden_states, *args, attention_mask=None, **kwargs):
        n = hidden_states.shape[1]
        query, key = torch.arange(n)[:, None], torch.arange(n)
        seen = (key <= query) & ((key < 2) | (key > query - 7))
        mask = torch.zeros(1, 1, n, n).masked_fill_(~seen, torch.finfo(torch.float32).min)
        return before(self, hidden_states, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", windowed)
    with pytest.raises(ModelError, match="logits differ"):
        wrap(tiny("llama"))


class Louder(LlamaAttention):
    """Attention that gives twice as much."""

    def forward(self, *args, **kwargs):
        output, pattern = super().forward(*args, **kwargs)
        return 2 * output, pattern


CHANGES = {
    "layer_types of the configuration": lambda model, patch: model.config.layer_types.__setitem__(0, "other"),
    "layers.1.self_attn is .*Louder": lambda model, patch: setattr(
        model.model.layers[1].self_attn, "__class__", Louder
    ),
    "LlamaAttention.forward": lambda model, patch: patch.setattr(LlamaAttention, "forward", Louder.forward),
    "nn.Linear|Linear.forward": lambda model, patch: patch.setattr(nn.Linear, "forward", Louder.forward),
    "modeling_llama.apply_rotary_pos_emb": lambda model, patch: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args: (q, k)
    ),
    "eager_attention_forward": lambda model, patch: patch.setattr(
        modeling_llama, "eager_attention_forward", lambda *args: None
    ),
    "rope_parameters of the configuration": lambda model, patch: model.config.rope_parameters.update(rope_theta=3.0),
}


@pytest.mark.parametrize("text", CHANGES)
def test_code_classes_and_lists_that_change_are_noticed(text, monkeypatch):
    model = tiny("gemma2") if "layer_types" in text else tiny("llama", attn_implementation="eager")
    lens = wrap(model)
    run_with(lens, batch())
    CHANGES[text](model, monkeypatch)
    refused(lens, text)


def test_a_function_under_the_name_of_one_of_transformers_is_told_from_it():
    with use(model := tiny("llama"), "sdpa"):
        assert str(wrap(model).own_attention) == "'sdpa' (softmax1)"
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert wrap(model).own_attention is None
