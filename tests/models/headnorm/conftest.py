"""Small models of the class in every variant."""

import functools

import pytest
import torch
from tiers import first

from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import tiny

VARIANTS = {
    "softmax": {},
    "shared": {"value_norm": "shared"},
    "per_head": {"value_norm": "per_head", "value_norm_init": "ones"},
    "position": {"value_norm": "position"},
    "sigmoid": {"attention": "sigmoid"},
    "sigmoid_norm": {"attention": "sigmoid", "value_norm": "per_head"},
    "elementwise": {"attention": "gate_elementwise"},
    "headwise_norm": {"attention": "gate_headwise", "value_norm": "shared", "qk_norm": True},
    "off_by_one": {"attention": "off_by_one"},
    "key_bias": {"attention": "key_bias"},
    "key_bias_norm": {
        "attention": "key_bias",
        "value_norm": "shared",
        "qk_norm": True,
        "head_dim": 16,
    },
    "single_scale": {"norm": "single_scale"},
    "sink": {"attention": "sink_logit"},
    "sink_norm": {"attention": "sink_logit", "value_norm": "shared", "head_dim": 16},
}
"""Name -> fields of the configuration."""
REPRESENTATIVES = (
    *(
        "softmax",
        "position",
        "sigmoid_norm",
        "elementwise",
        "headwise_norm",
        "off_by_one",
        "key_bias_norm",
    ),
    *("single_scale", "sink_norm"),
)
"""A variant for each mechanism: of one whose parts have variants of their own, the whole."""


def fresh(variant, **more):
    """A model of its own: of 2 layers, its sink logits, gains and biases not constant."""
    fields = {"value_norm": "none", "num_hidden_layers": 2} | VARIANTS[variant] | more
    return tiny("headnorm", **fields)


@functools.cache
def _model_of(variant):
    return fresh(variant)


@functools.cache
def _lens_of(variant):
    return wrap(_model_of(variant))


@pytest.fixture(scope="session")
def model_of():
    """Variant -> a model that is not to be changed, but for its kernel."""
    return _model_of


@pytest.fixture(scope="session")
def lens_of():
    """Variant -> that model, wrapped."""
    return _lens_of


@pytest.fixture
def new_model():
    """Variant -> a model to change."""
    return fresh


@pytest.fixture(scope="session")
def tokens():
    return torch.randint(3, VOCAB_SIZE, (2, 21), generator=torch.Generator().manual_seed(1))


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", first(VARIANTS, stay=REPRESENTATIVES.__contains__))
