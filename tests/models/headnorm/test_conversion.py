"""Checkpoints of other families in the class: the same numbers, and refusals."""

import pytest
import torch
from rounding import assert_moved, assert_rows_close

from sink_lens.errors import InputError, ModelError
from sink_lens.models.headnorm import HeadNormForCausalLM, convert
from tests.tiny_families import tiny


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


CASES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, scaled rotation": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    },
    "mistral": {"sliding_window": None},
    "mistral with a window over the context": {"sliding_window": 256},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_the_same(case, tokens):
    source = tiny(case.split()[0].strip(","), **CASES[case])
    state = torch.get_rng_state()
    made = convert(source)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(made) is HeadNormForCausalLM
    assert_rows_close(logits(made, tokens), logits(source, tokens))
    assert made.config._attn_implementation == source.config._attn_implementation == "sdpa"
    assert not made.training
    assert made.config is not source.config
    own = {parameter.data_ptr() for parameter in source.parameters()}
    assert not any(parameter.data_ptr() in own for parameter in made.parameters())
    assert {name for name, _ in made.named_parameters()} == {
        name for name, _ in source.named_parameters()
    }


def test_type_and_mode_are_kept(tokens):
    source = tiny("llama").to(torch.bfloat16).train()
    made = convert(source)
    assert made.dtype == torch.bfloat16
    assert made.training
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "new"),
    [
        ({"attention": "sink_logit"}, "sinks"),
        ({"attention": "key_bias"}, "key_bias"),
        ({"attention": "gate_headwise"}, "head_gate.weight"),
        ({"value_norm": "shared", "value_norm_init": "ones"}, "value_norm.gain"),
    ],
)
def test_a_variant_adds_its_own_weights_only(changes, new, tokens):
    source = tiny("qwen2")
    made = convert(source, **changes)
    added = {name for name, _ in made.named_parameters()} - {
        name for name, _ in source.named_parameters()
    }
    assert added == {f"model.layers.{layer}.self_attn.{new}" for layer in range(3)}
    assert not torch.allclose(logits(made, tokens), logits(source, tokens))
    back = convert(made, attention="softmax", value_norm="none")
    assert_rows_close(logits(back, tokens), logits(source, tokens))


def test_scaling_by_position_adds_no_weights(tokens):
    source = tiny("llama")
    made = convert(source, value_norm="position")
    assert [name for name, _ in made.named_parameters()] == [
        name for name, _ in source.named_parameters()
    ]
    found, was = logits(made, tokens), logits(source, tokens)
    assert_rows_close(found[:, 0], was[:, 0])  # times 1
    assert_moved(found[:, 1:], was[:, 1:])


def test_a_model_of_the_class_keeps_its_variant(tokens):
    source = tiny("headnorm_gate")
    made = convert(source)
    assert torch.equal(logits(made, tokens), logits(source, tokens))
    assert made.model.layers[0].self_attn.value_norm.gain.equal(
        source.model.layers[0].self_attn.value_norm.gain
    )
    shared = convert(source, value_norm="shared")
    assert shared.model.layers[0].self_attn.value_norm.gain.shape == (16,)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3", "olmo2"])
def test_a_class_that_is_no_llama_is_refused(family):
    with pytest.raises(
        ModelError, match=r"need one of LlamaForCausalLM, MistralForCausalLM, Qwen2.*, which differ"
    ):
        convert(tiny(family))


def test_a_subclass_of_someone_elses_and_a_sliding_window_are_refused():
    class LlamaForCausalLM(type(tiny("llama"))):
        pass

    model = tiny("llama")
    model.__class__ = LlamaForCausalLM
    windowed = tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    for source, text in (
        (model, r"LlamaForCausalLM; need one of"),
        (
            tiny("mistral"),
            r"MistralForCausalLM has a sliding window of 8 positions and a context of 256",
        ),
        (windowed, r"Qwen2ForCausalLM has a sliding window of 16"),
    ):
        with pytest.raises(ModelError, match=text):
            convert(source)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"value_gain": 1}, r"value_gain: no field of HeadNormConfig"),
        ({"attention": "relu"}, r"attention is 'relu'; need one of softmax"),
        (
            {"intermediate_size": 81},
            r"mlp.*and more.*not of the same shape.*leave the sizes as they are",
        ),
        ({"qk_norm": True}, r"k_norm.weight.*not of the same shape"),
    ],
)
def test_changes_that_cannot_be_are_refused(changes, text):
    with pytest.raises(InputError, match=text):
        convert(tiny("llama"), **changes)
