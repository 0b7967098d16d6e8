"""The configuration keeps its fields, and refuses what it does not know."""

import pytest

from sink_lens.errors import InputError
from sink_lens.models.headnorm import HeadNormConfig


def test_a_name_that_is_nearly_a_field_is_refused_and_others_are_kept_as_transformers_does():
    with pytest.raises(
        InputError, match="value_norms is no field of HeadNormConfig; did you mean value_norm"
    ):
        HeadNormConfig(value_norms="shared")
    for name in ("num_kv_heads", "_note", "tie_encoder_decoder"):
        assert getattr(HeadNormConfig(**{name: 2}), name) == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; need at least 1"),
        (
            {"attention": "relu"},
            r"attention is 'relu'; need one of softmax, sigmoid, gate_elementwise, .*sink_logit",
        ),
        (
            {"value_norm": "layer"},
            r"value_norm is 'layer'; need one of none, shared, per_head, position",
        ),
        ({"value_norm_eps": "small"}, r"value_norm_eps is 'small'; need a number"),
        (
            {"value_norm": "position", "attention": "sigmoid"},
            "'sigmoid', whose weights do not sum to 1; need an avera",
        ),
        ({"qk_norm": "yes"}, r"qk_norm is 'yes'; need true or false"),
        (
            {"value_norm_length": 0},
            r"value_norm_length is 0; need a number of tokens, 1 or more, or None",
        ),
        (
            {"value_norm_init": "zeros"},
            r"value_norm_init is 'zeros'; need one of first_token, .*, matched$",
        ),
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
