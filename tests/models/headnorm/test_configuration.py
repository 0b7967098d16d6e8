"""The configuration keeps its fields, and refuses what it does not know."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from analyses.tiny_families import tiny
from sink_lens.errors import InputError
from sink_lens.models.headnorm import HeadNormConfig


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "sigmoid", "value_norm": "per_head", "value_norm_init": "ones", "value_norm_eps": 1e-5},
        {"attention": "gate_headwise", "value_norm": "shared", "qk_norm": True},
        {"attention": "sink_logit", "attention_bias": True, "output_bias": False, "tie_word_embeddings": True},
    ],
)
def test_it_comes_back_from_a_folder(tmp_path, fields):
    config = HeadNormConfig(**fields)
    config.save_pretrained(tmp_path)
    for found in (HeadNormConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(found) is HeadNormConfig
        own = {"transformers_version", "_name_or_path"}
        assert {k: v for k, v in found.to_dict().items() if k not in own} == {
            k: v for k, v in config.to_dict().items() if k not in own
        }


def test_auto_model_opens_the_stack_of_a_folder(tmp_path):
    model = tiny("headnorm")
    model.save_pretrained(tmp_path)
    stack = AutoModel.from_pretrained(tmp_path)
    assert type(stack) is type(model.model)
    assert torch.equal(stack.layers[0].self_attn.value_norm, model.model.layers[0].self_attn.value_norm)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("attentions", "attention"),
        ("value_norms", "value_norm"),
        ("num_kv_heads", None),
        ("_note", None),
        ("tie_encoder_decoder", None),
    ],
)
def test_a_name_that_is_nearly_a_field_is_refused_and_others_are_kept_as_transformers_does(name, meant):
    if meant is None:
        assert getattr(HeadNormConfig(**{name: 2}), name) == 2
        return
    with pytest.raises(InputError, match=f"{name} is no field of HeadNormConfig; did you mean {meant}"):
        HeadNormConfig(**{name: "sigmoid"})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; need at least 1"),
        ({"attention": "relu"}, r"attention is 'relu'; need one of softmax, sigmoid, gate_elementwise, .*sink_logit"),
        ({"value_norm": "layer"}, r"value_norm is 'layer'; need one of none, shared, per_head, position"),
        ({"value_norm_eps": "small"}, r"value_norm_eps is 'small'; need a number"),
        (
            {"value_norm": "position", "attention": "sigmoid"},
            r"'sigmoid', whose weights do not sum to 1; need an average",
        ),
        ({"qk_norm": "yes"}, r"qk_norm is 'yes'; need true or false"),
        ({"value_norm_length": 0}, r"value_norm_length is 0; need a number of tokens, 1 or more, or None"),
        ({"value_norm_length": True}, r"value_norm_length is True; need a number of tokens"),
        ({"value_norm_init": "zeros"}, r"value_norm_init is 'zeros'; need one of first_token, .*, matched$"),
        ({"value_norm_eps": -1.0}, r"value_norm_eps is -1.0; need a number, 0 or more"),
        ({"value_norm_eps": float("nan")}, r"value_norm_eps is nan; need a number, 0 or more"),
    ],
)
def test_a_value_that_is_not_known_is_refused(tmp_path, fields, text):
    with pytest.raises(InputError, match=text):
        HeadNormConfig(**fields)
    config = HeadNormConfig()
    for key, value in fields.items():
        setattr(config, key, value)
    with pytest.raises(InputError, match=text):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_whether_w_o_has_a_bias_follows_the_others_unless_said():
    assert HeadNormConfig(attention_bias=True).output_bias is True
    assert HeadNormConfig(attention_bias=True, output_bias=False).output_bias is False
